"""overflow show as text: the answer in a few sentences, then tables of numbers."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show.diagnose import magnitude, named, percent, times
from distdiag.commands.overflow.show.forwards import Names
from distdiag.commands.overflow.show.recording import NEAR
from distdiag.diagnosis.wording import counted
from distdiag.output import Whole, Wrapped
from distdiag.training.overflow.report import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.overflow.show.diagnose import FileRead, OverflowShow
    from distdiag.commands.overflow.show.forwards import Growth
    from distdiag.commands.overflow.show.recording import Row
    from distdiag.report import Report


def overflow_show_view(report: Report[OverflowShow]) -> Iterator[RenderableType]:
    """The answer, the files, each forward in a line, and one module by module."""
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
    for forward, rows in groupby(data.rows, key=lambda row: row.of):
        yield ""
        yield Wrapped(f"{names.of(forward)}, module by module:", margin=0)
        yield from _rows(list(rows))


def _file(file: FileRead) -> str:
    numbers = file.batches
    batches = f"batch{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    if len(numbers) > 6:
        batches = f"{len(numbers):,} batches, {min(numbers)} to {max(numbers)}"
    about = [file.model, "" if file.rank is None else f"rank {file.rank}", file.host]
    frames = f"{file.frames:,} frames of {batches}" if file.frames else "no frames"
    return f"{file.path}: {', '.join([*filter(None, about), frames])}"


def _forwards(growth: Sequence[Growth], names: Names) -> Iterator[RenderableType]:
    yield Wrapped("largest value of each forward, in tensors that are all finite:", margin=0)
    labels = [names.of(each.of) for each in growth]
    width = max(len("forward"), *map(len, labels))
    yield Whole(f"{'forward':<{width}}  {'abs max':>8}  {'of max':>6}  {'grew':>8}  up to", style="bold")
    for each, label in zip(growth, labels, strict=True):
        end = each.through[-1]
        numbers = f"{magnitude(end.abs_max)}  {percent(each.share_of_limit):>6}  {times(each.factor):>7}x"
        style = "yellow" if each.share_of_limit >= NEAR else ""
        yield Whole(f"{label:<{width}}  {numbers}  {named(end.module)}", style=style)


def _rows(rows: Sequence[Row]) -> Iterator[RenderableType]:
    head = f"{'abs min':>8}  {'abs max':>8}  {'of max':>6}  {'out/in':>7}"
    yield Whole(f"{head}  module, class, tensor", style="bold")
    for before, row in zip([None, *rows], rows, strict=False):
        yield from _gap(before, row)
        share = "-" if row.share_of_limit == 0 else percent(row.share_of_limit)
        value = f"{row.text:>18}" if row.text else f"{magnitude(row.abs_min):>8}  {magnitude(row.abs_max):>8}"
        growth = "-" if row.growth is None else times(row.growth)
        style = "bold red" if row.is_bad else "yellow" if row.share_of_limit >= NEAR else ""
        yield Whole(f"{value}  {share:>6}  {growth:>7}  {_name(row)}", style=style)


def _gap(before: Row | None, row: Row) -> Iterator[Whole]:
    """Mark calls between two rows not shown or not kept."""
    left_out = row.number - (before.number + 1 if before is not None else 0)
    if left_out > 0:
        yield Whole(f"{'...':>8}  {counted(left_out, 'call')} not shown")


def _name(row: Row) -> str:
    return f"{row.module or MODEL}  {row.class_}  {row.tensor}"
