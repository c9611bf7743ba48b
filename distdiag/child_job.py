"""A job that runs as a child of ours: its output, its signals and its end are its own."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from distdiag.errors import UsageError
from distdiag.facts import programs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_PROCESS = 0
"""si_code of a signal that a process sent (SI_USER); what a terminal sends goes to the job as well."""
_TURN_S = 1.0


def argv_of(command: Sequence[str], *, example: str) -> list[str]:
    """Return the command to execute: with this Python before it, if it is a script or an option of Python's.

    Raises:
        UsageError: there is no such program; `example` is how it is typed.
    """
    first = command[0]
    if first.startswith("-"):
        return [sys.executable, *command]
    program = shutil.which(first)
    if first.endswith(".py") or (program is None and os.path.isfile(first)):
        return [sys.executable, *command]
    if program is None:
        raise UsageError(f"{first}: no such command or script", hint=example)
    return [program, *command[1:]]


def watched(variable: str, text: str) -> dict[str, str]:
    """Return an environment in which each Python of the job begins with `training/site`, and finds `text` there."""
    from distdiag.training import site

    ours = next(iter(site.__path__))
    before = os.environ.get("PYTHONPATH")
    path = ours if not before else os.pathsep.join([ours, before])
    return {**os.environ, "PYTHONPATH": path, variable: text}


@contextlib.contextmanager
def signals_for_the_job() -> Iterator[set[signal.Signals | int]]:
    """Hold back the signals that are meant for the job, for `wait` to take; gives what was held back before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*FORWARDED, signal.SIGCHLD])
    try:
        yield set(before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(
    argv: Sequence[str],
    mask: set[signal.Signals | int],
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    dies_by: int = signal.SIGKILL,
) -> int:
    """Start a program that dies with us, by `dies_by` (0: it outlives us); return its pid.

    `mask` are the signals that it holds back.
    """
    _flush()
    child = os.fork()
    if child:
        return child
    try:
        programs.die_with_parent(dies_by)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the job would inherit that
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if stdout is not None:
            os.dup2(stdout, 1)
        if stderr is not None:
            os.dup2(stderr, 2)
        os.execve(argv[0], list(argv), dict(os.environ if env is None else env))
    finally:
        # Never back into the program that this is a copy of.
        os._exit(127)


def start_recorder(config: Mapping[str, object], keep: Sequence[int]) -> int:
    """Start the recorder of a job, which outlives us, in a session of its own; return its pid. It inherits `keep`."""
    _flush()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.chdir("/")
        for number in keep:
            os.set_inheritable(number, True)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        code = f"import sys; sys.path.insert(0, {root!r}); from distdiag.agent.job_recorder import main; main()"
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, json.dumps(dict(config))])
    finally:
        os._exit(127)


def wait(child: int, pass_on: Callable[[int, int], None], turn: Callable[[], None] | None = None) -> int:
    """Wait for a child to end: its exit status, negative for a signal.

    `pass_on` is given its pid and each signal that is meant for the job; `turn` is called each second, and when the job
    is stopped.
    """
    while True:
        received = signal.sigtimedwait([*FORWARDED, signal.SIGCHLD], _TURN_S)
        if received is None:
            if turn is not None:
                turn()
            continue
        if received.si_signo != signal.SIGCHLD:
            if received.si_code == _FROM_PROCESS:
                pass_on(child, received.si_signo)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if turn is not None:  # it was stopped or goes on, or another child has ended
            turn()


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def leave_like(status: int) -> NoReturn:
    """End as the job did: with its exit status, or by its signal."""
    _flush()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the core is the job's
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed from the start
            with contextlib.suppress(OSError):
                stream.flush()
