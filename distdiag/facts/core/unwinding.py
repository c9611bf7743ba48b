"""The C frames of a core's threads, followed through the tables that compilers leave for exceptions.

libdw, by which pystack follows them, first sorts all of the table of each library: 0.1 s and 30 MB for libtorch_cpu.so.
Here only those entries are read that are on a stack.
"""

from __future__ import annotations

import contextlib
import struct
import time

from distdiag.facts import elf
from distdiag.facts.core import callframes, notes
from distdiag.facts.core.binary import Binary
from distdiag.facts.core.callframes import NoRules
from distdiag.facts.core.image import NotACore, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from distdiag.facts.core.image import Image

_MOST_FRAMES, _MOST_S = 2048, 5  # more is endless recursion, or what others follow faster
_WORD = struct.Struct("<Q")


class Place:
    """Code that runs: `address` in `path`, as that was linked, in what begins at `begin`.

    Where a file changed or tells nothing, `begin` is None and `address` is that in memory; `path` is "" where no file
    was mapped. `signal`: the kernel put this frame there, to return from a signal handler.
    """

    __slots__ = ("address", "begin", "path", "signal")

    def __init__(self, path: str, address: int, begin: int | None, *, signal: bool = False) -> None:
        self.path, self.address, self.begin, self.signal = path, address, begin, signal


class Stack:
    """The frames of a thread, innermost first; `whole`: they reach to where the thread began."""

    __slots__ = ("places", "whole")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.whole = False


def stacks(core: str, files: Sequence[notes.MappedFile], unlike: Container[str]) -> dict[int, Stack]:
    """Follow each thread as far as can be; `unlike`: files that are no longer what they were.

    Raises NoRules if the core is unreadable, of another machine than x86-64, or has more than is followed in some time.
    """
    late = time.monotonic() + _MOST_S
    found: dict[int, Stack] = {}
    try:
        with opened(core) as image:
            following = _Following(image, files, unlike)
            for tid, registers in notes.registers(image):
                found[tid] = following.stack(registers)
                if time.monotonic() > late:
                    raise NoRules
    except (NotACore, OSError, ValueError) as error:
        raise NoRules from error
    if not found:
        raise NoRules
    return found


class _Following:
    def __init__(self, image: Image, files: Sequence[notes.MappedFile], unlike: Container[str]) -> None:
        self._image = image
        self._mapped = notes.Mapped(files)
        self._unlike = unlike
        self._binaries: dict[str, Binary] = {}
        self._known: dict[int, tuple[Place, callframes.Rules | None]] = {}

    def stack(self, registers: dict[int, int]) -> Stack:
        """Follow the frames of a thread that had these registers."""
        found = Stack()
        with contextlib.suppress(NoRules):
            self._follow(found, registers)
            found.whole = True
        return found

    def _follow(self, found: Stack, registers: dict[int, int]) -> None:
        # What a thread runs now, or will when a signal handler returns, is there; callers are before where they go on.
        is_exact = True
        while len(found.places) < _MOST_FRAMES:
            at = registers[callframes.RETURN_ADDRESS] - (not is_exact)
            if at not in self._known:
                self._known[at] = self._look_up(at)
            place, rules = self._known[at]
            is_exact = place.signal
            found.places.append(place)
            if rules is None:
                raise NoRules
            if rules.outermost:
                return
            callers = rules.callers(registers, self._word)
            pointer = callframes.STACK_POINTER
            if callframes.RETURN_ADDRESS not in callers or pointer not in callers:
                raise NoRules
            # The stack grows downwards, unless a signal has its own.
            if not is_exact and callers[pointer] <= registers[pointer]:
                raise NoRules
            registers = callers
        raise NoRules

    def _look_up(self, at: int) -> tuple[Place, callframes.Rules | None]:
        file = self._mapped.at(at)
        if file is None:
            return Place("", at, None), None
        place = Place(file.path, at, None)
        if file.path in self._unlike:
            return place, None
        try:
            if file.path not in self._binaries:
                self._binaries[file.path] = Binary(file.path)
            binary = self._binaries[file.path]
            address = binary.address(at - file.start + file.offset)
            function = binary.function(address)
            place = Place(file.path, address, function.begin, signal=function.common.signal)
            return place, function.rules(address)
        except (NoRules, OSError, ValueError, elf.Malformed, struct.error):
            return place, None

    def _word(self, address: int) -> int:
        data = self._image.memory(address, _WORD.size)
        if len(data) < _WORD.size:
            raise NoRules
        return int(_WORD.unpack(data)[0])
