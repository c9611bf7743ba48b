"""Facts of an ELF file: required libraries, the loader's search path, build id, sections. See elf(5).

Reads only headers, tables and names, whatever the file's size, and without any tool. The file is not trusted: no offset
or size in it makes us read beyond its end, or more than `_MOST_BYTES` in all.
"""

from __future__ import annotations

import os
import stat
import struct

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_MACHINES = {62: "x86_64", 183: "aarch64"}
_MAGIC = b"\x7fELF\x02\x01\x01"  # 64 bits, little endian, version 1
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_NOTE = struct.Struct("<III")
_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_SHT_NULL, _SHT_NOBITS = 0, 8
_SHN_XINDEX = 0xFFFF
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 14, 15, 29
_NT_GNU_BUILD_ID = 3

_MOST_BYTES = 16 << 20
"""Limit for a file's tables and names: about 10 kB for a library, a few MB for the largest objects."""
_MOST_DYNAMIC = 64 << 10
_MOST_NOTES = 64 << 10
_LONGEST_NAME = 64 << 10


@record
class Section:
    """A part of the file, in bytes from its beginning; `size` is unverified."""

    name: str
    offset: int
    size: int


@record
class Elf:
    """One program, library or object; missing parts are empty.

    `machine` as named by uname(2). `rpath` and `runpath` as written, with $ORIGIN. `build_id` in hexadecimal.
    `sections` in the order of the file, without those that occupy no bytes; empty without section headers.
    """

    machine: str
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    build_id: str
    sections: tuple[Section, ...]


class Malformed(Exception):
    """An inconsistent file: a piece outside it, or more to read than allowed."""


class File:
    """A regular file, read piece by piece.

    Raises:
        OSError: it cannot be opened or read, or is not a regular file (opening a pipe would wait for its writer).
        ValueError: not a valid path.
    """

    def __init__(self, path: str, most_bytes: int = _MOST_BYTES) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(self._fd)
            if not stat.S_ISREG(state.st_mode):
                raise OSError(f"not a regular file: {path}")
        except OSError:
            os.close(self._fd)
            raise
        self.size = state.st_size
        self._left = most_bytes

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def at(self, offset: int, size: int) -> bytes:
        """Read `size` bytes; raises Malformed if the file ends before."""
        if offset + size > self.size:
            raise Malformed
        self.spend(size)
        data = os.pread(self._fd, size, offset)
        if len(data) < size:
            raise Malformed
        return data

    def name_at(self, offset: int) -> str:
        """Read up to the next zero byte."""
        size = 256
        while size <= _LONGEST_NAME:
            data = self.at(offset, min(size, max(1, self.size - offset)))
            if b"\0" in data:
                return _text(data.partition(b"\0")[0])
            size *= 4
        raise Malformed

    def spend(self, size: int) -> None:
        """Count bytes read; raises Malformed above the limit for one file."""
        self._left -= size
        if self._left < 0:
            raise Malformed


@record
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


def read(path: str) -> Elf | None:
    """Read a file; None if it is not a 64-bit ELF file for x86_64 or aarch64, is truncated, or not readable."""
    try:
        with File(path) as file:
            return _elf(file)
    except (OSError, ValueError, Malformed):
        return None


def _elf(file: File) -> Elf:
    header = _HEADER.unpack(file.at(0, _HEADER.size))
    _, _, machine, _, _, segments_at, sections_at, _, _, segment_size, segments, section_size, count, names = header
    if not header[0].startswith(_MAGIC) or machine not in _MACHINES:
        raise Malformed
    if (segments and segment_size != _SEGMENT.size) or (sections_at and section_size != _SECTION.size):
        raise Malformed
    mapped = [_segment(row) for row in _SEGMENT.iter_unpack(file.at(segments_at, segments * _SEGMENT.size))]
    sections = tuple(_sections(file, sections_at, count, names)) if sections_at else ()
    # A file of debug information may have its program's segments without their bytes (made by eu-strip).
    has_dynamic = not sections or any(section.name == ".dynamic" for section in sections)
    linked = _linked(file, mapped) if has_dynamic else {}
    return Elf(
        machine=_MACHINES[machine],
        soname=(linked.get(_DT_SONAME) or [""])[-1],
        needed=tuple(linked.get(_DT_NEEDED, ())),
        rpath=_folders(linked.get(_DT_RPATH)),
        runpath=_folders(linked.get(_DT_RUNPATH)),
        build_id=_build_id(file, mapped, sections),
        sections=sections,
    )


