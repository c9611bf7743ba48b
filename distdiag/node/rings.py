"""The file in which a process keeps the last lines of Python that its threads have executed, and how to read it.

Its size is fixed when it is made. One page tells of the process, then come the threads, then a ring of lines for each:

    0     magic, length of the JSON text, the JSON text that describes the process
    4072  threads that found no room (u64), the process's own end (f64, seconds of the monotonic clock; 0: none)
    4096  per thread 128 bytes: id (u64), state (u64), begin and end (f64), name (UTF-8)
    then  per thread `lines` blocks of 17 f64: a time, then up to 16 places

A place is `code * 2**20 + line`, negative where a function returned to that line. What a code number means stands in a
second file beside it, one JSON line each, written before the number is first used. Doubles, because Python stores them
fastest; 16 places to a time, because reading the clock costs as much as all else. Whoever begins a block clears it
and writes the time, then a line at a time its places: so nothing that is read was ever cut in the middle. A line that
took long has a block of its own, and with it so have the lines around.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAGIC = b"DDLINES2"
SUFFIX = ".lines"
NAMES_SUFFIX = ".names"
PAGE = 4096
TAIL = 4072
TEXT_BYTES = TAIL - 12
THREAD = struct.Struct("<QQdd96s")
PLACES = 16
BLOCK_BYTES = 8 * (1 + PLACES)
LINE_BITS = 20
LIVE, ENDED = 1, 2


@dataclass(frozen=True)
class Code:
    """A piece of Python code: `kind` is "user", or what else was asked for: "library", "stdlib"."""

    file: str
    function: str
    kind: str


@dataclass(frozen=True)
class Record:
    """One line; `at_s` of the machine's monotonic clock is when it began, or one of the few quick lines before it.

    `back`: the line was not begun then, a call made from it returned.
    """

    at_s: float
    code: Code
    line: int
    back: bool


@dataclass(frozen=True)
class Thread:
    """One thread; its records in order of time. `ended_s` is None while it lives, or if it died with its process."""

    tid: int
    name: str
    began_s: float
    ended_s: float | None
    records: tuple[Record, ...]


@dataclass(frozen=True)
class RingFile:
    """One process. `about` is what it told of itself; `ended_s` is None unless it came to its own end."""

    about: dict[str, Any]
    threads: tuple[Thread, ...]
    untold_threads: int
    ended_s: float | None


class NotARing(Exception):
    """The file is none of ours, or cut off."""


def size_of(threads: int, lines: int) -> int:
    """Give the bytes of a file for so many threads and lines each."""
    return PAGE + threads * (THREAD.size + lines * BLOCK_BYTES)


def ring_offset(threads: int, lines: int, thread: int) -> int:
    """Tell where the blocks of a thread begin."""
    return PAGE + threads * THREAD.size + thread * lines * BLOCK_BYTES


def read(path: str) -> RingFile:
    """Read a file, also while its process writes it, or after it has died.

    Raises:
        NotARing: it is something else.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read()
    about = _about(data)
    codes = _codes(path[: -len(SUFFIX)] + NAMES_SUFFIX if path.endswith(SUFFIX) else path + NAMES_SUFFIX)
    threads, lines = about["threads"], about["lines"]
    if len(data) < size_of(threads, lines):
        raise NotARing(f"{path} is cut off")
    untold, ended = struct.unpack_from("<Qd", data, TAIL)
    found = (_thread(data, threads, lines, number, codes) for number in range(threads))
    return RingFile(about, tuple(one for one in found if one is not None), untold, ended or None)


def _about(data: bytes) -> dict[str, Any]:
    if len(data) < PAGE or data[:8] != MAGIC:
        raise NotARing("it does not begin as a ring of lines does")
    (length,) = struct.unpack_from("<I", data, 8)
    try:
        about = json.loads(data[12 : 12 + min(length, TEXT_BYTES)])
        if not 0 < int(about["threads"]) <= 4096 or not 0 < int(about["lines"]) <= 2**24:
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise NotARing("its description cannot be read") from error
    return dict(about)


def _codes(path: str) -> dict[int, Code]:
    """Read what code numbers mean; a last line cut in the middle was never used."""
    codes = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    number, name, function, kind = json.loads(line)
                    codes[int(number)] = Code(str(name), str(function), str(kind))
                except (ValueError, TypeError):
                    continue
    except OSError:
        pass
    return codes


def _thread(data: bytes, threads: int, lines: int, number: int, codes: dict[int, Code]) -> Thread | None:
    tid, state, began, ended, name = THREAD.unpack_from(data, PAGE + number * THREAD.size)
    if state not in (LIVE, ENDED):
        return None
    offset = ring_offset(threads, lines, number)
    values = memoryview(data)[offset : offset + lines * BLOCK_BYTES].cast("d")
    return Thread(
        tid=tid,
        name=name.rstrip(b"\0").decode("utf-8", "replace"),
        began_s=began,
        ended_s=ended if state == ENDED else None,
        records=tuple(_records(values, codes)[-lines:]),
    )


def _records(values: memoryview[float], codes: dict[int, Code]) -> list[Record]:
    """Put the blocks in the order of their times."""
    size = 1 + PLACES
    begun = sorted((values[k], k) for k in range(0, len(values), size) if values[k] > 0)
    return [
        _record(at_s, place, codes) for at_s, k in begun for place in values[k + 1 : k + size].tolist() if place != 0
    ]


def _record(at_s: float, place: float, codes: dict[int, Code]) -> Record:
    code, line = divmod(int(abs(place)), 1 << LINE_BITS)
    return Record(at_s, codes.get(code) or _unknown(code), line, place < 0)


@lru_cache
def _unknown(code: int) -> Code:
    return Code(f"<code {code}, of which no name was kept>", "?", "user")
