"""The exported functions of a library by address.

Only .dynsym and .dynstr are read: a few hundred kB of libcuda.so's 30 MB.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right

from distdiag.facts import elf
from distdiag.facts.core.binary import Binary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_SYMBOL = struct.Struct("<IBxHQQ")
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
        found = elf.read(path)
        if found is None:
            raise elf.Malformed
        self._binary, sections = Binary(path), {section.name: section for section in found.sections}
        with elf.File(path) as file:
            self._extents = sorted(_extents(file, sections))
        self._begins = [begin for begin, *_ in self._extents]

    def name(self, offset: int) -> str:
        """Return the function with its code at this offset; "" if it is not exported."""
        try:
            address = self._binary.address(offset)
        except elf.Malformed:
            return ""
        index = bisect_right(self._begins, address) - 1
        return self._extents[index][2] if index >= 0 and address < self._extents[index][1] else ""


def of_file(path: str) -> Functions:
    """Return the functions of a file, read once per content. Raises like `Functions`."""
    key = identity(path)
    if key not in _known:
        _known[key] = Functions(path)
    return _known[key]


def _extents(file: elf.File, sections: dict[str, elf.Section]) -> Iterator[tuple[int, int, str]]:
    """List (begin, end, name); for aliases such as pncclCommInitRank and ncclCommInitRank the shortest name."""
    if ".dynsym" not in sections or ".dynstr" not in sections:
        return
    table, strings = sections[".dynsym"], sections[".dynstr"]
    names = file.at(strings.offset, strings.size)
    by_begin: dict[int, tuple[int, int, str]] = {}
    for at, info, section, begin, length in _SYMBOL.iter_unpack(
        file.at(table.offset, table.size // _SYMBOL.size * _SYMBOL.size)
    ):
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
