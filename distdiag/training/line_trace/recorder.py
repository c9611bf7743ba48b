"""What both tracers write into: the file of `facts.recorder.line_trace_file`, made when the first line is to be kept.

`Recorder` knows which code is traced, `TraceFile` hands out the parts of the file to threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import struct
import sys
import threading
import time
from dataclasses import asdict

from distdiag.facts import machine, private_files
from distdiag.facts.process import procs, rank_identity
from distdiag.facts.recorder import line_trace_file
from distdiag.record import record
from distdiag.training.line_trace.code_filter import CodeFilter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType
    from typing import Any, TypeVar

    Result = TypeVar("Result")

VARIABLE = "DISTDIAG_LINES"
_ABOVE = "DISTDIAG_LINES_ABOVE"
"""The traced processes above, nearest first: a helper of a rank may begin after the rank has ended."""
LINES = 1000
THREADS = 32
_MOST_CODE = 200_000
_ERROR = 300
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(line_trace_file.__file__ or "")) + os.sep
_NAMES_BYTES = 8 * 2**20
"""Limit on the names file; code beyond it is not traced."""
_SLOW_S = 0.005
_SLOW_LINES = 64
"""Number of lines with a timestamp each after a slow line, or a slow block of 16 lines."""
_MADE_AT_ONCE = 32
_MOST_ANCESTORS = 4
_DEEP = 64
"""Limit on frames searched for the caller: a callback may be called through frames of a library."""


@record
class Settings:
    """Where and how much to record: `lines` for each of at most `threads` concurrent threads, in `folder`.

    `include`: packages besides the user's own code ("torch", "torch.nn", "json"; "all": all packages; "stdlib");
    `exclude`: packages or directories to skip.
    """

    folder: str
    lines: int = LINES
    threads: int = THREADS
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Format for the environment variable of the job's processes."""
        return json.dumps(asdict(self))


def _nowhere() -> Iterator[list[float]]:
    """Replace a missing ring: writes are discarded."""
    return itertools.repeat([0.0])


