"""What the watched processes told -> Report. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.commands.overflow.model import COMMAND, Overflow
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.commands.overflow.model import Detection


_MOST_FILES = 4


def diagnose(seen: Overflow, program: str) -> Report[Overflow]:
    """Say what was found, or what that nothing was found rests on."""
    return Report(command=COMMAND, data=seen, findings=tuple(_findings(seen, program)), summary=_summary(seen))


def _summary(seen: Overflow) -> str:
    if seen.detections:
        return seen.detections[0].sentence
    if not seen.processes:
        return "nothing was watched: no process of the job called a model"
    batches = sum(model.batches for one in seen.processes for model in one.models)
    models = sorted({model.model for one in seen.processes for model in one.models})
    ranks = len(seen.processes)
    where = f" on {ranks} ranks" if ranks > 1 else ""
    return f"no nan or inf in {batches:,} forwards of {', '.join(models)}{where}"


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
    if not seen.processes:
        yield Finding(
            id="overflow.nothing-watched",
            level=Level.UNKNOWN,
            title="no process of the job called a torch model",
            detail="A model is found when it is called, in a Python that reads PYTHONPATH (not python -S, -I or -E), "
            "below the command that was typed.",
            fix=Fix(text="Or watch it from the script: DebugUnderflowOverflow(model)."),
        )
    if seen.status and not seen.detections:
        how = f"status {seen.status}" if seen.status > 0 else f"signal {-seen.status}"
        aborted = any(model.aborted for one in seen.processes for model in one.models)
        title = "it was ended after the batch of --abort-after" if aborted else f"the job itself ended with {how}"
        yield Finding(id="overflow.job-ended", level=Level.INFO, title=title)


def _where(one: Detection) -> Where:
    ranks = () if one.rank is None else (one.rank, *one.other_ranks)
    return Where(hosts=(one.host,) if one.host else (), ranks=ranks)


def _fix(seen: Overflow, program: str) -> Fix | None:
    if not seen.frames:
        return None
    shown = shlex.join(seen.frames[:_MOST_FILES])
    return Fix(text="The frames that lead there:", commands=(f"{program} overflow show {shown}",))
