"""Why a process aborted, in its own words, from its core: what the C library printed, the C++ exception.

glibc keeps its last message for debuggers (assert/assert.c, malloc, __fortify_fail; __abort_msg in stdlib/abort.c). An
exception lies behind a header that begins with "GNUCC++", see libsupc++/unwind-cxx.h; who throws has it on the stack.
"""

from __future__ import annotations

import re
import struct

from distdiag.facts import elf
from distdiag.facts.core import notes
from distdiag.facts.core.functions import demangled
from distdiag.facts.core.image import NotACore, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.facts.core.image import Core, Image
    from distdiag.facts.core.notes import CoreNotes

_WORD, _SYMBOL = struct.Struct("<Q"), struct.Struct("<IBBHQQ")
_CLASSES = b"\0++CCUNG", b"\1++CCUNG"
"""_Unwind_Exception.exception_class of an exception, and of one that was thrown again (std::rethrow_exception)."""
_TYPE_BEFORE, _OBJECT_AFTER = 80, 32
"""From that header: where its type_info is named (of one thrown again: the object), and where the object begins."""
_STACK_BYTES = 64 << 10
_MOST_TEXT = 4096
_RSP = 7
_LIBC = re.compile(r"/libc(-[\d.]+)?\.so[.\d]*$")


def read(core: Core, told: CoreNotes) -> tuple[str, str]:
    """Give the C library's message, and the exception as std::terminate prints it; each empty where it is not there.

    The exception may be an old one, that was caught: only the frames tell whether the process ended by one.
    """
    try:
        with opened(core) as image:
            memory = _Memory(image, told)
            return _of_libc(memory, told), _of_cpp(memory, image, told.threads[0].tid)
    except (NotACore, OSError, ValueError, elf.Malformed, struct.error):
        return "", ""


class _Memory:
    """Memory as the core has it, and what it left to the mapped files: constants."""

    def __init__(self, image: Image, told: CoreNotes) -> None:
        self._image = image
        self._mapped = notes.Mapped(told.files)

    def at(self, address: int, size: int) -> bytes:
        data = self._image.memory(address, size)
        place = self._mapped.at(address) if not data else None
        if place is None:
            return data
        with elf.File(place.path) as file:
            offset = address - place.start + place.offset
            return file.at(offset, max(0, min(size, place.end - address, file.size - offset)))

    def word(self, address: int) -> int:
        data = self.at(address, _WORD.size)
        return int(_WORD.unpack(data)[0]) if len(data) == _WORD.size else 0

    def text(self, address: int) -> str:
        """Read a text up to its zero; empty if there is none that a person could read."""
        data = self.at(address, _MOST_TEXT).partition(b"\0")[0] if address else b""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return ""
        return text.strip() if text and all(char.isprintable() or char.isspace() for char in text) else ""


def _of_libc(memory: _Memory, told: CoreNotes) -> str:
    libc = next((one for one in told.files if one.offset == 0 and _LIBC.search(one.path)), None)
    symbol = _symbol(libc.path, "__abort_msg") if libc is not None else 0
    message = memory.word(libc.start + symbol) if libc is not None and symbol else 0
    return memory.text(message + 4) if message else ""  # its size stands before it


def _symbol(path: str, name: str) -> int:
    """Give the address of a dynamic symbol in its library; 0 if it has none."""
    found = elf.read(path)
    parts = {one.name: one for one in found.sections} if found is not None else {}
    if ".dynsym" not in parts or ".dynstr" not in parts:
        return 0
    with elf.File(path) as file:
        names = file.at(parts[".dynstr"].offset, parts[".dynstr"].size)
        at = names.find(b"\0%s\0" % name.encode()) + 1
        table = file.at(parts[".dynsym"].offset, parts[".dynsym"].size // _SYMBOL.size * _SYMBOL.size)
    return next((int(value) for place, _, _, _, value, _ in _SYMBOL.iter_unpack(table) if at and place == at), 0)


def _of_cpp(memory: _Memory, image: Image, tid: int) -> str:
    """Describe the innermost exception that the thread's stack points to, as std::terminate prints it."""
    header = next(_exceptions(memory, image, tid), 0)
    if not header:
        return ""
    again = memory.at(header, 8) == _CLASSES[1]
    thrown = memory.word(header - _TYPE_BEFORE) if again else header + _OBJECT_AFTER
    kind = memory.text(memory.word(memory.word(thrown - _OBJECT_AFTER - _TYPE_BEFORE) + 8)).lstrip("*")
    name = demangled(f"_ZTS{kind}").removeprefix("typeinfo name for ") if kind else "an unknown type"
    first = memory.word(thrown + 8)  # std::runtime_error and c10::Error keep their text there, Gloo a list of texts
    text = memory.text(first) or memory.text(memory.word(first)) if first else ""
    return f"terminate called after throwing an instance of '{name}'" + (f"\n  what():  {text}" if text else "")


def _exceptions(memory: _Memory, image: Image, tid: int) -> Iterator[int]:
    stack = next((values.get(_RSP, 0) for thread, values in notes.registers(image) if thread == tid), 0)
    data = memory.at(stack, _STACK_BYTES) if stack else b""
    words = dict.fromkeys(word for (word,) in _WORD.iter_unpack(data[: len(data) // 8 * 8]) if not word % 16)
    for word in words:
        if 4096 < word < 1 << 47 and not stack <= word < stack + len(data) and image.memory(word, 8) in _CLASSES:
            yield word