def _segment(row: tuple[int, ...]) -> _Segment:
    kind, _, offset, address, _, size, _, _ = row
    return _Segment(kind, offset, address, size)


def _sections(file: File, at: int, count: int, names: int) -> Iterator[Section]:
    """List the sections; counts too large for the file header are in the first section."""
    first = _SECTION.unpack(file.at(at, _SECTION.size))
    rows = file.at(at, (count or first[5]) * _SECTION.size)
    names = (first[6] if names == _SHN_XINDEX else names) * _SECTION.size
    if names >= len(rows):
        raise Malformed
    _, _, _, _, offset, size, *_ = _SECTION.unpack_from(rows, names)
    table = file.at(offset, size)
    for name, kind, _, _, offset, size, *_ in _SECTION.iter_unpack(rows):
        if kind not in (_SHT_NULL, _SHT_NOBITS):
            end = table.find(b"\0", name, name + _LONGEST_NAME)
            if end < 0:
                raise Malformed
            file.spend(end - name)  # many may share the bytes of one long name
            yield Section(_text(table[name:end]), offset, size)


def _linked(file: File, mapped: list[_Segment]) -> dict[int, list[str]]:
    """Read the strings of the dynamic section by tag; located by the program headers, which survive any strip."""
    found: dict[int, list[str]] = {}
    tags = [tag for segment in mapped if segment.kind == _PT_DYNAMIC for tag in _dynamic(file, segment)]
    strings = dict(tags).get(_DT_STRTAB, 0)
    for tag, value in tags:
        if tag in (_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH):
            found.setdefault(tag, []).append(file.name_at(_in_file(strings + value, mapped)))
    return found


def _dynamic(file: File, segment: _Segment) -> Iterator[tuple[int, int]]:
    data = file.at(segment.offset, min(segment.size, _MOST_DYNAMIC) // _DYNAMIC.size * _DYNAMIC.size)
    for tag, value in _DYNAMIC.iter_unpack(data):
        if tag == _DT_NULL:
            return
        yield tag, value


def _in_file(address: int, mapped: list[_Segment]) -> int:
    for segment in mapped:
        if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.size:
            return segment.offset + address - segment.address
    raise Malformed


def _folders(written: list[str] | None) -> tuple[str, ...]:
    # The loader uses the last of several, and ignores an empty one.
    return tuple(written[-1].split(":")) if written and written[-1] else ()


def _build_id(file: File, mapped: list[_Segment], sections: tuple[Section, ...]) -> str:
    """Find the build id: in its section, or without sections in the note segments."""
    places = [(section.offset, section.size) for section in sections if section.name == ".note.gnu.build-id"]
    if not sections:
        places = [(segment.offset, segment.size) for segment in mapped if segment.kind == _PT_NOTE]
    for offset, size in places:
        for owner, kind, content in _notes(file.at(offset, min(size, _MOST_NOTES))):
            if owner == b"GNU\0" and kind == _NT_GNU_BUILD_ID:
                return content.hex()
    return ""


def _notes(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """List owner, type and content of notes, padded to 4 bytes; sizes in those padded to 8 need no padding."""
    at = 0
    while at + _NOTE.size <= len(data):
        owner_size, size, kind = _NOTE.unpack_from(data, at)
        content = at + _NOTE.size + (owner_size + 3) // 4 * 4
        yield data[at + _NOTE.size : at + _NOTE.size + owner_size], kind, data[content : content + size]
        at = content + (size + 3) // 4 * 4


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
