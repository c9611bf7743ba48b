"""The ring file of a process with the last Python lines executed by its threads, and its reader.

The size is fixed at creation. One page about the process, then the threads, then a ring of lines per thread:

    0     magic, length of the JSON text, the JSON text that describes the process
    4072  threads that found no room (u64), the process's own end (f64, seconds of the monotonic clock; 0: none)
    4096  per thread 128 bytes: id (u64), state (u64), begin and end (f64), name (UTF-8)
    then  per thread `lines` blocks of 17 f64: a time, then up to 16 places

A place is `code * 2**20 + line`, negative for a return to that line. A second file maps code numbers to code, one JSON
line each, written before a number's first use. Doubles, because Python stores them fastest; 16 places per time, because
reading the clock costs as much as all else. A writer clears a block and writes its time, then its places one by one, so
a reader never gets a torn value. A slow line has a block of its own, and so have its neighbours.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from dataclasses import fields

from distdiag.facts.process import procs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any, BinaryIO

MAGIC = b"DDLINES3"
SUFFIX = ".lines"
NAMES_SUFFIX = ".names"
PAGE = 4096
TAIL = 4072
TEXT_BYTES = TAIL - 12
THREAD = struct.Struct("<QQdd96s")
PLACES = 16
BLOCK_BYTES = 8 * (1 + PLACES)
LINE_BITS = 20
MOST_BYTES = 1024 * 2**20
_MOST_LINES = 2**20
_NO_PLACE = 2.0**62
"""Larger numbers are not places, nor are infinity and NaN."""
LIVE, ENDED = 1, 2
JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that tell jobs apart."""


@record
class About:
    """What the traced process writes about itself, as JSON. `rings`: one per thread, each of `lines` blocks.

    `began_s` and `monotonic_s`: wall and monotonic clock when the file was made. `started`: as in /proc/PID/stat.
    `ancestors`: the processes above the parent, then those traced, which may have ended. `error`: an uncaught
    exception, raised in the user's code at `raised_at`: file, function and line.
    """

    host: str
    boot: str
    pid: int
    parent: int
    ancestors: tuple[int, ...]
    started: int
    began_s: float
    monotonic_s: float
    rings: int
    lines: int
    rank: int | None
    world_size: int | None
    launcher: str
    job: dict[str, str]
    error: str
    raised_at: tuple[str, ...]


@record
class Code:
    """A piece of Python code: `kind` is "user", or "library", "stdlib" if requested."""

    file: str
    function: str
    kind: str


@record
class Record:
    """One line; `at_s` (monotonic clock): its start, or that of one of the few quick lines before it.

    `back`: a return to the line rather than its start.
    """

    at_s: float
    code: Code
    line: int
    back: bool


@record
class Thread:
    """One thread; its records in order of time. `ended_s`: None while alive, or if killed with its process."""

    tid: int
    name: str
    began_s: float
    ended_s: float | None
    records: tuple[Record, ...]


@record
class RingFile:
    """One process. `ended_s`: None unless it exited normally.

    `owner`: the file owner's user id.
    """

    about: About
    threads: tuple[Thread, ...]
    untold_threads: int
    ended_s: float | None
    owner: int


class NotARing(Exception):
    """Not a ring file, or truncated."""


class NotOurs(Exception):
    """The file belongs to a user other than the job's."""


def default_folder() -> str:
    """Return the directory of this user's traces, on the node's own disk."""
    import tempfile

    return os.path.join(tempfile.gettempdir(), folder_name())


def folder_name() -> str:
    """Return the name of that directory, which must be owned by this user."""
    return f"distdiag-lines-{os.geteuid()}"


def size_of(threads: int, lines: int) -> int:
    """Return the file size for `threads` threads of `lines` lines."""
    return PAGE + threads * (THREAD.size + lines * BLOCK_BYTES)


def thread_offset(thread: int) -> int:
    """Return the offset of a thread's entry in the table of threads."""
    return PAGE + thread * THREAD.size


def ring_offset(threads: int, lines: int, thread: int) -> int:
    """Return the offset of a thread's blocks."""
    return PAGE + threads * THREAD.size + thread * lines * BLOCK_BYTES


