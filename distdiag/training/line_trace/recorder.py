"""What both tracers write into: the file of `distdiag.facts.line_trace_file`, made when the first line is to be kept.

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

from distdiag.facts import line_trace_file, machine, private_files, procs, rank_identity
from distdiag.training.line_trace.code_filter import CodeFilter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType
    from typing import Any

    from distdiag.training.line_trace.session import Settings

_MOST_CODE = 200_000
_ERROR = 300
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(line_trace_file.__file__ or "")) + os.sep
_NAMES_BYTES = 8 * 2**20
"""At most so much is written for names; code beyond is not traced."""
_COMMAND = 300
_SLOW_S = 0.005
_SLOW_LINES = 64
"""A line, or 16 of them, that took so long: so many lines from there on have a time of their own."""
_MADE_AT_ONCE = 32
_MOST_ANCESTORS = 4
_DEEP = 64
"""Frames to look through for the one that a call returns to: between it and a callback lie those of a library."""


def _nowhere() -> Iterator[list[float]]:
    """Take the place of a ring where there is none: what is written goes to nobody."""
    return itertools.repeat([0.0])


class Recorder:
    """The code that is traced, by identity: hashing a code object takes longer than all else."""

    def __init__(self, settings: Settings) -> None:
        self.bases: dict[int, float] = {}
        """id of a code object -> what places in it begin with."""
        self._settings = settings
        self._filter = CodeFilter(settings.include, settings.exclude)
        self._kept: list[CodeType] = []
        self._names: list[bytes] = []
        self._trace_file: TraceFile | None = None
        self._broken = False
        self._making = False
        self._lock = threading.RLock()

    def base_of(self, frame: FrameType) -> float | None:
        """Return what places in this frame's code begin with, None if it is not traced. Asked once per code."""
        try:
            return self._base_of(frame)
        except RecursionError:
            raise  # the job's own: whoever calls us makes do without this call
        except Exception as error:
            if not _is_ours(error):
                raise
            self._give_up(error)
            return None

    def _base_of(self, frame: FrameType) -> float | None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)
        kind = self._filter.kind_of(code.co_filename, name, str(frame.f_globals.get("__name__", "")))
        if kind is None:
            return None
        trace_file = self._file()
        if trace_file is None or len(self._kept) >= _MOST_CODE:
            return None
        file = code.co_filename
        path = file if file.startswith("<") else os.path.abspath(file)
        with self._lock:
            number = len(self._names) + 1
            line = json.dumps([number, path, name, kind]).encode() + b"\n"
            if not trace_file.write_names(line):
                return None
            self._names.append(line)
            self._kept.append(code)  # or its id would be given to another
            base = self.bases[id(code)] = float(number << line_trace_file.LINE_BITS)
        return base

    def codes(self) -> list[CodeType]:
        """List the code that is traced."""
        return list(self._kept)

    def place_of_caller(self, frame: FrameType) -> float | None:
        """Return the place to which this frame returns: the nearest traced frame outside of it, at its current line."""
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
        """Return a ring for the calling thread, see `TraceFile.lease`; nowhere if there is none."""
        try:
            trace_file = self._file()
            leased = trace_file.lease() if trace_file is not None else None
        except Exception as error:
            if not _is_ours(error):
                raise
            self._give_up(error)
            leased = None
        return leased if leased is not None else (_nowhere, lambda: None)

    def _give_up(self, error: Exception) -> None:
        if not self._broken:
            complain(f"recording of process {os.getpid()} stopped: {type(error).__name__} {error}")
        self._broken = True
        self._trace_file = None

    def forget_file(self) -> None:
        """In a child: the file is the parent's. A file of its own, with all names, is made at its first line."""
        self._lock = threading.RLock()
        self._trace_file = None
        self._broken = False

    def close(self) -> None:
        """Note the process's own end, and the exception that ended it if there was one."""
        if self._trace_file is not None:
            error = getattr(sys, "last_value", None)  # Python sets it when nobody caught an exception
            self._trace_file.close({} if error is None else self._about_error(error))

    def _about_error(self, error: BaseException) -> dict[str, Any]:
        """Return what was raised, and the innermost line of the user's own that it came through."""
        found: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"[:_ERROR]}
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            module = str(trace.tb_frame.f_globals.get("__name__", ""))
            if self._filter.kind_of(code.co_filename, code.co_name, module) == "user":
                found["at"] = [code.co_filename, trace.tb_lineno, getattr(code, "co_qualname", code.co_name)]
            trace = trace.tb_next
        return found

    @property
    def path(self) -> str | None:
        """The file, once there is one."""
        return None if self._trace_file is None else self._trace_file.path

    def _file(self) -> TraceFile | None:
        with self._lock:
            # What runs while the file is being made is our own, in this thread: the others wait for the lock.
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
    """Return whether our own code failed: that would come out of a line of the job's, which must not see it.

    Else it is the job's: a signal handler that ran in the midst of ours raised it.
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
    """Ends a thread's ring when the thread has ended: kept in a threading.local, it goes with the thread."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __del__(self) -> None:
        self._end()


