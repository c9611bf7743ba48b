"""Where an ELF file has what it exports, by name: the few lines of a dynamic linker's work that need no linker.

By the hash table that GNU's linkers make (DT_GNU_HASH): a bloom filter, buckets, and for each bucket a chain of hashes
that ends with an odd one; names and values are in the dynamic symbols (System V ABI, chapter 5).
"""

from __future__ import annotations

import struct

from distdiag.node import elf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_HEADER, _SEGMENT = struct.Struct("<32xQ16xH6x"), struct.Struct("<I4xQQ8xQ16x")
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 5, 6, 0x6FFFFEF5
_SYMBOL_BYTES = 24
_LONGEST_CHAIN = 4096


def addresses(path: str, names: Iterable[str]) -> dict[str, int]:
    """Give the addresses of these exported symbols, counted from where the file's first byte is in memory.

    What it does not export is not in the answer.

    Raises:
        OSError, ValueError, elf.Malformed, struct.error: it cannot be read, or is no ELF file of 64 bits.
    """
    with elf.File(path) as file:
        at, count = _HEADER.unpack(file.at(0, _HEADER.size))
        rows = list(_SEGMENT.iter_unpack(file.at(at, count * _SEGMENT.size)))
        loaded = [row[1:] for row in rows if row[0] == _PT_LOAD]
        dynamic = next((row for row in rows if row[0] == _PT_DYNAMIC), None)
        if dynamic is None or not loaded:
            return {}
        tags = dict(struct.iter_unpack("<QQ", file.at(dynamic[1], dynamic[3] - dynamic[3] % 16)))
        if not {_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH} <= tags.keys():
            return {}
        strings, symbols, hashes = (_in_file(tags[tag], loaded) for tag in (_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH))
        first = next((address for offset, address, _ in loaded if offset == 0), 0)
        found = {}
        for name in names:
            for index in _same_hash(file, hashes, name):
                where, value = struct.unpack("<I4xQ8x", file.at(symbols + index * _SYMBOL_BYTES, _SYMBOL_BYTES))
                if file.name_at(strings + where) == name:
                    found[name] = value - first
        return found


def _same_hash(file: elf.File, table: int, name: str) -> list[int]:
    """Number the symbols whose hash is that of a name, save the last bit, which ends a chain."""
    hashed = 5381
    for letter in name.encode():
        hashed = (hashed * 33 + letter) & 0xFFFFFFFF
    buckets, skipped, bloom, _ = struct.unpack("<4I", file.at(table, 16))
    if buckets == 0:
        return []
    starts = table + 16 + bloom * 8
    (index,) = struct.unpack("<I", file.at(starts + hashed % buckets * 4, 4))
    found: list[int] = []
    while index >= skipped and len(found) < _LONGEST_CHAIN:
        (its,) = struct.unpack("<I", file.at(starts + (buckets + index - skipped) * 4, 4))
        if its | 1 == hashed | 1:
            found.append(index)
        if its & 1:
            break
        index += 1
    return found


def _in_file(address: int, loaded: Iterable[tuple[int, int, int]]) -> int:
    for offset, start, size in loaded:
        if start <= address < start + size:
            return offset + address - start
    raise elf.Malformed
