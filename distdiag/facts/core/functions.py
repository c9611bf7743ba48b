"""Which function an address of a frame is in, where a tool that reads stacks does not know it, or not for sure."""

from __future__ import annotations

import re
import struct

from distdiag.facts import elf, procs
from distdiag.facts.core import notes
from distdiag.facts.core.binary import Binary
from distdiag.facts.core.frames import UNKNOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = re.compile(r"@@?[A-Z][A-Za-z]*_[\w.]+$")
"""What may stand after a symbol's name: "@@GLIBC_2.34"."""
_MAPPED = re.compile(r"^(\w+)-(\w+) \S+ (\w+) \S+ \d+ +(/.+)$", re.MULTILINE)


class Functions:
    """The functions of the programs and libraries that a process has mapped, by address; each is looked up once."""

    def __init__(self, files: Sequence[notes.MappedFile]) -> None:
        self._mapped = notes.Mapped(files)
        self._binaries: dict[str, Binary] = {}
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
        place = self._mapped.at(address)
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
        place = self._mapped.at(address - 1)
        if place is None:
            return name
        if place.path not in self._binaries:
            self._binaries[place.path] = Binary(place.path)
        binary = self._binaries[place.path]
        there = binary.address(address - 1 - place.start + place.offset) + 1
        begin, another_begins = binary.begin_before(there)
        if begin is None or not (name in UNKNOWN or another_begins):
            return name
        return demangled(binary.names({begin}).get(begin, "")) or UNKNOWN[0]


def demangled(name: str) -> str:
    """Write the name of a C++ function as its source does; others stay."""
    if not name.startswith("_Z"):
        return name
    import ctypes

    try:
        demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):  # musl, or no C++ here
        return name
    demangle.restype = ctypes.c_char_p
    return (demangle(name.encode(), None, None, None) or name.encode()).decode("utf-8", "replace")
