"""Starts a job below strace: its output, its signals and its end are its own; what was seen is told afterwards."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

from distdiag import foreground
from distdiag.commands.trace.sys import collect
from distdiag.commands.trace.sys.bounded import Bounded
from distdiag.commands.trace.sys.choices import expression
from distdiag.commands.trace.sys.model import MAX_JOB_LOG_BYTES
from distdiag.commands.trace.sys.words import log_name
from distdiag.errors import DistdiagError, UsageError
from distdiag.node import machine, run, tools
from distdiag.node.identity import identify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.sys.model import Request

_SECCOMP, _NAMES, _KILLS = (5, 3), (5, 15), (6, 6)
"""Since which version strace has --seccomp-bpf, -Y and --kill-on-exit."""
_VERSION_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Log:
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


def open_log(folder: str) -> Log:
    """Make the log, in a folder by the name of this rank if one is given. Raises UsageError."""
    me = identify(os.environ)
    rank, host = me.rank if me is not None else None, machine.host_name()
    path = os.path.join(os.path.abspath(folder), log_name(rank, host, os.getpid())) if folder else ""
    try:
        return Log(file=collect.private_file(path), kept=path, rank=rank, host=host)
    except OSError as error:
        raise UsageError(f"--logs {folder}: {error.strerror}", hint="name a folder that can be written") from error


def launch(argv: Sequence[str], request: Request, log: Log) -> tuple[int, Log]:
    """Run a job below strace to its end; its exit status, negative for a signal, and what was kept of the log.

    Raises:
        DistdiagError: there is no strace.
    """
    tool = tools.find("strace")
    if tool is None:
        raise DistdiagError(
            "strace is not installed, and the job was not started",
            hint="sudo apt-get install strace || sudo dnf install strace; of a job that runs, this needs no strace: "
            f"{request.program} trace blocked",
        )
    version = _version(tool)
    options = ["-q", *collect.arguments(expression(request.only), request.payload_bytes), "-o", log.path]
    # A filter in the kernel: calls that are not wanted cost next to nothing.
    options += ["--seccomp-bpf"] if request.only and version >= _SECCOMP else []
    # The names of threads, which stand in strings otherwise.
    options += ["-Y"] if version >= _NAMES else []
    options += ["--kill-on-exit"] if version >= _KILLS else []
    bounded = Bounded(log.file, MAX_JOB_LOG_BYTES)
    with foreground.signals_for_the_job() as mask:
        # strace ends like the job.
        status = foreground.wait(foreground.start([tool, *options, *argv], mask), _pass_on, bounded.check)
    return status, _whole(log, bounded)


def _whole(log: Log, bounded: Bounded) -> Log:
    """Give a log without a hole."""
    if not bounded.tail:
        return log
    part = f"{log.kept}.part" if log.kept else ""
    file = collect.private_file(part)
    bounded.copy_to(file)
    if part:
        os.replace(part, log.kept)
    return replace(log, file=file, gap=True)


def _version(tool: str) -> tuple[int, int]:
    try:
        told = run.run([tool, "-V"], timeout_s=_VERSION_S).stdout
    except run.CannotRun:
        return (0, 0)
    match = re.search(rb"version (\d+)\.(\d+)", told)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _pass_on(child: int, number: int) -> None:
    """Send a signal to the job itself: strace, which is between, does not hand it on."""
    for pid in machine.read_text(f"/proc/{child}/task/{child}/children").split():
        foreground.send(int(pid), number)
