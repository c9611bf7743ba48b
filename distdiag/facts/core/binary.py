"""Functions of a program or library: their bounds from the exception-handling table, their names from the symbols.

The table is .eh_frame_hdr with .eh_frame (Linux Standard Base 5, 10.6), which strip never removes; see elf(5) for the
rest. Addresses are link-time addresses, not those of a loaded library.
"""

from __future__ import annotations

import contextlib
import re
import struct
from bisect import bisect_left, bisect_right
from itertools import islice

from distdiag.facts import elf
from distdiag.facts.core.call_frames import CannotUnwind, Cie, Fde
from distdiag.facts.core.core_file import MappedFiles
from distdiag.facts.core.stacks import UNKNOWN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.facts.core.core_file import MappedFile

VERSION = re.compile(r"@@?[A-Z][A-Za-z]*_[\w.]+$")
"""Version suffix of a symbol name: "@@GLIBC_2.34"."""
UNREADABLE = (OSError, ValueError, elf.Malformed, struct.error)
"""Raised by `Binary` for a missing, damaged or replaced file."""
_MAX_SYMBOLS_BYTES = 1 << 30  # libtorch_cpu.so has 13 MB of symbols
_MAX_ENTRY_BYTES = 1 << 16  # of one function
_PT_LOAD, _PT_GNU_EH_FRAME = 1, 0x6474E550
_HEADER, _SEGMENT, _WORD = struct.Struct("<8s10xH12xQ16xH6x"), struct.Struct("<I4xQQ8xQ16x"), struct.Struct("<I")
_READABLE, _X86_64 = b"\x7fELF\x02\x01\x01", 62  # 64 bits, little endian, version 1
_EH_FRAME_HDR = b"\x01\x1b\x03\x3b"  # version 1, encodings that gcc and clang use; then 2 words and pairs of words
_PAIR, _PAIRS_AT = struct.Struct("<ii"), 12
_SYMBOL = struct.Struct("<IB3xQ8x")
_AT_ONCE, _MAX_ALIKE = _SYMBOL.size << 18, 4096
_KINDS = {0: 1, 2: 2, 10: 2}  # STT_NOTYPE, written by assemblers; STT_FUNC, STT_GNU_IFUNC
_BINDINGS = {0: 1, 2: 2, 1: 3}  # local, weak, global


class Binary:
    """One ELF file; every method may raise UNREADABLE."""

    def __init__(self, path: str) -> None:
        self._path = path
        with elf.File(path) as file:
            kind, machine, at, count = _HEADER.unpack(file.at(0, _HEADER.size))
            if not kind.startswith(_READABLE):
                raise elf.Malformed
            rows = list(_SEGMENT.iter_unpack(file.at(at, count * _SEGMENT.size)))
            offset, self._base, size = next((row[1:] for row in rows if row[0] == _PT_GNU_EH_FRAME), (0, 0, 0))
            is_known = size > _PAIRS_AT and file.at(offset, _PAIRS_AT).startswith(_EH_FRAME_HDR)
        self._loaded = [(offset, address, size) for kind, offset, address, size in rows if kind == _PT_LOAD]
        self._pairs_at, self._pairs = offset + _PAIRS_AT, (size - _PAIRS_AT) // _PAIR.size if is_known else 0
        self._is_x86_64 = machine == _X86_64
        self._cies: dict[int, Cie] = {}

    def address(self, offset: int) -> int:
        """Return the address of a byte of the file."""
        for begin, address, size in self._loaded:
            if begin <= offset < begin + size:
                return int(offset - begin + address)
        raise elf.Malformed

    def begin_before(self, address: int) -> tuple[int | None, bool]:
        """Return the start of the last function before `address` (None: no such function), and whether one starts
        there."""
        with elf.File(self._path) as file:
            begins = _Begins(file, self._pairs_at, self._pairs)
            at = bisect_left(begins, address - self._base)
            another = at < len(begins) and begins[at] + self._base == address
            return (begins[at - 1] + self._base if at else None), another

    def function(self, address: int) -> Fde:
        """Return the FDE of the function at an address. Raises CannotUnwind as well."""
        if not self._is_x86_64:
            raise CannotUnwind
        with elf.File(self._path) as file:
            begins = _Begins(file, self._pairs_at, self._pairs)
            at = bisect_right(begins, address - self._base) - 1
            if at < 0:
                raise CannotUnwind
            found = self._function(file, begins.fde_at(at) + self._base)
        if not found.begin <= address < found.end:
            raise CannotUnwind
        return found

    def _function(self, file: elf.File, address: int) -> Fde:
        offset = self._offset(address)
        content = _entry(file, offset)
        (back,) = _WORD.unpack_from(content)
        if back == 0:  # a CIE has 0 in place of the back reference
            raise CannotUnwind
        cie_at = offset + _WORD.size - back
        if cie_at not in self._cies:
            self._cies[cie_at] = Cie(_entry(file, cie_at)[_WORD.size :])
        return Fde(self._cies[cie_at], content[_WORD.size :], address + 2 * _WORD.size)

    def _offset(self, address: int) -> int:
        for offset, begin, size in self._loaded:
            if begin <= address < begin + size:
                return int(address - begin + offset)
        raise elf.Malformed

    def names(self, addresses: set[int]) -> dict[int, str]:
        """Return the names of the functions that begin at these addresses, omitting stripped names."""
        own = elf.read(self._path)
        if own is None or not own.sections:  # pystack may still find symbols through the dynamic section
            raise elf.Malformed
        found: dict[int, str] = {}
        sections = {section.name: section for section in own.sections}
        with elf.File(self._path, _MAX_SYMBOLS_BYTES) as file:
            for symbols, names in ((".dynsym", ".dynstr"), (".symtab", ".strtab")):
                wanted = addresses.difference(found)
                if wanted and symbols in sections and names in sections:
                    table = sections[symbols]
                    with contextlib.suppress(elf.Malformed):
                        found.update(_names(file, table.offset, table.size, sections[names].offset, wanted))
        return found


