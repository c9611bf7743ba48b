"""A job below strace, from its start to the report on it. Its exit status is ours."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import typer

from distdiag.commands.trace.sys import ask, launch, saved
from distdiag.commands.trace.sys.choices import COMMAND
from distdiag.commands.trace.sys.diagnose import judge_logs
from distdiag.commands.trace.sys.words import PAYLOAD_WARNING
from distdiag.deliver import Output, deliver, document, say
from distdiag.errors import DistdiagError
from distdiag.files import write_whole
from distdiag.foreground import argv_of, leave_like

if TYPE_CHECKING:
    from distdiag.commands.trace.sys.ask import Typed
    from distdiag.commands.trace.sys.launch import Log
    from distdiag.commands.trace.sys.model import Request, TraceSys
    from distdiag.report import Report


def become(typed: Typed, program: str) -> NoReturn:
    """Run the job; report on it; end as it did.

    Raises:
        UsageError: the options contradict each other, or a file cannot be written.
        DistdiagError: there is no strace.
    """
    request = ask.start(typed, program)
    argv = argv_of(typed.command, example=f"{program} trace sys -- train.py")
    if typed.report:
        write_whole(os.path.abspath(typed.report), b"")  # hours later would be too late to hear that it cannot be
    log = launch.open_log(request.logs)
    folder = os.getcwd()
    if request.payload_bytes:
        say(f"distdiag {COMMAND}: {PAYLOAD_WARNING}")
    status, log = launch.launch(argv, request, log)
    try:
        _tell(request, log, typed.report and os.path.join(folder, typed.report))
    except (DistdiagError, KeyboardInterrupt) as error:
        say(f"distdiag {COMMAND}: {error or 'interrupted'}")
    leave_like(status)


def _tell(request: Request, log: Log, file: str) -> None:
    if log.kept:
        say(
            f"distdiag {COMMAND}: the log is {log.kept}; {request.program} trace sys --from {os.path.dirname(log.kept)}"
        )
    if log.kept and not file:
        return
    report = _judge(request, log)
    if file:
        write_whole(file, (json.dumps(document(report), indent=2) + "\n").encode())
        say(f"distdiag {COMMAND}: {report.verdict}: {report.summary} ({file})")
        return
    from distdiag.commands.trace.sys.view import trace_sys_view

    # The exit status is the job's: what deliver would leave with is of no interest.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(typer.Exit):
        deliver(COMMAND, lambda: report, lambda found: trace_sys_view(found.data), Output())


def _judge(request: Request, log: Log) -> Report[TraceSys]:
    subjects, logs = saved.read([log.path], of={log.path: (log.rank, log.host, None)})
    return judge_logs(request, subjects, [replace(one, gap=log.gap) for one in logs])
