"""overflow show for people: the answer in a few sentences, then numbers with the names of their modules behind."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show.divergence import ratio
from distdiag.commands.overflow.show.recording import NEAR
from distdiag.commands.overflow.show.selection import Names
from distdiag.commands.overflow.show.wording import MODEL, count, magnitude, named, percent, times
from distdiag.output import Whole, Wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from distdiag.commands.overflow.show.diagnose import FileRead, OverflowShow
    from distdiag.commands.overflow.show.divergence import Divergence
    from distdiag.commands.overflow.show.growth import Growth
    from distdiag.commands.overflow.show.recording import Row
    from distdiag.report import Report


def overflow_show_view(report: Report[OverflowShow]) -> Iterator[RenderableType]:
    """The answer, the files, each forward in a line, two beside each other, and one module by module."""
    data = report.data
    for line in data.answer:
        yield Wrapped(line, margin=0, hang=2, style="bold")
    yield ""
    for file in data.files:
        yield Whole(_file(file))
    names = Names([*(growth.of for growth in data.growth), *(row.of for row in data.rows)])
    if len(data.growth) > 1:
        yield ""
        yield from _forwards(data.growth, names)
    if data.divergence is not None and data.divergence.around:
        yield ""
        yield _SideBySide(data.divergence)
    for forward, rows in groupby(data.rows, key=lambda row: row.of):
        yield ""
        yield Wrapped(f"{names.of(forward)}, module by module:", margin=0)
        yield _Rows(list(rows))


def _file(file: FileRead) -> str:
    who = [file.model, "" if file.rank is None else f"rank {file.rank}", file.host]
    frames = f"{file.frames:,} frames of {_batches(file.batches)}" if file.frames else "no frames"
    return f"{file.path}: {', '.join([*filter(None, who), frames])}"


def _batches(numbers: Sequence[int]) -> str:
    if len(numbers) <= 6:
        return f"batch{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    return f"{len(numbers):,} batches, {min(numbers)} to {max(numbers)}"


def _forwards(growth: Sequence[Growth], names: Names) -> Iterator[RenderableType]:
    """The greatest number of each forward."""
    yield Wrapped("largest value of each forward, in tensors that are all finite:", margin=0)
    labels = [names.of(each.of) for each in growth]
    width = max(len("forward"), *map(len, labels))
    yield Whole(f"{'forward':<{width}}  {'abs max':>8}  {'of max':>6}  {'grew':>8}  up to", style="bold")
    for each, label in zip(growth, labels, strict=True):
        numbers = f"{magnitude(each.end.abs_max)}  {percent(each.share_of_limit):>6}  {times(each.factor):>7}x"
        style = "yellow" if each.share_of_limit >= NEAR else ""
        yield Whole(f"{label:<{width}}  {numbers}  {named(each.end.module)}", style=style)


class _Rows:
    """The outputs of one forward; a name that finds no room goes on below."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = f"{'abs min':>8}  {'abs max':>8}  {'of max':>6}  {'out/in':>7}"
        yield Whole(f"{head}  module, class, tensor", style="bold")
        for before, row in zip([None, *self._rows], self._rows, strict=False):
            yield from _gap(before, row)
            share = "-" if row.share_of_limit == 0 else percent(row.share_of_limit)
            value = f"{row.text:>18}" if row.text else f"{magnitude(row.abs_min):>8}  {magnitude(row.abs_max):>8}"
            numbers = f"{value}  {share:>6}  {'-' if row.growth is None else times(row.growth):>7}"
            style = "bold red" if row.is_bad else "yellow" if row.share_of_limit >= NEAR else ""
            for text in _beside(numbers, row, options.max_width):
                yield Whole(text, style=style)


class _SideBySide:
    """abs max of two forwards around where they diverge."""

    def __init__(self, divergence: Divergence) -> None:
        self._divergence = divergence

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self._divergence
        names = Names([found.a, found.b])
        a, b = names.of(found.a), names.of(found.b)
        width = max(9, len(a), len(b)) + 1
        yield Wrapped("abs max side by side:", margin=0)
        yield Whole(f"{a:>{width}}{b:>{width}}{'times':>8}  module, class, tensor", style="bold")
        before = None
        for row, other in found.around:
            yield from _gap(before, row)
            before = row
            cells = f"{row.text or magnitude(row.abs_max):>{width}}{other.text or magnitude(other.abs_max):>{width}}"
            for text in _beside(f"{cells}{_times(row, other):>8}", row, options.max_width):
                yield Whole(text)


def _gap(before: Row | None, row: Row) -> Iterator[Whole]:
    """Mark that calls between two rows are left out, or were not kept."""
    left_out = row.number - (before.number + 1 if before is not None else 0)
    if left_out > 0:
        yield Whole(f"{'...':>8}  {count(left_out, 'call')} not shown")


def _times(row: Row, other: Row) -> str:
    """Format how many times the greater of two magnitudes is the other; - where one is 0, nan, inf or unknown."""
    if not row.most or not other.most:
        return "-"
    factor = ratio(row.most, other.most)
    return times(factor) if math.isfinite(factor) else "-"


def _beside(numbers: str, row: Row, width: int) -> list[str]:
    """Put numbers and names in one line, or where that is too long the class and the tensor below the module."""
    module, about = row.module or MODEL, f"{row.class_}  {row.tensor}"
    if len(numbers) + len(module) + len(about) + 4 <= width:
        return [f"{numbers}  {module}  {about}"]
    return [f"{numbers}  {module}", " " * (len(numbers) + 4) + about]
