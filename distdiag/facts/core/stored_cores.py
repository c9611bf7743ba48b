"""Stored cores: search and decompression."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import time
from collections import deque

from distdiag.facts.core import core_file, setup
from distdiag.facts.core.core_file import MAGIC
from distdiag.facts.elf import File, Malformed
from distdiag.facts.packed_files import BY_PROGRAM, CannotUnpack, Packing, packing_of, stream
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADERS_BYTES = 16 << 20
"""Enough for the headers of 250,000 mappings."""
_MORE_THAN_PROMISED_BYTES = 64 << 20
"""Allowance for data after the memory: section headers, as written by gdb's gcore."""
_LEFT_FREE_BYTES = 64 << 20
_FIRST_BYTES_TIMEOUT_S = 20.0

_ET_CORE = 4
_IDENTITY_BYTES = 64
_REPORT = b"ProblemType: Crash"
_LOOKS_LIKE_A_CORE = re.compile(r"(^|[._-])(core|coredump|vgcore)([._-]|$)|^core\d+$|^_.*\.crash$")
_MAX_DEPTH = 3
_MAX_FILES = 20_000
_MAX_SEARCH_S = 10.0
_NEVER = ("/proc", "/sys")


def unpack(path: str, folder: str, *, most_bytes: int, timeout_s: float) -> tuple[str, CannotUnpack | None]:
    """Unpack a core into a new file in a private folder; return its path, and why its end is missing.

    Once its headers are unpacked, the rest must fit into the folder and `most_bytes`.

    Raises:
        CannotUnpack: damaged or truncated at once, or the program for it is not installed.
        OSError, ValueError: see `packing_of`; also if the folder cannot be written.
    """
    unpacked = os.path.join(folder, "core")
    most, is_checked = _HEADERS_BYTES, False
    with open(unpacked, "xb") as file, contextlib.closing(stream(path, packing_of(path), timeout_s)) as pieces:
        try:
            for piece in pieces:
                file.write(piece)
                if file.tell() > most:
                    if is_checked:
                        raise CannotUnpack("damaged: it contains more than its headers promise")
                    file.flush()
                    most, is_checked = _promised_bytes(unpacked, most_bytes) + _MORE_THAN_PROMISED_BYTES, True
        except CannotUnpack as error:
            if not file.tell():
                raise
            return unpacked, error
    return unpacked, None


def _promised_bytes(core: str, most_bytes: int) -> int:
    """Return the size in a core's headers. Raises CannotUnpack if there is no room for it."""
    folder = os.path.dirname(core)
    try:
        with core_file.opened(core) as image:
            size = image.whole_bytes
    except core_file.NotACore as error:
        raise CannotUnpack(str(error)) from None
    disk = os.statvfs(folder)
    free = max(0, disk.f_bavail * disk.f_frsize - _LEFT_FREE_BYTES)
    if size > min(most_bytes, free):
        room = f"{folder} has {_mib(free)} free; set TMPDIR to another directory"
        raise CannotUnpack(f"it unpacks to {_mib(size)}; {room if size > free else f'the limit is {_mib(most_bytes)}'}")
    return size


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


@record
class Found:
    """The result of a search: paths of cores, newest first, and the searched folders.

    `skipped`: unreadable files and folders, and non-cores named like a core, each with the reason.
    """

    cores: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    searched: tuple[str, ...]


def find(folder: str | None) -> Found:
    """Find cores by content: in a folder, in a file, or (None) where this system stores them.

    A given folder is searched three levels deep, without hidden folders, up to 20,000 files and 10 seconds in all; zstd
    and lz4 files are opened only if named like a core. None: search the working directory (not below) and the folders
    of core_pattern.
    """
    search = _Search()
    if folder is not None and not os.path.isdir(folder):
        search.examine(folder, named=True)
    elif folder is not None:
        search.look(folder, _MAX_DEPTH, given=True)
    else:
        search.look(os.getcwd(), 0, given=True)
        for path, depth in _usual_folders():
            search.look(path, depth, given=False)
    newest_first = sorted(search.cores.values(), key=lambda core: (-core[0], core[1]))
    return Found(tuple(path for _, path in newest_first), tuple(search.skipped.items()), tuple(search.searched))


