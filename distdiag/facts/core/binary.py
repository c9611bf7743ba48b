"""Where the functions of a program or library are: by its table for exceptions, and by its symbols.

The table is .eh_frame_hdr with .eh_frame (Linux Standard Base 5, 10.6), which no strip takes away; see elf(5) for the
rest. Addresses are those that the file was linked for; a library is loaded elsewhere.
"""

from __future__ import annotations

import contextlib
import struct
from bisect import bisect_left, bisect_right
from itertools import islice

from distdiag.facts import elf
from distdiag.facts.core.callframes import Common, Function, NoRules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_SYMBOLS_BYTES = 1 << 30  # libtorch_cpu.so has 13 MB of them
_MOST_TABLE_BYTES = 1 << 16  # of one function
_PT_LOAD, _PT_GNU_EH_FRAME = 1, 0x6474E550
_HEADER, _SEGMENT, _WORD = struct.Struct("<8s10xH12xQ16xH6x"), struct.Struct("<I4xQQ8xQ16x"), struct.Struct("<I")
_READABLE, _X86_64 = b"\x7fELF\x02\x01\x01", 62  # 64 bits, little endian, version 1
_EH_FRAME_HDR = b"\x01\x1b\x03\x3b"  # version 1, encodings that gcc and clang use; then 2 words and pairs of words
_PAIR, _PAIRS_AT = struct.Struct("<ii"), 12
_SYMBOL = struct.Struct("<IB3xQ8x")
_AT_ONCE, _MOST_ALIKE = _SYMBOL.size << 18, 4096
_KINDS = {0: 1, 2: 2, 10: 2}  # STT_NOTYPE, as assemblers write it by themselves; STT_FUNC, STT_GNU_IFUNC
_BINDINGS = {0: 1, 2: 2, 1: 3}  # local, weak, global


class Binary:
    """One file. Raises OSError, ValueError, elf.Malformed, struct.error if it is not here, or is not what it says."""

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
        self._common: dict[int, Common] = {}

    def address(self, offset: int) -> int:
        """Give the address of a byte of the file."""
        for begin, address, size in self._loaded:
            if begin <= offset < begin + size:
                return int(offset - begin + address)
        raise elf.Malformed

    def begin_before(self, address: int) -> tuple[int | None, bool]:
        """Tell where the last function begins that does so before `address`, and whether another begins there."""
        with elf.File(self._path) as file:
            begins = _Begins(file, self._pairs_at, self._pairs)
            at = bisect_left(begins, address - self._base)
            another = at < len(begins) and begins[at] + self._base == address
            return (begins[at - 1] + self._base if at else None), another

    def function(self, address: int) -> Function:
        """Give what is known of the function at an address; raises NoRules, too."""
        if not self._is_x86_64:
            raise NoRules
        with elf.File(self._path) as file:
            begins = _Begins(file, self._pairs_at, self._pairs)
            at = bisect_right(begins, address - self._base) - 1
            if at < 0:
                raise NoRules
            found = self._function(file, begins.described_at(at) + self._base)
        if not found.begin <= address < found.end:
            raise NoRules
        return found

    def _function(self, file: elf.File, address: int) -> Function:
        offset = self._offset(address)
        content = _entry(file, offset)
        (back,) = _WORD.unpack_from(content)
        if back == 0:  # that is what a CIE has in its place
            raise NoRules
        common_at = offset + _WORD.size - back
        if common_at not in self._common:
            self._common[common_at] = Common(_entry(file, common_at)[_WORD.size :])
        return Function(self._common[common_at], content[_WORD.size :], address + 2 * _WORD.size)

    def _offset(self, address: int) -> int:
        for offset, begin, size in self._loaded:
            if begin <= address < begin + size:
                return int(address - begin + offset)
        raise elf.Malformed

    def names(self, addresses: set[int]) -> dict[int, str]:
        """Name the functions that begin at these addresses, as their symbols do; what was stripped is not there."""
        found: dict[int, str] = {}
        sections = {one.name: one for one in _sections(self._path)}
        if not sections:  # it may have symbols all the same, for who looks into its dynamic section
            raise elf.Malformed
        with elf.File(self._path, _MOST_SYMBOLS_BYTES) as file:
            for symbols, names in ((".dynsym", ".dynstr"), (".symtab", ".strtab")):
                wanted = addresses.difference(found)
                if wanted and symbols in sections and names in sections:
                    table = sections[symbols]
                    with contextlib.suppress(elf.Malformed):
                        found.update(_names(file, table.offset, table.size, sections[names].offset, wanted))
        return found


class _Begins:
    """Where functions begin, relative to the table itself; read where it is looked at."""

    def __init__(self, file: elf.File, at: int, count: int) -> None:
        self._file, self._at, self._count = file, at, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return self._pair(index)[0]

    def described_at(self, index: int) -> int:
        """Give the place of what is known of the function, relative to the table as well."""
        return self._pair(index)[1]

    def _pair(self, index: int) -> tuple[int, int]:
        begin, place = _PAIR.unpack(self._file.at(self._at + index * _PAIR.size, _PAIR.size))
        return begin, place


def _entry(file: elf.File, offset: int) -> bytes:
    """Read what follows the length of an entry of .eh_frame."""
    (size,) = _WORD.unpack(file.at(offset, _WORD.size))
    if not _WORD.size < size < _MOST_TABLE_BYTES:  # all bits set: 8 bytes of length follow, which nobody writes
        raise NoRules
    return file.at(offset + _WORD.size, size)


def _sections(path: str) -> tuple[elf.Section, ...]:
    found = elf.read(path)
    return found.sections if found else ()


def _names(file: elf.File, at: int, size: int, names_at: int, wanted: set[int]) -> dict[int, str]:
    """Name the functions at `wanted`; of several names for one place, that which most may use."""
    best: dict[int, tuple[int, int, int]] = {}
    for first in range(0, size // _SYMBOL.size * _SYMBOL.size, _AT_ONCE):
        data = file.at(at + first, min(_AT_ONCE, size // _SYMBOL.size * _SYMBOL.size - first))
        # Half a million of them are looked through in no time as one text of the lower halves of their values.
        values = memoryview(data).cast("I")[2 :: _SYMBOL.size // 4].tobytes()
        for address in wanted:
            for index in islice(_all(values, struct.pack("<I", address & 0xFFFFFFFF)), _MOST_ALIKE):
                name, info, value = _SYMBOL.unpack_from(data, index * _SYMBOL.size)
                rank = _KINDS.get(info & 0xF, 0), _BINDINGS.get(info >> 4, 0)
                if value == address and all(rank) and rank > best.get(address, (0, 0))[:2]:
                    best[address] = *rank, name
    return {address: file.name_at(names_at + name) for address, (*_, name) in best.items()}


def _all(words: bytes, word: bytes) -> Iterator[int]:
    """List which of the words are `word`."""
    at = words.find(word)
    while at >= 0:
        if at % len(word) == 0:
            yield at // len(word)
        at = words.find(word, at + 1)
