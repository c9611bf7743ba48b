"""Frame files -> Report: the detections, where the numbers grew, where two forwards diverge."""

from __future__ import annotations

import os
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show import wording
from distdiag.commands.overflow.show.divergence import Divergence, Mismatch, compare
from distdiag.commands.overflow.show.growth import Growth  # noqa: TC001 - msgspec reads the annotations
from distdiag.commands.overflow.show.recording import NEAR, NotFrames, Reader, Row
from distdiag.commands.overflow.show.selection import COMMAND, select
from distdiag.errors import DistdiagError, UsageError
from distdiag.report import Finding, Fix, Level, Report, Where
from distdiag.training.overflow.report import Detection  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distdiag.commands.overflow.show.divergence import Comparison
    from distdiag.commands.overflow.show.recording import Recording
    from distdiag.commands.overflow.show.selection import Request, Selection

_SUFFIX = ".jsonl"
_SHOWN = 8


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
    divergence: Divergence | None
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


def _files(paths: Sequence[str]) -> list[str]:
    """List the files, and those of folders that end in .jsonl. Raises UsageError."""
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            inside = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIX))
            if not inside:
                raise UsageError(f"{path}: no *{_SUFFIX} files in this directory", hint="give frame files")
            found += [os.path.join(path, name) for name in inside]
        elif os.path.exists(path):
            found.append(path)
        else:
            wrote = 'give the files that DebugUnderflowOverflow(model, save="frames-{rank}.jsonl") wrote'
            raise UsageError(
                f"{path}: no such file", hint=f"{wrote}; it creates a file once there is something to save"
            )
    return found


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
    selection = select(request, recordings)
    comparison = compare(request, selection)
    findings = (
        *_detected(request, selection),
        *_not_finite(selection),
        *_near(request, selection),
        *_diverges(comparison),
        *_incomplete(selection, unread, interrupted=interrupted),
    )
    files = [
        FileRead(**{name: getattr(recording, name) for name in FileRead.__struct_fields__})
        for recording in selection.recordings
    ]
    return Report(
        command=COMMAND,
        data=OverflowShow(
            answer=tuple(wording.answer(selection, comparison)),
            files=tuple(files),
            detections=tuple(found for recording in selection.recordings for found in recording.detections),
            growth=selection.growth,
            divergence=None if comparison is None else comparison.found,
            rows=tuple(selection.rows()),
        ),
        findings=findings,
        summary=_summary(selection, findings),
        interrupted=interrupted,
    )


def _summary(selection: Selection, findings: Sequence[Finding]) -> str:
    for level in (Level.FAIL, Level.UNKNOWN):
        for finding in findings:
            if finding.level == level:
                return finding.title
    near = (finding.title for finding in findings if finding.id in ("overflow.not-finite", "overflow.near-limit"))
    return next(near, f"nothing detected; {wording.grew(selection)}")


def _detected(request: Request, selection: Selection) -> Iterator[Finding]:
    found = selection.detections
    for recording, detection in found[:_SHOWN]:
        rank = detection.rank if detection.rank is not None else recording.rank
        host = detection.host or recording.host
        tally = tuple(detection.tally.lines()) if detection.tally is not None else ()
        yield Finding(
            id="overflow.detected",
            level=Level.FAIL,
            title=wording.sentence(selection, recording, detection),
            where=Where(
                hosts=(host,) if host else (), ranks=(*(() if rank is None else (rank,)), *detection.other_ranks)
            ),
            evidence=(*tally, *detection.hints),
            fix=_fix(request, detection),
        )
    if len(found) > _SHOWN:
        yield Finding(id="overflow.detected", level=Level.FAIL, title=f"{len(found) - _SHOWN} more detections (--json)")


def _fix(request: Request, detection: Detection) -> Fix | None:
    if not detection.fix:
        return None
    around = _around(detection)
    words = ("--module", f"{around}*") if around else ()
    command = request.again("--batch", str(detection.batch), *words, "--verbose")
    return Fix(text=f"{detection.fix}; what leads up to it:", commands=(command,))