class _Begins:
    """Function start addresses, relative to the table itself; read on demand (binary search touches few entries)."""

    def __init__(self, file: elf.File, at: int, count: int) -> None:
        self._file, self._at, self._count = file, at, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return self._pair(index)[0]

    def fde_at(self, index: int) -> int:
        return self._pair(index)[1]

    def _pair(self, index: int) -> tuple[int, int]:
        begin, place = _PAIR.unpack(self._file.at(self._at + index * _PAIR.size, _PAIR.size))
        return begin, place


def _entry(file: elf.File, offset: int) -> bytes:
    (size,) = _WORD.unpack(file.at(offset, _WORD.size))
    if not _WORD.size < size < _MAX_ENTRY_BYTES:  # all bits set would mean an 8-byte length, which no compiler emits
        raise CannotUnwind
    return file.at(offset + _WORD.size, size)


def _names(file: elf.File, at: int, size: int, names_at: int, wanted: set[int]) -> dict[int, str]:
    """Return the names of the functions at `wanted`; prefer global to weak to local among aliases."""
    best: dict[int, tuple[int, int, int]] = {}
    for first in range(0, size // _SYMBOL.size * _SYMBOL.size, _AT_ONCE):
        data = file.at(at + first, min(_AT_ONCE, size // _SYMBOL.size * _SYMBOL.size - first))
        # bytes.find over the lower halves of all values: fast for half a million symbols.
        values = memoryview(data).cast("I")[2 :: _SYMBOL.size // 4].tobytes()
        for address in wanted:
            for index in islice(_indices(values, struct.pack("<I", address & 0xFFFFFFFF)), _MAX_ALIKE):
                name, info, value = _SYMBOL.unpack_from(data, index * _SYMBOL.size)
                rank = _KINDS.get(info & 0xF, 0), _BINDINGS.get(info >> 4, 0)
                if value == address and all(rank) and rank > best.get(address, (0, 0))[:2]:
                    best[address] = *rank, name
    return {address: file.name_at(names_at + name) for address, (*_, name) in best.items()}


def _indices(words: bytes, word: bytes) -> Iterator[int]:
    at = words.find(word)
    while at >= 0:
        if at % len(word) == 0:
            yield at // len(word)
        at = words.find(word, at + 1)


class Functions:
    """Functions of the files that a process maps, by address; lookups are cached."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._mapped = MappedFiles(files)
        self._binaries: dict[str, Binary] = {}
        self._names: dict[int, str] = {}

    def path(self, address: int) -> str:
        """Return the path of the file mapped at an address, else ""."""
        mapped = self._mapped.at(address)
        return mapped.path if mapped else ""

    def before(self, address: int, name: str) -> str:
        """Return the function containing the call that returns to `address`, else `name`, the function at `address`."""
        if address not in self._names:
            try:
                self._names[address] = self._before(address, name)
            except UNREADABLE:
                self._names[address] = name
        return self._names[address]

    def _before(self, address: int, name: str) -> str:
        mapped = self._mapped.at(address - 1)
        if mapped is None:
            return name
        if mapped.path not in self._binaries:
            self._binaries[mapped.path] = Binary(mapped.path)
        binary = self._binaries[mapped.path]
        begin, another_begins = binary.begin_before(binary.address(address - 1 - mapped.start + mapped.offset) + 1)
        if begin is None or not (name in UNKNOWN or another_begins):
            return name
        return demangled(binary.names({begin}).get(begin, "")) or UNKNOWN[0]


def demangled(name: str) -> str:
    """Demangle a C++ name; other names are returned unchanged."""
    if not name.startswith("_Z"):
        return name
    import ctypes

    try:
        demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):  # musl, or no libstdc++
        return name
    demangle.restype = ctypes.c_char_p
    return (demangle(name.encode(), None, None, None) or name.encode()).decode("utf-8", "replace")