class Recorder:
    """Traced code by id: hashing a code object costs more than the rest of a lookup."""

    def __init__(self, settings: Settings) -> None:
        self.bases: dict[int, float] = {}
        """id of a code object -> the base of its places, to which a line number is added."""
        self._settings = settings
        self._filter = CodeFilter(settings.include, settings.exclude)
        self.codes: list[CodeType] = []
        """The traced code objects, kept: or an id could be reused."""
        self._names: list[bytes] = []
        self._trace_file: TraceFile | None = None
        self._broken = False
        self._making = False
        self._lock = threading.RLock()

    def base_of(self, frame: FrameType) -> float | None:
        """Return the base of places in this frame's code, None if not traced. Called once per code object."""
        return self._unless_broken(lambda: self._base_of(frame))

    def _unless_broken(self, act: Callable[[], Result | None]) -> Result | None:
        """Run our own code; at an error of it stop recording and return None, never fail a line of the job."""
        try:
            return act()
        except RecursionError:
            raise  # the job's own: callers skip this call
        except Exception as error:
            if not _is_ours(error):
                raise
            if not self._broken:
                complain(f"recording of process {os.getpid()} stopped: {type(error).__name__} {error}")
            self._broken = True
            self._trace_file = None
            return None

    def _base_of(self, frame: FrameType) -> float | None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)
        kind = self._filter.kind_of(code.co_filename, name, str(frame.f_globals.get("__name__", "")))
        trace_file = None if kind is None else self._file()
        if trace_file is None or len(self.codes) >= _MOST_CODE:
            return None
        file = code.co_filename
        path = file if file.startswith("<") else os.path.abspath(file)
        with self._lock:
            number = len(self._names) + 1
            line = json.dumps([number, path, name, kind]).encode() + b"\n"
            if not trace_file.write_names(line):
                return None
            self._names.append(line)
            self.codes.append(code)
            base = self.bases[id(code)] = float(number << line_trace_file.LINE_BITS)
        return base

    def place_of_caller(self, frame: FrameType) -> float | None:
        """Return the place this frame returns to: the nearest traced caller at its current line."""
        bases, back = self.bases, frame.f_back
        for _ in range(_DEEP):
            if back is None:
                return None
            base = bases.get(id(back.f_code))
            if base is not None:
                return -(base + (back.f_lineno or 0))
            back = back.f_back
        return None

    def lease(self) -> tuple[Callable[[], Iterator[Any]], Callable[[], None]]:
        """Return a ring for the calling thread, see `TraceFile.lease`; without one, writes are discarded."""
        leased = self._unless_broken(lambda: trace_file.lease() if (trace_file := self._file()) is not None else None)
        return leased if leased is not None else (_nowhere, lambda: None)

    def forget_file(self) -> None:
        """In a forked child: drop the parent's file; the child's first line creates a new one with all names."""
        self._lock = threading.RLock()
        self._trace_file = None
        self._broken = self._making = False  # another thread may have been making one

    def close(self) -> None:
        """Record a normal exit, and the uncaught exception if any."""
        if self._trace_file is not None:
            error = getattr(sys, "last_value", None)  # Python sets it for an uncaught exception
            text = "" if error is None else f"{type(error).__name__}: {error}"[:_ERROR]
            self._trace_file.close(text, self._raised_at(error))

    def _raised_at(self, error: BaseException | None) -> tuple[str, ...]:
        """Return the innermost line of the user's own code in a traceback: file, function, line."""
        found: tuple[str, ...] = ()
        trace = None if error is None else error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            module = str(trace.tb_frame.f_globals.get("__name__", ""))
            if self._filter.kind_of(code.co_filename, code.co_name, module) == "user":
                found = code.co_filename, getattr(code, "co_qualname", code.co_name), str(trace.tb_lineno)
            trace = trace.tb_next
        return found

    @property
    def path(self) -> str | None:
        """The trace file, None before it exists."""
        return None if self._trace_file is None else self._trace_file.path

    def _file(self) -> TraceFile | None:
        with self._lock:
            # While the file is being created only our own code runs in this thread; others wait for the lock.
            if self._trace_file is None and not self._broken and not self._making:
                self._making = True
                try:
                    self._trace_file = TraceFile(self._settings, self._names)
                except OSError as error:
                    self._broken = True
                    why = error.strerror or error
                    complain(
                        f"cannot record lines in {self._settings.folder}: {why}; choose another directory: "
                        "trace py --dir DIR"
                    )
                finally:
                    self._making = False
            return self._trace_file


def _is_ours(error: Exception) -> bool:
    """Return whether our own code failed: such an error must not surface in a line of the job.

    Otherwise a signal handler of the job raised it while our code ran.
    """
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        is_library = file.startswith((_LIBRARY, "<frozen ")) and "-packages" not in file
        if not file.startswith(_OWN) and not is_library:
            return False
        trace = trace.tb_next
    return True


class RingLease:
    """Marks a thread's ring as ended at thread exit, when its threading.local is destroyed."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __del__(self) -> None:
        self._end()


def complain(what: str) -> None:
    """Print to stderr why the job is not traced, or only in part."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no stderr: the job continues
        sys.stderr.write(f"distdiag trace: {what}\n")


