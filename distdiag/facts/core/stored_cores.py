"""Cores that are stored: where to find them, and packed ones (gzip, xz, zstd, lz4) unpacked as streams.

gzip and xz are read by Python's own modules, zstd and lz4 by their programs. What a file is, its bytes show.
"""

from __future__ import annotations

import contextlib
import enum
import glob
import importlib
import os
import re
import selectors
import time
from collections import deque
from dataclasses import dataclass

from distdiag.facts import carried_tools, programs
from distdiag.facts.core import setup
from distdiag.facts.core.core_file import MAGIC, Bytes, Image
from distdiag.facts.elf import File, Malformed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import BinaryIO

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 16 << 20
"""Enough for the headers of 250,000 mappings."""
_MORE_THAN_PROMISED_BYTES = 64 << 20
"""What may follow the memory: section headers, as gdb's gcore writes them."""
_LEFT_FREE_BYTES = 64 << 20
_HEAD_TIMEOUT_S = 20.0
_CUT_OFF = ("premature end", "unfinished stream", "unexpected end")  # as zstd 1.5 and lz4 1.9 write it

_ET_CORE = 4
_IDENTITY_BYTES = 64
_REPORT = b"ProblemType: Crash"
_LOOKS_LIKE_A_CORE = re.compile(r"(^|[._-])(core|coredump|vgcore)([._-]|$)|^core\d+$|^_.*\.crash$")
_MAX_DEPTH = 3
_MAX_FILES = 20_000
_MAX_SEARCH_S = 10.0
_NEVER = ("/proc", "/sys")


class Packing(enum.Enum):
    """How a file is packed, by the name of the program that does it."""

    NONE = ""
    GZIP = "gzip"
    XZ = "xz"
    ZSTD = "zstd"
    LZ4 = "lz4"


