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


def _some(pairs: Sequence[Pair]) -> str:
    return f"{len(pairs)} tensors" if len(pairs) > 1 else pairs[0].key or "the tensor"


def _list(pairs: Sequence[Pair]) -> tuple[str, ...]:
    more = [f"... and {len(pairs) - _SHOWN} more"] if len(pairs) > _SHOWN else []
    return (*(f"{pair.key}: {verdict(pair)}" if pair.key else verdict(pair) for pair in pairs[:_SHOWN]), *more)


def _about_tensors(request: Request, found: Comparison) -> Iterator[Finding]:
    shapes = [pair for pair in found.pairs if pair.shape_a != pair.shape_b]
    one_sided = [pair for pair in found.pairs if pair.counts.one_sided]
    differs = [pair for pair in found.pairs if pair.likeness == Likeness.DIFFERS and pair not in (*shapes, *one_sided)]
    far, integers = [pair for pair in differs if pair.unit], [pair for pair in differs if not pair.unit]
    inexact = [
        pair
        for pair in found.pairs
        if pair.likeness in (Likeness.ROUNDING, Likeness.LONG_SUM)
        or (pair.likeness == Likeness.IDENTICAL and pair.counts.zero_signs)
    ]
    sums = [pair for pair in found.pairs if pair.likeness == Likeness.LONG_SUM]
    both_nan = [pair.key for pair in found.pairs if pair.counts.both_nan]
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
    if request.exact and inexact:
        yield Finding(
            id=f"{COMMAND}.not-exact",
            level=Level.FAIL,
            title=f"not bit-identical: {_some(inexact)}",
            evidence=_list(inexact),
        )
    elif sums:
        yield Finding(
            id=f"{COMMAND}.long-sum",
            level=Level.WARN,
            title=f"{_some(sums)}: rounding, provided they are sums of about "
            f"{sum_length(max(pair.max_scaled_ulp for pair in sums))} numbers",
            detail="Sums of n numbers in another order differ by about sqrt(n) ulp. This is a hint: the files do "
            "not say how the values were computed.",
            evidence=_list(sums),
        )
    if both_nan:
        yield Finding(
            id=f"{COMMAND}.both-nan",
            level=Level.WARN,
            title=f"NaN at the same positions in both files: {shorten(both_nan)}",
        )


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


def _about_names(request: Request, found: Comparison) -> Iterator[Finding]:
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
    elif not found.tensors:
        yield Finding(
            id=f"{COMMAND}.nothing-compared", level=Level.UNKNOWN, title="the files have no tensor names in common"
        )
    if found.values_differ:
        yield Finding(
            id=f"{COMMAND}.values",
            level=Level.FAIL if request.exact else Level.WARN,
            title=f"non-tensor values (text and others) differ: {shorten(found.values_differ)}",
        )


def _about_reference(found: Comparison) -> Iterator[Finding]:
    lacking = [pair for pair in found.pairs if any(NO_REFERENCE in note for note in pair.notes)]
    if lacking:
        yield Finding(
            id=f"{COMMAND}.reference",
            level=Level.WARN,
            title=f"the reference cannot be used for {_some(lacking)}",
            evidence=tuple(note for note in lacking[0].notes if NO_REFERENCE in note),
            fix=Fix(text="compute the same values in float64 and save them under the same names"),
        )
    near = [(pair.key, pair.nearness) for pair in found.pairs if pair.nearness is not None]
    if near:
        yield Finding(
            id=f"{COMMAND}.closer-to-reference",
            level=Level.INFO,
            title="distance of both files from the reference",
            evidence=tuple(
                f"{key}{': ' if key else ''}{format_nearness(nearness, (found.a, found.b))}"
                for key, nearness in near[:_SHOWN]
            ),
        )


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
