"""Libraries and exported functions on a thread's stack, from a copy of its registers and stack.

Frames are followed with the compilers' exception tables where possible. Above a function without a table (the driver's
hand-written code, all code on aarch64) the stack is scanned: a word is a return address if it points behind a call
instruction in executable memory. Only a stale return address can mislead.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from typing import NamedTuple

from distdiag.facts import elf
from distdiag.facts.core.binary import UNREADABLE, Binary
from distdiag.facts.core.call_frames import RETURN_ADDRESS, STACK_POINTER, CannotUnwind
from distdiag.facts.core.core_file import MappedFile, MappedFiles
from distdiag.facts.stacks import exported_functions
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts.core.call_frames import Rules
    from distdiag.facts.stacks.exported_functions import Functions, Identity
    from distdiag.facts.stacks.user_registers import Sample

_EXECUTABLE = re.compile(r"^(\w+)-(\w+) ..x. (\w+) \S+ \d+ *(.*)$", re.MULTILINE)
_RUNTIME = re.compile(r"(libc|ld|libpthread)([-.]\S*)?\.so[.\d]*|(libc|ld)[.-]musl\S*|\[v\w+\]")
"""The C library and the kernel's pages: every wait ends in them, so the library that called them is reported."""
_MOST_FRAMES = 64
_LINK_REGISTER = 30
_ADDRESS_BITS = (1 << 48) - 1  # aarch64 signs return addresses in the bits above


class Place(NamedTuple):
    """One stack. `inner`: its innermost library apart from the C library's; "" if unknown.

    `libraries` and `calls` (exported functions of the selected libraries): innermost first, each once.
    """

    inner: str
    libraries: tuple[str, ...]
    calls: tuple[str, ...]


class Binaries:
    """The files of all processes of one reading, each opened once even if 64 ranks map it."""

    def __init__(self) -> None:
        self._binaries: dict[Identity, Binary | None] = {}
        self._rules: dict[tuple[Identity, int], Rules | None] = {}

    def rules(self, path: str, offset: int) -> Rules | None:
        """Return how to unwind the frame of the code at an offset; None if its file has no usable table."""
        try:
            key = exported_functions.identity(path)
        except OSError:
            return None
        if key not in self._binaries:
            try:
                self._binaries[key] = Binary(path)
            except UNREADABLE:
                self._binaries[key] = None
        binary = self._binaries[key]
        if binary is not None and (key, offset) not in self._rules:
            try:
                address = binary.address(offset)
                self._rules[key, offset] = binary.function(address).rules(address)
            except (CannotUnwind, *UNREADABLE):
                self._rules[key, offset] = None
        return self._rules.get((key, offset))


