"""What the watched processes of a job wrote -> Report, and its table. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.diagnosis.verdicts import finding
from distdiag.record import record
from distdiag.report import Level, Report, Where
from distdiag.training.overflow.report import (  # noqa: TC001 - msgspec reads the annotations
    Detection,
    WatchedModel,
    WatchedProcess,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.report import Finding

COMMAND = "overflow"
_MOST_FILES = 4


@record(kw_only=True)
class Overflow:
    """Result of a watched job. `status`: the job's exit status, negative for a signal.

    `frames`: files kept; `folder`, as typed, if these are its only frame files.
    """

    argv: tuple[str, ...]
    status: int
    processes: tuple[WatchedProcess, ...]
    detections: tuple[Detection, ...]
    frames: tuple[str, ...] = ()
    folder: str = ""

    @property
    def watched(self) -> list[tuple[WatchedProcess, WatchedModel]]:
        """All models of all processes."""
        return [(process, model) for process in self.processes for model in process.models]

    @property
    def models(self) -> list[WatchedModel]:
        """The models alone."""
        return [model for _, model in self.watched]

    @property
    def was_aborted(self) -> bool:
        """Whether the job ended after the batch of --abort-after."""
        return self.status != 0 and any(model.aborted for model in self.models)

    @property
    def ended(self) -> str:
        """How the job ended."""
        return f"status {self.status}" if self.status >= 0 else f"signal {-self.status}"

    @property
    def saw_nothing(self) -> bool:
        """Whether no forward ran; unknown, hence False, with processes killed or not watched."""
        all_known = all(process.ended and not process.left_out for process in self.processes)
        return all_known and not any(model.batches for model in self.models)


def diagnose(outcome: Overflow, program: str) -> Report[Overflow]:
    """Report the detections; without any, the extent of the check."""
    blind = tuple(_blind_spots(outcome))
    findings = (*_detected(outcome, program), *blind, *_warnings(outcome), *_ends(outcome))
    return Report(command=COMMAND, data=outcome, findings=findings, summary=_summary(outcome, blind))


def _summary(outcome: Overflow, blind: tuple[Finding, ...]) -> str:
    if outcome.detections:
        return outcome.detections[0].sentence
    found = sum(model.began for model in outcome.models)
    if found:
        return f"{found:,} detections, but their details could not be saved"
    unknown = [each.title for each in blind if each.level is Level.UNKNOWN]
    if unknown:
        return unknown[0]
    if not all(process.ended for process in outcome.processes):
        return "unknown: the job ended before it reported its results"
    batches = sum(model.batches for model in outcome.models)
    models = ", ".join(sorted({model.model for model in outcome.models}))
    where = f" on {len(outcome.processes)} ranks" if len(outcome.processes) > 1 else ""
    until = f" before the job ended with {outcome.ended}" if outcome.status else ""
    return f"no nan or inf in {batches:,} forward{'s' * (batches != 1)} of {models}{where}{until}"


def _detected(outcome: Overflow, program: str) -> Iterator[Finding]:
    for found in outcome.detections:
        fix, show = found.fix, ""
        if outcome.frames:
            shown = shlex.join([outcome.folder] if outcome.folder else outcome.frames[:_MOST_FILES])
            fix = f"{found.fix}; the frames before it:" if found.fix else "show the frames before the detection"
            show = f"{program} overflow show {shown}"
        ranks = () if found.rank is None else (found.rank, *found.other_ranks)
        words = {"sentence": found.sentence, "fix": fix, "show": show}
        where = Where(hosts=(found.host,) if found.host else (), ranks=ranks)
        yield finding("overflow.detected", words, where=where, evidence=found.hints)


def _blind_spots(outcome: Overflow) -> Iterator[Finding]:
    """Report unchecked or partly checked parts of the job."""
    if outcome.saw_nothing:
        yield finding("overflow.ended-unwatched" if outcome.status else "overflow.nothing-watched", ended=outcome.ended)
    for why in dict.fromkeys(why for process in outcome.processes for why in process.left_out):
        where = _where(*[process for process in outcome.processes if why in process.left_out])
        yield finding("overflow.not-watched", where=where, why=why)
    for process, model in outcome.watched:
        words = {"model": model.model, "why": model.off, "kind": model.kind}
        if model.off:
            yield finding("overflow.gave-up", words, where=_where(process))
        if model.unread:
            often = "" if model.unread == model.batches else f"{model.unread:,} of {model.batches:,} times"
            # The gradients show a bad output of training, too.
            level = Level.WARN if model.steps else None
            yield finding("overflow.outputs-unreadable", words, level=level, where=_where(process), often=often)


def _where(*processes: WatchedProcess) -> Where:
    return Where(
        hosts=tuple(dict.fromkeys(process.host for process in processes)),
        ranks=tuple(process.rank for process in processes if process.rank is not None),
        pids=tuple(process.pid for process in processes),
    )


def _warnings(outcome: Overflow) -> Iterator[Finding]:
    warnings = {text: process for process, model in reversed(outcome.watched) for text in model.warnings}
    for text, process in warnings.items():
        yield finding("overflow.warning", where=_where(process), text=text)


def _ends(outcome: Overflow) -> Iterator[Finding]:
    """Report the exits of processes and job, if no detection explains them."""
    if outcome.detections:
        return
    lost = [process for process in outcome.processes if not process.ended]
    if lost:
        yield finding("overflow.ended-early", where=_where(*lost), lost=len(lost), of=len(outcome.processes))
    if outcome.status:
        yield finding("overflow.job-aborted" if outcome.was_aborted else "overflow.job-ended", ended=outcome.ended)


def overflow_view(report: Report[Overflow]) -> Iterator[RenderableType]:
    """One row for each model of each process; the frames were printed by the job itself."""
    from rich.table import Column

    from distdiag.output import plain_table

    if not report.data.processes:
        return
    titles = ("rank", "host", "pid", "model", "forwards", "steps", "found")
    names = ("host", "model")
    table = plain_table(
        *(Column(title, overflow="fold") if title in names else Column(title, justify="right") for title in titles)
    )
    for process, model in report.data.watched:
        rank = "-" if process.rank is None else str(process.rank)
        counts = (model.batches, model.steps, model.began)
        table.add_row(rank, process.host, str(process.pid), model.model, *[f"{count:,}" for count in counts])
    yield table
