"""print() for many ranks: lines of different ranks never interleave.

The ranks of a job on one host share a lock: flock on a file named after the job, in a directory of the user. flock has
no timeout, and a rank may be stopped while it holds the lock. So a rank retries while the holder writes something every
few seconds; after that it prints without the lock.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import threading
import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from functools import lru_cache
from io import TextIOWrapper

from distdiag.facts import machine, private_files
from distdiag.facts.process import procs
from distdiag.facts.process.rank_identity import identify, own_label, torch_distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

PATIENCE_S = 5.0
"""Maximum wait for a holder that does not write."""
_LONGEST_WAIT_S = 60.0
"""Maximum wait for holders that write."""
_IMPATIENT_S = 30.0
"""Period without waiting after a timeout."""
_LOOK_S = 0.25
"""Interval of checks on the holder."""
_JOB_NAMES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")


def printflock(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: IO[Any] | None = None,
    flush: bool = True,
    prefix: bool = True,
) -> None:
    """Print as print() does, with `[host:rank] ` before each line; lines of different ranks do not interleave.

    The text is written in one piece, under a lock of all ranks of the job on this host. If the holder of the lock
    writes nothing for 5 s (a stopped rank), this rank says so once on stderr and prints without the lock.

    Args:
        values: as for print(), and so are `sep` and `end`.
        file: text or binary, with or without a file descriptor. Default: sys.stdout.
        flush: accepted for compatibility with print(); the output is always flushed.
        prefix: False to omit `[host:rank] `.

    Raises:
        ValueError: the file is closed, as with print().
        OSError: the file cannot be written, as with print(); BrokenPipeError if the reader has closed the pipe.
    """
    stream = sys.stdout if file is None else file
    if stream is None:  # as under pythonw, or with a closed descriptor 1: print() is silent then
        return
    text = (" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end)
    if prefix:
        label = _label(os.getpid(), "torch.distributed" in sys.modules and torch_distributed() is not None)
        text = label + text[:-1].replace("\n", "\n" + label) + text[-1:]
    # Notebooks and loggers replace the stream, or its write(): the text must pass through the replacement.
    is_own = stream in (sys.__stdout__, sys.__stderr__) and "write" not in stream.__dict__
    with _lock.held():
        if is_own and type(stream) is TextIOWrapper:
            stream.flush()  # text buffered by print() precedes
            _write_all(stream.fileno(), text.encode(stream.encoding, stream.errors or "strict"))
        elif isinstance(stream, io.RawIOBase):
            _write_all(stream.fileno(), text.encode())
        else:
            data: Any = text.encode() if isinstance(stream, io.BufferedIOBase) else text
            stream.write(data)
            stream.flush()


_label = lru_cache(maxsize=4)(lambda pid, has_group: own_label() + " ")  # cached until a process group exists


def _write_all(file: int, data: bytes) -> None:
    """Write all bytes: with python -u, a stream's write() drops the rest if a signal interrupts it."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(file, rest) :]
        except BlockingIOError:  # O_NONBLOCK set by any process sharing the pipe
            writable = select.poll()
            writable.register(file, select.POLLOUT)
            writable.poll()


class _HostLock:
    """flock on one open descriptor, and a lock among threads, which share that descriptor."""

    def __init__(self) -> None:
        self._has_warned = False
        self._start()
        # A forked child shares the open file description, and so the lock: it must open the file again.
        os.register_at_fork(after_in_child=self._after_fork)

    def _start(self) -> None:
        self._file: int | None = None
        self._threads = threading.RLock()
        self._is_held, self._is_usable, self._no_wait_until = False, True, 0.0

    def _after_fork(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._start()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock, or continue without it if it is not free in time."""
        threads = self._threads
        if not threads.acquire(timeout=PATIENCE_S):
            yield
            return
        # A signal handler may print while this thread is printing, with the lock already held.
        is_outermost, self._is_held = not self._is_held, True
        try:
            if is_outermost and self._is_usable:
                self._lock_file()
            yield
        finally:
            if is_outermost:
                if self._file is not None and self._is_usable:
                    flock(self._file, LOCK_UN)
                self._is_held = False
            threads.release()

    def _lock_file(self) -> None:
        try:
            if self._file is None:
                self._file = _open_file()
            if not _try_lock(self._file) and time.monotonic() > self._no_wait_until and not _wait(self._file):
                self._no_wait_until = time.monotonic() + _IMPATIENT_S
                self._warn(
                    f"waited {PATIENCE_S:g} s for {_describe(_holder(self._file))}; printing without the lock now"
                )
        except OSError as error:  # no folder, or a file system without locks
            self._is_usable = False
            self._warn(f"no lock between the processes of this host, {error.filename or 'flock'}: {error.strerror}")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(OSError, ValueError, AttributeError):  # without a stderr the job continues, too
                sys.stderr.write(f"{own_label()} distdiag printflock: {what}; lines may be interleaved\n")
                sys.stderr.flush()


_lock = _HostLock()


def _open_file() -> int:
    job = next((os.environ[name] for name in _JOB_NAMES if os.environ.get(name)), "job")
    # A private folder: another user could hold the lock forever.
    path = os.path.join(private_files.temporary_folder("printflock"), re.sub(r"[^\w.-]", "_", job)[:64] + ".lock")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _try_lock(file: int) -> bool:
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(file: int) -> bool:
    """Wait while the holder changes or writes, at most _LONGEST_WAIT_S; return whether the lock was acquired."""
    now = time.monotonic()
    last, give_up, look_at, written, pause_s = now + _LONGEST_WAIT_S, now + PATIENCE_S, now, "", 0.0001
    while now < min(last, give_up):
        if now >= look_at:
            holder, before, look_at = _holder(file), written, now + _LOOK_S
            written = f"{holder} {machine.read_text(f'/proc/{holder}/io')}"
            give_up = give_up if written == before else now + PATIENCE_S
        time.sleep(pause_s)
        if _try_lock(file):
            return True
        now, pause_s = time.monotonic(), min(2 * pause_s, 0.005)
    return False


def _holder(file: int) -> int | None:
    """Return the pid of the holder from /proc/locks, see proc(5); None if the kernel does not show it."""
    inode = f":{os.fstat(file).st_ino}"
    for fields in map(str.split, machine.read_text("/proc/locks").splitlines()):
        if fields[1] == "FLOCK" and fields[5].endswith(inode) and int(fields[4]) > 0:
            return int(fields[4])
    return None


def _describe(pid: int | None) -> str:
    if pid is None:
        return "the lock"
    identity, proc = identify(procs.variables(pid) or {}), procs.read(pid)
    rank = "" if identity is None else f" of rank {identity.rank}"
    state = " and is stopped" if proc is not None and proc.state in "tT" else ""
    return f"process {pid}{rank}, which holds the lock{state}"
