"""Makes the file of `distdiag.node.rings` and hands out its parts to threads."""

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

from distdiag.node import identity, machine, private, procs, rings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from distdiag.training.lines.settings import Settings

_NAMES_BYTES = 8 * 2**20
"""At most so much is written for names; code beyond is not traced."""
_WORDS = 300
_SLOW_S = 0.005
_SLOW_LINES = 64
"""A line, or 16 of them, that took so long: so many lines from there on have a time of their own."""
_MADE_AT_ONCE = 32
_MOST_ANCESTORS = 4


class Writer:
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
        folder = private.open_folder(settings.folder, own=os.path.basename(settings.folder) == rings.folder_name())
        try:
            self._make(folder)
        finally:
            os.close(folder)
        self.tell_name(b"".join(names))
        self._doubles = memoryview(self._map).cast("d")
        self.describe()

    def _make(self, folder: int) -> None:
        settings = self._settings
        proc = procs.read(self.pid)
        started = proc.started if proc is not None else int(time.time())
        # A name of its own each time: to cut off a file that somebody still writes to would end the process by SIGBUS.
        stem = f"{machine.host_name()}-{self.pid}-{time.time_ns()}"
        self.path = os.path.join(settings.folder, stem + rings.SUFFIX)
        size = rings.size_of(settings.threads, settings.lines)
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(stem + rings.SUFFIX, os.O_RDWR | flags, 0o600, dir_fd=folder)
        try:
            _take_space(fd, size)
            self._map = mmap.mmap(fd, size)
            flags |= os.O_WRONLY | os.O_APPEND
            self._names = os.open(stem + rings.NAMES_SUFFIX, flags, 0o600, dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(stem + rings.SUFFIX, dir_fd=folder)
            raise
        finally:
            os.close(fd)
        self._about = _about(settings, started)

    def describe(self) -> None:
        """Write what this process is; once more when its rank has become known."""
        self._about.update(_place(), notes=self._notes)
        text = json.dumps(self._about).encode()[: rings.TEXT_BYTES]
        self._map[12 : 12 + len(text)] = text
        self._map[0:12] = rings.MAGIC + struct.pack("<I", len(text))
        self.rank_known = self._about["rank"] is not None

    def tell_name(self, lines: bytes) -> bool:
        """Write what a piece of code is called, before a place in it is; False if there is no room."""
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
        """Give the calling thread a ring: (what begins it, to take one place after the other; what to call at its end).

        None if as many threads as there is room for live already; the file says how many had none.
        """
        with self._lock:
            number = self._free_slot()
            if number is None:
                count = int.from_bytes(self._map[rings.TAIL : rings.TAIL + 8], sys.byteorder)
                self._map[rings.TAIL : rings.TAIL + 8] = struct.pack("<Q", count + 1)
                return None
            settings = self._settings
            first = rings.ring_offset(settings.threads, settings.lines, number)
            self._map[first : first + settings.lines * rings.BLOCK_BYTES] = bytes(settings.lines * rings.BLOCK_BYTES)
            self._tell_thread(number, rings.LIVE, time.monotonic(), 0.0)
        blocks = self._doubles[first // 8 : first // 8 + settings.lines * (1 + rings.PLACES)]
        return lambda: itertools.chain.from_iterable(_turns(blocks)), lambda: self._end_thread(number)

    def close(self, notes: dict[str, Any]) -> None:
        """Note that the process came to its own end, and what else is to be known of that."""
        if os.getpid() == self.pid:
            if notes:
                self._notes = notes
                self.describe()
            struct.pack_into("<d", self._map, rings.TAIL + 8, time.monotonic())

    def _free_slot(self) -> int | None:
        """Find a part that was never used, else that of the thread which ended first."""
        ended = []
        for number in range(self._settings.threads):
            _, state, _, end, _ = rings.THREAD.unpack_from(self._map, rings.PAGE + number * rings.THREAD.size)
            if state == 0:
                return number
            if state == rings.ENDED:
                ended.append((end, number))
        return min(ended)[1] if ended else None

    def _tell_thread(self, number: int, state: int, began: float, ended: float) -> None:
        name = _thread_name().encode()[:96]
        offset = rings.PAGE + number * rings.THREAD.size
        rings.THREAD.pack_into(self._map, offset, threading.get_native_id(), state, began, ended, name)

    def _end_thread(self, number: int) -> None:
        if os.getpid() == self.pid:
            offset = rings.PAGE + number * rings.THREAD.size
            tid, _, began, _, name = rings.THREAD.unpack_from(self._map, offset)
            rings.THREAD.pack_into(self._map, offset, tid, rings.ENDED, began, time.monotonic(), name)


def _turns(ring: memoryview[float]) -> Iterator[tuple[memoryview[float], ...]]:
    """Begin one block after the other, for ever; yield its places: one only, as long as lines take long.

    A chain of these gives a place at a time without running any Python between. Begins behind the newest block: where
    a signal handler's exception came through here, this is done again.
    """
    size, now = 1 + rings.PLACES, time.monotonic
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
        "command": machine.command_line(os.getpid())[:_WORDS],
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
    """Tell the rank that this process is, as far as its environment says by now."""
    place = identity.identify(os.environ)
    names = {name: os.environ[name][:80] for name in _JOB if name in os.environ}
    if place is None:
        return {"rank": None, "local_rank": None, "world_size": None, "launcher": "", "job": names}
    return {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "world_size": place.world_size,
        "launcher": place.launcher,
        "job": names,
    }


_JOB = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")


def _thread_name() -> str:
    # threading.current_thread() would make an entry for a thread that threading does not know.
    known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return known.name if known is not None else "a thread that threading did not start"
