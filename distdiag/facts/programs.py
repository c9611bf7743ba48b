"""Starts programs: with a deadline, in a group of their own, ended as a whole group. The only user of subprocess."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import BinaryIO, TypeVar

    K = TypeVar("K")

Process = subprocess.Popen  # the type of what `start` returns; Popen[bytes]
REAP_S = 1.0
MAX_OUTPUT_BYTES = 4 * 2**20
_LATE_S = 0.5
_started: set[subprocess.Popen[bytes] | Adopted] = set()


class CannotRun(Exception):
    """The program to run does not exist, or cannot be started."""


@dataclass(frozen=True)
class Done:
    """How a program ended. `status` is negative for a signal and None if it would not even die (D state)."""

    status: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool
    elapsed_s: float

    @property
    def cut_off(self) -> bool:
        """It did not end by itself."""
        return self.timed_out or self.status is None or self.status < 0


@dataclass(frozen=True)
class Pipes:
    """What `start` connects: stderr may share the pipe of stdout; `keep` are descriptors the child inherits."""

    stderr_to_stdout: bool = False
    keep: tuple[int, ...] = ()


def start(
    argv: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    pipes: Pipes = Pipes(),
) -> subprocess.Popen[bytes]:
    """Start a long-running program in a process group of its own, with pipes on its standard streams.

    Raises:
        CannotRun: there is no such program.
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
    except OSError as error:  # not there, not allowed, or no descriptors, memory or processes left
        raise CannotRun(f"cannot run {argv[0]}: {error.strerror}") from error
    _started.add(process)
    return process


class Adopted:
    """A child that this process did not start itself, see `adopt_orphans`; as much of Popen as its users need."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin: BinaryIO = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: BinaryIO = os.fdopen(stdout, "rb", buffering=0)
        self.stderr: BinaryIO | None = None
        self.returncode: int | None = None
        _started.add(self)

    def poll(self) -> int | None:
        """Give its status if it has ended, as Popen does: negative for a signal."""
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
            except ChildProcessError:  # reaped by somebody else: its status is not to be had
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def run(
    argv: Sequence[str], *, timeout_s: float, env: dict[str, str] | None = None, most_bytes: int = MAX_OUTPUT_BYTES
) -> Done:
    """Run a program to its end or for at most `timeout_s` seconds, then kill its whole group.

    A child of it that keeps the pipes open cannot make this wait longer, and each stream is kept up to `most_bytes`.
    """
    began = time.monotonic()
    process = start(argv, env=env)
    say(process, b"")
    return hear(process, timeout_s=timeout_s, began=began, most_bytes=most_bytes)


def say(process: subprocess.Popen[bytes] | Adopted, words: bytes, *, is_all: bool = True) -> None:
    """Tell something to what `start` gave, by default all that it will ever be told; no more than a pipe holds."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended already
        process.stdin.write(words)
    if is_all:
        process.stdin.close()


def hear(
    process: subprocess.Popen[bytes] | Adopted,
    *,
    timeout_s: float,
    began: float | None = None,
    most_bytes: int = MAX_OUTPUT_BYTES,
) -> Done:
    """Hear what it tells, to its end, as `run` does; `began`: since when its seconds count, by default from now."""
    began = time.monotonic() if began is None else began
    output, in_time = _read(process, began + timeout_s, most_bytes)
    if in_time:
        in_time = _wait(process, max(0.0, began + timeout_s - time.monotonic())) is not None
    end_group(process)
    return Done(process.returncode, output[1], output[2], not in_time, time.monotonic() - began)


