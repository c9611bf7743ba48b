"""A core, or another ELF file whose end may be missing: its notes, and what lay in memory. See elf(5), core(5).

Nothing in it is trusted: counts and sizes are compared with what is there before anything is read or kept.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from bisect import bisect_right
from dataclasses import dataclass

from distdiag.facts.elf import File, Malformed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol, Union

    Core = Union[str, bytes]
    """The path of a core, or as many of its first bytes as are known (see `packed.head`)."""

    class Readable(Protocol):
        """What `elf.File` and `Bytes` are."""

        size: int

        def at(self, offset: int, size: int) -> bytes:
            """Read `size` bytes; Malformed if they are not all there."""


MAGIC = b"\x7fELF"
_READABLE = MAGIC + b"\x02\x01\x01"  # 64 bits, little endian, version 1
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOTE = struct.Struct("<III")
_MACHINES = {62: "x86_64", 183: "aarch64"}
_OTHER_MACHINES = {3: "i386", 8: "mips", 20: "ppc", 21: "ppc64", 22: "s390", 40: "arm", 243: "riscv", 258: "loongarch"}
_KINDS = {1: "an object file", 2: "a program", 3: "a program or library"}
_ET_CORE = 4
_IDENTITY_BYTES = 20  # up to e_machine
_BITS_32, _BITS_64, _LITTLE, _BIG = 1, 2, 1, 2
_LONGEST_OWNER = 8  # "CORE", "LINUX" and "GNU", with their zeros
_PT_LOAD, _PT_NOTE = 1, 4
_PN_XNUM = 0xFFFF
_AT_ONCE = 4096
_MOST_NOTES = 1 << 17  # of ten kinds for each of 13,000 threads
_MOST_BYTES = 32 << 20
"""Of headers and notes; a torch job's are 0.2 MB. The kernel writes 4 MiB about mapped files unless told otherwise."""


class NotACore(Exception):
    """This file is no core that can be read; the text says why, to stand behind "FILE: "."""


class OtherMachine(NotACore):
    """A core, but of a kind of machine that is not read here."""


