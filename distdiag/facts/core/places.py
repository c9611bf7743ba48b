"""Where this system puts the cores of its processes, and the cores that lie somewhere. See core(5)."""

from __future__ import annotations

import glob
import os
import re
import stat
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum

from distdiag.facts import machine
from distdiag.facts.core import packed
from distdiag.facts.core.image import MAGIC
from distdiag.facts.elf import File, Malformed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PATTERN = "/proc/sys/kernel/core_pattern"
_USES_PID = "/proc/sys/kernel/core_uses_pid"
_DISCARDING = ("/bin/false", "/bin/true", "/usr/bin/false", "/usr/bin/true", "/dev/null")
_PER_PROCESS = frozenset("pPiI")

_ET_CORE = 4
_HEAD_BYTES = 64
_OUTSIDE = (packed.Kind.ZSTD, packed.Kind.LZ4)
"""Unpacked by a program: that is started only for a file that is called like a core."""
_REPORT = b"ProblemType: Crash"
_LOOKS_LIKE_A_CORE = re.compile(r"(^|[._-])(core|coredump|vgcore)([._-]|$)|^core\d+$|^_.*\.crash$")

_DEPTH = 3
_MOST_FILES = 20_000
_SECONDS = 10.0
_NEVER = ("/proc", "/sys")


class Kind(str, Enum):
    """What the kernel does with a core: a file in the process's directory or in a fixed one, or somebody takes it."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"
    PROGRAM = "program"
    SOCKET = "socket"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class Pattern:
    """core_pattern, understood.

    `folder` is the part of a file's path before its first %; relative for a relative pattern. `program` takes the cores
    instead, `handler` is its common name, and `folders` (patterns of glob) are where it keeps them. `apart`: no two
    processes of a machine write the same file. `told_limit`: the program is told the limit on the core's size.
    """

    text: str
    uses_pid: bool
    kind: Kind
    folder: str = ""
    program: str = ""
    handler: str = ""
    folders: tuple[str, ...] = ()
    apart: bool = True
    told_limit: bool = False


@dataclass(frozen=True)
class Place:
    """A folder that cores are written to. `free_bytes` and `filesystem` (st_dev) None: it is not there, or not ours.

    `writable`: by the user in question, as owner and mode say. `blocked_by`: what has the core's name already and stays
    ("a folder", "a file of another user").
    """

    path: str
    exists: bool
    writable: bool
    free_bytes: int | None = None
    filesystem: int | None = None
    blocked_by: str = ""


@dataclass(frozen=True)
class _Handler:
    name: str
    program: str
    folders: tuple[str, ...]


_HANDLERS = (
    _Handler("systemd-coredump", "systemd-coredump", ("/var/lib/systemd/coredump",)),
    _Handler("apport", "apport", ("/var/lib/apport/coredump", "/var/crash")),
    _Handler("abrt", "abrt-hook-ccpp", ("/var/spool/abrt", "/var/tmp/abrt")),
    _Handler("WSL", "wsl-capture-crash", ("/mnt/?/Users/*/AppData/Local/Temp/wsl-crashes",)),
)


@dataclass(frozen=True)
class CoreFile:
    """A core that is there. `modified_s` since 1970; `packing` is one of `packed.Kind`, "" for a plain core."""

    path: str
    size_bytes: int
    modified_s: float
    packing: str


@dataclass(frozen=True)
class Missed:
    """A file or folder that was not looked at, or a core that is none, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Found:
    """What a search came to, newest first; `searched` names the folders."""

    cores: tuple[CoreFile, ...]
    missed: tuple[Missed, ...]
    searched: tuple[str, ...]


def pattern() -> Pattern | None:
    """Read where this system puts cores; None if its kernel makes none, or if it is not ours to read."""
    text = machine.read_text(PATTERN)
    uses_pid = machine.read_text(_USES_PID).strip() not in ("", "0")
    return understand(text.rstrip("\n"), uses_pid=uses_pid) if text else None


def understand(text: str, *, uses_pid: bool) -> Pattern:
    """Tell what the kernel does with a core_pattern; `uses_pid` is core_uses_pid."""
    letters = frozenset(re.findall(r"%(.)", text))
    if text.startswith("|"):
        return _piped(text, uses_pid, told_limit="c" in letters)
    if text.startswith("@"):
        return Pattern(text, uses_pid, Kind.SOCKET, program=text.lstrip("@"))
    if text == "/dev/null" or (not text and not uses_pid):
        return Pattern(text, uses_pid, Kind.NOWHERE)
    kind = Kind.ABSOLUTE if text.startswith("/") else Kind.RELATIVE
    folder = text.partition("%")[0].rpartition("/")[0] or ("/" if kind is Kind.ABSOLUTE else "")
    return Pattern(text, uses_pid, kind, folder=folder, apart=uses_pid or bool(letters & _PER_PROCESS))


def _piped(text: str, uses_pid: bool, *, told_limit: bool) -> Pattern:
    program = next(iter(text[1:].split()), "")
    if program in ("", *_DISCARDING):
        return Pattern(text, uses_pid, Kind.NOWHERE, program=program)
    known = next((one for one in _HANDLERS if os.path.basename(program).startswith(one.program)), None)
    name, folders = (known.name, known.folders) if known else (os.path.basename(program), ())
    return Pattern(text, uses_pid, Kind.PROGRAM, "", program, name, folders, told_limit=told_limit)


