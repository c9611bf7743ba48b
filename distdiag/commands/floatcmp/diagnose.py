"""How two files compare -> Report, and its lines for people. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.floatcmp.child import COMMAND
from distdiag.diagnosis.verdicts import finding
from distdiag.output import Whole, Wrapped
from distdiag.report import Level, Report
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
    from distdiag.report import Finding
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
    far, integers = [pair for pair in differs if pair.unit], [pair for pair in differs if not pair.unit]
    sums = [pair for pair in pairs if pair.likeness == Likeness.LONG_SUM]
    zeros = [pair for pair in pairs if pair.likeness == Likeness.IDENTICAL and pair.counts.zero_signs]
    inexact = [pair for pair in pairs if pair.likeness == Likeness.ROUNDING] + zeros + sums
    if one_sided:
        places = [line.strip() for line in format_mismatches(one_sided[0].one_sided, (request.a, request.b))]
        yield _finding("one-sided", one_sided, *places, program=request.program)
    if far:
        function, sum_ = limits(far[0].unit)
        only = ("--key", request.key or far[0].key) if far[0].key else ()
        words = {"s": "s" * (len(far) == 1), "function": function, "sum": sum_, "unit": far[0].unit}
        yield _finding("beyond-rounding", far, again=request.again(*only, "--worst", "20"), **words)
    if integers:
        yield _finding("integers", integers)
    if shapes:
        yield _finding("shapes", shapes)
    if request.exact and inexact:
        yield _finding("not-exact", inexact)
    elif sums:
        yield _finding("long-sum", sums, length=sum_length(max(pair.max_scaled_ulp for pair in sums)))
    if both_nan := [pair.key for pair in pairs if pair.counts.both_nan]:
        yield finding("floatcmp.both-nan", tensors=shorten(both_nan))


def _finding(name: str, pairs: Sequence[Pair], *evidence: str, **words: object) -> Finding:
    tensors = f"{len(pairs)} tensors" if len(pairs) > 1 else pairs[0].key or "the tensor"
    lines = [f"{pair.key}: {verdict(pair)}".removeprefix(": ") for pair in pairs[:_SHOWN]]
    more = [f"... and {len(pairs) - _SHOWN} more"] if len(pairs) > _SHOWN else []
    return finding(f"floatcmp.{name}", words, tensors=tensors, evidence=(*lines, *more, *evidence))


def _about_names(request: Request, found: Comparison) -> Iterator[Finding]:
    missing = [(path, names) for path, names in ((request.a, found.only_a), (request.b, found.only_b)) if names]
    if missing:
        count = len(found.only_a) + len(found.only_b)
        lines = tuple(f"only in {path}: {shorten(names)}" for path, names in missing)
        yield finding("floatcmp.keys", count=f"{count} name{'s' * (count > 1)}", evidence=lines)
    if found.not_compared:
        some = found.not_compared[:_SHOWN]
        yield finding("floatcmp.not-compared", count=len(found.not_compared), evidence=some)
    elif not found.tensors:
        yield finding("floatcmp.nothing-compared")
    if found.values_differ:
        yield finding("values-exact" if request.exact else "floatcmp.values", names=shorten(found.values_differ))


def _about_reference(found: Comparison) -> Iterator[Finding]:
    lacking = [pair for pair in found.pairs if any(NO_REFERENCE in note for note in pair.notes)]
    if lacking:
        yield _finding("reference", lacking, *(note for note in lacking[0].notes if NO_REFERENCE in note))
    near = [(pair.key, pair.nearness) for pair in found.pairs if pair.nearness is not None]
    if near:
        lines = (f"{key}: {format_nearness(one, (found.a, found.b))}".removeprefix(": ") for key, one in near[:_SHOWN])
        yield finding("floatcmp.closer-to-reference", evidence=tuple(lines))


def _summary(found: Comparison, findings: Sequence[Finding]) -> str:
    for title in (each.title for level in (Level.FAIL, Level.UNKNOWN) for each in findings if each.level == level):
        return title
    s, of = "s" * (found.numbers != 1), "s" * (found.tensors != 1)
    numbers = f"{found.numbers:,} number{s} in {found.tensors:,} tensor{of}"
    if found.identical == found.tensors:
        return f"identical: {numbers}"
    worst = found.worst_first[0]
    same = f", {found.identical} of them identical" if found.identical else ""
    return f"{worst.key}: {verdict(worst)}; {numbers}{same}".removeprefix(": ")


def floatcmp_view(report: Report[Comparison]) -> Iterator[RenderableType]:
    """Format the files as a and b, and the comparison."""
    found = report.data
    for side, path in (("a", found.a), ("b", found.b), ("reference", found.reference)):
        if path:
            yield Whole(f"{side}: {path}")
    yield ""
    for line in describe(found, ("a", "b")):
        margin = len(line) - len(line.lstrip())
        # Indices stay unbroken, for text search.
        yield Whole(line) if margin == 4 else Wrapped(line.strip(), margin=margin, hang=4 if margin else 0)