_BY_PROGRAM = (Packing.ZSTD, Packing.LZ4)
_MAGIC = {
    Packing.GZIP: (b"\x1f\x8b",),
    Packing.XZ: (b"\xfd7zXZ\0",),
    Packing.ZSTD: (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"),  # pzstd begins with a frame to skip
    Packing.LZ4: (b"\x04\x22\x4d\x18", b"\x02\x21\x4c\x18"),
}


class CannotUnpack(Exception):
    """A packed file that cannot be unpacked: the text is the reason, to follow "FILE: "."""


class CutOff(CannotUnpack):
    """A packed file whose end is missing; its `head` may be all that is needed. `unpack` counts what came out."""

    unpacked_bytes = 0


def packing_of(path: str) -> Packing:
    """Return how a file is packed.

    Raises:
        OSError, ValueError: it cannot be opened or read, or is not a regular file; this is no path.
    """
    with File(path) as file:
        start = file.at(0, min(8, file.size))
    return next((packing for packing, magic in _MAGIC.items() if start.startswith(magic)), Packing.NONE)


def head(path: str, most_bytes: int, *, timeout_s: float = _HEAD_TIMEOUT_S) -> bytes:
    """Return the first bytes of the core in a file, unpacked; fewer if it was cut off before.

    Raises:
        CannotUnpack: it is damaged from the beginning, its program is not installed, or it takes too long.
        OSError, ValueError: as of `packing_of`.
    """
    packing = packing_of(path)
    if packing is Packing.NONE:
        with File(path, most_bytes) as file:
            return file.at(0, min(file.size, most_bytes))
    data = bytearray()
    with contextlib.closing(stream(path, packing, timeout_s)) as pieces:
        try:
            for piece in pieces:
                data += piece
                if len(data) >= most_bytes:
                    break
        except CutOff:
            if not data:
                raise
    return bytes(data[:most_bytes])


def unpack(path: str, folder: str, *, most_bytes: int, timeout_s: float) -> str:
    """Unpack a core into a new file in a folder, which nobody else may read; its path. The caller removes it.

    There must be room for the size that its own headers promise, and not much more than that is written.

    Raises:
        CannotUnpack: there is no core in it, or it would have more than `most_bytes` or than there is room for, or
            `head`'s reasons, or it was cut off (`CutOff`); then no file is left behind.
        OSError, ValueError: as of `packing_of`, and if there is no such folder; also if `path` is not packed.
    """
    packing = packing_of(path)
    if packing is Packing.NONE:
        raise ValueError(f"not packed: {path}")
    promised = _promised_bytes(head(path, _HEAD_BYTES, timeout_s=timeout_s))
    _check_room(promised, folder, most_bytes)
    import tempfile

    fd, unpacked = tempfile.mkstemp(prefix="core-", dir=folder)
    try:
        with open(fd, "wb") as file, contextlib.closing(stream(path, packing, timeout_s)) as pieces:
            _write(file, pieces, promised)
    except BaseException as error:
        if isinstance(error, CutOff):
            error.unpacked_bytes = os.path.getsize(unpacked)
        os.unlink(unpacked)
        if isinstance(error, OSError):
            raise CannotUnpack(f"cannot unpack into {folder}: {error.strerror}") from error
        raise
    return unpacked


def _write(file: BinaryIO, pieces: Iterator[bytes], promised: int) -> None:
    for piece in pieces:
        if file.tell() + len(piece) > promised + _MORE_THAN_PROMISED_BYTES:
            raise CannotUnpack(f"damaged: it contains more than the {_mib(promised)} of its headers")
        file.write(piece)


def _promised_bytes(start: bytes) -> int:
    try:
        return Image(Bytes(start)).whole_bytes
    except Malformed:
        raise CannotUnpack("the packed file is not a 64-bit core") from None


def _check_room(promised: int, folder: str, most_bytes: int) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize - _LEFT_FREE_BYTES
    if promised > most_bytes:
        raise CannotUnpack(f"it unpacks to {_mib(promised)}; the limit is {_mib(most_bytes)}")
    if promised > free:
        room = f"{folder} has {_mib(max(0, free))} free; set TMPDIR to another directory"
        raise CannotUnpack(f"it unpacks to {_mib(promised)}; {room}")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def stream(path: str, packing: Packing, timeout_s: float) -> Generator[bytes, None, None]:
    """Unpack piece by piece, for at most `timeout_s` seconds; closing it ends the work."""
    deadline = time.monotonic() + timeout_s
    if packing in _BY_PROGRAM:
        in_time = yield from _by_program(path, packing, deadline)
    else:
        in_time = yield from _by_module(path, packing, deadline)
    if not in_time:
        raise CannotUnpack(f"not unpacked within {timeout_s:g} s")


def _by_module(path: str, packing: Packing, deadline: float) -> Generator[bytes, None, bool]:
    name = "gzip" if packing is Packing.GZIP else "lzma"
    try:
        module = importlib.import_module(name)
    except ImportError:  # a Python that was built without zlib or liblzma
        raise CannotUnpack(f"this Python has no {name}, which is needed for {packing.value}") from None
    try:
        with module.open(path) as file:
            while piece := file.read1(_CHUNK_BYTES):
                yield piece
                if time.monotonic() > deadline:
                    return False
    except EOFError as error:
        raise CutOff("this file is truncated") from error
    except Exception as error:  # each module has errors of its own
        raise CannotUnpack(f"damaged: {error}") from error
    return True


def _by_program(path: str, packing: Packing, deadline: float) -> Generator[bytes, None, bool]:
    program = carried_tools.find(packing.value)
    if program is None:
        raise CannotUnpack(f"{packing.value} is not installed: apt-get install {packing.value}")
    try:
        process = programs.start([program, "-dcq", os.path.realpath(path)])  # zstd does not follow links
    except programs.CannotRun as error:
        raise CannotUnpack(str(error)) from error
    try:
        programs.say(process, b"")
        yield from _output(process, deadline)
        done = programs.hear(process, timeout_s=max(0.0, deadline - time.monotonic()))
    except BaseException:
        programs.end_group(process)
        raise
    if done.timed_out:
        return False
    if done.status:
        complaint = done.stderr.decode("utf-8", "replace").strip()[:1000]
        if any(words in complaint.lower() for words in _CUT_OFF):
            raise CutOff("this file is truncated")
        raise CannotUnpack(f"damaged: {complaint or f'{program} ended with status {done.status}'}")
    return True


def _output(process: programs.Process[bytes], deadline: float) -> Iterator[bytes]:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline and selector.select(deadline - time.monotonic()):
            piece = os.read(process.stdout.fileno(), _CHUNK_BYTES)
            if not piece:
                return
            yield piece


@dataclass(frozen=True)
class StoredCore:
    """A core file. `modified_s` since 1970; `packing` is a value of `Packing`."""

    path: str
    size_bytes: int
    modified_s: float
    packing: str


@dataclass(frozen=True)
class Skipped:
    """A file or folder that was not looked at, or is called like a core and is none, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Found:
    """The result of a search, newest core first; `searched` names the folders."""

    cores: tuple[StoredCore, ...]
    skipped: tuple[Skipped, ...]
    searched: tuple[str, ...]


def find(folder: str | None) -> Found:
    """Find cores by what is in the files: in a folder (or the file itself), or where this system would put them.

    A given folder is searched three levels deep, without hidden folders, up to 20,000 files and 10 seconds in all; one
    that is packed by zstd or lz4 is only seen if it is called like a core. If none is given, the working directory and
    the pattern's folders are searched, but not what is below the working directory.
    """
    search = _Search()
    if folder is not None:
        search.look(folder, _MAX_DEPTH, given=True)
    else:
        search.look(os.getcwd(), 0, given=True)
        for path, depth in _usual_folders():
            search.look(path, depth, given=False)
    return search.found()


def _usual_folders() -> Iterator[tuple[str, int]]:
    pattern = setup.read_pattern()
    if pattern is not None and pattern.folder:
        # What comes after the first % may name folders.
        yield os.path.abspath(pattern.folder), pattern.text[len(pattern.folder) + 1 :].count("/")
    for kept in pattern.folders if pattern is not None else ():
        for path in sorted(glob.glob(kept)):
            yield path, 1


class _Search:
    """One search: what it found, and what is left of its time."""

    def __init__(self) -> None:
        self._cores: dict[tuple[int, int], StoredCore] = {}
        self._skipped: dict[str, str] = {}
        self._searched: dict[str, None] = {}
        self._files = 0
        self._deadline = time.monotonic() + _MAX_SEARCH_S

    def found(self) -> Found:
        cores = sorted(self._cores.values(), key=lambda core: (-core.modified_s, core.path))
        skipped = tuple(Skipped(path, why) for path, why in self._skipped.items())
        return Found(tuple(cores), skipped, tuple(self._searched))

    def look(self, path: str, depth: int, *, given: bool) -> None:
        """Look into a folder, the nearer files first; one that was not given may be missing."""
        if given and not os.path.isdir(path):
            self._examine(path, named=True)
            return
        waiting = deque([(path, depth)])
        while waiting:
            folder, left = waiting.popleft()
            self._searched.setdefault(folder)
            for entry in self._entries(folder, given=given):
                if self._files >= _MAX_FILES or time.monotonic() > self._deadline:
                    self._skipped[path] = f"not searched completely: {self._files} files read"
                    return
                if not entry.is_dir():
                    self._files += 1
                    self._examine(entry.path, named=False)
                elif left and not entry.is_symlink() and not entry.name.startswith(".") and entry.path not in _NEVER:
                    waiting.append((entry.path, left - 1))

    def _entries(self, folder: str, *, given: bool) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if given or not isinstance(error, FileNotFoundError):
                self._skipped[folder] = str(error.strerror)
        return []

    def _examine(self, path: str, *, named: bool) -> None:
        """Keep a file if it is a core; if it is only called like one, keep why it is none."""
        looks = named or _LOOKS_LIKE_A_CORE.search(os.path.basename(path)) is not None
        why = ""
        try:
            packing, why = _core_in(path, by_program=looks)
            if packing is not None:
                state = os.stat(path)
                core = StoredCore(path, state.st_size, state.st_mtime, packing.value)
                self._cores.setdefault((state.st_dev, state.st_ino), core)
                return
        except OSError as error:
            why = error.strerror or str(error)
        except (ValueError, Malformed, CannotUnpack) as error:
            why = str(error)
        if looks and (why or named):
            self._skipped[path] = why or "not a core"


def _core_in(path: str, *, by_program: bool) -> tuple[Packing | None, str]:
    """Return how the core in a file is packed; None if there is none, and why if that is not obvious.

    Raises:
        OSError, ValueError, Malformed, CannotUnpack: it cannot be read.
    """
    with File(path) as file:
        size, start = file.size, file.at(0, min(file.size, len(_REPORT)))
    if not size:
        return None, "empty: the disk was full, or the core size limit is too low"
    if start == _REPORT:
        return None, "an apport report: apport-unpack FILE DIR extracts the core to DIR/CoreDump"
    packing = packing_of(path)
    # A program is started only for a file that is called like a core.
    promising = by_program if packing in _BY_PROGRAM else start.startswith(MAGIC) or packing is not Packing.NONE
    return (packing if promising and _is_core(head(path, _IDENTITY_BYTES)) else None), ""


def _is_core(start: bytes) -> bool:
    kind = start[16:18] if start[5:6] == b"\x01" else start[17:15:-1]
    return start.startswith(MAGIC) and int.from_bytes(kind, "little") == _ET_CORE
