"""The answer in sentences: what was detected, how the numbers grew, where two forwards diverge. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show.divergence import Mismatch, ratio
from distdiag.commands.overflow.show.recording import INPUT
from distdiag.training.overflow.report import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.overflow.show.divergence import Comparison, Difference, Divergence
    from distdiag.commands.overflow.show.recording import Recording, Row
    from distdiag.commands.overflow.show.selection import Selection
    from distdiag.training.overflow.report import Detection

_GREW = 10.0
"""What grows by less than this on its path is worth no word: a layer does that."""


def named(module: str) -> str:
    """Name a module in a sentence."""
    return f"`{module}`" if module else MODEL


def count(number: int, thing: str) -> str:
    """Format a number of things: "1 call", "2,000 calls"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def magnitude(value: float | str | None) -> str:
    """Format a number as frames have it: 6.27e+04, inf, nan; - where it is not known."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.2e}"


def times(factor: float) -> str:
    """Format a factor: 1.2e+04, 340, 5.8."""
    return f"{factor:.1e}" if factor >= 1000 or factor < 0.01 else f"{factor:.3g}"


def percent(share: float) -> str:
    """Format a share of a limit: 96%, <1%."""
    return f"{100 * share:.0f}%" if share >= 0.01 else "<1%"


def answer(selection: Selection, comparison: Comparison | None) -> Iterator[str]:
    """Return a few sentences: what was detected, how the numbers grew, where two forwards diverge."""
    detections = selection.detections
    if detections:
        more = len(detections) - 1
        yield sentence(selection, *detections[0]) + (f" ({more} more below)" if more else "")
    yield grew(selection)
    if comparison is not None:
        yield diverged(comparison)


def sentence(selection: Selection, recording: Recording, detection: Detection) -> str:
    """Return the detector's sentence; where it names no rank, of several files with the name of the file."""
    if detection.rank is not None or len(selection.recordings) == 1:
        return detection.sentence
    return f"{selection.name_of(recording)}: {detection.sentence}"


def grew(selection: Selection) -> str:
    """Describe where the numbers of the main forward grew."""
    growth = selection.growth_of(selection.main)
    if growth is None or selection.main is None:
        return _without_growth(selection)
    where = selection.names.within(selection.main.id)
    start, end = growth.through[0], growth.through[-1]
    limit = f"{percent(end.share_of_limit)} of {end.dtype} max"
    if growth.factor < _GREW:
        text = "values do not grow: the largest finite value"
        if selection.detections:
            text = "in tensors that are all finite, values do not grow: the largest"
        return f"{text} is {magnitude(end.abs_max)}, from {_at(end)} {where} ({limit})"
    return (
        f"abs max grows {times(growth.factor)}x from {_at(start)} to {_at(end)} "
        f"({magnitude(start.abs_max)} -> {magnitude(end.abs_max)}, {limit}) {where}"
    )


def _without_growth(selection: Selection) -> str:
    if not selection.forwards:
        return "no frames were saved"
    peak = selection.main.peak() if selection.main is not None else 0.0
    if peak and selection.request.module:
        return f"the largest value is outside the modules of --module {shlex.quote(selection.request.module)}"
    return "the frames have no floating-point tensor that is all finite"


def _at(row: Row) -> str:
    return f"the input of {named(row.module)}" if row.tensor == INPUT else named(row.module)


def of_limit(row: Row) -> str:
    """Describe a row near its limit."""
    what = "the input of " if row.tensor == INPUT else f"`{row.tensor}` of "
    share = f"{percent(row.share_of_limit)} of {row.dtype} max"
    return f"{what}{named(row.module)} ({row.class_}) reaches {magnitude(row.abs_max)} = {share}"


def lacks(recording: Recording) -> str:
    """Describe the part of a file that could not be read; empty if all of it was."""
    why = []
    if recording.truncated:
        why.append("the last line is incomplete: the job was killed or is still writing; the lines before it were read")
    if recording.torn:
        torn = f"{count(recording.torn, 'line')} cannot be read, first line {recording.first_torn}"
        why.append(f'{torn}: if several ranks write to this file, give each its own: save="frames-{{rank}}.jsonl"')
    if recording.left_out:
        why.append(
            f"the file is too large: its last {recording.left_out:,} frames were skipped; select others by --batch"
        )
    return "; ".join(why)


def diverged(comparison: Comparison) -> str:
    """Describe where two forwards begin to diverge."""
    (a, b), found = comparison.names, comparison.found
    if found is None:
        return f"{a} and {b} cannot be compared: {comparison.why}"
    first, numbers, factor = found.first, found.in_numbers, found.factor
    if first is None:
        batches = f" in {comparison.batches:,} batches" if comparison.batches > 1 else ""
        compared = count(found.compared, "call")
        return f"{a} and {b} do not diverge{batches}: {compared} compared, values within {factor:g}x"
    text = f"{a} and {b} diverge{_in_batch(found)} starting at {_place(first)}: {_differ((a, b), factor, first)}"
    if numbers is None:
        return f"{text}. Their values stay within {factor:g}x"
    if numbers is first:
        return text
    return f"{text}. Their values diverge starting at {_place(numbers)}: {_differ((a, b), factor, numbers)}"


def _in_batch(found: Divergence) -> str:
    of_one_file = (found.a.path, found.a.rank) == (found.b.path, found.b.rank)
    return f" in batch {found.a.batch}" if found.a.batch == found.b.batch and not of_one_file else ""


def _place(difference: Difference) -> str:
    row = difference.a
    return f"{named(row.module)} ({row.class_}), `{row.tensor}`"


def _differ(names: tuple[str, str], factor: float, found: Difference) -> str:
    a, b = found.a, found.b
    if found.what in (Mismatch.KIND, Mismatch.DTYPE, Mismatch.SHAPE):
        return f"{_like(a)} vs {_like(b)}"
    text = f"abs max {magnitude(a.abs_max)} vs {magnitude(b.abs_max)}"
    if found.what == Mismatch.NOT_FINITE:
        text = f"{magnitude(a.abs_max)} in {names[0]}, {magnitude(b.abs_max)} in {names[1]}"
    if found.given_a is None or found.given_b is None:
        return text
    how = "were similar" if ratio(found.given_a, found.given_b) <= factor else "already differed"
    return f"{text}; their inputs {how} ({magnitude(found.given_a)} vs {magnitude(found.given_b)})"


def _like(row: Row) -> str:
    """Describe what a tensor is like: float16 [2, 8]; or what stands in its place."""
    shape = "" if row.shape is None else f" [{', '.join(map(str, row.shape))}]"
    return row.text or f"{row.dtype or 'unknown dtype'}{shape}"
