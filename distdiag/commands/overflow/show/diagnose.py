"""Files of frames -> Report: what was detected, where the numbers grew, where two forwards diverge."""

from __future__ import annotations

import os
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - imported lazily, when there is a file to read

from distdiag.commands.overflow.show import wording
from distdiag.commands.overflow.show.divergence import Divergence, Mismatch, compare
from distdiag.commands.overflow.show.recording import INPUT, NEAR, Detection, NotFrames, Reader, Row
from distdiag.commands.overflow.show.selection import COMMAND, MOST_ROWS, matches, rows_that_matter, select
from distdiag.errors import DistdiagError, UsageError
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distdiag.commands.overflow.show.divergence import Comparison
    from distdiag.commands.overflow.show.growth import Growth
    from distdiag.commands.overflow.show.recording import At, ForwardId, Recording
    from distdiag.commands.overflow.show.selection import Request, Selection

_SUFFIX = ".jsonl"
_SHOWN = 8
_FLOAT8 = ("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz")


class FileRead(msgspec.Struct, frozen=True):
    """What was read; `truncated` within a line, `torn` lines that are none, `left_out` frames without room."""

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
    """All of it; `answer` in a few sentences.

    `rows` are those that matter, of the forward the answer is about; with --all every one of each forward.
    """

    answer: tuple[str, ...]
    files: tuple[FileRead, ...]
    detections: tuple[Detection, ...]
    growth: tuple[Growth, ...]
    divergence: Divergence | None
    rows: tuple[Row, ...]


