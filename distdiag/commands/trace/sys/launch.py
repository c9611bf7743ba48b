"""A job under strace, from its start to its report: its output, signals and exit status pass through unchanged."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import typer

from distdiag import child_job
from distdiag.commands.trace.sys import collect, logs
from distdiag.commands.trace.sys.diagnose import diagnose_logs
from distdiag.commands.trace.sys.types import COMMAND, MAX_JOB_LOG_BYTES
from distdiag.commands.trace.sys.wording import PAYLOAD_WARNING, log_name
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts import carried_tools, machine, programs
from distdiag.facts.rank_identity import identify
from distdiag.files import write_whole
from distdiag.output import Output, deliver, document, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.sys.types import Request, TraceSys
    from distdiag.report import Report

_SECCOMP, _NAMES, _KILLS = (5, 3), (5, 15), (6, 6)
"""Since which version strace has --seccomp-bpf, -Y and --kill-on-exit."""
_VERSION_S = 10.0
_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # linux/falloc.h
_BLOCK = 512


def launch(command: Sequence[str], request: Request, report: str) -> NoReturn:
    """Run a job below strace; report on it, into the file `report` if one is named; end as it did.

    Raises:
        UsageError: there is no such program, or a file cannot be written.
        DistdiagError: there is no strace.
    """
    argv = child_job.argv_of(command, example=f"{request.program} trace sys -- train.py")
    child_job.say_python(argv, command, say)
    if report:
        report = os.path.abspath(report)  # the job may leave this folder
        write_whole(report, b"")  # fail now, not hours later
    log = _open_log(request.logs)
    if request.payload_bytes:
        say(f"distdiag {COMMAND}: {PAYLOAD_WARNING}")
    status, log = _run(argv, request, log)
    try:
        _report(request, log, report)
    except (DistdiagError, KeyboardInterrupt) as error:
        say(f"distdiag {COMMAND}: {error or 'interrupted'}")
    child_job.leave_like(status)


@dataclass(frozen=True, kw_only=True)
class _JobLog:
    """The log of the job: a file that has no name, or `kept`. `gap`: its middle was let go, as it was too long."""

    file: BinaryIO
    kept: str
    rank: int | None
    host: str
    gap: bool = False

    @property
    def path(self) -> str:
        """Where it can be opened, by us and by strace."""
        return f"/proc/{os.getpid()}/fd/{self.file.fileno()}"


def _open_log(folder: str) -> _JobLog:
    """Make the log, in a folder by the name of this rank if one is given. Raises UsageError."""
    me = identify(os.environ)
    rank, host = me.rank if me is not None else None, machine.host_name()
    path = os.path.join(os.path.abspath(folder), log_name(rank, host, os.getpid())) if folder else ""
    try:
        return _JobLog(file=collect.private_file(path), kept=path, rank=rank, host=host)
    except OSError as error:
        raise UsageError(f"--logs {folder}: {error.strerror}", hint="choose a writable folder") from error


def _run(argv: Sequence[str], request: Request, log: _JobLog) -> tuple[int, _JobLog]:
    """Run a job below strace to its end; its exit status, negative for a signal, and what was kept of the log.

    Raises:
        DistdiagError: there is no strace.
    """
    tool = carried_tools.find("strace")
    if tool is None:
        raise DistdiagError(
            "strace is not installed; the job was not started",
            hint="sudo apt-get install strace || sudo dnf install strace; for a running job, this needs no strace: "
            f"{request.program} trace blocked",
        )
    version = _version(tool)
    options = ["-q", *collect.arguments(request.only, request.payload_bytes), "-o", log.path]
    # A filter in the kernel: calls that are not wanted cost next to nothing.
    options += ["--seccomp-bpf"] if request.only and version >= _SECCOMP else []
    # The names of threads, which are in strings otherwise.
    options += ["-Y"] if version >= _NAMES else []
    options += ["--kill-on-exit"] if version >= _KILLS else []
    bounded = BoundedLog(log.file, MAX_JOB_LOG_BYTES)
    with child_job.signals_for_the_job() as mask:
        # strace ends like the job.
        status = child_job.wait(child_job.start([tool, *options, *argv], mask), _pass_on, bounded.check)
    return status, _without_hole(log, bounded)


def _version(tool: str) -> tuple[int, int]:
    try:
        text = programs.run([tool, "-V"], timeout_s=_VERSION_S).stdout
    except programs.CannotRun:
        return (0, 0)
    match = re.search(rb"version (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _pass_on(child: int, number: int) -> None:
    """Send a signal to the job itself: strace, which is between, does not hand it on."""
    for pid in machine.read_text(f"/proc/{child}/task/{child}/children").split():
        child_job.send(int(pid), number)


def _without_hole(log: _JobLog, bounded: BoundedLog) -> _JobLog:
    if not bounded.tail:
        return log
    part = f"{log.kept}.part" if log.kept else ""
    file = collect.private_file(part)
    bounded.copy_to(file)
    if part:
        os.replace(part, log.kept)
    return replace(log, file=file, gap=True)


def _report(request: Request, log: _JobLog, file: str) -> None:
    if log.kept:
        folder = os.path.dirname(log.kept)
        say(
            f"distdiag {COMMAND}: log written to {log.kept}; to analyze it: {request.program} trace sys --from {folder}"
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


def _judge(request: Request, log: _JobLog) -> Report[TraceSys]:
    threads, found = logs.read([log.path], owners={log.path: (log.rank, log.host, None)})
    return diagnose_logs(request, threads, [replace(each, gap=log.gap) for each in found])


class BoundedLog:
    """Keeps a file that another program writes below `limit_bytes` on its disk: its middle is let go, by a hole."""

    def __init__(self, file: BinaryIO, limit_bytes: int) -> None:
        self.file, self._limit = file, limit_bytes
        self.head = limit_bytes // 4
        """So many bytes of its beginning are kept."""
        self.tail = 0
        """Where what is kept of its end begins; 0 while all is kept."""

    def check(self) -> None:
        """Make room, if it has become too long; call it often."""
        status = os.fstat(self.file.fileno())
        if status.st_blocks * _BLOCK <= self._limit:
            return
        tail = max(self.head, status.st_size - self._limit // 2)
        # Not every file system can do it; there the log grows.
        if _punch(self.file.fileno(), self.head, tail - self.head):
            self.tail = tail

    def copy_to(self, other: BinaryIO) -> None:
        """Write what was kept into another file, in whole lines."""
        self.file.seek(0)
        head = self.file.read(self.head) if self.tail else b""
        other.write(head[: head.rfind(b"\n") + 1])
        self.file.seek(self.tail)
        if self.tail:
            self.file.readline()
        shutil.copyfileobj(self.file, other, 2**20)
        other.flush()


def _punch(fd: int, start: int, length: int) -> bool:
    libc = ctypes.CDLL(None)
    done = libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_longlong(start), ctypes.c_longlong(length))
    return bool(length > 0 and done == 0)