def complain(what: str) -> None:
    """Write on stderr why the job runs without being traced, or with less of it."""
    try:
        sys.stderr.write(f"distdiag trace: {what}\n")
    except (OSError, ValueError, AttributeError):  # no stderr: the job goes on all the same
        return


class TraceFile:
    """The file of one process. All of its bytes are there from the beginning: a full disk shows here, never later."""

    def __init__(self, settings: Settings, names: list[bytes]) -> None:
        """Make the files, with the names of code that are known already.

        Raises:
            OSError: they cannot be made, or the disk is full.
        """
        self.pid = os.getpid()
        self.rank_known = True
        self._settings = settings
        self._lock = threading.Lock()
        self._names_left = _NAMES_BYTES
        self._notes: dict[str, Any] = {}
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
        proc = procs.read(self.pid)
        started = proc.started if proc is not None else int(time.time())
        # A name of its own each time: to cut off a file that somebody still writes to would end the process by SIGBUS.
        stem = f"{machine.host_name()}-{self.pid}-{time.time_ns()}"
        self.path = os.path.join(settings.folder, stem + line_trace_file.SUFFIX)
        size = line_trace_file.size_of(settings.threads, settings.lines)
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(stem + line_trace_file.SUFFIX, os.O_RDWR | flags, 0o600, dir_fd=folder)
        try:
            _take_space(fd, size)
            self._map = mmap.mmap(fd, size)
            flags |= os.O_WRONLY | os.O_APPEND
            self._names = os.open(stem + line_trace_file.NAMES_SUFFIX, flags, 0o600, dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(stem + line_trace_file.SUFFIX, dir_fd=folder)
            raise
        finally:
            os.close(fd)
        self._about = _about(settings, started)

    def describe(self) -> None:
        """Write what this process is; once more when its rank has become known."""
        self._about.update(_place(), notes=self._notes)
        text = json.dumps(self._about).encode()[: line_trace_file.TEXT_BYTES]
        self._map[12 : 12 + len(text)] = text
        self._map[0:12] = line_trace_file.MAGIC + struct.pack("<I", len(text))
        self.rank_known = self._about["rank"] is not None

    def write_names(self, lines: bytes) -> bool:
        """Write what pieces of code are called, before a place in one is; return False if there is no room."""
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
        """Return a ring for the calling thread: (what begins it, to take its places in turn; what to call at its end).

        None if as many threads as there is room for live already; the file says how many had none.
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

    def close(self, notes: dict[str, Any]) -> None:
        """Note that the process came to its own end, and what else is to be known of that."""
        if os.getpid() == self.pid:
            if notes:
                self._notes = notes
                self.describe()
            struct.pack_into("<d", self._map, line_trace_file.TAIL + 8, time.monotonic())

    def _free_slot(self) -> int | None:
        """Find a part that was never used, else that of the thread which ended first."""
        ended = []
        for number in range(self._settings.threads):
            _, state, _, end, _ = line_trace_file.THREAD.unpack_from(
                self._map, line_trace_file.PAGE + number * line_trace_file.THREAD.size
            )
            if state == 0:
                return number
            if state == line_trace_file.ENDED:
                ended.append((end, number))
        return min(ended)[1] if ended else None

    def _describe_thread(self, number: int, state: int, began: float, ended: float) -> None:
        name = _thread_name().encode()[:96]
        offset = line_trace_file.PAGE + number * line_trace_file.THREAD.size
        line_trace_file.THREAD.pack_into(self._map, offset, threading.get_native_id(), state, began, ended, name)

    def _end_thread(self, number: int) -> None:
        if os.getpid() == self.pid:
            offset = line_trace_file.PAGE + number * line_trace_file.THREAD.size
            tid, _, began, _, name = line_trace_file.THREAD.unpack_from(self._map, offset)
            line_trace_file.THREAD.pack_into(
                self._map, offset, tid, line_trace_file.ENDED, began, time.monotonic(), name
            )


def _turns(ring: memoryview[float]) -> Iterator[tuple[memoryview[float], ...]]:
    """Begin one block after the other, for ever; yield its places: one only, as long as lines take long.

    A chain of these gives a place at a time without running any Python between. Begins behind the newest block: where
    a signal handler's exception came through here, this is done again.
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
    # No generator for them: where there is room for no more calls, its end would be told on the job's stderr.
    for at in itertools.cycle(range(0, len(order), _MADE_AT_ONCE)):
        if at == len(made):  # not before: most threads end before they are through their ring
            few = [ring[k * size : (k + 1) * size] for k in order[at : at + _MADE_AT_ONCE]]
            made.extend([(block, tuple(map(block.__getitem__, slices))) for block in few])
        for block, all_places in made[at : at + _MADE_AT_ONCE]:
            block[whole] = nothing  # `:` would make a slice each time, which takes as long as this does
            at_s = block[0] = now()
            slow = _SLOW_LINES if at_s - before > _SLOW_S else slow - 1
            before = at_s
            yield all_places[:1] if slow > 0 else all_places


def _take_space(fd: int, size: int) -> None:
    """Have the disk give the space now: a hole in the file would end the job by SIGBUS on the day the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.pwrite(fd, bytes(size), 0)


def _about(settings: Settings, started: int) -> dict[str, Any]:
    return {
        "host": machine.host_name(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "ancestors": _ancestors(),
        "started": started,
        "boot": machine.read_text("/proc/sys/kernel/random/boot_id").strip(),
        "wall_s": time.time(),
        "monotonic_s": time.monotonic(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "command": machine.command_line(os.getpid())[:_COMMAND],
        "threads": settings.threads,
        "lines": settings.lines,
        "include": list(settings.include)[:20],
    }


def _ancestors() -> list[int]:
    """List the processes above the parent: between a rank and its worker may be a server that forks, or a shell."""
    found: list[int] = []
    above = procs.read(os.getppid())
    while above is not None and above.parent > 1 and len(found) < _MOST_ANCESTORS:
        found.append(above.parent)
        above = procs.read(above.parent)
    return found


def _place() -> dict[str, Any]:
    """Return the rank that this process is, as far as its environment says by now."""
    place = rank_identity.identify(os.environ)
    names = {name: os.environ[name][:80] for name in _JOB if name in os.environ}
    numbers = {name: getattr(place, name, None) for name in ("rank", "local_rank", "world_size")}
    return {**numbers, "launcher": "" if place is None else place.launcher, "job": names}


_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")


def _thread_name() -> str:
    # threading.current_thread() would make an entry for a thread that threading does not know.
    known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return known.name if known is not None else "a thread not started by threading"
