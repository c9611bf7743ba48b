"""How two files compare -> Report, and its lines for people. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.floatcmp.child import COMMAND
from distdiag.output import Whole, Wrapped
from distdiag.report import Finding, Fix, Level, Report
from distdiag.training.floatcmp.result import (
    NO_REFERENCE,
    Likeness,
    describe,
    format_mismatches,
    format_nearness,
    limits,
    shorten,
    sum_length,
    verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.floatcmp.child import Request
    from distdiag.training.floatcmp.result import Comparison, Pair

_SHOWN = 3


def diagnose(request: Request, found: Comparison) -> Report[Comparison]:
    """Report whether the files hold the same numbers, and if not, which differ and where to begin."""
    findings = (*_about_tensors(request, found), *_about_names(request, found), *_about_reference(found))
    return Report(command=COMMAND, data=found, findings=findings, summary=_summary(found, findings))


def _about_tensors(request: Request, found: Comparison) -> Iterator[Finding]:
    pairs = found.pairs
    shapes = [pair for pair in pairs if pair.shape_a != pair.shape_b]
    one_sided = [pair for pair in pairs if pair.counts.one_sided]
    differs = [pair for pair in pairs if pair.likeness == Likeness.DIFFERS and pair not in (*shapes, *one_sided)]
    sums = [pair for pair in pairs if pair.likeness == Likeness.LONG_SUM]
    inexact = [
        pair
        for pair in pairs
        if pair.likeness == Likeness.ROUNDING or (pair.likeness == Likeness.IDENTICAL and pair.counts.zero_signs)
    ] + sums
    both_nan = [pair.key for pair in pairs if pair.counts.both_nan]
    if one_sided:
        places = format_mismatches(one_sided[0].one_sided, (request.a, request.b))
        text = "rerun the side that has it under overflow, which names the module that first produces it"
        fix = Fix(text=text, commands=(f"{request.program} overflow -- train.py",))
        lines = [*_list(one_sided), *(line.strip() for line in places)]
        yield _finding("one-sided", Level.FAIL, f"NaN or Inf in one file only: {_some(one_sided)}", lines, fix=fix)
    if far := [pair for pair in differs if pair.unit]:
        yield _far(request, far)
    if integers := [pair for pair in differs if not pair.unit]:
        wrong = f"integers or booleans differ, which rounding cannot explain: {_some(integers)}"
        fix = Fix(text="check for different inputs, seeds or steps before suspecting rounding")
        yield _finding("integers", Level.FAIL, wrong, _list(integers), fix=fix)
    if shapes:
        yield _finding("shapes", Level.FAIL, f"shapes differ: {_some(shapes)}", _list(shapes))
    if request.exact and inexact:
        yield _finding("not-exact", Level.FAIL, f"not bit-identical: {_some(inexact)}", _list(inexact))
    elif sums:
        length = sum_length(max(pair.max_scaled_ulp for pair in sums))
        title = f"{_some(sums)}: rounding, provided they are sums of about {length} numbers"
        detail = (
            "Sums of n numbers in another order differ by about sqrt(n) ulp. This is a hint: the files do "
            "not say how the values were computed."
        )
        yield _finding("long-sum", Level.WARN, title, _list(sums), detail)
    if both_nan:
        yield _finding("both-nan", Level.WARN, f"NaN at the same positions in both files: {shorten(both_nan)}")


def _finding(
    name: str, level: Level, title: str, evidence: Sequence[str] = (), detail: str = "", fix: Fix | None = None
) -> Finding:
    return Finding(id=f"{COMMAND}.{name}", level=level, title=title, detail=detail, evidence=tuple(evidence), fix=fix)


def _some(pairs: Sequence[Pair]) -> str:
    return f"{len(pairs)} tensors" if len(pairs) > 1 else pairs[0].key or "the tensor"


def _list(pairs: Sequence[Pair]) -> list[str]:
    more = [f"... and {len(pairs) - _SHOWN} more"] if len(pairs) > _SHOWN else []
    return [*(f"{pair.key}: {verdict(pair)}".removeprefix(": ") for pair in pairs[:_SHOWN]), *more]


def _far(request: Request, far: Sequence[Pair]) -> Finding:
    function, sum_ = limits(far[0].unit)
    only = ("--key", request.key or far[0].key) if far[0].key else ()
    detail = (
        f"A single function may differ by {function} ulp of {far[0].unit}, a long sum by {sum_}. Rounding "
        "accumulates over layers: a difference this large in the last layer can start as rounding in the first."
    )
    text = "compare the inputs, then layer by layer from the first: the earliest difference is the cause"
    fix = Fix(text=text, commands=(request.again(*only, "--worst", "20"),) if request.worst < 20 else ())
    title = f"{_some(far)} differ{'s' if len(far) == 1 else ''} by more than rounding can explain"
    return _finding("beyond-rounding", Level.FAIL, title, _list(far), detail, fix)


def _about_names(request: Request, found: Comparison) -> Iterator[Finding]:
    missing = [(path, names) for path, names in ((request.a, found.only_a), (request.b, found.only_b)) if names]
    if missing:
        count = len(found.only_a) + len(found.only_b)
        title = f"{count} names are in one file only" if count > 1 else "one name is in one file only"
        yield _finding("keys", Level.FAIL, title, [f"only in {path}: {shorten(names)}" for path, names in missing])
    if found.not_compared:
        unread = f"{len(found.not_compared)} values are in both files but could not be compared"
        yield _finding("not-compared", Level.UNKNOWN, unread, found.not_compared[:_SHOWN])
    elif not found.tensors:
        yield _finding("nothing-compared", Level.UNKNOWN, "the files have no tensor names in common")
    if found.values_differ:
        level = Level.FAIL if request.exact else Level.WARN
        yield _finding("values", level, f"non-tensor values (text and others) differ: {shorten(found.values_differ)}")


def _about_reference(found: Comparison) -> Iterator[Finding]:
    lacking = [pair for pair in found.pairs if any(NO_REFERENCE in note for note in pair.notes)]
    if lacking:
        fix = Fix(text="compute the same values in float64 and save them under the same names")
        notes = [note for note in lacking[0].notes if NO_REFERENCE in note]
        yield _finding("reference", Level.WARN, f"the reference cannot be used for {_some(lacking)}", notes, fix=fix)
    near = [(pair.key, pair.nearness) for pair in found.pairs if pair.nearness is not None]
    if near:
        lines = [f"{key}: {format_nearness(one, (found.a, found.b))}".removeprefix(": ") for key, one in near[:_SHOWN]]
        yield _finding("closer-to-reference", Level.INFO, "distance of both files from the reference", lines)


def _summary(found: Comparison, findings: Sequence[Finding]) -> str:
    for level in (Level.FAIL, Level.UNKNOWN):
        for finding in findings:
            if finding.level == level:
                return finding.title
    tensors = f"{found.tensors:,} tensor{'' if found.tensors == 1 else 's'}"
    numbers = f"{found.numbers:,} number{'' if found.numbers == 1 else 's'} in {tensors}"
    if found.identical == found.tensors:
        return f"identical: {numbers}"
    unlike = (pair for pair in found.pairs if pair.likeness != Likeness.IDENTICAL)
    worst = max(unlike, key=lambda pair: pair.max_scaled_ulp)
    where = f", most in {worst.key}" if worst.key else ""
    if not worst.max_scaled_ulp:
        return f"equal after conversion to {worst.unit}: {numbers}"
    same = f", {found.identical} of them identical" if found.identical else ""
    return f"equal within {worst.max_scaled_ulp} ulp of {worst.unit}{where} (rounding): {numbers}{same}"


def floatcmp_view(report: Report[Comparison]) -> Iterator[RenderableType]:
    """Format the files as a and b, and how they compare."""
    found = report.data
    for side, path in (("a", found.a), ("b", found.b), ("reference", found.reference)):
        if path:
            yield Whole(f"{side}: {path}")
    yield ""
    for line in describe(found, ("a", "b")):
        margin = len(line) - len(line.lstrip())
        # Places stay whole: they can be searched for then.
        yield Whole(line) if margin == 4 else Wrapped(line.strip(), margin=margin, hang=4 if margin else 0)