class Bytes:
    """The beginning of a file, in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def at(self, offset: int, size: int) -> bytes:
        """Give `size` bytes; Malformed if they are not all there."""
        if offset + size > self.size:
            raise Malformed
        return self._data[offset : offset + size]


@dataclass(frozen=True)
class Note:
    """A note whose content is all there: `size` bytes from `offset` of the file on."""

    owner: bytes
    kind: int
    offset: int
    size: int


class Image:
    """The program headers of a file of 64 bits, little endian.

    `machine` as uname(2) names it, empty for one that is not read here. `whole_bytes` is where the last segment ends: a
    file that has fewer, `size_bytes`, was cut off.

    Raises:
        Malformed: it is no such file, or its program headers are not there.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self.size_bytes = file.size
        self.whole_bytes = 0
        self._notes: list[tuple[int, int]] = []
        header = _HEADER.unpack(file.at(0, _HEADER.size))
        if not header[0].startswith(_READABLE) or header[9] != _SEGMENT.size:
            raise Malformed
        self.machine = _MACHINES.get(header[2], "")
        self._read_segments(header[5], self._count(segments_at=header[5], sections_at=header[6], said=header[10]))

    def at(self, offset: int, size: int) -> bytes:
        """Read bytes of the file; Malformed if they are not all there."""
        return self._file.at(offset, size)

    def memory(self, address: int, most_bytes: int) -> bytes:
        """Give what lay at an address, up to the end of its segment; nothing where that is not in the file."""
        found = bisect_right(self._starts, address) - 1
        if found < 0:
            return b""
        skipped = address - self._starts[found]
        offset = self._offsets[found] + skipped
        size = min(self._sizes[found] - skipped, most_bytes, self.size_bytes - offset)
        return self._file.at(offset, size) if size > 0 else b""

    def notes(self) -> Iterator[Note]:
        """List the notes in their order, up to the first that is not all there; all are padded to 4 bytes."""
        left = _MOST_NOTES
        for at, size in self._notes:
            end = min(at + size, self.size_bytes)
            while at + _NOTE.size <= end:
                left -= 1
                if not left:
                    raise Malformed
                head = self._file.at(at, min(_NOTE.size + _LONGEST_OWNER, end - at))
                owner_size, content_size, kind = _NOTE.unpack_from(head)
                content = at + _NOTE.size + (owner_size + 3) // 4 * 4
                if content + content_size > end:
                    return
                yield Note(head[_NOTE.size :][:owner_size].rstrip(b"\0"), kind, content, content_size)
                at = content + (content_size + 3) // 4 * 4

    def _count(self, *, segments_at: int, sections_at: int, said: int) -> int:
        """Count the program headers.

        Too many for the header's field are counted by the first section, which the kernel writes last: where a cut
        has taken it, by where the notes begin, for they follow the program headers (fs/binfmt_elf.c, elf_core_dump).
        """
        if said != _PN_XNUM:
            return said
        try:
            return int(_SECTION.unpack(self._file.at(sections_at, _SECTION.size))[7])
        except Malformed:
            kind, _, offset, *_ = _SEGMENT.unpack(self._file.at(segments_at, _SEGMENT.size))
            if kind != _PT_NOTE or offset < segments_at:
                raise
            return int(offset - segments_at) // _SEGMENT.size

    def _read_segments(self, at: int, count: int) -> None:
        if at + count * _SEGMENT.size > self.size_bytes:
            raise Malformed
        columns = array("Q"), array("Q"), array("Q")
        for first in range(0, count, _AT_ONCE):
            rows = self._file.at(at + first * _SEGMENT.size, min(count - first, _AT_ONCE) * _SEGMENT.size)
            for kind, _, offset, address, _, size, _, _ in _SEGMENT.iter_unpack(rows):
                self.whole_bytes = max(self.whole_bytes, offset + size)
                if kind == _PT_LOAD:
                    for column, value in zip(columns, (address, offset, size)):
                        column.append(value)
                elif kind == _PT_NOTE:
                    self._notes.append((offset, size))
        # With kernel.core_sort_vma, and before there was this choice (about 6.13), Linux writes small mappings first.
        order = sorted(range(len(columns[0])), key=columns[0].__getitem__)
        self._starts, self._offsets, self._sizes = (array("Q", map(column.__getitem__, order)) for column in columns)


@contextlib.contextmanager
def opened(core: Core) -> Iterator[Image]:
    """Open a core; what is found to be wrong with it while it is open raises NotACore, too.

    Raises:
        NotACore: it is none, or is damaged or cut off where something was looked for.
        OSError, ValueError: it cannot be opened or read, or is not a regular file; this is no path.
    """
    with File(core, _MOST_BYTES) if isinstance(core, str) else contextlib.nullcontext(Bytes(core)) as file:
        _check(file.at(0, min(_IDENTITY_BYTES, file.size)))
        try:
            yield Image(file)
        except (Malformed, struct.error) as error:
            reason = f"damaged, or cut off before the end of its notes: it has {file.size:,} bytes"
            raise NotACore(reason) from error


def _check(head: bytes) -> None:
    """Refuse what is no core of a machine that is read here, by the beginning of its header."""
    if not head:
        raise NotACore("empty, as a full disk leaves it")
    if head[:4] != MAGIC:
        raise NotACore("not a core: it does not begin as an ELF file does")
    if len(head) < _IDENTITY_BYTES or head[4] not in (_BITS_32, _BITS_64) or head[5] not in (_LITTLE, _BIG):
        raise NotACore("damaged or cut off in its first 20 bytes")
    kind, machine = struct.unpack_from("<HH" if head[5] == _LITTLE else ">HH", head, 16)
    if kind != _ET_CORE:
        raise NotACore(f"not a core, but {_KINDS.get(kind, f'an ELF file of type {kind}')}")
    if machine not in _MACHINES or head[4] != _BITS_64 or head[5] != _LITTLE:
        name = _MACHINES.get(machine) or _OTHER_MACHINES.get(machine, f"machine {machine}")
        bits, order = 32 * head[4], "little" if head[5] == _LITTLE else "big"
        raise OtherMachine(f"a core of another kind of machine: {name}, {bits} bits, {order} endian")
