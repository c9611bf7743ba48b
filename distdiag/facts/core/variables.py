"""Which rank of its job a process was, from the core itself: the few variables that launchers set, and no other."""

from __future__ import annotations

import struct

from distdiag.facts import procs
from distdiag.facts.core.image import opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.facts.core.image import Core, Image

_NT_AUXV, _AT_EXECFN = 6, 31  # include/uapi/linux/elf.h, auxvec.h
_AUXV = struct.Struct("<QQ")
_MOST_BYTES = 512 * 1024


def said_in(core: Core) -> dict[str, str]:
    """Read the environment that the program was started with: it lies below its name, at the top of the stack.

    Empty where that part of the memory is not in the core. Raises NotACore, OSError, ValueError as `notes.read`.
    """
    with opened(core) as image:
        # Most of what lies there is zero.
        return procs.wanted(filter(None, _below(image, _name_at(image)).split(b"\0")))


def _name_at(image: Image) -> int:
    for note in image.notes():
        if note.kind == _NT_AUXV:
            data = image.at(note.offset, note.size)
            return int(dict(_AUXV.iter_unpack(data[: len(data) // _AUXV.size * _AUXV.size])).get(_AT_EXECFN, 0))
    return 0


def _below(image: Image, address: int) -> bytes:
    """Give what lies right below an address, as much as there is of its segment."""
    size = _MOST_BYTES
    while size >= 4096:
        if found := image.memory(max(0, address - size), size):
            return found
        size //= 2
    return b""
