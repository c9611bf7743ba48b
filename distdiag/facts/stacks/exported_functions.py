"""The exported functions of a library by address.

Only .dynsym and .dynstr are read: a few hundred kB of libcuda.so's 30 MB.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right

from distdiag.facts import elf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_HEADER = struct.Struct("<8s24xQQ6xHHHHH")
_SEGMENT = struct.Struct("<I4xQQ8xQ16x")
_SECTION = struct.Struct("<4xI16xQQI20x")
_SYMBOL = struct.Struct("<IBxHQQ")
_READABLE = b"\x7fELF\x02\x01\x01"  # 64 bits, little endian, version 1
_PT_LOAD, _SHT_DYNSYM = 1, 11
_CODE = (0, 2, 10)  # STT_NOTYPE, as assemblers use by default; STT_FUNC, STT_GNU_IFUNC

Identity = tuple[int, int, int, int]
"""Device, inode, size and modification time: the cache key for a file's content."""
_known: dict[Identity, Functions] = {}


def identity(path: str) -> Identity:
    """Identify a file. Raises OSError."""
    state = os.stat(path)
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


class Functions:
    """Exported functions of one file, by offset in the file."""

    def __init__(self, path: str) -> None:
        """Read the tables. Raises OSError, ValueError, elf.Malformed, struct.error."""
        with elf.File(path) as file:
            magic, segments_at, sections_at, _, segments, _, sections, _ = _HEADER.unpack(file.at(0, _HEADER.size))
            if not magic.startswith(_READABLE):
                raise elf.Malformed
            rows = _SEGMENT.iter_unpack(file.at(segments_at, segments * _SEGMENT.size))
            self._loaded = [row[1:] for row in rows if row[0] == _PT_LOAD]
            table = list(_SECTION.iter_unpack(file.at(sections_at, sections * _SECTION.size)))
            self._extents = sorted(_extents(file, table))
        self._begins = [begin for begin, *_ in self._extents]

    def name(self, offset: int) -> str:
        """Return the function with its code at this offset; "" if it is not exported."""
        for begin, address, size in self._loaded:
            if begin <= offset < begin + size:
                index = bisect_right(self._begins, offset - begin + address) - 1
                inside = index >= 0 and offset - begin + address < self._extents[index][1]
                return self._extents[index][2] if inside else ""
        return ""


def of_file(path: str) -> Functions:
    """Return the functions of a file, read once per content. Raises like `Functions`."""
    key = identity(path)
    if key not in _known:
        _known[key] = Functions(path)
    return _known[key]


def _extents(file: elf.File, sections: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, str]]:
    """List (begin, end, name); for aliases such as pncclCommInitRank and ncclCommInitRank the shortest name."""
    for kind, offset, size, strings in sections:
        if kind != _SHT_DYNSYM or strings >= len(sections):
            continue
        _, names_at, names_size, _ = sections[strings]
        names = file.at(names_at, names_size)
        rows = _SYMBOL.iter_unpack(file.at(offset, size // _SYMBOL.size * _SYMBOL.size))
        by_begin: dict[int, tuple[int, int, str]] = {}
        for at, info, section, begin, length in rows:
            if section and info & 15 in _CODE:
                name = names[at : names.find(b"\0", at)].decode("utf-8", "replace")
                known = by_begin.get(begin)
                if known is None or (len(name), name) < (len(known[2]), known[2]):
                    by_begin[begin] = (section, length, name)
        following: dict[int, int] = {}
        for begin, (section, length, name) in sorted(by_begin.items(), reverse=True):
            # Assemblers may omit the size: such a function extends to the next one of its section.
            yield begin, begin + length if length else following.get(section, begin), name
            following[section] = begin
