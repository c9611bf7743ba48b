"""Why a process aborted, from its core: the last message of the C library, the C++ exception.

glibc keeps its last message for debuggers (assert/assert.c, malloc, __fortify_fail; __abort_msg in stdlib/abort.c). A
C++ exception follows a header that begins with "GNUCC++", see libsupc++/unwind-cxx.h; the throwing thread has its
address on the stack.
"""

from __future__ import annotations

import re
import struct

from distdiag.facts import elf
from distdiag.facts.core import core_file
from distdiag.facts.core.binary import demangled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.facts.core.core_file import Core, CoreNotes, Image

_WORD, _SYMBOL = struct.Struct("<Q"), struct.Struct("<IBBHQQ")
_CLASSES = b"\0++CCUNG", b"\1++CCUNG"
"""_Unwind_Exception.exception_class of an exception, and of a rethrown exception (std::rethrow_exception)."""
_TYPE_BEFORE, _OBJECT_AFTER = 80, 32
"""Offset of type_info before the exception header (if rethrown: of the object), and of the object after the header."""
_STACK_BYTES = 64 << 10
_MAX_TEXT_BYTES = 4096
_RSP = 7
_LIBC = re.compile(r"/libc(-[\d.]+)?\.so[.\d]*$")


def read(core: Core, notes: CoreNotes) -> tuple[str, str]:
    """Return the message of the C library, and the exception in the format of std::terminate; "" if none.

    The exception may be an earlier one that was caught; only the frames show whether it ended the process.
    """
    try:
        with core_file.opened(core) as image:
            memory = _Memory(image, notes)
            return _of_libc(memory, notes), _of_cpp(memory, image, notes.threads[0].tid)
    except (core_file.NotACore, OSError, ValueError, elf.Malformed, struct.error):
        return "", ""


class _Memory:
    """Memory from the core, or from the mapped files for constants omitted from the core."""

    def __init__(self, image: Image, notes: CoreNotes) -> None:
        self._image = image
        self._mapped = core_file.MappedFiles(notes.files)

    def at(self, address: int, size: int) -> bytes:
        data = self._image.memory(address, size)
        mapped = self._mapped.at(address) if not data else None
        if mapped is None:
            return data
        with elf.File(mapped.path) as file:
            offset = address - mapped.start + mapped.offset
            return file.at(offset, max(0, min(size, mapped.end - address, file.size - offset)))

    def word(self, address: int) -> int:
        data = self.at(address, _WORD.size)
        return int(_WORD.unpack(data)[0]) if len(data) == _WORD.size else 0

    def text(self, address: int) -> str:
        """Read a NUL-terminated string; "" unless printable."""
        data = self.at(address, _MAX_TEXT_BYTES).partition(b"\0")[0] if address else b""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return ""
        return text.strip() if text and all(char.isprintable() or char.isspace() for char in text) else ""


def _of_libc(memory: _Memory, notes: CoreNotes) -> str:
    libc = next((file for file in notes.files if file.offset == 0 and _LIBC.search(file.path)), None)
    symbol = _symbol(libc.path, "__abort_msg") if libc is not None else 0
    message = memory.word(libc.start + symbol) if libc is not None and symbol else 0
    return memory.text(message + 4) if message else ""  # preceded by its size


def _symbol(path: str, name: str) -> int:
    found = elf.read(path)
    parts = {section.name: section for section in found.sections} if found is not None else {}
    if ".dynsym" not in parts or ".dynstr" not in parts:
        return 0
    with elf.File(path) as file:
        names = file.at(parts[".dynstr"].offset, parts[".dynstr"].size)
        at = names.find(b"\0%s\0" % name.encode()) + 1
        table = file.at(parts[".dynsym"].offset, parts[".dynsym"].size // _SYMBOL.size * _SYMBOL.size)
    return next((int(value) for place, _, _, _, value, _ in _SYMBOL.iter_unpack(table) if at and place == at), 0)


def _of_cpp(memory: _Memory, image: Image, tid: int) -> str:
    """Describe the innermost exception on the thread's stack in the format of std::terminate."""
    header = next(_exceptions(memory, image, tid), 0)
    if not header:
        return ""
    again = memory.at(header, 8) == _CLASSES[1]
    thrown = memory.word(header - _TYPE_BEFORE) if again else header + _OBJECT_AFTER
    kind = memory.text(memory.word(memory.word(thrown - _OBJECT_AFTER - _TYPE_BEFORE) + 8)).lstrip("*")
    name = demangled(f"_ZTS{kind}").removeprefix("typeinfo name for ") if kind else "an unknown type"
    first = memory.word(thrown + 8)  # std::runtime_error and c10::Error keep their text here, Gloo a list of texts
    text = memory.text(first) or memory.text(memory.word(first)) if first else ""
    return f"terminate called after throwing an instance of '{name}'" + (f"\n  what():  {text}" if text else "")


def _exceptions(memory: _Memory, image: Image, tid: int) -> Iterator[int]:
    stack = next((values.get(_RSP, 0) for thread, values in core_file.registers(image) if thread == tid), 0)
    data = memory.at(stack, _STACK_BYTES) if stack else b""
    words = dict.fromkeys(word for (word,) in _WORD.iter_unpack(data[: len(data) // 8 * 8]) if not word % 16)
    for word in words:
        if 4096 < word < 1 << 47 and not stack <= word < stack + len(data) and image.memory(word, 8) in _CLASSES:
            yield word