def read(path: str, owners: Container[int] | None = None) -> RingFile:
    """Read a file, even while its process writes it, or after it has died.

    Args:
        owners: trusted owners, besides the user of the process itself; None: all. With it, links are not followed.

    Raises:
        NotARing: another kind of file.
        NotOurs: it belongs to an untrusted user.
        OSError: it cannot be read.
    """
    # Opening a FIFO would block.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if owners is None else os.O_NOFOLLOW)
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NotARing("not a regular file")
        head = file.read(PAGE)
        about = _about(head)
        if owners is not None and status.st_uid not in owners and not _is_of_its_process(status.st_uid, about):
            raise NotOurs(f"owned by another user (uid {status.st_uid})")
        codes = _codes(f"{path[: -len(SUFFIX)] if path.endswith(SUFFIX) else path}{NAMES_SUFFIX}", status.st_uid)
        threads, lines = about.rings, about.lines
        if status.st_size < size_of(threads, lines):
            raise NotARing(f"{path} is truncated")
        untold, ended = struct.unpack_from("<Qd", head, TAIL)
        table = file.read(threads * THREAD.size)
        used = sum(state in (LIVE, ENDED) for _, state, *_ in THREAD.iter_unpack(table))
        if used * lines * BLOCK_BYTES > MOST_BYTES:
            raise NotARing(f"{path} has {used} threads of {lines} lines; up to {MOST_BYTES >> 20} MiB are read")
        found = [_thread(file, table, threads, lines, number, codes) for number in range(threads)]
    return RingFile(about, tuple(ring for ring in found if ring is not None), untold, ended or None, status.st_uid)


def _is_of_its_process(owner: int, about: About) -> bool:
    """Return whether the file's process lives, and runs as the file's owner."""
    proc = procs.read(about.pid)
    return proc is not None and proc.started == about.started and procs.owner(proc.pid) == owner


_TYPES: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "str": ((str,), ()),
    "int": ((int,), ()),
    "float": ((int, float), ()),
    "int | None": ((int, type(None)), ()),
    "tuple[int, ...]": ((list,), (int,)),
    "tuple[str, ...]": ((list,), (str,)),
    "dict[str, str]": ((dict,), (str,)),
}
"""By annotation of About: types of the JSON value, and of its items."""


def _about(data: bytes) -> About:
    if len(data) < PAGE or data[:8] != MAGIC:
        raise NotARing("not a recording of trace py")
    (length,) = struct.unpack_from("<I", data, 8)
    try:
        given = json.loads(data[12 : 12 + min(length, TEXT_BYTES)])
        about = About(**{each.name: _checked(str(each.type), given[each.name]) for each in fields(About)})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotARing("its header cannot be read") from error
    if not (0 < about.rings <= 4096 and 0 < about.lines <= _MOST_LINES):
        raise NotARing("its header cannot be read")
    return about


def _checked(kind: str, value: Any) -> Any:  # noqa: ANN401 - as JSON has it
    outer, inner = _TYPES[kind]
    items = (value.values() if isinstance(value, dict) else value) if inner else ()
    if not isinstance(value, outer) or not all(isinstance(item, inner) for item in items):
        raise TypeError
    return tuple(value) if isinstance(value, list) else value


def _codes(path: str, owner: int) -> dict[int, Code]:
    """Read the code table, from a file of the same owner; a truncated last line was never used."""
    codes: dict[int, Code] = {}
    try:
        with open(
            os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8", errors="replace"
        ) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != owner or not stat.S_ISREG(status.st_mode):
                return codes
            for line in file:
                try:
                    number, name, function, kind = json.loads(line)
                    codes[int(number)] = Code(str(name), str(function), str(kind))
                except (ValueError, TypeError, OverflowError, RecursionError):
                    continue
    except OSError:
        pass
    return codes


def _thread(
    file: BinaryIO, table: bytes, threads: int, lines: int, number: int, codes: dict[int, Code]
) -> Thread | None:
    tid, state, began, ended, name = THREAD.unpack_from(table, number * THREAD.size)
    if state not in (LIVE, ENDED):
        return None
    file.seek(ring_offset(threads, lines, number))
    values = memoryview(file.read(lines * BLOCK_BYTES)).cast("d")
    return Thread(
        tid=tid,
        name=name.rstrip(b"\0").decode("utf-8", "replace"),
        began_s=began,
        ended_s=ended if state == ENDED else None,
        records=tuple(_records(values, codes)[-lines:]),
    )


def _records(values: memoryview[float], codes: dict[int, Code]) -> list[Record]:
    """Put the blocks in order of time."""
    size = 1 + PLACES
    found = []
    for at_s, k in sorted((values[k], k) for k in range(0, len(values), size) if values[k] > 0):
        for place in values[k + 1 : k + size].tolist():
            if place != 0 and abs(place) < _NO_PLACE:
                number, line = divmod(int(abs(place)), 1 << LINE_BITS)
                code = codes.get(number) or Code(f"<code {number}, whose name was not recorded>", "?", "user")
                found.append(Record(at_s, code, line, place < 0))
    return found
