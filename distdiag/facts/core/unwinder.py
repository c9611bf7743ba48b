"""The C frames of the threads of a core, followed through the tables that compilers leave for exceptions.

It answers where no other tool does: the program is gone, the core is cut off, there is neither pystack nor gdb. It
needs less memory than these, too: libdw, by which pystack follows frames, sorts the whole table of each library (30 MB
for libtorch_cpu.so); here only those entries are read that are on a stack. Functions are named by their symbols;
`source_lines` reads what debug information has (source lines, inlined calls).
"""

from __future__ import annotations

import contextlib
import struct
import time

from distdiag.facts.core import call_frames, core_file, source_lines, stacks
from distdiag.facts.core.binary import UNREADABLE, VERSION, Binary, demangled
from distdiag.facts.core.call_frames import CannotUnwind
from distdiag.facts.core.stacks import UNKNOWN, Frame, Stacks
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from distdiag.facts.core.core_file import Image, MappedFile
    from distdiag.facts.core.source_lines import Line

_MAX_FRAMES, _MAX_S = 2048, 5  # more is endless recursion, or what others follow faster
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

    `without_lines`: why the source lines of some frames are missing, "" if none are. Raises CannotUnwind, see `unwind`.
    """

    def __init__(self, core: str, files: Sequence[MappedFile], unlike: Container[str]) -> None:
        self._stacks = unwind(core, files, unlike)
        self.whole = all(stack.whole for stack in self._stacks.values())
        self._names: dict[tuple[str, int], str] = {}
        self._read_names()
        self._lines, self.without_lines = source_lines.read(self._debuggable())

    def frames(self) -> dict[int, list[Frame]]:
        """Return the frames of each thread, innermost first; an inlined call is a frame of its own."""
        return {
            tid: [frame for at in stack.locations for frame in self._frames(at, self._lines.get((at.path, at.address)))]
            for tid, stack in self._stacks.items()
        }

    def stacks(self) -> Stacks:
        """Return the C frames alone, as far as unwinding got."""
        without = f", without source lines: {self.without_lines}" if self.without_lines else ""
        threads = tuple(stacks.of_c_alone(tid, frames) for tid, frames in self.frames().items())
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
        """Return addresses of shown frames by file, for files with debug information."""
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
            path: list(dict.fromkeys(addresses))
            for path, addresses in found.items()
            if source_lines.has_debug_information(path)
        }

    def _name(self, location: Location) -> str:
        return "" if location.begin is None else self._names.get((location.path, location.begin), "")

    def _frames(self, location: Location, lines: Sequence[Line] | None) -> Iterator[Frame]:
        if location.signal:
            yield Frame("c", "<signal handler called>", "", None, printable(location.path))
            return
        *inlined, last = lines or [("", "", 0)]
        for name, file, line in (*inlined, (demangled(self._name(location)) or last[0], *last[1:])):
            function = printable(VERSION.sub("", name)) or UNKNOWN[1]
            yield Frame("c", function, printable(file) if line else "", line or None, printable(location.path))