def examine(request: Request, news: Callable[[str], None]) -> Report[OverflowShow]:
    """Read files of frames, and diagnose what is in them.

    Raises:
        UsageError: a file is not there, or no batch or module is like that.
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
            raise UsageError(
                f"{path}: no such file",
                hint='give the files that DebugUnderflowOverflow(model, save="frames-{rank}.jsonl") wrote; it '
                "creates a file "
                "once there is something to save",
            )
    return found


def _check_choice(request: Request, recordings: Sequence[Recording]) -> None:
    batches = dict.fromkeys(str(batch) for recording in recordings for batch in recording.batches)
    for batch in request.batches:
        if str(batch) not in batches:
            raise UsageError(f"--batch {batch}: no frames of this batch", hint=f"available: {_some(batches)}")
    calls = (call for recording in recordings for forward in recording.forwards for call in forward.calls)
    names = dict.fromkeys(call.module for call in calls) if request.module else {}
    if names and not any(map(matches(request.module), names)):
        raise UsageError(f"no module matches --module {request.module}", hint=f"available: {_some(names)}")


def _some(names: Iterable[str]) -> str:
    shown = [name for name in names if name]
    return (", ".join(shown[:_SHOWN]) or "none") + (", ..." if len(shown) > _SHOWN else "")


def diagnose(
    request: Request, recordings: Sequence[Recording], unread: Mapping[str, str], *, interrupted: bool = False
) -> Report[OverflowShow]:
    """Diagnose what was kept of frames; `unread` has why files could not be read. Pure."""
    selection = select(request, recordings)
    comparison = compare(request, selection)
    findings = (
        *_detected(request, selection),
        *_not_finite(selection),
        *_near(request, selection),
        *_diverges(comparison),
        *_incomplete(selection, unread, interrupted=interrupted),
    )
    return Report(
        command=COMMAND,
        data=OverflowShow(
            answer=tuple(wording.answer(selection, comparison)),
            files=tuple(map(_file, selection.recordings)),
            detections=tuple(found for recording in selection.recordings for found in recording.detections),
            growth=selection.growth,
            divergence=None if comparison is None else comparison.found,
            rows=tuple(_rows(request, selection)),
        ),
        findings=findings,
        summary=_summary(selection, findings),
        interrupted=interrupted,
    )


def _file(recording: Recording) -> FileRead:
    return FileRead(**{name: getattr(recording, name) for name in FileRead.__struct_fields__})


def _rows(request: Request, selection: Selection) -> list[Row]:
    main = [] if selection.main is None else [selection.main]
    rows: list[Row] = []
    for forward in selection.forwards if request.everything else main:
        if len(rows) < MOST_ROWS:
            rows += rows_that_matter(request, forward, selection.growth_of(forward))
    return rows[:MOST_ROWS]


def _summary(selection: Selection, findings: Sequence[Finding]) -> str:
    for level in (Level.FAIL, Level.UNKNOWN):
        for finding in findings:
            if finding.level == level:
                return finding.title
    near = (finding.title for finding in findings if finding.id in ("overflow.not-finite", "overflow.near-limit"))
    return next(near, f"nothing detected; {wording.grew(selection)}")


# Findings


def _detected(request: Request, selection: Selection) -> Iterator[Finding]:
    found = selection.detections
    for recording, detection in found[:_SHOWN]:
        rank = detection.rank if detection.rank is not None else recording.rank
        host = detection.host or recording.host
        yield Finding(
            id="overflow.detected",
            level=Level.FAIL,
            title=wording.sentence(selection, recording, detection),
            where=Where(
                hosts=(host,) if host else (), ranks=(*(() if rank is None else (rank,)), *detection.other_ranks)
            ),
            evidence=(*_tally(detection), *detection.hints),
            fix=_fix(request, detection),
        )
    if len(found) > _SHOWN:
        yield Finding(id="overflow.detected", level=Level.FAIL, title=f"{len(found) - _SHOWN} more detections (--json)")


def _fix(request: Request, detection: Detection) -> Fix | None:
    if not detection.fix:
        return None
    around = _around(detection)
    words = ("--module", f"{around}*") if around else ()
    command = request.again("--batch", str(detection.batch), *words, "--all")
    return Fix(text=f"{detection.fix}; what leads up to it:", commands=(command,))


def _around(detection: Detection) -> str:
    """Return the module around the one that made it, and around where it became nan; empty for all of the model."""
    names = [detection.made_by or detection.module]
    names += [detection.became.module] if detection.became is not None else []
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _tally(detection: Detection) -> Iterator[str]:
    tally = detection.tally
    if tally is None:
        return
    first = "" if tally.first is None else f", first at [{', '.join(map(str, tally.first))}]"
    counts = ((tally.nan, "nan"), (tally.inf, "inf"), (tally.minus_inf, "-inf"))
    bad = ", ".join(f"{count:,} {name}" for count, name in counts if count)
    yield f"{tally.dtype} [{', '.join(map(str, tally.shape))}]: {bad or 'none'} of {tally.of:,}{first}"


def _not_finite(selection: Selection) -> Iterator[Finding]:
    """Report nan and inf that the detector says nothing of: it may be meant so, or the job ended first."""
    found = [
        (forward.id, forward.not_finite[0], recording)
        for recording, forward in selection.owned
        # Only the first is detected where the job goes on.
        if forward.not_finite and not any(found.batch <= forward.id.batch for found in recording.detections)
    ]
    if found:
        forward, at, _ = found[0]
        yield Finding(
            id="overflow.not-finite",
            level=Level.WARN,
            title=f"{at.abs_max} in `{at.tensor}` of {wording.named(at.module)} ({at.class_}), "
            f"{selection.names.of(forward)}, not reported by the detector",
            detail="Masks of -inf and the modules in `ignore` are not reported; or the job was killed "
            "before the report.",
            where=_where([recording for _, _, recording in found]),
        )


def _near(request: Request, selection: Selection) -> Iterator[Finding]:
    """Report outputs near their limit, each module once, where it was nearest."""
    fits = matches(request.module)
    best: dict[str, tuple[At, ForwardId, Recording]] = {}
    for recording, forward in selection.owned:
        for at in forward.near():
            if fits(at.module) and (at.module not in best or at.share > best[at.module][0].share):
                best[at.module] = (at, forward.id, recording)
    ordered = sorted(best.values(), key=lambda found: -found[0].share)
    if not ordered:
        return
    lines = [f"{_of_limit(at)} {selection.names.within(forward)}" for at, forward, _ in ordered[:_SHOWN]]
    more = f"; {wording.count(len(ordered) - 1, 'other module')} above {wording.percent(NEAR)}"
    yield Finding(
        id="overflow.near-limit",
        level=Level.WARN,
        title=lines[0] + (more if len(ordered) > 1 else ""),
        where=_where([recording for _, _, recording in ordered]),
        evidence=tuple(lines[1:]),
        fix=Fix(text=_scale_down([at for at, _, _ in ordered])),
    )


def _scale_down(near: Sequence[At]) -> str:
    if all(at.dtype in ("float16", *_FLOAT8) for at in near):
        return "run these modules in bfloat16 or float32, or scale down their inputs"
    return "scale down the inputs of these modules"


def _of_limit(at: At) -> str:
    what = "the input of " if at.tensor == INPUT else f"`{at.tensor}` of "
    share = f"{wording.percent(at.share)} of {at.dtype} max"
    return f"{what}{wording.named(at.module)} ({at.class_}) reaches {wording.magnitude(at.abs_max)} = {share}"


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
    if not first and not evidence:
        return
    serious = (Mismatch.NOT_FINITE, Mismatch.DTYPE, Mismatch.KIND)
    yield Finding(
        id="overflow.diverges",
        level=Level.WARN if any(difference.what in serious for difference in first) else Level.INFO,
        title=wording.diverged(comparison),
        evidence=evidence,
    )


def _only_in(names: tuple[str, str], found: Divergence) -> Iterator[str]:
    for name, calls in zip(names, (found.only_a, found.only_b), strict=True):
        if calls:
            more = f" and {len(calls) - _SHOWN} more" if len(calls) > _SHOWN else ""
            yield f"only in {name}: {', '.join(wording.named(at.module) for at in calls[:_SHOWN])}{more}"


def _incomplete(selection: Selection, unread: Mapping[str, str], *, interrupted: bool) -> Iterator[Finding]:
    if unread:
        yield Finding(
            id="overflow.unreadable",
            level=Level.UNKNOWN,
            title=f"{wording.count(len(unread), 'file')} could not be read: {next(iter(unread.values()))}",
            evidence=tuple(list(unread.values())[1:_SHOWN]),
        )
    for recording in selection.recordings:
        if why := _lacks(recording):
            may_lack_detection = not recording.detections and (recording.truncated or recording.torn > 0)
            yield Finding(
                id="overflow.incomplete",
                # What is missing may be the detection: without one, nothing is shown as fine.
                level=Level.UNKNOWN if may_lack_detection else Level.WARN,
                title=f"{recording.path}: {'; '.join(why)}",
                where=_where([recording]),
            )
    empty = [recording for recording in selection.recordings if recording.is_empty]
    if empty and not interrupted:
        yield Finding(
            id="overflow.no-frames",
            level=Level.UNKNOWN,
            title=f"{empty[0].path} has no frames"
            + (f", and neither do {len(empty) - 1} more files" if len(empty) > 1 else ""),
            detail="The detector saves the frames of batches in trace_batch_nums, and the last frames "
            "before a detection.",
            where=_where(empty),
        )


def _lacks(recording: Recording) -> list[str]:
    why = []
    if recording.truncated:
        why.append("the last line is incomplete: the job was killed or is still writing; the lines before it were read")
    if recording.torn:
        why.append(
            f"{wording.count(recording.torn, 'line')} cannot be read, first line {recording.first_torn}: "
            "if several ranks "
            'write to this file, give each its own: save="frames-{rank}.jsonl"'
        )
    if recording.left_out:
        why.append(
            f"the file is too large: its last {recording.left_out:,} frames were skipped; select others by --batch"
        )
    return why


def _where(recordings: Sequence[Recording]) -> Where:
    hosts = dict.fromkeys(recording.host for recording in recordings if recording.host)
    ranks = sorted({recording.rank for recording in recordings if recording.rank is not None})
    return Where(hosts=tuple(hosts), ranks=tuple(ranks))
