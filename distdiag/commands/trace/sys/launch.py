"""Starts a job below strace: its output, its signals and its end are its own; what was seen is told afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from distdiag.commands.trace.sys import collect
from distdiag.commands.trace.sys.bounded import Bounded
from distdiag.commands.trace.sys.choices import expression
from distdiag.commands.trace.sys.model import MAX_JOB_LOG_BYTES
from distdiag.commands.trace.sys.words import log_name
from distdiag.errors import DistdiagError, UsageError
from distdiag.node import machine, run, tools
from distdiag.node.identity import identify

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SECCOMP, _KILLS = (5, 3), (6, 6)
"""Since which version strace has --seccomp-bpf and --kill-on-exit."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_PROCESS = 0
"""si_code of a signal that a process sent (SI_USER); what a terminal sends goes to the job as well."""
_VERSION_S, _TURN_S = 10.0, 1.0


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
        raise UsageError(f"--save {folder}: {error.strerror}", hint="name a folder that can be written") from error


def launch(argv: Sequence[str], only: Sequence[str], log: Log, program: str) -> tuple[int, Log]:
    """Run a job below strace to its end; its exit status, negative for a signal, and what was kept of the log.

    Raises:
        DistdiagError: there is no strace.
    """
    tool = tools.find("strace")
    if tool is None:
        raise DistdiagError(
            "strace is not installed, and the job was not started",
            hint="sudo apt-get install strace || sudo dnf install strace; of a job that runs, this needs no strace: "
            f"{program} trace blocked",
        )
    version = _version(tool)
    options = ["-q", *collect.arguments(expression(only)), "-o", log.path]
    # A filter in the kernel: calls that are not wanted cost next to nothing.
    options += ["--seccomp-bpf"] if only and version >= _SECCOMP else []
    options += ["--kill-on-exit"] if version >= _KILLS else []
    bounded = Bounded(log.file, MAX_JOB_LOG_BYTES)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*_FORWARDED, signal.SIGCHLD])
    try:
        status = _wait(_start([tool, *options, *argv], before), bounded)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
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


def leave_like(status: int) -> NoReturn:
    """End as the job did: with its exit status, or by its signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core is the job's
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


def _version(tool: str) -> tuple[int, int]:
    try:
        told = run.run([tool, "-V"], timeout_s=_VERSION_S).stdout
    except run.CannotRun:
        return (0, 0)
    match = re.search(rb"version (\d+)\.(\d+)", told)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _start(argv: list[str], mask: Iterable[int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    try:
        run.die_with_parent()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the job would inherit that
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(argv[0], argv)
    finally:
        # Never back into the program that this is a copy of.
        os._exit(127)


def _wait(child: int, log: Bounded) -> int:
    """Wait for strace to end, which ends like the job; signals that are meant for us are the job's."""
    while True:
        told = signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], _TURN_S)
        if told is None:
            log.check()
            continue
        if told.si_signo != signal.SIGCHLD:
            if told.si_code == _FROM_PROCESS:
                _pass_on(child, told.si_signo)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)


def _pass_on(child: int, number: int) -> None:
    """Send a signal to the job itself: strace, which is between, does not hand it on."""
    for pid in machine.read_text(f"/proc/{child}/task/{child}/children").split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)