def _around(detection: Detection) -> str:
    """Return the module around the one that made it, and around where it became nan; empty for all of the model."""
    names = [detection.made_by or detection.module, *([detection.became.module] if detection.became else [])]
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _not_finite(selection: Selection) -> Iterator[Finding]:
    """Report nan and inf that the detector did not: it may be meant, or the job ended first."""
    found = [
        (forward.not_finite[0], recording)
        for recording, forward in selection.owned
        # Only the first is detected where the job continues.
        if forward.not_finite and not any(found.batch <= forward.id.batch for found in recording.detections)
    ]
    if found:
        row, _ = found[0]
        yield Finding(
            id="overflow.not-finite",
            level=Level.WARN,
            title=f"{row.abs_max} in `{row.tensor}` of {wording.named(row.module)} ({row.class_}), "
            f"{selection.names.of(row.of)}, not reported by the detector",
            detail="Masks of -inf and the modules in `ignore` are not reported; or the job was killed "
            "before the report.",
            where=_where([recording for _, recording in found]),
        )


def _near(request: Request, selection: Selection) -> Iterator[Finding]:
    """Report outputs near their limit, each module once, where it was nearest."""
    best: dict[str, tuple[Row, Recording]] = {}
    for recording, forward in selection.owned:
        for row in forward.near():
            known = best.get(row.module)
            if request.fits(row.module) and (known is None or row.share_of_limit > known[0].share_of_limit):
                best[row.module] = (row, recording)
    ordered = sorted(best.values(), key=lambda found: -found[0].share_of_limit)
    if not ordered:
        return
    lines = [f"{wording.of_limit(row)} {selection.names.within(row.of)}" for row, _ in ordered[:_SHOWN]]
    more = f"; {wording.count(len(ordered) - 1, 'other module')} above {wording.percent(NEAR)}"
    small = all(row.dtype == "float16" or row.dtype.startswith("float8") for row, _ in ordered)
    wider = "run these modules in bfloat16 or float32, or scale down their inputs"
    yield Finding(
        id="overflow.near-limit",
        level=Level.WARN,
        title=lines[0] + (more if len(ordered) > 1 else ""),
        where=_where([recording for _, recording in ordered]),
        evidence=tuple(lines[1:]),
        fix=Fix(text=wider if small else "scale down the inputs of these modules"),
    )


def _diverges(comparison: Comparison | None) -> Iterator[Finding]:
    """Report where two forwards diverge. Other data explains other numbers, but not another dtype, or nan."""
    if comparison is None:
        return
    found = comparison.found
    if found is None:
        yield Finding(id="overflow.not-compared", level=Level.UNKNOWN, title=wording.diverged(comparison))
        return
    first = [difference for difference in (found.first, found.in_numbers) if difference is not None]
    evidence = tuple(_only_in(comparison.names, found))
    serious = any(each.what in (Mismatch.NOT_FINITE, Mismatch.DTYPE, Mismatch.KIND) for each in first)
    if first or evidence:
        level = Level.WARN if serious else Level.INFO
        yield Finding(id="overflow.diverges", level=level, title=wording.diverged(comparison), evidence=evidence)


def _only_in(names: tuple[str, str], found: Divergence) -> Iterator[str]:
    for name, rows in zip(names, (found.only_a, found.only_b), strict=True):
        if rows:
            more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
            yield f"only in {name}: {', '.join(wording.named(row.module) for row in rows[:_SHOWN])}{more}"


def _incomplete(selection: Selection, unread: Mapping[str, str], *, interrupted: bool) -> Iterator[Finding]:
    if unread:
        yield Finding(
            id="overflow.unreadable",
            level=Level.UNKNOWN,
            title=f"{wording.count(len(unread), 'file')} could not be read: {next(iter(unread.values()))}",
            evidence=tuple(list(unread.values())[1:_SHOWN]),
        )
    for recording in selection.recordings:
        if why := wording.lacks(recording):
            # The detection may be missing: without one, nothing is shown as fine.
            may_lack_detection = not recording.detections and (recording.truncated or recording.torn > 0)
            yield Finding(
                id="overflow.incomplete",
                level=Level.UNKNOWN if may_lack_detection else Level.WARN,
                title=f"{recording.path}: {why}",
                where=_where([recording]),
            )
    empty = [recording for recording in selection.recordings if recording.is_empty]
    if empty and not interrupted:
        others = f", and neither do {len(empty) - 1} more files" if len(empty) > 1 else ""
        yield Finding(
            id="overflow.no-frames",
            level=Level.UNKNOWN,
            title=f"{empty[0].path} has no frames{others}",
            detail="The detector saves the frames of batches in trace_batch_nums, and the last frames "
            "before a detection.",
            where=_where(empty),
        )


def _where(recordings: Sequence[Recording]) -> Where:
    hosts = dict.fromkeys(recording.host for recording in recordings if recording.host)
    ranks = sorted({recording.rank for recording in recordings if recording.rank is not None})
    return Where(hosts=tuple(hosts), ranks=tuple(ranks))
