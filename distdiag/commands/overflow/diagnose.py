"""What the watched processes told -> Report. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.overflow.model import COMMAND, Overflow
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.overflow.model import Detection, Watched


_MOST_FILES = 4
_HOW_FOUND = (
    "A model is found when it is called, in a Python that reads PYTHONPATH (not python -S, -I or -E), "
    "below the command that was typed."
)
_NOTHING = "nothing was watched: no forward of a torch model was seen"


def diagnose(seen: Overflow, program: str) -> Report[Overflow]:
    """Say what was found, or what that nothing was found rests on."""
    return Report(command=COMMAND, data=seen, findings=tuple(_findings(seen, program)), summary=_summary(seen))


def _summary(seen: Overflow) -> str:
    if seen.detections:
        return seen.detections[0].sentence
    if _saw_nothing(seen):
        return _NOTHING
    found = sum(model.found for one in seen.processes for model in one.models)
    if found:
        return f"something was found {found:,} times, and what it was could not be kept"
    blind = [one for one in (*_gave_up(seen), *_unread(seen)) if one.level is Level.UNKNOWN]
    if blind:
        return blind[0].title
    if not all(one.ended for one in seen.processes):
        return "nothing was found, as far as is known: the job was ended before it could tell what it saw"
    batches = sum(model.batches for one in seen.processes for model in one.models)
    models = sorted({model.model for one in seen.processes for model in one.models})
    ranks = len(seen.processes)
    where = f" on {ranks} ranks" if ranks > 1 else ""
    until = f", until the job ended with {_how(seen.status)}" if seen.status else ""
    return f"no nan or inf in {batches:,} forward{'s' * (batches != 1)} of {', '.join(models)}{where}{until}"


def _findings(seen: Overflow, program: str) -> Iterator[Finding]:
    for one in seen.detections:
        yield Finding(
            id="overflow.detected",
            level=Level.FAIL,
            title=one.sentence,
            where=_where(one),
            evidence=one.hints,
            fix=_fix(seen, program),
        )
    if _saw_nothing(seen):
        yield Finding(
            id="overflow.nothing-watched",
            level=Level.UNKNOWN,
            title=_NOTHING,
            detail=f"The job ended with {_how(seen.status)} before it called one." if seen.status else _HOW_FOUND,
            fix=None if seen.status else Fix(text="Or watch it from the script: DebugUnderflowOverflow(model)."),
        )
    yield from _gave_up(seen)
    yield from _unread(seen)
    yield from _warnings(seen)
    lost = [one for one in seen.processes if not one.ended]
    if lost and not seen.detections:
        yield Finding(
            id="overflow.ended-early",
            level=Level.UNKNOWN,
            title=f"{len(lost)} of {len(seen.processes)} processes ended before they could tell what they saw",
            detail="They were killed, crashed, or left by os._exit().",
            where=Where(hosts=tuple({one.host for one in lost}), pids=tuple(one.pid for one in lost)),
        )
    if seen.status and not seen.detections:
        aborted = any(model.aborted for one in seen.processes for model in one.models)
        title = (
            "it was ended after the batch of --abort-after"
            if aborted
            else f"the job itself ended with {_how(seen.status)}"
        )
        yield Finding(id="overflow.job-ended", level=Level.INFO if aborted else Level.WARN, title=title)


def _gave_up(seen: Overflow) -> Iterator[Finding]:
    """Tell where nobody looked, or not to the end: what was not found there says nothing."""
    for process in seen.processes:
        for why in process.left_out:
            yield _blind("not-watched", f"what was not watched is not known: {why}", process)
        for model in process.models:
            if model.off:
                yield _blind("gave-up", f"the detector of {model.model} gave up: {model.off}", process)


def _unread(seen: Overflow) -> Iterator[Finding]:
    for process in seen.processes:
        for model in process.models:
            if model.unread:
                all_ = "" if model.unread == model.batches else f"{model.unread:,} of {model.batches:,} times "
                title = f"{model.model} {all_}gave back nothing that can be read ({model.kind})"
                yield replace(
                    _blind("outputs-unread", title, process),
                    # Of what a forward makes in training the gradients tell, too.
                    level=Level.WARN if model.steps else Level.UNKNOWN,
                    fix=Fix(text="read what its modules give each other: add --full before the --"),
                )


def _blind(name: str, title: str, process: Watched) -> Finding:
    ranks = () if process.rank is None else (process.rank,)
    where = Where(hosts=(process.host,), ranks=ranks, pids=(process.pid,))
    return Finding(id=f"overflow.{name}", level=Level.UNKNOWN, title=title, where=where)


def _warnings(seen: Overflow) -> Iterator[Finding]:
    told = {text: process for process in reversed(seen.processes) for one in process.models for text in one.warnings}
    for text, process in told.items():
        ranks = () if process.rank is None else (process.rank,)
        yield Finding(
            id="overflow.warning", level=Level.WARN, title=text, where=Where(hosts=(process.host,), ranks=ranks)
        )


def _saw_nothing(seen: Overflow) -> bool:
    """Tell whether there was no forward; of processes that were killed, or not watched, it is not known."""
    return not any(model.batches for one in seen.processes for model in one.models) and all(
        one.ended and not one.left_out for one in seen.processes
    )


def _how(status: int) -> str:
    return f"status {status}" if status > 0 else f"signal {-status}"


def _where(one: Detection) -> Where:
    ranks = () if one.rank is None else (one.rank, *one.other_ranks)
    return Where(hosts=(one.host,) if one.host else (), ranks=ranks)


def _fix(seen: Overflow, program: str) -> Fix | None:
    if not seen.frames:
        return None
    shown = shlex.join(seen.frames[:_MOST_FILES])
    return Fix(text="The frames that lead there:", commands=(f"{program} overflow show {shown}",))
