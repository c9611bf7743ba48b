"""Files beside the report: the earlier run that is read, what is kept, the picture."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench import baseline, plot
from distdiag.commands.allreduce_bench.check import check
from distdiag.deliver import document
from distdiag.errors import UsageError
from distdiag.files import write_whole
from distdiag.node.identity import identify

if TYPE_CHECKING:
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
        plot.check_target(files.plot)
        if files.save and not os.path.isdir(os.path.dirname(os.path.abspath(files.save))):
            raise UsageError(f"--save {files.save}: there is no such folder", hint="name a folder that is there")
        if files.compare:
            request = replace(request, baseline=baseline.read(files.compare))
    report = check(request, progress)
    if files.save:
        write_whole(files.save, json.dumps(document(report, strict=strict), indent=2).encode() + b"\n")
    if files.plot not in ("", "-"):
        plot.save(report.data, request.unit, files.plot)
    return report