class Stacks:
    """Converts the samples of one process to places; equal samples are analysed once."""

    def __init__(self, pid: int, maps: str, memory: int, named: Sequence[str], binaries: Binaries) -> None:
        """Take the text of /proc/PID/maps, an open /proc/PID/mem, and patterns of base names."""
        self._pid, self._memory, self._binaries = pid, memory, binaries
        self._named = [re.compile(pattern) for pattern in named]
        rows = _EXECUTABLE.findall(maps)
        files = [
            MappedFile(int(begin, 16), int(end, 16), int(offset, 16), path.replace(" (deleted)", ""))
            for begin, end, offset, path in rows
        ]
        self._mapped = MappedFiles(files)
        self._is_return: dict[int, bool] = {}
        self._rules: dict[int, Rules | None] = {}
        self._names: dict[int, str] = {}
        self._functions: dict[str, Functions | None] = {}
        self._known: dict[Sample, Place] = {}
        self._after_call = _after_call_aarch64 if os.uname().machine == "aarch64" else self._after_call_x86_64

    def place(self, sample: Sample) -> Place:
        """Identify the libraries and calls of one stack. Reads the process's code and files, which may block."""
        if sample not in self._known:
            self._known[sample] = self._place(self._addresses(sample))
        return self._known[sample]

    def _place(self, addresses: Sequence[int]) -> Place:
        # A return address may be the first of another function, so use the call before it.
        exact = [addresses[0], *(address - 1 for address in addresses[1:])]
        mapped = [(at, mapping) for at in exact if (mapping := self._mapped.at(at)) is not None]
        names = [_name(mapping) for _, mapping in mapped]
        calls = [self._call(at, mapping) for at, mapping in mapped]
        return Place(
            inner=next((name for name in names if not _RUNTIME.fullmatch(name)), ""),
            libraries=tuple(dict.fromkeys(names)),
            calls=tuple(dict.fromkeys(filter(None, calls))),
        )

    def _addresses(self, sample: Sample) -> list[int]:
        """Return the instruction pointer and the return addresses, innermost first."""
        found, at = self._followed(sample)
        if at is None:
            return found
        if len(found) == 1:
            link = dict(sample.saved).get(_LINK_REGISTER, 0) & _ADDRESS_BITS
            found += [link] if self._is_return_address(link) else []
        return [*found, *self._scanned(sample.stack[max(0, at - sample.sp) :])]

    def _followed(self, sample: Sample) -> tuple[list[int], int | None]:
        """Unwind by tables: addresses, and the stack pointer where these end; None: the thread's start."""

        def word(address: int) -> int:
            at = address - sample.sp
            if not 0 <= at <= len(sample.stack) - 8:
                raise CannotUnwind
            return int(struct.unpack_from("<Q", sample.stack, at)[0])

        found = [sample.ip]
        registers = {**dict(sample.saved), STACK_POINTER: sample.sp, RETURN_ADDRESS: sample.ip}
        while len(found) < _MOST_FRAMES:
            rules = self._rules_at(found[-1] - (len(found) > 1))
            if rules is None:
                break
            if rules.outermost:
                return found, None
            try:
                caller = rules.caller_registers(registers, word)
            except CannotUnwind:
                break
            above = caller.get(STACK_POINTER, 0)
            address = caller.get(RETURN_ADDRESS, 0)
            if above <= registers[STACK_POINTER] or self._mapped.at(address) is None:
                break
            registers = caller
            found.append(address)
        return found, registers[STACK_POINTER]

    def _rules_at(self, address: int) -> Rules | None:
        if address not in self._rules:
            mapping = self._mapped.at(address)
            offset = address - mapping.start + mapping.offset if mapping else 0
            path = self._file(mapping) if mapping else ""
            self._rules[address] = self._binaries.rules(path, offset) if path else None
        return self._rules[address]

    def _scanned(self, stack: bytes) -> list[int]:
        words = [word & _ADDRESS_BITS for (word,) in struct.iter_unpack("<Q", stack[: len(stack) // 8 * 8])]
        for word in set(words).difference(self._is_return):
            self._is_return_address(word)
        return [word for word in words if self._is_return[word]]

    def _is_return_address(self, address: int) -> bool:
        if address not in self._is_return:
            self._is_return[address] = self._mapped.at(address) is not None and self._after_call(
                address, self._code_before(address)
            )
        return self._is_return[address]

    def _code_before(self, address: int) -> bytes:
        try:
            return os.pread(self._memory, 8, address - 8)
        except (OSError, OverflowError):
            return b""

    def _after_call_x86_64(self, address: int, code: bytes) -> bool:
        """Return whether the 8 bytes before an address end with call rel32, or a call through register or memory."""
        if len(code) < 8:
            return False
        if code[3] == 0xE8 and self._mapped.at(address + struct.unpack_from("<i", code, 4)[0]) is not None:
            return True
        return ends_with_indirect_call(code)

    def _call(self, address: int, mapping: MappedFile) -> str:
        if address not in self._names:
            functions = self._functions_of(mapping)
            offset = address - mapping.start + mapping.offset
            self._names[address] = printable(functions.name(offset)) if functions else ""
        return self._names[address]

    def _functions_of(self, mapping: MappedFile) -> Functions | None:
        if mapping.path not in self._functions:
            self._functions[mapping.path] = None
            if any(pattern.fullmatch(_name(mapping)) for pattern in self._named):
                with contextlib.suppress(OSError, ValueError, elf.Malformed, struct.error):
                    self._functions[mapping.path] = exported_functions.of_file(self._file(mapping))
        return self._functions[mapping.path]

    def _file(self, mapping: MappedFile) -> str:
        """Return a valid path to a mapped file: in the process's root, else by the mapping itself."""
        path = f"/proc/{self._pid}/root{mapping.path}"
        return path if os.path.exists(path) else f"/proc/{self._pid}/map_files/{mapping.start:x}-{mapping.end:x}"


def _name(mapping: MappedFile) -> str:
    return printable(os.path.basename(mapping.path)) or "[anonymous]"


def ends_with_indirect_call(code: bytes) -> bool:
    """Return whether 8 bytes of x86-64 code end with a call through a register or memory."""
    return any(code[at] == 0xFF and _call_size(code[at + 1 :]) == 8 - at for at in range(1, 7))


def _call_size(code: bytes) -> int:
    """Return the size of the instruction ff /2 (call), given the bytes after ff; 0 for any other instruction."""
    mode, kind, register = code[0] >> 6, code[0] >> 3 & 7, code[0] & 7
    if kind != 2:
        return 0
    if mode == 3:
        return 2
    has_index = register == 4
    without_base = mode == 0 and (code[1:2] and code[1] & 7 == 5 if has_index else register == 5)
    displacement = 4 if mode == 2 or without_base else mode
    return 2 + has_index + displacement


def _after_call_aarch64(_: int, code: bytes) -> bool:
    """Return whether the 8 bytes before an address end with bl or blr, with or without pointer authentication."""
    if len(code) < 8:
        return False
    word = int.from_bytes(code[4:], "little")
    return word >> 26 == 0x25 or word & 0xFEFFF000 == 0xD63F0000