def place(path: str, seen: str = "", name: str = "", user: int = 0, groups: frozenset[int] = frozenset()) -> Place:
    """Look at a folder, through the path `seen`, for a process that would write its core there.

    `name` is the core's if it is known beforehand; `user` and `groups` are the effective ones of the process.
    """
    try:
        state, disk = os.stat(seen or path), os.statvfs(seen or path)
    except OSError as error:
        return Place(path, not isinstance(error, FileNotFoundError), False)
    if not state.st_nlink:  # a working directory that was removed
        return Place(path, False, False)
    writable = stat.S_ISDIR(state.st_mode) and not disk.f_flag & os.ST_RDONLY and _may_write(state, user, groups)
    blocked_by = _blocked_by(os.path.join(seen or path, name), user, state) if name else ""
    return Place(path, True, writable, disk.f_bavail * disk.f_frsize, state.st_dev, blocked_by)


def _may_write(state: os.stat_result, user: int, groups: frozenset[int]) -> bool:
    if user == 0:
        return True
    shift = 6 if state.st_uid == user else 3 if state.st_gid in groups else 0
    return state.st_mode >> shift & 3 == 3


def _blocked_by(path: str, user: int, folder: os.stat_result) -> str:
    """Say what is in a core's place and stays: the kernel removes whatever it can (do_coredump of fs/coredump.c)."""
    try:
        state = os.lstat(path)
    except OSError:
        return ""
    if stat.S_ISDIR(state.st_mode):
        return "a folder"
    sticky = folder.st_mode & stat.S_ISVTX
    return "a file of another user" if sticky and user not in (0, state.st_uid, folder.st_uid) else ""


def find(folder: str | None) -> Found:
    """Find cores by what is in the files: in a folder (or the file itself), or where this system would put them.

    A given folder is searched three levels deep, without hidden folders, up to 20,000 files and 10 seconds in all; one
    that is packed by zstd or lz4 is only seen if it is called like a core. If none is given, the working directory and
    the pattern's places are searched, but not what lies below the working directory.
    """
    search = _Search()
    if folder is not None:
        search.look(folder, _DEPTH, asked=True)
    else:
        search.look(os.getcwd(), 0, asked=True)
        for path, depth in _usual():
            search.look(path, depth, asked=False)
    return search.found()


def _usual() -> Iterator[tuple[str, int]]:
    known = pattern()
    if known is not None and known.folder:
        # What comes after the first % may name folders.
        yield os.path.abspath(known.folder), known.text[len(known.folder) + 1 :].count("/")
    for kept in known.folders if known is not None else ():
        for path in sorted(glob.glob(kept)):
            yield path, 1


class _Search:
    """One search: what it found, and what is left of its time."""

    def __init__(self) -> None:
        self._cores: dict[tuple[int, int], CoreFile] = {}
        self._missed: dict[str, str] = {}
        self._searched: dict[str, None] = {}
        self._files = 0
        self._until = time.monotonic() + _SECONDS

    def found(self) -> Found:
        cores = sorted(self._cores.values(), key=lambda core: (-core.modified_s, core.path))
        missed = tuple(Missed(path, why) for path, why in self._missed.items())
        return Found(tuple(cores), missed, tuple(self._searched))

    def look(self, path: str, depth: int, *, asked: bool) -> None:
        """Look into a folder, the nearer files first; one that nobody asked for may be missing."""
        if asked and not os.path.isdir(path):
            self._take(path, named=True)
            return
        waiting = deque([(path, depth)])
        while waiting:
            folder, left = waiting.popleft()
            self._searched.setdefault(folder)
            for entry in self._entries(folder, asked=asked):
                if self._files >= _MOST_FILES or time.monotonic() > self._until:
                    self._missed[path] = f"not searched to its end: looked at {self._files} files"
                    return
                if not entry.is_dir():
                    self._files += 1
                    self._take(entry.path, named=False)
                elif left and not entry.is_symlink() and not entry.name.startswith(".") and entry.path not in _NEVER:
                    waiting.append((entry.path, left - 1))

    def _entries(self, folder: str, *, asked: bool) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError as error:
            if asked:
                self._missed[folder] = str(error.strerror)
        except OSError as error:
            self._missed[folder] = str(error.strerror)
        return []

    def _take(self, path: str, *, named: bool) -> None:
        """Keep a file if it is a core; if it is only called like one, say why it is none."""
        looks = named or _LOOKS_LIKE_A_CORE.search(os.path.basename(path)) is not None
        try:
            core, why = _examine(path, by_program=looks)
            state = os.stat(path)
        except OSError as error:
            core, why = None, error.strerror or str(error)
        except (ValueError, Malformed, packed.CannotUnpack) as error:
            core, why = None, str(error)
        if core is not None:
            self._cores.setdefault((state.st_dev, state.st_ino), core)
        elif looks and (why or named):
            self._missed[path] = why or "not a core"


def _examine(path: str, *, by_program: bool) -> tuple[CoreFile | None, str]:
    """Read a file's first bytes; a core, or why it is none where that is worth a word.

    Raises:
        OSError, ValueError, Malformed, packed.CannotUnpack: it cannot be read.
    """
    with File(path) as file:
        size, start = file.size, file.at(0, min(file.size, len(_REPORT)))
    if not size:
        return None, "empty: the disk was full, or a limit left no room for a core"
    if start == _REPORT:
        return None, "a report of apport: apport-unpack FILE FOLDER puts the core into FOLDER/CoreDump"
    packing = packed.kind(path)
    promising = by_program if packing in _OUTSIDE else start.startswith(MAGIC) or packing is not packed.Kind.PLAIN
    if not promising or not _is_core(packed.head(path, _HEAD_BYTES)):
        return None, ""
    return CoreFile(path, size, os.stat(path).st_mtime, packing.value), ""


def _is_core(head: bytes) -> bool:
    kind = head[16:18] if head[5:6] == b"\x01" else head[17:15:-1]
    return head.startswith(MAGIC) and int.from_bytes(kind, "little") == _ET_CORE
