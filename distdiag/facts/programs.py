"""Runs programs with a deadline, each in its own process group, ended as a whole. The only user of subprocess."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any, BinaryIO, TypeVar

    K = TypeVar("K")

Process = subprocess.Popen  # the type returned by `start`: Popen[bytes]
REAP_S = 1.0
MAX_OUTPUT_BYTES = 4 * 2**20
_LATE_S = 0.5
_started: set[subprocess.Popen[bytes] | Adopted] = set()


class CannotRun(Exception):
    """The program does not exist, or cannot be started."""


@record
class Done:
    """The end of a program. `status`: negative for a signal, None if unkillable (D state)."""

    status: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    elapsed_s: float

    @property
    def cut_off(self) -> bool:
        """Whether it was killed or timed out."""
        return self.timed_out or self.status is None or self.status < 0


@record
class Pipes:
    """Pipes of `start`: stderr may share the pipe of stdout; `keep`: descriptors inherited by the child."""

    stderr_to_stdout: bool = False
    keep: tuple[int, ...] = ()


def start(
    argv: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    pipes: Pipes = Pipes(),
) -> subprocess.Popen[bytes]:
    """Start a long-running program in its own process group, with pipes on its standard streams.

    Raises:
        CannotRun: the program does not exist or cannot be started.
    """
    try:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if pipes.stderr_to_stdout else subprocess.PIPE,
            pass_fds=pipes.keep,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:  # missing, not permitted, or out of descriptors, memory or processes
        raise CannotRun(f"cannot run {argv[0]}: {error.strerror}") from error
    _started.add(process)
    return process


class Adopted:
    """A child not started by this process, see `adopt_orphans`; the subset of Popen that is used."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin: BinaryIO = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: BinaryIO = os.fdopen(stdout, "rb", buffering=0)
        self.stderr: BinaryIO | None = None
        self.returncode: int | None = None
        _started.add(self)

    def poll(self) -> int | None:
        """Return its exit status if it has ended, like Popen: negative for a signal."""
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return status

    def _wait(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # already reaped: its status is unavailable
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def run(
    argv: Sequence[str], *, timeout_s: float, env: dict[str, str] | None = None, most_bytes: int = MAX_OUTPUT_BYTES
) -> Done:
    """Run a program to its end or for at most `timeout_s` seconds, then kill its whole group.

    A child that keeps the pipes open cannot prolong the wait, and each stream is kept up to `most_bytes`.
    """
    began = time.monotonic()
    process = start(argv, env=env)
    say(process, b"")
    return collect_output(process, timeout_s=timeout_s, began=began, most_bytes=most_bytes)


def say(process: subprocess.Popen[bytes] | Adopted, words: bytes, *, is_all: bool = True) -> None:
    """Write to stdin of a `start`ed process, and close it unless `is_all` is False; at most a pipe's capacity."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended already
        process.stdin.write(words)
    if is_all:
        process.stdin.close()


def collect_output(
    process: subprocess.Popen[bytes] | Adopted,
    *,
    timeout_s: float,
    began: float | None = None,
    most_bytes: int = MAX_OUTPUT_BYTES,
) -> Done:
    """Collect the output up to the end, like `run`; `began`: the start of the timeout, by default now."""
    began = time.monotonic() if began is None else began
    with selectors.DefaultSelector() as selector:
        running = _Running(process, selector, began=began, most_bytes=most_bytes)
        while running.open and (left := began + timeout_s - time.monotonic()) > 0:
            for ready, _ in selector.select(left):
                running.read(ready, selector)
        return running.end(selector, max(0.0, began + timeout_s - time.monotonic()))


def run_many(
    commands: Mapping[K, Sequence[str]], timeout_s: float, *, width: int | None = None
) -> Iterator[tuple[K, Done | None]]:
    """Run several short programs in parallel and yield each result; None for one that cannot be started.

    Each has `timeout_s` seconds from its own start. At most `width` (twice the processors) run at once, not counting
    late ones, so hung programs do not hold up the rest.
    """
    width = width or 2 * (os.cpu_count() or 1)
    waiting = list(commands.items())[::-1]
    running: dict[K, _Running] = {}
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            now = time.monotonic()
            young = sum(now - program.began < _LATE_S for program in running.values())
            while waiting and young < width:
                key, argv = waiting.pop()
                try:
                    process = start(argv)
                    say(process, b"")
                    running[key] = _Running(process, selector, key=key, began=time.monotonic())
                except CannotRun:
                    yield key, None
                young += 1
            limit = min((program.began for program in running.values()), default=now) + timeout_s
            soonest = min([limit - now, *([_LATE_S / 4] if waiting else [])])
            for ready, _ in selector.select(max(0.0, soonest)):
                running[ready.data].read(ready, selector)
            now = time.monotonic()
            for key, program in list(running.items()):
                if program.open == 0 or now - program.began > timeout_s:
                    del running[key]
                    yield key, program.end(selector, REAP_S)


class _Running:
    """A started program, and its output so far; `open`: the number of streams not at their end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | Adopted,
        selector: selectors.BaseSelector,
        *,
        key: object = None,
        began: float,
        most_bytes: int = MAX_OUTPUT_BYTES,
    ) -> None:
        self.process, self.began, self._most_bytes = process, began, most_bytes
        self._output: dict[Any, bytes] = dict.fromkeys((process.stdout, process.stderr), b"")
        for stream in self._output:
            selector.register(stream, selectors.EVENT_READ, key)
        self.open = len(self._output)

    def read(self, ready: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        data = os.read(ready.fd, 2**18)
        self._output[ready.fileobj] = (self._output[ready.fileobj] + data)[: self._most_bytes]
        if not data:
            selector.unregister(ready.fileobj)
            self.open -= 1

    def end(self, selector: selectors.BaseSelector, wait_s: float) -> Done:
        in_time = self.open == 0 and wait(self.process, wait_s) is not None
        for key in [key for key in selector.get_map().values() if key.fileobj in self._output]:
            selector.unregister(key.fileobj)
        end_group(self.process)
        stdout, stderr = self._output.values()
        return Done(self.process.returncode, stdout, stderr, not in_time, time.monotonic() - self.began)


def end_group(process: subprocess.Popen[bytes] | Adopted) -> int | None:
    """Kill the group of a `start`ed process, reap it and close its pipes; return its status, None if unkillable."""
    _started.discard(process)
    _kill_group(process)
    status = wait(process, REAP_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.close()
            except OSError:  # a pipe without a reader
                continue
    return status


def _kill_group(process: subprocess.Popen[bytes] | Adopted) -> None:
    # Also after the leader's exit, as its children may survive in the group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.returncode is None or not _is_reused(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def _is_reused(pid: int) -> bool:
    """Whether the id of a reaped leader belongs to another process, which means that its own group is empty."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def kill_all() -> None:
    """Kill the groups of all `start`ed processes not yet ended, before this process exits."""
    left = list(_started)
    for process in left:
        _kill_group(process)
    deadline = time.monotonic() + REAP_S / 2
    for process in left:  # reaped here, as a container may have no init to do it
        wait(process, max(0.0, deadline - time.monotonic()))


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL, or "signal 77" if unknown."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """On Linux, have the kernel send this process a signal when its parent ends.

    SIGKILL ends it even while stopped; after SIGTERM a launcher also ends its own children.
    """
    _prctl(1, number)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Become the parent of our orphaned descendants; Linux only."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def allow_tracing_by_anyone() -> None:
    """Let a sibling (py-spy) read this process under yama's ptrace_scope 1; only for processes we made."""
    _prctl(0x59616D61, -1)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY


def name_process(name: str) -> None:
    """Set the name shown by ps and top, at most 15 bytes; Linux only."""
    _prctl(15, name.encode()[:15])  # PR_SET_NAME


def _prctl(option: int, value: int | bytes) -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    # If refused or unknown to an old kernel, the watch on stdin still ends us, and reports say why py-spy failed.
    ctypes.CDLL(None).prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0)


def wait(process: subprocess.Popen[bytes] | Adopted, timeout_s: float) -> int | None:
    """Wait for the end of a process; return its status, None if it still runs then."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
