"""Frame files -> Report: the detections, and where the numbers grew."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show.forwards import (
    COMMAND,
    FEW,
    MOST_ROWS,
    Growth,
    Names,
    growth_of,
)
from distdiag.commands.overflow.show.recording import INPUT, NEAR, NotFrames, Reader, Row
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted
from distdiag.errors import DistdiagError, UsageError
from distdiag.report import Level, Report, Where
from distdiag.training.overflow.report import MODEL, Detection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distdiag.commands.overflow.show.forwards import Request
    from distdiag.commands.overflow.show.recording import Forward, Recording
    from distdiag.report import Finding

_SUFFIX = ".jsonl"
_SHOWN = 8
_MOST_DETECTIONS = 100
_NEAREST = 8
_BAD = 3
_MOST_GROWTH = 32
_GREW = 10.0
"""What grows by less than this on its path is worth no word: a layer does that."""


class FileRead(msgspec.Struct, frozen=True):
    """A file; `truncated` within a line, `torn` lines that cannot be read, `left_out` frames without room."""

    path: str
    rank: int | None
    host: str
    model: str
    batches: tuple[int, ...]
    frames: int
    truncated: bool
    torn: int
    left_out: int


class OverflowShow(msgspec.Struct, frozen=True):
    """`answer`: a few sentences; `rows`: of the forward that it is about, with --all every one of each forward."""

    answer: tuple[str, ...]
    files: tuple[FileRead, ...]
    detections: tuple[Detection, ...]
    growth: tuple[Growth, ...]
    rows: tuple[Row, ...]


def examine(request: Request, news: Callable[[str], None]) -> Report[OverflowShow]:
    """Read and diagnose frame files.

    Raises:
        UsageError: a file is missing, or no batch or module fits.
        DistdiagError: no file can be read.
    """
    reader = Reader(news, frozenset(request.batches))
    unread: dict[str, str] = {}
    hint, interrupted = "", False
    try:
        for path in _files(request.paths):
            try:
                reader.read(path)
            except NotFrames as error:
                unread[path], hint = str(error), hint or error.hint
            except OSError as error:
                unread[path], hint = f"{path}: {error.strerror}", hint or "choose a readable file"
    except KeyboardInterrupt:
        interrupted = True
    if unread and not reader.recordings:
        raise DistdiagError(next(iter(unread.values())), hint=hint)
    _check_choice(request, reader.recordings)
    return diagnose(request, reader.recordings, unread, interrupted=interrupted)


def _files(paths: Sequence[str]) -> Iterator[str]:
    """Yield the files, and the *.jsonl files of directories. Raises UsageError."""
    for path in paths:
        if not os.path.exists(path):
            wrote = 'give the files that DebugUnderflowOverflow(model, save="frames-{rank}.jsonl") wrote'
            hint = f"{wrote}; it creates a file once there is something to save"
            raise UsageError(f"{path}: no such file", hint=hint)
        is_folder = os.path.isdir(path)
        inside = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIX)) if is_folder else []
        if is_folder and not inside:
            raise UsageError(f"{path}: no *{_SUFFIX} files in this directory", hint="give frame files")
        yield from (os.path.join(path, name) for name in inside) if is_folder else [path]


def _check_choice(request: Request, recordings: Sequence[Recording]) -> None:
    batches = dict.fromkeys(str(batch) for recording in recordings for batch in recording.batches)
    for batch in request.batches:
        if str(batch) not in batches:
            raise UsageError(f"--batch {batch}: no frames of this batch", hint=f"available: {_some(batches)}")
    calls = (call for recording in recordings for forward in recording.forwards for call in forward.calls)
    names = dict.fromkeys(call.module for call in calls) if request.module else {}
    if names and not any(map(request.fits, names)):
        raise UsageError(f"no module matches --module {request.module}", hint=f"available: {_some(names)}")


def _some(names: Iterable[str]) -> str:
    shown = [name for name in names if name]
    return (", ".join(shown[:_SHOWN]) or "none") + (", ..." if len(shown) > _SHOWN else "")


def diagnose(
    request: Request, recordings: Sequence[Recording], unread: Mapping[str, str], *, interrupted: bool = False
) -> Report[OverflowShow]:
    """Diagnose frames; `unread` has the files that could not be read, with the reasons. Pure."""
    selection = Selection(request, recordings)
    detected = list(_detected(request, selection))
    findings = (
        *detected,
        *_not_finite(selection),
        *_near(request, selection),
        *_incomplete(selection, unread, interrupted=interrupted),
    )
    files = ({name: getattr(each, name) for name in FileRead.__struct_fields__} for each in selection.recordings)
    return Report(
        command=COMMAND,
        data=OverflowShow(
            answer=tuple(_answer(selection, detected)),
            files=tuple(FileRead(**file) for file in files),
            detections=tuple(found for recording in selection.recordings for found in recording.detections),
            growth=tuple(selection.growth),
            rows=tuple(selection.rows()),
        ),
        findings=findings,
        summary=_summary(selection, findings),
        interrupted=interrupted,
    )


def _summary(selection: Selection, findings: Sequence[Finding]) -> str:
    near = ("overflow.not-finite", "overflow.near-limit")
    ordered = [[each for each in findings if each.level == level] for level in (Level.FAIL, Level.UNKNOWN)]
    found = [*itertools.chain(*ordered), *(each for each in findings if each.id in near)]
    return found[0].title if found else f"nothing detected; {grew(selection)}"


def _finding(
    verdict: str,
    recordings: Sequence[Recording],
    evidence: Sequence[str] = (),
    level: Level | None = None,
    **words: str,
) -> Finding:
    """Make a finding about recordings."""
    hosts = dict.fromkeys(recording.host for recording in recordings if recording.host)
    ranks = sorted({recording.rank for recording in recordings if recording.rank is not None})
    where = Where(hosts=tuple(hosts), ranks=tuple(ranks))
    return finding(verdict, words, level=level, where=where, evidence=tuple(evidence))


def _detected(request: Request, selection: Selection) -> Iterator[Finding]:
    """Report the detections; one that names no rank also by its file, if there are several."""
    for recording, found in selection.detections[:_MOST_DETECTIONS]:
        tally = tuple(found.tally.lines()) if found.tally is not None else ()
        unnamed = found.rank is None and len(selection.recordings) > 1
        made = _finding(
            "overflow.detected",
            [recording],
            (*tally, *found.hints),
            sentence=f"{recording.path}: " * unnamed + found.sentence,
            fix=f"{found.fix}; what leads up to it:" if found.fix else "",
            show=request.again("--batch", str(found.batch), "--verbose"),
        )
        where = Where(hosts=(found.host,), ranks=(found.rank or 0, *found.other_ranks))
        yield made if found.rank is None else replace(made, where=where)


def _not_finite(selection: Selection) -> Iterator[Finding]:
    """Report nan and inf not reported by the detector: intended, or the job ended first."""
    found = [
        (forward.bad, recording)
        for recording, forward in selection.owned
        # If the job continues, only the first is detected.
        if forward.bad and not any(found.batch <= forward.id.batch for found in recording.detections)
    ]
    if found:
        row = found[0][0]
        what = f"{row.abs_max} in `{row.tensor}` of {named(row.module)} ({row.class_}), {selection.names.of(row.of)}"
        yield _finding("overflow.not-finite", [recording for _, recording in found], what=what)


def _near(request: Request, selection: Selection) -> Iterator[Finding]:
    """Report outputs near their limit, each module once at its maximum."""
    best: dict[str, tuple[Row, Recording]] = {}
    for recording, forward in selection.owned:
        for row in forward.near():
            known = best.get(row.module)
            if request.fits(row.module) and (known is None or row.share_of_limit > known[0].share_of_limit):
                best[row.module] = (row, recording)
    ordered = sorted(best.values(), key=lambda found: -found[0].share_of_limit)
    if not ordered:
        return
    lines = [f"{of_limit(row)} {selection.names.within(row.of)}" for row, _ in ordered[:_SHOWN]]
    others = f"{counted(len(ordered) - 1, 'other module')} above {percent(NEAR)}" if len(ordered) > 1 else ""
    small = all(row.dtype == "float16" or row.dtype.startswith("float8") for row, _ in ordered)
    verdict = "overflow.near-small-limit" if small else "overflow.near-limit"
    yield _finding(verdict, [recording for _, recording in ordered], lines[1:], nearest=lines[0], others=others)


def _incomplete(selection: Selection, unread: Mapping[str, str], *, interrupted: bool) -> Iterator[Finding]:
    if unread:
        first, *rest = unread.values()
        yield _finding("overflow.unreadable", (), rest[: _SHOWN - 1], files=counted(len(unread), "file"), why=first)
    for recording in selection.recordings:
        if why := "; ".join(_lacks(recording)):
            # The detection may be missing from a truncated file: without one, no verdict of OK.
            may_lack_detection = not recording.detections and (recording.truncated or recording.torn > 0)
            level = Level.UNKNOWN if may_lack_detection else None
            yield _finding("overflow.incomplete", [recording], level=level, path=recording.path, why=why)
    empty = [recording for recording in selection.recordings if recording.is_empty]
    if empty and not interrupted:
        more = str(len(empty) - 1) if len(empty) > 1 else ""
        yield _finding("overflow.no-frames", empty, path=empty[0].path, more=more)


def _lacks(recording: Recording) -> Iterator[str]:
    """Describe the parts of a file that could not be read."""
    if recording.truncated:
        yield "the last line is incomplete: the job was killed or is still writing; the lines before it were read"
    if recording.torn:
        own = 'if several ranks write to this file, give each its own: save="frames-{rank}.jsonl"'
        yield f"{counted(recording.torn, 'line')} cannot be read: {own}"
    if recording.left_out:
        yield f"the file is too large: its last {recording.left_out:,} frames were skipped; select others by --batch"


class Selection:
    """The forwards selected by --batch, with their recordings, in the order of ranks.

    `detections`: the earliest first, each once. `main`: the forward to describe, of the first detection, else that
    nearest to a limit. `growth`: of the forwards nearest to a limit, in file order.
    """

    def __init__(self, request: Request, recordings: Iterable[Recording]) -> None:
        self.request = request
        self.recordings = sorted(recordings, key=lambda recording: (recording.rank is None, recording.rank or 0))
        every = ((recording, forward) for recording in self.recordings for forward in recording.forwards)
        self.owned = [pair for pair in every if not request.batches or pair[1].id.batch in request.batches]
        self.names = Names([forward.id for _, forward in self.owned])
        self.detections = _distinct(self.recordings)
        first = [(id(recording), found.batch) for recording, found in self.detections]
        detected = [forward for recording, forward in self.owned if (id(recording), forward.id.batch) in first[:1]]
        highest = sorted((forward for _, forward in self.owned), key=lambda forward: -forward.peak())[:_MOST_GROWTH]
        self.main = next(iter([*detected, *highest]), None)
        wanted = {id(forward) for forward in (self.main, *highest)}
        found = ((id(forward), growth_of(forward)) for _, forward in self.owned if id(forward) in wanted)
        growth = {key: each for key, each in found if each is not None}
        self.growth, self.of_main = list(growth.values()), growth.get(id(self.main))

    def rows(self) -> list[Row]:
        """Return the rows to show."""
        shown = [forward for _, forward in self.owned] if self.request.everything else filter(None, [self.main])
        path = self.of_main.through if self.of_main else ()
        rows = itertools.chain.from_iterable(rows_that_matter(self.request, forward, path) for forward in shown)
        return list(itertools.islice(rows, MOST_ROWS))


def _distinct(recordings: Sequence[Recording]) -> list[tuple[Recording, Detection]]:
    """Return the detections, the earliest first; of duplicates the copy of the rank named in it."""
    found: dict[tuple[object, ...], tuple[Recording, Detection]] = {}
    for recording in recordings:
        for each in recording.detections:
            key = (each.sentence, *(() if each.rank is not None else (recording.path, recording.rank)))
            if key not in found or recording.rank == each.rank:
                found[key] = (recording, each)
    return sorted(found.values(), key=lambda pair: (pair[1].step, pair[1].batch))


def rows_that_matter(request: Request, forward: Forward, path: Sequence[Row]) -> list[Row]:
    """Choose the rows of one forward to show; all of them if few or requested.

    Chosen are the path of growth, the first rows with nan or inf, the rows nearest to a limit, and both ends.
    """
    rows = [row for call in forward.calls if request.fits(call.module) for row in call.rows]
    if request.everything or len(rows) <= FEW:
        return rows
    near = sorted((row for row in rows if row.share_of_limit >= NEAR), key=lambda row: -row.share_of_limit)
    kept = [rows[0], rows[-1], *path, *near[:_NEAREST], *[row for row in rows if row.is_bad][:_BAD]]
    places = {(row.number, row.tensor) for row in kept}
    return [row for row in rows if (row.number, row.tensor) in places]


def named(module: str) -> str:
    """Name a module in a sentence."""
    return f"`{module}`" if module else MODEL


def magnitude(value: float | str | None) -> str:
    """Format a number as frames have it: 6.27e+04, inf, nan; - where it is not known."""
    return "-" if value is None else value if isinstance(value, str) else f"{value:.2e}"


def times(factor: float) -> str:
    """Format a factor: 1.2e+04, 340, 5.8."""
    return f"{factor:.1e}" if factor >= 1000 or factor < 0.01 else f"{factor:.3g}"


def percent(share: float) -> str:
    """Format a share of a limit: 96%, <1%."""
    return f"{100 * share:.0f}%" if share >= 0.01 else "<1%"


def _answer(selection: Selection, detected: Sequence[Finding]) -> Iterator[str]:
    """Yield a few sentences: the detection, the growth of values."""
    for each in detected[:1]:
        yield each.title + (f" ({len(detected) - 1} more below)" if len(detected) > 1 else "")
    yield grew(selection)


def grew(selection: Selection) -> str:
    """Describe where the numbers of the main forward grew."""
    main, growth = selection.main, selection.of_main
    if main is None:
        return "no frames were saved"
    if growth is None:
        return "the frames have no floating-point tensor that is all finite"
    where = selection.names.within(main.id)
    start, end = growth.through[0], growth.through[-1]
    limit = f"{percent(end.share_of_limit)} of {end.dtype} max"
    if growth.factor < _GREW:
        return f"finite values do not grow: they reach {magnitude(end.abs_max)}, in {_at(end)} {where} ({limit})"
    return (
        f"abs max grows {times(growth.factor)}x from {_at(start)} to {_at(end)} "
        f"({magnitude(start.abs_max)} -> {magnitude(end.abs_max)}, {limit}) {where}"
    )


def _at(row: Row) -> str:
    return f"the input of {named(row.module)}" if row.tensor == INPUT else named(row.module)


def of_limit(row: Row) -> str:
    """Describe a row near its limit."""
    what = "the input of " if row.tensor == INPUT else f"`{row.tensor}` of "
    share = f"{percent(row.share_of_limit)} of {row.dtype} max"
    return f"{what}{named(row.module)} ({row.class_}) reaches {magnitude(row.abs_max)} = {share}"
