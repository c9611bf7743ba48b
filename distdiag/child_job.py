"""A job that runs as a child of ours: its output, its signals and its end are its own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shlex
import shutil
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from distdiag.errors import CannotExecute, CommandNotFound
from distdiag.facts import programs
from distdiag.users_python import users_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distdiag.agent.job_recorder import Config

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_PROCESS = 0
"""si_code of a signal that a process sent: SI_USER, SI_QUEUE and SI_TKILL are 0 and less.

A terminal sends SIGINT and SIGQUIT to the job as well.
"""
_TURN_S = 1.0


def argv_of(command: Sequence[str], *, example: str) -> list[str]:
    """Return the command to execute, after the job's Python if it begins with a script (x.py) or a Python option.

    An executable script given by path is executed directly, as in a shell.

    Raises:
        CommandNotFound, CannotExecute: as a shell would report; `example` is how a job is typed.
    """
    _put_uvx_last()
    first = command[0]
    program = shutil.which(first)
    if first.startswith("-") or (
        first.endswith(".py") and os.path.isfile(first) and (program is None or "/" not in first)
    ):
        return [users_python()[0], *command]
    if program is not None:
        return list(command)
    path = (
        first
        if "/" in first
        else next(filter(os.path.exists, (os.path.join(d, first) for d in os.get_exec_path())), "")
    )
    if os.path.isfile(path):
        raise CannotExecute(f"{first}: Permission denied", hint=f"chmod +x {shlex.quote(path)}")
    if os.path.isdir(path) and "/" in first:
        raise CannotExecute(f"{first}: Is a directory", hint=example)
    raise CommandNotFound(
        f"{first}: {'No such file or directory' if '/' in first else 'command not found'}", hint=example
    )


def _put_uvx_last() -> None:
    """Move the environment of uvx from the front of PATH to its end: the job gets the user's programs."""
    first, *rest = os.get_exec_path()
    is_of_uvx = "UV" in os.environ and os.environ.get("VIRTUAL_ENV") != sys.prefix
    if is_of_uvx and first == os.path.dirname(sys.executable):
        os.environ["PATH"] = os.pathsep.join([*rest, first])


def say_python(argv: Sequence[str], command: Sequence[str], say: Callable[[str], None]) -> None:
    """Report which Python a bare script is started with, where it is not distdiag's own."""
    if len(argv) > len(command) and argv[0] != sys.executable:
        say(f"distdiag: starting {command[0]} with {argv[0]}")


def watched(variable: str, text: str) -> dict[str, str]:
    """Return an environment in which each Python of the job begins with `training/site`, and finds `text` there."""
    from distdiag.training import site

    ours = next(iter(site.__path__))
    before = os.environ.get("PYTHONPATH")
    path = ours if not before else os.pathsep.join([ours, before])
    return {**os.environ, "PYTHONPATH": path, variable: text}


@contextlib.contextmanager
def signals_for_the_job() -> Iterator[set[signal.Signals | int]]:
    """Block the signals meant for the job, for `wait` to receive; yield the previous mask."""
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
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and the job would inherit that
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if stdout is not None:
            os.dup2(stdout, 1)
        if stderr is not None:
            os.dup2(stderr, 2)
        execute(argv, os.environ if env is None else env)
    finally:
        # Never back into the program that this is a copy of.
        os._exit(127)


def execute(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Become a program as a shell would: a text without #! is a shell script. Ends with 126 or 127 if that fails."""
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as error:
        trouble = error
    path = shutil.which(argv[0]) or argv[0]
    if trouble.errno == errno.ENOEXEC and b"\0" not in _first_bytes(path):
        os.execve("/bin/sh", ["sh", path, *argv[1:]], dict(env))
    with contextlib.suppress(OSError):
        os.write(2, f"distdiag: {argv[0]}: {trouble.strerror}\n".encode("utf-8", "replace"))
    os._exit(CommandNotFound.exit_code if trouble.errno in (errno.ENOENT, errno.ENOTDIR) else CannotExecute.exit_code)


def _first_bytes(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(80)
    return b""


def start_recorder(config: Config, keep: Sequence[int]) -> int:
    """Start the recorder of a job, which outlives us, in a new session; return its pid. It inherits `keep`."""
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
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, json.dumps(config)])
    finally:
        os._exit(127)


def wait(child: int, pass_on: Callable[[int, int], None], turn: Callable[[], None] | None = None) -> int:
    """Wait for a child to end; return its exit status, negative for a signal.

    `pass_on` receives its pid and each signal meant for the job; `turn` is called each second, and when the job is
    stopped.
    """
    while True:
        received = signal.sigtimedwait([*FORWARDED, signal.SIGCHLD], _TURN_S)
        if received is None:
            if turn is not None:
                turn()
            continue
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= _FROM_PROCESS:
                pass_on(child, received.si_signo)
            elif received.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid():
                # The kernel notifies only the session leader of a hangup: without us that would be the job.
                pass_on(child, received.si_signo)
                send(child, signal.SIGCONT)
            continue
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if turn is not None:  # the job stopped or continued, or another child ended
            turn()


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have exited."""
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
