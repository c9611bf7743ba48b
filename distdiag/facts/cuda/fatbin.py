"""GPU architectures of the code in a file, like cuobjdump --list-elf --list-ptx, without cuobjdump.

nvcc puts the code of each object into a section as a fat binary: a header (magic, version, header size, content size),
then entries, each one cubin or PTX of one architecture after its own header. NVIDIA does not document the format:
offsets are from files made by CUDA 11.8 to 13.5, and from cricket (github.com/RWTH-ACS/cricket). Headers are never
compressed; only they are read, as a library may have gigabytes of code.
"""

from __future__ import annotations

import struct

from distdiag.facts import elf
from distdiag.record import record

_EXECUTABLE, _RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"
_BLOB = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the entries
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, version, size of this header, size of the code; architecture; flags
_PTX, _CUBIN = 1, 2  # code for the linker (8) also exists, but no GPU or driver accepts it
_ARCHS = range(10, 1000)
_SPECIFIC, _FAMILY = 1 << 20, 1 << 21
_PAGE = 4096  # costs no more to read than the 16 bytes needed from it
_WIDE = 16 * _PAGE
_MOST_HEADERS = 1_000_000  # libcublasLt.so.13 has 10,000; this limit takes a second to read
_MOST_BYTES = _MOST_HEADERS * _WIDE


@record
class Archs:
    """The GPU code in a file: machine code (`cubins`) and code to be compiled by a driver (`ptx`).

    In nvcc's notation, without sm_ or compute_: "75", "90a" (this GPU only), "100f" (its family); sorted. `complete` is
    false if part of it could not be read, and so may contain more.
    """

    cubins: tuple[str, ...]
    ptx: tuple[str, ...]
    complete: bool


def archs(path: str, found: elf.Elf | None = None) -> Archs | None:
    """List the architectures in a program, library or object; None if it is not a readable ELF file.

    `found`: its header, if it has been read already.
    """
    found = found or elf.read(path)
    if found is None:
        return None
    try:
        with elf.File(path, _MOST_BYTES) as file:
            walk = _Walk(file)
            for section in _code(found):
                walk.section(section)
    except OSError:
        return None
    return Archs(_named(walk.found, _CUBIN), _named(walk.found, _PTX), walk.complete and bool(found.sections))


class _Walk:
    def __init__(self, file: elf.File) -> None:
        self.found: set[tuple[int, int, int]] = set()
        self.complete = True
        self._file = file
        self._headers = 0
        self._window, self._window_at, self._window_end = b"", 0, 0

    def section(self, section: elf.Section) -> None:
        """Read the fat binaries of a section; the number of headers is limited, so it ends for any content."""
        at, end = section.offset, section.offset + section.size
        try:
            while at < end:
                at = self._blob(at, end)
        except elf.Malformed:
            self.complete = False

    def _blob(self, at: int, end: int) -> int:
        """Read one fat binary; return the start of the next."""
        magic, _, size, content = self._read(_BLOB, at)
        if not magic:
            return at + 8  # linkers may pad with zeros between two objects
        if magic != _MAGIC or size < _BLOB.size:
            raise elf.Malformed
        self._entries(at + size, min(at + size + content, end))
        if at + size + content > end:
            raise elf.Malformed
        return int(at + size + content)

    def _entries(self, at: int, end: int) -> None:
        while at < end:
            kind, _, size, code, arch, flags = self._read(_ENTRY, at)
            at += size + code
            runs = kind in (_PTX, _CUBIN)
            if size < _ENTRY.size or at > end or (runs and arch not in _ARCHS):
                self.complete = False
                return
            if runs:
                self.found.add((kind, arch, flags & (_SPECIFIC | _FAMILY)))

    def _read(self, header: struct.Struct, at: int) -> tuple[int, ...]:
        self._headers += 1
        if self._headers > _MOST_HEADERS:
            raise elf.Malformed
        if not self._window_at <= at <= self._window_end - header.size:
            self._move(at, header.size)
        return header.unpack_from(self._window, at - self._window_at)

    def _move(self, at: int, size: int) -> None:
        """Read up to the end of a page, or more if headers are close together."""
        step = _WIDE if self._window_at < at < self._window_end + _PAGE else _PAGE
        end = min(-(-(at + size) // step) * step, self._file.size)
        self._window = self._file.at(at, max(size, end - at))
        self._window_at, self._window_end = at, at + len(self._window)


def _code(found: elf.Elf) -> list[elf.Section]:
    """Choose the runnable sections: code still to be linked counts only without any linked code.

    A library made with -rdc=true keeps the objects it was linked from, including NVIDIA's own for every architecture.
    """
    for name in (_EXECUTABLE, _RELOCATABLE):
        sections = [section for section in found.sections if section.name == name]
        if sections:
            return sections
    return []


def _named(found: set[tuple[int, int, int]], wanted: int) -> tuple[str, ...]:
    suffixes = {_SPECIFIC: "a", _FAMILY: "f"}
    return tuple(f"{arch}{suffixes.get(flags, '')}" for kind, arch, flags in sorted(found) if kind == wanted)
