"""Which function an address of a frame is in, where a tool that reads stacks does not know it, or not for sure."""

from __future__ import annotations

import re
import struct
from array import array
from bisect import bisect_left, bisect_right

from distdiag.node import elf, procs
from distdiag.node.core import notes
from distdiag.node.core.frames import UNKNOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_MAPPED = re.compile(r"^(\w+)-(\w+) \S+ (\w+) \S+ \d+ +(/.+)$", re.MULTILINE)
_MOST_SYMBOLS_BYTES = 256 << 20  # libtorch_cpu.so has 13 MB of them
_PT_LOAD, _PT_GNU_EH_FRAME, _STT_FUNC = 1, 0x6474E550, 2
_HEADER, _SEGMENT = struct.Struct("<32xQ16xH6x"), struct.Struct("<I4xQQ8xQ16x")
_EH_FRAME_HDR = b"\x01\x1b\x03\x3b"  # version 1, encodings that gcc and clang use; then 2 words and pairs of words


class Functions:
    """The functions of the programs and libraries that a process has mapped, by address; each is looked up once."""

    def __init__(self, files: Sequence[notes.MappedFile]) -> None:
        self._files = sorted(files, key=lambda one: one.start)
        self._starts = [one.start for one in self._files]
        self._libraries: dict[str, _Library] = {}
        self._names: dict[int, str] = {}

    @classmethod
    def of_process(cls, pid: int) -> Functions:
        """Take what /proc/PID/maps lists, see proc(5)."""
        lines = _MAPPED.findall(procs.maps(pid) or "")
        return cls(
            [notes.MappedFile(int(start, 16), int(end, 16), int(at, 16), path) for start, end, at, path in lines]
        )

    def path(self, address: int) -> str:
        """Name the file that lay at an address; "" if none did."""
        place = self._place(address)
        return place.path if place else ""

    def before(self, address: int, name: str) -> str:
        """Name the function whose last call returns to `address`; `name` is the one there, and what is else given."""
        if address not in self._names:
            try:
                self._names[address] = self._before(address, name)
            except (OSError, ValueError, elf.Malformed, struct.error):  # not here, or not as it was there
                self._names[address] = name
        return self._names[address]

    def _before(self, address: int, name: str) -> str:
        place = self._place(address - 1)
        if place is None:
            return name
        if place.path not in self._libraries:
            self._libraries[place.path] = _Library(place.path)
        return self._libraries[place.path].before(address - place.start + place.offset, name)

    def _place(self, address: int) -> notes.MappedFile | None:
        at = bisect_right(self._starts, address) - 1
        return self._files[at] if at >= 0 and address < self._files[at].end else None


class _Library:
    """Where the functions of one file begin: the table for exceptions (.eh_frame_hdr, Linux Standard Base 5, 10.6)."""

    def __init__(self, path: str) -> None:
        self._path = path
        with elf.File(path) as file:
            at, count = _HEADER.unpack(file.at(0, _HEADER.size))
            rows = list(_SEGMENT.iter_unpack(file.at(at, count * _SEGMENT.size)))
            offset, self._base, size = next((row[1:] for row in rows if row[0] == _PT_GNU_EH_FRAME), (0, 0, 0))
            data = file.at(offset, size)
        self._loaded = [(offset, address, size) for kind, offset, address, size in rows if kind == _PT_LOAD]
        words = array("i", data[12 : size - (size - 12) % 8] if data.startswith(_EH_FRAME_HDR) else b"")
        self._starts = words[::2]

    def before(self, offset: int, name: str) -> str:
        start, address = next((row[:2] for row in self._loaded if row[0] < offset <= row[0] + row[2]), (0, 0))
        there = offset - start + address - self._base
        at = bisect_left(self._starts, there)
        another_begins = self._starts[at : at + 1] == array("i", [there])
        if at == 0 or not (another_begins or name in UNKNOWN):
            return name
        return self._symbol(self._starts[at - 1] + self._base) or UNKNOWN[0]

    def _symbol(self, address: int) -> str:
        """Name the function that begins at an address; "" if its symbol was stripped."""
        found = elf.read(self._path)
        sections = {one.name: one for one in found.sections} if found else {}
        with elf.File(self._path, _MOST_SYMBOLS_BYTES) as file:
            for symbols, names in ((".symtab", ".strtab"), (".dynsym", ".dynstr")):
                size = sections[symbols].size if symbols in sections and names in sections else 0
                # Three words for each: its name, kind and section; its value; its size.
                words = array("Q", file.at(sections[symbols].offset, size - size % 24) if size else b"")
                for at, value in enumerate(words[1::3]):
                    if value == address and words[3 * at] >> 32 & 0xF == _STT_FUNC:
                        return _demangled(file.name_at(sections[names].offset + (words[3 * at] & 0xFFFFFFFF)))
        return ""


def _demangled(name: str) -> str:
    import ctypes

    try:
        demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):  # musl, or no C++ here
        return name
    demangle.restype = ctypes.c_char_p
    return (demangle(name.encode(), None, None, None) or name.encode()).decode("utf-8", "replace")