def run_many(
    commands: Mapping[K, Sequence[str]], timeout_s: float, *, width: int | None = None
) -> Iterator[tuple[K, Done | None]]:
    """Run several short programs at the same time and yield each one's end; None for one that cannot be started.

    Each has `timeout_s` seconds from its own start. At most `width` (twice the processors) are started at once, not
    counting those that are late already: who hangs takes nobody's place.
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
                    running[key] = _Running(argv, selector, key)
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
                    yield key, program.end(selector, in_time=program.open == 0)


class _Running:
    """One program of many."""

    def __init__(self, argv: Sequence[str], selector: selectors.BaseSelector, key: object) -> None:
        self.began = time.monotonic()
        self.process = start(argv)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._output = {1: bytearray(), 2: bytearray()}
        self._streams = {self.process.stdout: 1, self.process.stderr: 2}
        self.open = 0
        for stream in self._streams:
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, key)
            self.open += 1

    def read(self, ready: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        data = os.read(ready.fd, 2**18)
        output = self._output[self._streams[ready.fileobj]]  # type: ignore[index]
        if not data:
            selector.unregister(ready.fileobj)
            self.open -= 1
        elif len(output) < MAX_OUTPUT_BYTES:
            output += data

    def end(self, selector: selectors.BaseSelector, *, in_time: bool) -> Done:
        for stream in self._streams:
            if stream is not None and stream in (key.fileobj for key in selector.get_map().values()):
                selector.unregister(stream)
        if in_time:
            in_time = _wait(self.process, REAP_S) is not None
        elapsed = time.monotonic() - self.began
        end_group(self.process)
        return Done(self.process.returncode, bytes(self._output[1]), bytes(self._output[2]), not in_time, elapsed)


def end_group(process: subprocess.Popen[bytes] | Adopted) -> int | None:
    """Kill the group that a `start`ed process leads, reap it and close its pipes; its status, None if unkillable."""
    _started.discard(process)
    status = process.poll()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # Also after the leader is gone: its children may live on in the group. A reaped leader's id is not reused
        # as long as the group has members; when it has none, there is nobody to hit.
        os.killpg(process.pid, signal.SIGKILL)
    if status is None:
        status = _wait(process, REAP_S)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.close()
            except OSError:  # a pipe nobody reads any more
                continue
    return status


def kill_all() -> None:
    """Kill the groups of all processes that `start` made and nobody ended; for a process that is about to leave."""
    left = list(_started)
    for process in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + REAP_S / 2
    for process in left:  # reaped, because in a container there may be nobody else to do it
        _wait(process, max(0.0, deadline - time.monotonic()))


def signal_name(number: int) -> str:
    """Give a signal's name, such as SIGKILL; "signal 77" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask Linux for a signal to this process when its parent ends; elsewhere do nothing.

    SIGKILL ends it even while it is stopped; by SIGTERM a launcher ends what it has started, too.
    """
    _prctl(1, number)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Become the parent of what our descendants leave behind; Linux only."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def allow_tracing_by_anyone() -> None:
    """Let a sibling (py-spy) read this process where yama's ptrace_scope is 1; only for processes we made."""
    _prctl(0x59616D61, -1)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY


def name_process(name: str) -> None:
    """Set the name that ps and top show, at most 15 letters; on Linux only."""
    _prctl(15, name.encode()[:15])  # PR_SET_NAME


def _prctl(option: int, value: int | bytes) -> None:
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    # Refused or unknown to an old kernel: the watch on stdin still ends us, and evidence says why py-spy failed.
    ctypes.CDLL(None).prctl(option, value if isinstance(value, bytes) else ctypes.c_ulong(value), 0, 0, 0)


def _wait(process: subprocess.Popen[bytes] | Adopted, timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def _read(
    process: subprocess.Popen[bytes] | Adopted, deadline: float, most_bytes: int
) -> tuple[dict[int, bytes], bool]:
    assert process.stdout is not None
    assert process.stderr is not None
    output = {1: b"", 2: b""}
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, 1)
        selector.register(process.stderr, selectors.EVENT_READ, 2)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return output, False
            for key, _ in selector.select(left):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                output[key.data] = (output[key.data] + data)[:most_bytes]
    return output, True
