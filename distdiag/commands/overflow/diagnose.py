"""What the watched processes wrote -> Report. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.overflow.types import COMMAND, Overflow
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.training.overflow.report import Detection, WatchedProcess


_MOST_FILES = 4
_HOW_FOUND = (
    "distdiag finds a model when it is called, in a Python process that the command started and that reads "
    "PYTHONPATH (not python -S, -I or -E)."
)
_NOTHING = "no forward of a torch model seen: nothing was checked"


def diagnose(outcome: Overflow, program: str) -> Report[Overflow]:
    """Report what was found, or what that nothing was found rests on."""
    return Report(command=COMMAND, data=outcome, findings=tuple(_findings(outcome, program)), summary=_summary(outcome))


def _summary(outcome: Overflow) -> str:
    if outcome.detections:
        return outcome.detections[0].sentence
    if _saw_nothing(outcome):
        return _NOTHING
    found = sum(model.began for model in outcome.models)
    if found:
        return f"{found:,} detections, but their details could not be saved"
    blind = [finding for finding in (*_gave_up(outcome), *_unread(outcome)) if finding.level is Level.UNKNOWN]
    if blind:
        return blind[0].title
    if not all(process.ended for process in outcome.processes):
        return "unknown: the job ended before it reported its results"
    batches = sum(model.batches for model in outcome.models)
    models = sorted({model.model for model in outcome.models})
    ranks = len(outcome.processes)
    where = f" on {ranks} ranks" if ranks > 1 else ""
    until = f" before the job ended with {_how(outcome.status)}" if outcome.status else ""
    return f"no nan or inf in {batches:,} forward{'s' * (batches != 1)} of {', '.join(models)}{where}{until}"


def _findings(outcome: Overflow, program: str) -> Iterator[Finding]:
    for detection in outcome.detections:
        yield Finding(
            id="overflow.detected",
            level=Level.FAIL,
            title=detection.sentence,
            where=_where(detection),
            evidence=detection.hints,
            fix=_fix(outcome, detection, program),
        )
    if _saw_nothing(outcome):
        yield Finding(
            id="overflow.nothing-watched",
            level=Level.UNKNOWN,
            title=_NOTHING,
            detail=f"The job ended with {_how(outcome.status)} before it called a model."
            if outcome.status
            else _HOW_FOUND,
            fix=None
            if outcome.status
            else Fix(text="attach the detector in the script: DebugUnderflowOverflow(model)"),
        )
    yield from _gave_up(outcome)
    yield from _unread(outcome)
    yield from _warnings(outcome)
    lost = [process for process in outcome.processes if not process.ended]
    if lost and not outcome.detections:
        yield Finding(
            id="overflow.ended-early",
            level=Level.UNKNOWN,
            title=f"{len(lost)} of {len(outcome.processes)} processes ended before they reported their results",
            detail="They were killed, crashed, or exited by os._exit().",
            where=Where(hosts=tuple({process.host for process in lost}), pids=tuple(process.pid for process in lost)),
        )
    if outcome.status and not outcome.detections:
        title = (
            "the job was stopped after the batch of --abort-after"
            if outcome.was_aborted
            else f"the job itself ended with {_how(outcome.status)}"
        )
        yield Finding(id="overflow.job-ended", level=Level.INFO if outcome.was_aborted else Level.UNKNOWN, title=title)


def _gave_up(outcome: Overflow) -> Iterator[Finding]:
    """Report where nobody looked, or not to the end: what was not found there says nothing."""
    unwatched: dict[str, list[WatchedProcess]] = {}
    for process in outcome.processes:
        for why in process.left_out:
            unwatched.setdefault(why, []).append(process)
    for why, processes in unwatched.items():
        yield _blind("not-watched", f"part of the job was not checked: {why}", *processes)
    for process in outcome.processes:
        for model in process.models:
            if model.off:
                yield _blind("gave-up", f"the detector of {model.model} stopped: {model.off}", process)


def _unread(outcome: Overflow) -> Iterator[Finding]:
    for process in outcome.processes:
        for model in process.models:
            if model.unread:
                all_ = "" if model.unread == model.batches else f"{model.unread:,} of {model.batches:,} times "
                title = f"the output of {model.model} {all_}cannot be read ({model.kind})"
                yield replace(
                    _blind("outputs-unreadable", title, process),
                    # Of what a forward makes in training the gradients tell, too.
                    level=Level.WARN if model.steps else Level.UNKNOWN,
                    fix=Fix(text="check the tensors of all modules: add --full before the --"),
                )


def _blind(name: str, title: str, *processes: WatchedProcess) -> Finding:
    where = Where(
        hosts=tuple(dict.fromkeys(process.host for process in processes)),
        ranks=tuple(process.rank for process in processes if process.rank is not None),
        pids=tuple(process.pid for process in processes),
    )
    return Finding(id=f"overflow.{name}", level=Level.UNKNOWN, title=title, where=where)


def _warnings(outcome: Overflow) -> Iterator[Finding]:
    warnings = {
        text: process for process in reversed(outcome.processes) for model in process.models for text in model.warnings
    }
    for text, process in warnings.items():
        ranks = () if process.rank is None else (process.rank,)
        yield Finding(
            id="overflow.warning", level=Level.WARN, title=text, where=Where(hosts=(process.host,), ranks=ranks)
        )


def _saw_nothing(outcome: Overflow) -> bool:
    """Return whether there was no forward; of processes that were killed, or not watched, it is not known."""
    return not any(model.batches for model in outcome.models) and all(
        process.ended and not process.left_out for process in outcome.processes
    )


def _how(status: int) -> str:
    return f"status {status}" if status > 0 else f"signal {-status}"


def _where(detection: Detection) -> Where:
    ranks = () if detection.rank is None else (detection.rank, *detection.other_ranks)
    return Where(hosts=(detection.host,) if detection.host else (), ranks=ranks)


def _fix(outcome: Overflow, detection: Detection, program: str) -> Fix | None:
    if not outcome.frames:
        return Fix(text=detection.fix) if detection.fix else None
    shown = shlex.join([outcome.folder] if outcome.folder else outcome.frames[:_MOST_FILES])
    text = f"{detection.fix}; the frames before it:" if detection.fix else "show the frames before the detection"
    return Fix(text=text, commands=(f"{program} overflow show {shown}",))