def _usual_folders() -> Iterator[tuple[str, int]]:
    pattern = setup.read_pattern()
    if pattern is None:
        return
    if pattern.folder:
        # Components after the first % may be folders.
        yield os.path.abspath(pattern.folder), pattern.text[len(pattern.folder) + 1 :].count("/")
    yield from ((path, 1) for kept in pattern.folders for path in sorted(glob.glob(kept)))


class _Search:
    """One search: results by device and inode, and the limits on files and time."""

    def __init__(self) -> None:
        self.cores: dict[tuple[int, int], tuple[float, str]] = {}
        self.skipped: dict[str, str] = {}
        self.searched: dict[str, None] = {}
        self._files = 0
        self._deadline = time.monotonic() + _MAX_SEARCH_S

    def look(self, path: str, depth: int, *, given: bool) -> None:
        """Search a folder breadth-first; a folder not `given` may be missing."""
        waiting = deque([(path, depth)])
        while waiting:
            folder, left = waiting.popleft()
            self.searched.setdefault(folder)
            for entry in self._entries(folder, given=given):
                if self._files >= _MAX_FILES or time.monotonic() > self._deadline:
                    self.skipped[path] = f"not searched completely: {self._files} files read"
                    return
                if not entry.is_dir():
                    self._files += 1
                    self.examine(entry.path, named=False)
                elif left and not entry.is_symlink() and not entry.name.startswith(".") and entry.path not in _NEVER:
                    waiting.append((entry.path, left - 1))

    def _entries(self, folder: str, *, given: bool) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if given or not isinstance(error, FileNotFoundError):
                self.skipped[folder] = str(error.strerror)
        return []

    def examine(self, path: str, *, named: bool) -> None:
        """Record a file that is a core; for a file merely named like one, record why it is not."""
        looks = named or _LOOKS_LIKE_A_CORE.search(os.path.basename(path)) is not None
        try:
            why = _why_no_core(path, by_program=looks)
            if why is None:
                state = os.stat(path)
                self.cores.setdefault((state.st_dev, state.st_ino), (state.st_mtime, path))
                return
        except OSError as error:
            why = error.strerror or str(error)
        except (ValueError, Malformed, CannotUnpack) as error:
            why = str(error)
        if looks and (why or named):
            self.skipped[path] = why or "not a core"


def _why_no_core(path: str, *, by_program: bool) -> str | None:
    """Return None for a core, packed or not, else the reason ("" if obvious).

    Raises:
        OSError, ValueError, Malformed, CannotUnpack: unreadable.
    """
    with File(path) as file:
        size, start = file.size, file.at(0, min(file.size, len(_REPORT)))
    if not size:
        return "empty: the disk was full, or the core size limit is too low"
    if start == _REPORT:
        return "an apport report: apport-unpack FILE DIR extracts the core to DIR/CoreDump"
    packing = packing_of(path)
    # Start a decompressor only for a file named like a core.
    promising = by_program if packing in BY_PROGRAM else start.startswith(MAGIC) or packing is not Packing.NONE
    return None if promising and _is_core(_first_bytes(path, packing)) else ""


def _first_bytes(path: str, packing: Packing) -> bytes:
    if packing is Packing.NONE:
        with File(path) as file:
            return file.at(0, min(file.size, _IDENTITY_BYTES))
    with contextlib.closing(stream(path, packing, _FIRST_BYTES_TIMEOUT_S)) as pieces:
        return next(pieces, b"")


def _is_core(start: bytes) -> bool:
    kind = start[16:18] if start[5:6] == b"\x01" else start[17:15:-1]
    return start.startswith(MAGIC) and int.from_bytes(kind, "little") == _ET_CORE
