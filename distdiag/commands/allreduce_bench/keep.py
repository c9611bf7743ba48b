"""Files beside the report: the earlier run that is read, what is kept, the picture."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench import baseline, plot
from distdiag.commands.allreduce_bench.check import job_of
from distdiag.deliver import document
from distdiag.errors import DistdiagError, UsageError
from distdiag.files import check_picture, write_whole
from distdiag.node.identity import identify
from distdiag.report import Finding, Fix, Level
from distdiag.workload.carry_out import carry_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.commands.allreduce_bench.model import Bench, Request
    from distdiag.deliver import Progress
    from distdiag.report import Report


@dataclass(frozen=True, kw_only=True)
class Files:
    """What was named; empty where nothing was."""

    save: str
    compare: str
    plot: str


def answer(request: Request, files: Files, progress: Progress, *, strict: bool) -> Report[Bench]:
    """Measure, with the files read before and written after it; what a Ctrl-C left is kept, too.

    Raises:
        UsageError: a file that cannot be what it is named for.
        DistdiagError: the measurement failed, or a file cannot be written.
    """
    me = identify(os.environ)
    if me is None or me.rank == 0:  # the files of the others' nodes are not ours
        check_picture(files.plot)
        _check_save(files.save)
        if files.compare:
            request = replace(request, baseline=baseline.read(files.compare))
    report = carry_out(job_of(request), progress)
    if files.plot not in ("", "-"):
        report = _told(report, lambda: plot.save(report.data, request.unit, files.plot))
    if files.save:
        kept = json.dumps(document(report, strict=strict), indent=2).encode() + b"\n"
        report = _told(report, lambda: write_whole(files.save, kept))
    return report


def _check_save(target: str) -> None:
    folder = os.path.dirname(os.path.abspath(target)) if target else "."
    if os.path.isdir(target) or not os.path.isdir(folder):
        what = "that is a folder" if os.path.isdir(target) else f"there is no folder {folder}"
        raise UsageError(f"--save {target}: {what}", hint="name a file in a folder that is there")


def _told(report: Report[Bench], write: Callable[[], None]) -> Report[Bench]:
    """Write a file; where that fails, the report says so, and is not lost with it."""
    try:
        write()
    except DistdiagError as error:
        fix = Fix(text=error.hint) if error.hint else None
        failed = Finding(id=f"{report.command}.not-saved", level=Level.UNKNOWN, title=str(error), fix=fix)
        return replace(report, findings=(*report.findings, failed), summary=f"{report.summary}; {error}")
    return report
