"""floatcmp for people: the tensors that are not identical, folded, and the worst one in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.deliver import Whole, Wrapped
from distdiag.training.floats.model import Likeness
from distdiag.training.floats.words import details, verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.floatcmp.result import FloatCmp
    from distdiag.report import Report

_TENSORS = 12


def floatcmp_view(report: Report[FloatCmp]) -> Iterator[RenderableType]:
    """The files as a and b, one line for each tensor that differs, and all of the worst."""
    found = report.data
    yield Whole(f"a: {found.a}")
    yield Whole(f"b: {found.b}")
    if found.reference:
        yield Whole(f"reference: {found.reference}")
    unlike = [pair for pair in found.pairs if pair.likeness != Likeness.IDENTICAL]
    yield ""
    yield Wrapped(f"tensors in both: {found.tensors:,}, of them identical: {found.identical:,}", margin=0)
    for pair in unlike[:_TENSORS]:
        yield Wrapped(f"{pair.key or '(one tensor)'}: {verdict(pair)}", margin=2, hang=4)
    if len(unlike) > _TENSORS:
        yield Whole(f"  ... and {len(unlike) - _TENSORS} more (--json has them all)")
    if found.pairs:
        yield ""
        yield Wrapped(f"{found.pairs[0].key or 'the tensor'} in full:", margin=0)
        for line in details(found.pairs[0], ("a", "b")):
            # Places stay whole, so that they can be searched for; the rest is words.
            yield Whole(line) if line.startswith("    ") else Wrapped(line.strip(), margin=2, hang=4)
