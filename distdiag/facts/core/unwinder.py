"""The C frames of the threads of a core, followed through the tables that compilers leave for exceptions.

It answers where no other tool does: the program is gone, the core is cut off, there is neither pystack nor gdb. It
needs less memory than these, too: libdw, by which pystack follows frames, sorts the whole table of each library (30 MB
for libtorch_cpu.so); here only those entries are read that are on a stack. Functions are named by their symbols; what
debug information has (source lines, inlined calls) is read by `libdw`, in the child that asks pystack.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time

from distdiag.facts import elf
from distdiag.facts.core import call_frames, core_file, stacks
from distdiag.facts.core.binary import UNREADABLE, VERSION, Binary, demangled
from distdiag.facts.core.call_frames import CannotUnwind
from distdiag.facts.core.stacks import UNKNOWN, Frame, Stacks
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from distdiag.facts.core.core_file import Image, MappedFile
    from distdiag.facts.core.libdw import Line, LinesByFile

_MAX_FRAMES, _MAX_S = 2048, 5  # more is endless recursion, or what others follow faster
_DEBUG_FOLDER = "/usr/lib/debug"
_MAX_BYTES_COMPARED = 64 << 20
_WORD = struct.Struct("<Q")


class Location:
    """Code that runs: `address` in `path`, as that was linked, in the function that begins at `begin`.

    Where a file changed or cannot be read, `begin` is None and `address` is that in memory; `path` is "" where no file
    was mapped. `signal`: the kernel made this frame, to return from a signal handler.
    """

    __slots__ = ("address", "begin", "path", "signal")

    def __init__(self, path: str, address: int, begin: int | None, *, signal: bool = False) -> None:
        self.path, self.address, self.begin, self.signal = path, address, begin, signal


class CStack:
    """The frames of a thread, innermost first; `whole`: they reach to where the thread began."""

    __slots__ = ("locations", "whole")

    def __init__(self) -> None:
        self.locations: list[Location] = []
        self.whole = False


def unwind(core: str, files: Sequence[MappedFile], unlike: Container[str]) -> dict[int, CStack]:
    """Follow each thread as far as can be; `unlike`: files that are no longer what they were.

    Raises CannotUnwind if the core is unreadable, not of x86-64, or has more frames than can be followed in some time.
    """
    deadline = time.monotonic() + _MAX_S
    found: dict[int, CStack] = {}
    try:
        with core_file.opened(core) as image:
            unwinder = _Unwinder(image, files, unlike)
            for tid, registers in core_file.registers(image):
                found[tid] = unwinder.stack(registers)
                if time.monotonic() > deadline:
                    raise CannotUnwind
    except (core_file.NotACore, OSError, ValueError) as error:
        raise CannotUnwind from error
    if not found:
        raise CannotUnwind
    return found


class _Unwinder:
    def __init__(self, image: Image, files: Sequence[MappedFile], unlike: Container[str]) -> None:
        self._image = image
        self._mapped = core_file.MappedFiles(files)
        self._unlike = unlike
        self._binaries: dict[str, Binary] = {}
        self._known: dict[int, tuple[Location, call_frames.Rules | None]] = {}

    def stack(self, registers: dict[int, int]) -> CStack:
        """Follow the frames of a thread that had these registers."""
        found = CStack()
        with contextlib.suppress(CannotUnwind):
            self._follow(found, registers)
            found.whole = True
        return found

    def _follow(self, found: CStack, registers: dict[int, int]) -> None:
        # A thread's own place, and that to which a signal handler returns, are exact; a caller is one call before it.
        is_exact = True
        while len(found.locations) < _MAX_FRAMES:
            address = registers[call_frames.RETURN_ADDRESS] - (not is_exact)
            if address not in self._known:
                self._known[address] = self._look_up(address)
            location, rules = self._known[address]
            is_exact = location.signal
            found.locations.append(location)
            if rules is None:
                raise CannotUnwind
            if rules.outermost:
                return
            caller = rules.caller_registers(registers, self._word)
            pointer = call_frames.STACK_POINTER
            if call_frames.RETURN_ADDRESS not in caller or pointer not in caller:
                raise CannotUnwind
            # The stack grows downwards, unless a signal has its own.
            if not is_exact and caller[pointer] <= registers[pointer]:
                raise CannotUnwind
            registers = caller
        raise CannotUnwind

    def _look_up(self, at: int) -> tuple[Location, call_frames.Rules | None]:
        file = self._mapped.at(at)
        if file is None:
            return Location("", at, None), None
        location = Location(file.path, at, None)
        if file.path in self._unlike:
            return location, None
        try:
            if file.path not in self._binaries:
                self._binaries[file.path] = Binary(file.path)
            binary = self._binaries[file.path]
            address = binary.address(at - file.start + file.offset)
            function = binary.function(address)
            location = Location(file.path, address, function.begin, signal=function.cie.signal)
            return location, function.rules(address)
        except (CannotUnwind, *UNREADABLE):
            return location, None

    def _word(self, address: int) -> int:
        data = self._image.memory(address, _WORD.size)
        if len(data) < _WORD.size:
            raise CannotUnwind
        return int(_WORD.unpack(data)[0])


class CFrames:
    """All threads of a core; `whole`: to where each began, and the symbols of all files could be read.

    `debuggable`: the addresses, by file, of which debug information may know more, and whose frames are shown. Raises
    CannotUnwind, see `unwind`.
    """

    def __init__(self, core: str, files: Sequence[MappedFile], unlike: Container[str]) -> None:
        self._stacks = unwind(core, files, unlike)
        self.whole = all(stack.whole for stack in self._stacks.values())
        self._names: dict[tuple[str, int], str] = {}
        self._read_names()
        self.debuggable = self._debuggable()

    def frames(self, lines: LinesByFile) -> dict[int, list[Frame]]:
        """Return the frames of each thread, innermost first; `lines`: what was read of `debuggable`, as far as it was.

        A call that was inlined is a frame of its own.
        """
        known = {
            (path, address): found
            for path, addresses in self.debuggable.items()
            for address, found in zip(addresses, lines.get(path, ()))
        }
        return {
            tid: [frame for at in stack.locations for frame in self._frames(at, known.get((at.path, at.address)))]
            for tid, stack in self._stacks.items()
        }

    def stacks(self, lines: LinesByFile) -> Stacks:
        """Return the C frames only, as far as they could be followed."""
        without = ", without source lines" if self.debuggable and not lines else ""
        threads = tuple(stacks.of_c_alone(tid, frames) for tid, frames in self.frames(lines).items())
        return Stacks("distdiag", threads, f"C frames only{without}", 0.0)

    def _read_names(self) -> None:
        begins: dict[str, set[int]] = {}
        for stack in self._stacks.values():
            for location in stack.locations:
                if location.begin is not None:
                    begins.setdefault(location.path, set()).add(location.begin)
        for path, wanted in begins.items():
            try:
                self._names.update(((path, begin), name) for begin, name in Binary(path).names(wanted).items())
            except UNREADABLE:
                self.whole = False  # others may know more of its symbols

    def _debuggable(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for stack in self._stacks.values():
            inside = True  # as in `stacks.essential`
            for location in stack.locations:
                plain = Frame("c", self._name(location), "", None, location.path)
                own = stacks.is_interpreter(plain) or stacks.is_eval(plain)
                inside = inside and own
                if location.begin is not None and (inside or not own):
                    found.setdefault(location.path, []).append(location.address)
        return {
            path: list(dict.fromkeys(addresses)) for path, addresses in found.items() if has_debug_information(path)
        }

    def _name(self, location: Location) -> str:
        return "" if location.begin is None else self._names.get((location.path, location.begin), "")

    def _frames(self, location: Location, lines: Sequence[Line] | None) -> Iterator[Frame]:
        if location.signal:
            yield Frame("c", "<signal handler called>", "", None, printable(location.path))
            return
        *inlined, last = lines or [("", "", 0)]
        for name, file, line in (*inlined, (last[0] or demangled(self._name(location)), *last[1:])):
            function = printable(VERSION.sub("", name)) or UNKNOWN[1]
            yield Frame("c", function, printable(file) if line else "", line or None, printable(location.path))


def has_debug_information(path: str) -> bool:
    """Return whether a file has it, in itself or in a file beside it, see gdb's manual (Separate Debug Files)."""
    found = elf.read(path)
    if found is None:
        return False
    if any(section.name in (".debug_info", ".zdebug_info") for section in found.sections):
        return True
    build_id = found.build_id
    if build_id and os.path.isfile(f"{_DEBUG_FOLDER}/.build-id/{build_id[:2]}/{build_id[2:]}.debug"):
        return True
    try:
        beside = [debug for debug in _linked_debug_files(path, found.sections) if os.path.exists(debug)]
    except (OSError, ValueError, elf.Malformed):
        return False
    # Opening a pipe would wait. Without a build id libdw compares a checksum the whole file, 80 MB in a second.
    most_bytes = sys.maxsize if build_id else _MAX_BYTES_COMPARED
    return bool(beside) and all(os.path.isfile(debug) and os.stat(debug).st_size <= most_bytes for debug in beside)


def _linked_debug_files(path: str, sections: Sequence[elf.Section]) -> Iterator[str]:
    """List where the file that .gnu_debuglink names may be."""
    folder = os.path.dirname(os.path.realpath(path))
    for section in sections:
        if section.name == ".gnu_debuglink":
            with elf.File(path) as file:
                name = file.name_at(section.offset)
            yield from (f"{folder}/.debug/{name}", f"{_DEBUG_FOLDER}{folder}/{name}")
            if name != os.path.basename(path):
                yield f"{folder}/{name}"
