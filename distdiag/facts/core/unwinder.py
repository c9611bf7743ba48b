"""C frames of the threads of a core, unwound through the exception-handling tables of compilers.

Works without the program, on a truncated core, and without pystack. It also needs less memory: libdw, used by
pystack, sorts the whole table of each library (30 MB for libtorch_cpu.so), while this reads only the entries of frames
on a stack. Functions are named from symbols; `source_lines` adds debug information (source lines, inlined calls).
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

_MAX_FRAMES, _MAX_S = 2048, 5  # more is endless recursion, or faster in other tools
_WORD = struct.Struct("<Q")


class Location:
    """A code location: link-time `address` in `path`, in the function that begins at `begin`.

    For a changed or unreadable file, `begin` is None and `address` is the memory address; `path` is "" outside mapped
    files. `signal`: a frame made by the kernel to return from a signal handler.
    """

    __slots__ = ("address", "begin", "path", "signal")

    def __init__(self, path: str, address: int, begin: int | None, *, signal: bool = False) -> None:
        self.path, self.address, self.begin, self.signal = path, address, begin, signal


class CStack:
    """The frames of a thread, innermost first.

    `whole`: complete up to the start of the thread. `jumped`: the number of frames up to a call of an address outside
    any file; its return address is assumed to be on top of the stack.
    """

    __slots__ = ("jumped", "locations", "whole")

    def __init__(self) -> None:
        self.locations: list[Location] = []
        self.whole = False
        self.jumped = 0


def unwind(core: str, files: Sequence[MappedFile], unlike: Container[str]) -> dict[int, CStack]:
    """Unwind each thread as far as possible; `unlike`: files changed since the crash.

    Raises CannotUnwind if the core is unreadable, not of x86-64, or takes longer than _MAX_S.
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
        found = CStack()
        with contextlib.suppress(CannotUnwind):
            self._follow(found, registers)
            found.whole = True
        if found.jumped and not found.whole:  # the assumption was wrong, or cannot be checked
            del found.locations[found.jumped :]
        return found

    def _follow(self, found: CStack, registers: dict[int, int]) -> None:
        # The innermost address, and one interrupted by a signal, are exact; a return address is one past the call.
        is_exact = True
        while len(found.locations) < _MAX_FRAMES:
            address = registers[call_frames.RETURN_ADDRESS] - (not is_exact)
            if address not in self._known:
                self._known[address] = self._look_up(address)
            location, rules = self._known[address]
            has_jumped = is_exact and not location.path
            is_exact = location.signal
            found.locations.append(location)
            pointer = call_frames.STACK_POINTER
            if has_jumped:
                found.jumped = len(found.locations)
                returns_to = {call_frames.RETURN_ADDRESS: self._word(registers[pointer])}
                caller = {**registers, **returns_to, pointer: registers[pointer] + _WORD.size}
            elif rules is None:
                raise CannotUnwind
            elif rules.outermost:
                return
            else:
                caller = rules.caller_registers(registers, self._word)
            if call_frames.RETURN_ADDRESS not in caller or pointer not in caller:
                raise CannotUnwind
            # The stack grows downwards, except across a signal with its own stack.
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
    """All threads of a core; `whole`: unwound completely, with the symbols of all files.

    `without_lines`: why some source lines are missing, else "". Raises CannotUnwind, see `unwind`.
    """

    def __init__(self, core: str, files: Sequence[MappedFile], unlike: Container[str]) -> None:
        self._stacks = unwind(core, files, unlike)
        self.whole = all(stack.whole for stack in self._stacks.values())
        self._names: dict[tuple[str, int], str] = {}
        self._read_names()
        self._lines, self.without_lines = source_lines.read(self._debuggable())

    def frames(self) -> dict[int, list[Frame]]:
        """Return the frames of each thread, innermost first; inlined calls get separate frames."""
        return {
            tid: [frame for at in stack.locations for frame in self._frames(at, self._lines.get((at.path, at.address)))]
            for tid, stack in self._stacks.items()
        }

    def stacks(self) -> Stacks:
        """Return the C frames alone."""
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
                self.whole = False  # other tools may read its symbols

    def _debuggable(self) -> dict[str, list[int]]:
        """Return the addresses of displayed frames by file, for files with debug information."""
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
