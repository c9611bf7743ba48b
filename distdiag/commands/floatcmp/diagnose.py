"""How two files compare -> Report, and its lines for people. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.floatcmp.compare_files import COMMAND
from distdiag.output import Whole, Wrapped
from distdiag.report import Finding, Fix, Level, Report
from distdiag.training.floatcmp.result import (
    NO_REFERENCE,
    Likeness,
    details,
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

    from distdiag.commands.floatcmp.compare_files import FloatCmp, Request
    from distdiag.training.floatcmp.result import Pair

_SHOWN, _LINES = 3, 12


def diagnose(request: Request, found: FloatCmp) -> Report[FloatCmp]:
    """Report whether the files hold the same numbers, and if not, what is unlike and where to begin."""
    findings = (*_faults(request, found), *_warnings(request, found), *_about_reference(request, found))
    return Report(command=COMMAND, data=found, findings=findings, summary=_summary(found, findings))


def _named(pair: Pair) -> str:
    return f"{pair.key}: {verdict(pair)}" if pair.key else verdict(pair)


def _list(pairs: Sequence[Pair]) -> tuple[str, ...]:
    more = [f"... and {len(pairs) - _SHOWN} more"] if len(pairs) > _SHOWN else []
    return (*map(_named, pairs[:_SHOWN]), *more)


def _some(pairs: Sequence[Pair]) -> str:
    return f"{len(pairs)} tensors" if len(pairs) > 1 else pairs[0].key or "the tensor"


def _faults(request: Request, found: FloatCmp) -> Iterator[Finding]:
    shapes = [pair for pair in found.pairs if pair.shape_a != pair.shape_b]
    one_sided = [pair for pair in found.pairs if pair.counts.one_sided]
    unlike = [pair for pair in found.pairs if pair.likeness == Likeness.DIFFERS and pair.shape_a == pair.shape_b]
    far = [pair for pair in unlike if pair.unit and not pair.counts.one_sided]
    integers = [pair for pair in unlike if not pair.unit]
    if one_sided:
        places = format_mismatches(one_sided[0].one_sided, (request.a, request.b))
        yield Finding(
            id=f"{COMMAND}.one-sided",
            level=Level.FAIL,
            title=f"NaN or Inf in one file only: {_some(one_sided)}",
            evidence=(*_list(one_sided), *(line.strip() for line in places)),
            fix=Fix(
                text="rerun the side that has it under overflow, which names the module that first produces it",
                commands=(f"{request.program} overflow -- train.py",),
            ),
        )
    if far:
        yield _far(request, far)
    if integers:
        yield Finding(
            id=f"{COMMAND}.integers",
            level=Level.FAIL,
            title=f"integers or booleans differ, which rounding cannot explain: {_some(integers)}",
            evidence=_list(integers),
            fix=Fix(text="check for different inputs, seeds or steps before suspecting rounding"),
        )
    if shapes:
        yield Finding(
            id=f"{COMMAND}.shapes", level=Level.FAIL, title=f"shapes differ: {_some(shapes)}", evidence=_list(shapes)
        )
    yield from _names(request, found)
    if request.exact:
        yield from _inexact(found)


def _inexact(found: FloatCmp) -> Iterator[Finding]:
    """Yield what is within rounding and no fault, but for --exact."""
    near = [pair for pair in found.pairs if pair.likeness in (Likeness.ROUNDING, Likeness.LONG_SUM)]
    signs = [pair for pair in found.pairs if pair.likeness == Likeness.IDENTICAL and pair.counts.zero_signs]
    if near or signs:
        yield Finding(
            id=f"{COMMAND}.not-exact",
            level=Level.FAIL,
            title=f"not bit-identical: {_some([*near, *signs])}",
            evidence=(*_list(near), *(f"{pair.key}: zeros of opposite signs" for pair in signs[:_SHOWN])),
        )
    if found.values_differ:
        yield Finding(id=f"{COMMAND}.values", level=Level.FAIL, title=f"values differ: {shorten(found.values_differ)}")


def _far(request: Request, far: Sequence[Pair]) -> Finding:
    function, sum_ = limits(far[0].unit)
    only = ("--key", request.key or far[0].key) if far[0].key else ()
    return Finding(
        id=f"{COMMAND}.beyond-rounding",
        level=Level.FAIL,
        title=f"{_some(far)} differ{'s' if len(far) == 1 else ''} by more than rounding can explain",
        detail=f"A single function may differ by {function} ulp of {far[0].unit}, a long sum by {sum_}. Rounding "
        "accumulates over layers: a difference this large in the last layer can start as rounding in the first.",
        evidence=_list(far),
        fix=Fix(
            text="compare the inputs, then layer by layer from the first: the earliest difference is the cause",
            commands=(request.again(*only, "--worst", "20"),) if request.worst < 20 else (),
        ),
    )


def _names(request: Request, found: FloatCmp) -> Iterator[Finding]:
    missing = ((request.a, found.only_a), (request.b, found.only_b))
    if found.only_a or found.only_b:
        count = len(found.only_a) + len(found.only_b)
        yield Finding(
            id=f"{COMMAND}.keys",
            level=Level.FAIL,
            title=f"{count} names are in one file only" if count > 1 else "one name is in one file only",
            evidence=tuple(f"only in {path}: {shorten(names)}" for path, names in missing if names),
        )
    if found.not_compared:
        yield Finding(
            id=f"{COMMAND}.not-compared",
            level=Level.UNKNOWN,
            title=f"{len(found.not_compared)} values are in both files but could not be compared",
            evidence=found.not_compared[:_SHOWN],
        )
    if not found.tensors and not found.not_compared:
        yield Finding(
            id=f"{COMMAND}.nothing-compared", level=Level.UNKNOWN, title="the files have no tensor names in common"
        )


def _warnings(request: Request, found: FloatCmp) -> Iterator[Finding]:
    sums = [pair for pair in found.pairs if pair.likeness == Likeness.LONG_SUM]
    if sums and not request.exact:
        length = sum_length(max(pair.max_scaled_ulp for pair in sums))
        yield Finding(
            id=f"{COMMAND}.long-sum",
            level=Level.WARN,
            title=f"{_some(sums)}: rounding, provided they are sums of about {length} numbers",
            detail="Sums of n numbers in another order differ by about sqrt(n) ulp. This is a hint: the files do "
            "not say how the values were computed.",
            evidence=_list(sums),
        )
    if found.both_nan:
        yield Finding(
            id=f"{COMMAND}.both-nan",
            level=Level.WARN,
            title=f"NaN at the same positions in both files: {shorten(found.both_nan)}",
        )
    if found.values_differ and not request.exact:
        yield Finding(
            id=f"{COMMAND}.values",
            level=Level.WARN,
            title=f"non-tensor values (text and others) differ: {shorten(found.values_differ)}",
        )


def _about_reference(request: Request, found: FloatCmp) -> Iterator[Finding]:
    unlike = [pair for pair in found.pairs if pair.likeness != Likeness.IDENTICAL]
    lacking = [pair for pair in unlike if any(NO_REFERENCE in note for note in pair.notes)]
    if lacking:
        why = next(note for note in lacking[0].notes if NO_REFERENCE in note)
        yield Finding(
            id=f"{COMMAND}.reference",
            level=Level.WARN,
            title=f"the reference cannot be used for {_some(lacking)}",
            evidence=(why,),
            fix=Fix(text="compute the same values in float64 and save them under the same names"),
        )
    names = (request.a, request.b)
    near = [(pair.key, pair.nearness) for pair in found.pairs if pair.nearness is not None]
    if near:
        yield Finding(
            id=f"{COMMAND}.closer-to-reference",
            level=Level.INFO,
            title="distance of both files from the reference",
            evidence=tuple(
                f"{key}{': ' if key else ''}{format_nearness(nearness, names)}" for key, nearness in near[:_SHOWN]
            ),
        )


def _summary(found: FloatCmp, findings: Sequence[Finding]) -> str:
    for level in (Level.FAIL, Level.UNKNOWN):
        for finding in findings:
            if finding.level == level:
                return finding.title
    numbers = f"{found.numbers:,} number{'' if found.numbers == 1 else 's'} in {_count(found.tensors)}"
    if found.identical == found.tensors:
        return f"identical: {numbers}"
    worst = max(
        (pair for pair in found.pairs if pair.likeness != Likeness.IDENTICAL), key=lambda pair: pair.max_scaled_ulp
    )
    where = f", most in {worst.key}" if worst.key else ""
    if not worst.max_scaled_ulp:
        return f"equal after conversion to {worst.unit}: {numbers}"
    same = f", {found.identical} of them identical" if found.identical else ""
    return f"equal within {worst.max_scaled_ulp} ulp of {worst.unit}{where} (rounding): {numbers}{same}"


def _count(tensors: int) -> str:
    return f"{tensors:,} tensor{'' if tensors == 1 else 's'}"


def floatcmp_view(report: Report[FloatCmp]) -> Iterator[RenderableType]:
    """Format the files as a and b, one line for each tensor that differs, and all of the worst."""
    found = report.data
    yield Whole(f"a: {found.a}")
    yield Whole(f"b: {found.b}")
    if found.reference:
        yield Whole(f"reference: {found.reference}")
    unlike = [pair for pair in found.pairs if pair.likeness != Likeness.IDENTICAL]
    yield ""
    yield Wrapped(f"tensors in both: {found.tensors:,}, identical: {found.identical:,}", margin=0)
    for pair in unlike[:_LINES]:
        yield Wrapped(f"{pair.key or '(one tensor)'}: {verdict(pair)}", margin=2, hang=4)
    if len(unlike) > _LINES:
        yield Whole(f"  ... and {len(unlike) - _LINES} more (all with --json)")
    if found.pairs:
        yield ""
        yield Wrapped(f"{found.pairs[0].key or 'the tensor'} in full:", margin=0)
        for line in details(found.pairs[0], ("a", "b")):
            # Places stay whole, so that they can be searched for; the rest is words.
            yield Whole(line) if line.startswith("    ") else Wrapped(line.strip(), margin=2, hang=4)