class TraceFile:
    """The file of one process, allocated in full at creation: a full disk is reported then, never later."""

    def __init__(self, settings: Settings, names: list[bytes]) -> None:
        """Create the files, with the names of code already known.

        Raises:
            OSError: they cannot be created, or the disk is full.
        """
        self.pid = os.getpid()
        self.rank_known = True
        above = _traced_above()
        self._parent, self._ancestors = os.getppid(), (*_ancestors(), *above)
        if VARIABLE in os.environ:  # else children are not traced
            os.environ[_ABOVE] = ",".join(map(str, [self.pid, *above][:_MOST_ANCESTORS]))
        self._settings = settings
        self._lock = threading.Lock()
        self._names_left = _NAMES_BYTES
        folder = private_files.open_folder(
            settings.folder, own=os.path.basename(settings.folder) == line_trace_file.folder_name()
        )
        try:
            self._make(folder)
        finally:
            os.close(folder)
        self.write_names(b"".join(names))
        self._doubles = memoryview(self._map).cast("d")
        self.describe()

    def _make(self, folder: int) -> None:
        settings = self._settings
        # Always a new name: truncating a file still mapped by another process would kill it by SIGBUS.
        stem = f"{machine.host_name()}-{self.pid}-{time.time_ns()}"
        self.path = os.path.join(settings.folder, stem + line_trace_file.SUFFIX)
        size = line_trace_file.size_of(settings.threads, settings.lines)
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(stem + line_trace_file.SUFFIX, os.O_RDWR | flags, 0o600, dir_fd=folder)
        try:
            os.posix_fallocate(fd, 0, size)  # else a full disk kills the job by SIGBUS, at a hole of the mapped file
            self._map = mmap.mmap(fd, size)
            flags |= os.O_WRONLY | os.O_APPEND
            self._names = os.open(stem + line_trace_file.NAMES_SUFFIX, flags, 0o600, dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(stem + line_trace_file.SUFFIX, dir_fd=folder)
            raise
        finally:
            os.close(fd)
        self._proc, self._began = procs.read(self.pid), (time.time(), time.monotonic())

    def describe(self, error: str = "", raised_at: tuple[str, ...] = ()) -> None:
        """Write the description of this process; again once its rank is known, and at an uncaught exception."""
        place = rank_identity.identify(os.environ)
        self.rank_known = place is not None and place.rank is not None
        about = line_trace_file.About(
            host=machine.host_name(),
            boot=machine.read_text("/proc/sys/kernel/random/boot_id").strip(),
            pid=self.pid,
            parent=self._parent,
            ancestors=self._ancestors,
            started=self._proc.started if self._proc is not None else int(self._began[0]),
            began_s=self._began[0],
            monotonic_s=self._began[1],
            rings=self._settings.threads,
            lines=self._settings.lines,
            rank=None if place is None else place.rank,
            world_size=None if place is None else place.world_size,
            launcher="" if place is None else place.launcher,
            job={name: os.environ[name][:80] for name in line_trace_file.JOB_NAMES if name in os.environ},
            error=error,
            raised_at=raised_at,
        )
        text = json.dumps(asdict(about)).encode()[: line_trace_file.TEXT_BYTES]
        self._map[12 : 12 + len(text)] = text
        self._map[0:12] = line_trace_file.MAGIC + struct.pack("<I", len(text))

    def write_names(self, lines: bytes) -> bool:
        """Write names of code objects, before any place in them; return False at the limit."""
        if len(lines) > self._names_left:
            return False
        try:
            os.write(self._names, lines)
        except OSError:
            return False
        self._names_left -= len(lines)
        if not self.rank_known and "RANK" in os.environ:
            self.describe()
        return True

    def lease(self) -> tuple[Callable[[], Iterator[Any]], Callable[[], None]] | None:
        """Return a ring for the calling thread: (starts its iterator of places, marks its end).

        None if all rings belong to live threads; the file counts the threads without a ring.
        """
        with self._lock:
            number = self._free_slot()
            if number is None:
                count = int.from_bytes(self._map[line_trace_file.TAIL : line_trace_file.TAIL + 8], sys.byteorder)
                self._map[line_trace_file.TAIL : line_trace_file.TAIL + 8] = struct.pack("<Q", count + 1)
                return None
            settings = self._settings
            first = line_trace_file.ring_offset(settings.threads, settings.lines, number)
            self._map[first : first + settings.lines * line_trace_file.BLOCK_BYTES] = bytes(
                settings.lines * line_trace_file.BLOCK_BYTES
            )
            self._describe_thread(number, line_trace_file.LIVE, time.monotonic(), 0.0)
        blocks = self._doubles[first // 8 : first // 8 + settings.lines * (1 + line_trace_file.PLACES)]
        return lambda: itertools.chain.from_iterable(_turns(blocks)), lambda: self._end_thread(number)

    def close(self, error: str, raised_at: tuple[str, ...]) -> None:
        """Record the normal exit of the process, and the uncaught exception that ended it, if any."""
        if os.getpid() == self.pid:
            if error:
                self.describe(error, raised_at)
            struct.pack_into("<d", self._map, line_trace_file.TAIL + 8, time.monotonic())

    def _free_slot(self) -> int | None:
        """Return an unused slot, else that of the thread that ended first."""
        ended = []
        for number in range(self._settings.threads):
            _, state, _, end, _ = line_trace_file.THREAD.unpack_from(self._map, line_trace_file.thread_offset(number))
            if state == 0:
                return number
            if state == line_trace_file.ENDED:
                ended.append((end, number))
        return min(ended)[1] if ended else None

    def _describe_thread(self, number: int, state: int, began: float, ended: float) -> None:
        name = _thread_name().encode()[:96]
        offset = line_trace_file.thread_offset(number)
        line_trace_file.THREAD.pack_into(self._map, offset, threading.get_native_id(), state, began, ended, name)

    def _end_thread(self, number: int) -> None:
        if os.getpid() == self.pid:
            offset, slot = line_trace_file.thread_offset(number), line_trace_file.THREAD
            tid, _, began, _, name = slot.unpack_from(self._map, offset)
            slot.pack_into(self._map, offset, tid, line_trace_file.ENDED, began, time.monotonic(), name)


def _turns(ring: memoryview[float]) -> Iterator[tuple[memoryview[float], ...]]:
    """Start block after block endlessly; yield the places of each, only the first while lines are slow.

    Chained, these yield places without running Python code in between. The newest block is found first, because an
    exception of a signal handler may have ended an earlier iterator on the same ring.
    """
    size, now = 1 + line_trace_file.PLACES, time.monotonic
    nothing, whole = memoryview(bytes(8 * size)).cast("d"), slice(None)
    before, slow = now(), _SLOW_LINES
    slices = [slice(place, place + 1) for place in range(1, size)]
    times = ring[::size].tolist()
    newest = max(range(len(times)), key=times.__getitem__)
    first = newest + 1 if times[newest] else 0
    order = [*range(first, len(times)), *range(first)]

    made: list[tuple[memoryview[float], tuple[memoryview[float], ...]]] = []
    # Not a nested generator: at the recursion limit its cleanup would print to the job's stderr.
    for at in itertools.cycle(range(0, len(order), _MADE_AT_ONCE)):
        if at == len(made):  # lazily: most threads end before filling their ring
            few = [ring[k * size : (k + 1) * size] for k in order[at : at + _MADE_AT_ONCE]]
            made.extend([(block, tuple(map(block.__getitem__, slices))) for block in few])
        for block, all_places in made[at : at + _MADE_AT_ONCE]:
            block[whole] = nothing  # `:` would make a slice each time, which takes as long as this does
            at_s = block[0] = now()
            slow = _SLOW_LINES if at_s - before > _SLOW_S else slow - 1
            before = at_s
            yield all_places[:1] if slow > 0 else all_places


def _ancestors() -> tuple[int, ...]:
    """Return pids above the parent: a fork server or shell may lie between a rank and its worker."""
    found: list[int] = []
    above = procs.read(os.getppid())
    while above is not None and above.parent > 1 and len(found) < _MOST_ANCESTORS:
        found.append(above.parent)
        above = procs.read(above.parent)
    return tuple(found)


def _traced_above() -> tuple[int, ...]:
    return tuple(int(pid) for pid in os.environ.get(_ABOVE, "").split(",") if pid.isdecimal())


def _thread_name() -> str:
    # threading.current_thread() would make an entry for a thread that threading does not know.
    known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return known.name if known is not None else "a thread not started by threading"
