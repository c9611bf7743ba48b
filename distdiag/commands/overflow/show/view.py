"""overflow show for people: the answer in a few sentences, then numbers with the names of their modules behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.overflow.show import plot, words
from distdiag.commands.overflow.show.answer import shown
from distdiag.commands.overflow.show.choose import MOST_ROWS, columns, table_of
from distdiag.commands.overflow.show.kept import NEAR
from distdiag.commands.overflow.show.over import across
from distdiag.commands.overflow.show.sentences import headlines
from distdiag.deliver import Whole, Wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from distdiag.commands.overflow.show.choose import Chosen, Line
    from distdiag.commands.overflow.show.compare import Compared
    from distdiag.commands.overflow.show.kept import Row, Side
    from distdiag.commands.overflow.show.model import Request
    from distdiag.commands.overflow.show.over import Across

_NAMES = 36
"""So much is left for names in a table over several forwards."""
_COLUMN = 10
_WIDEST = 100
_MODEL = "(model)"


def overflow_show_view(request: Request, chosen: Chosen, compared: Compared | None) -> Iterator[RenderableType]:
    """The answer, the files, one forward module by module, several beside each other, and the picture."""
    for line in headlines(chosen, compared):
        yield Wrapped(line, margin=0, hang=2, style="bold")
    yield ""
    yield from _files(chosen)
    if len(chosen.sides) > 1:
        yield ""
        yield _Over(request, chosen, compared)
    left = MOST_ROWS
    for side in chosen.sides if request.everything else shown(request, chosen, None):
        if left <= 0:
            left -= side.forward.rows
            continue
        lines = table_of(request, side, chosen.chain(side))
        if lines:
            yield ""
            yield Wrapped(f"{words.side(side, chosen.sides)}, module by module:", margin=0)
            yield _Rows(lines[:left])
        left -= len(lines)
    if left < 0:
        yield Whole(f"... and {-left:,} rows more: choose with --batch or --module")
    if request.plot == "-" and (drawn := plot.drawn(request, chosen)):
        yield ""
        yield from map(Whole, drawn.splitlines())


def _files(chosen: Chosen) -> Iterator[RenderableType]:
    for one in chosen.recordings:
        who = [one.model, "" if one.rank is None else f"rank {one.rank}", one.host]
        batches = list(dict.fromkeys(forward.batch for forward in one.forwards))
        said = f"{one.frames:,} frames of {_batches(batches)}" if batches else "no frames"
        said += f" (other batches: {len(one.passed):,})" if one.passed else ""
        yield Whole(f"{one.path}: {', '.join([*filter(None, who), said])}")


def _batches(numbers: Sequence[int]) -> str:
    if len(numbers) <= 6:
        return f"batch{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    return f"{len(numbers):,} batches, {min(numbers)} to {max(numbers)}"


class _Rows:
    """The outputs of one forward; a name that finds no room goes on below."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = f"{'abs min':>8}  {'abs max':>8}  {'limit':>5}  {'growth':>7}"
        yield Whole(f"{head}  module, class, tensor", style="bold")
        for line in self._lines:
            if line.call is None or line.row is None:
                yield Whole(f"{'...':>8}  {_skipped(line)}")
                continue
            row = line.row
            grown = line.call.growth(row)
            share = "-" if row.share == 0 else words.percent(row.share)
            numbers = f"{_least(row)}  {_most(row)}  {share:>5}  {'-' if grown is None else words.times(grown):>7}"
            style = "bold red" if row.is_bad else "yellow" if row.share >= NEAR else ""
            for text in _beside(numbers, row, options.max_width):
                yield Whole(text, style=style)


def _least(row: Row) -> str:
    return "" if row.spec.text else f"{words.magnitude(row.least):>8}"


def _most(row: Row) -> str:
    return f"{row.spec.text:>18}" if row.spec.text else f"{words.magnitude(row.most):>8}"


def _skipped(line: Line) -> str:
    more = f"{line.skipped:,} more output{'' if line.skipped == 1 else 's'}"
    if line.least is None:
        return more
    return f"{more}, abs max {words.magnitude(line.least)} to {words.magnitude(line.most)}"


def _beside(numbers: str, row: Row, width: int) -> list[str]:
    """Write numbers and names in one line, or where that is too long the class and the tensor below the module."""
    module, about = row.place.module or _MODEL, f"{row.place.kind}  {row.place.tensor}"
    if len(numbers) + len(module) + len(about) + 4 <= width:
        return [f"{numbers}  {module}  {about}"]
    return [f"{numbers}  {module}", " " * (len(numbers) + 4) + about]


class _Over:
    """abs max of each output in several forwards, as many as there is room for."""

    def __init__(self, request: Request, chosen: Chosen, compared: Compared | None) -> None:
        self._request, self._chosen, self._compared = request, chosen, compared

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        every = self._compared.sides if self._compared is not None and self._compared.sides else self._chosen.sides
        column = max(_COLUMN, 1 + max(len(part) for side in every[:_WIDEST] for part in _heading(side, every)))
        sides = columns(every, max(2, (options.max_width - _NAMES) // column))
        rows, left_out = across(self._request, sides, self._compared)
        some = f", {len(sides)} of {len(every):,}" if len(sides) < len(every) else ""
        yield Wrapped(f"abs max over {_what(sides)}{some}:", margin=0)
        pair = len(sides) == 2
        for text in _headings(sides, column):
            yield Whole(text + (f"{'times':>8}" if pair else "") + "  module, class, tensor", style="bold")
        for row in rows:
            cells = "".join(f"{_cell(one)[: column - 1]:>{column}}" for one in row.each)
            numbers = cells + (f"{_apart(row):>8}" if pair else "")
            for text in _beside(numbers, row.row, options.max_width):
                yield Whole(text)
        if left_out:
            yield Whole(f"  ... and {left_out:,} more (--all)")


def _what(sides: Sequence[Side]) -> str:
    if len({id(side.recording) for side in sides}) == 1:
        return "batches"
    numbers = {side.forward.batch for side in sides}
    return "ranks or files" + (f" in batch {numbers.pop()}" if len(numbers) == 1 else "")


def _heading(side: Side, among: Sequence[Side]) -> list[str]:
    return words.side(side, among).split(", ")


def _headings(sides: Sequence[Side], column: int) -> Iterator[str]:
    """Name the columns: the rank or file above the batch where both are needed."""
    names = [_heading(side, sides) for side in sides]
    for line in range(max(map(len, names))):
        yield "".join(f"{name[line] if line < len(name) else '':>{column}}" for name in names)


def _cell(row: Row | None) -> str:
    return "" if row is None else row.spec.text or words.magnitude(row.most)


def _apart(row: Across) -> str:
    return words.times(row.apart) if row.apart < float("inf") else "-"
