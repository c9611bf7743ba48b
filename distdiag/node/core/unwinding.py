"""The C frames of a core's threads, followed through the tables that compilers leave for exceptions.

libdw, by which pystack follows them, first sorts all of the table of each library: 0.1 s and 30 MB for libtorch_cpu.so.
Here only those entries are read that are on a stack. It is followed to its end, or it does not count.
"""

from __future__ import annotations

import struct
from bisect import bisect_right

from distdiag.node import elf
from distdiag.node.core import callframes, notes
from distdiag.node.core.binary import Binary
from distdiag.node.core.callframes import NoRules
from distdiag.node.core.image import NotACore, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from distdiag.node.core.image import Image

_MOST_FRAMES = 2048  # more is endless recursion, which others follow faster
_WORD = struct.Struct("<Q")


class Place:
    """Code that runs: `address` in `path`, as that was linked, in what begins at `begin`.

    `signal`: the kernel put this frame there, to return from a signal handler.
    """

    __slots__ = ("address", "begin", "path", "signal")

    def __init__(self, path: str, address: int, begin: int, *, signal: bool) -> None:
        self.path, self.address, self.begin, self.signal = path, address, begin, signal


def stacks(core: str, files: Sequence[notes.MappedFile], unlike: Container[str]) -> dict[int, list[Place]]:
    """Give the frames of each thread, innermost first; `unlike`: files that are no longer what they were.

    Raises NoRules if one of the threads cannot be followed to where it began.
    """
    try:
        with opened(core) as image:
            following = _Following(image, files, unlike)
            found = {tid: following.frames(registers) for tid, registers in notes.registers(image)}
    except (NotACore, OSError, ValueError) as error:
        raise NoRules from error
    if not found:  # of another machine than x86-64
        raise NoRules
    return found


class _Following:
    def __init__(self, image: Image, files: Sequence[notes.MappedFile], unlike: Container[str]) -> None:
        self._image = image
        self._files = sorted(files, key=lambda one: one.start)
        self._starts = [one.start for one in self._files]
        self._unlike = unlike
        self._binaries: dict[str, Binary] = {}
        self._known: dict[int, tuple[Place, callframes.Rules]] = {}

    def frames(self, registers: dict[int, int]) -> list[Place]:
        """Follow the frames of a thread that had these registers."""
        found: list[Place] = []
        # What a thread runs now, or will when a signal handler returns, is there; callers are before where they go on.
        is_exact = True
        while len(found) < _MOST_FRAMES:
            at = registers[callframes.RETURN_ADDRESS] - (not is_exact)
            if at not in self._known:
                self._known[at] = self._look_up(at)
            place, rules = self._known[at]
            is_exact = place.signal
            found.append(place)
            if rules.outermost:
                return found
            callers = rules.callers(registers, self._word)
            if callframes.RETURN_ADDRESS not in callers:
                raise NoRules
            # The stack grows downwards, unless a signal has its own.
            pointer = callframes.STACK_POINTER
            if not is_exact and callers[pointer] <= registers[pointer]:
                raise NoRules
            registers = callers
        raise NoRules

    def _look_up(self, at: int) -> tuple[Place, callframes.Rules]:
        index = bisect_right(self._starts, at) - 1
        if index < 0 or at >= self._files[index].end:
            raise NoRules
        file = self._files[index]
        if file.path in self._unlike:
            raise NoRules
        try:
            if file.path not in self._binaries:
                self._binaries[file.path] = Binary(file.path)
            binary = self._binaries[file.path]
            address = binary.address(at - file.start + file.offset)
            function = binary.function(address)
        except (OSError, ValueError, elf.Malformed, struct.error) as error:
            raise NoRules from error
        place = Place(file.path, address, function.begin, signal=function.common.signal)
        return place, function.rules(address)

    def _word(self, address: int) -> int:
        data = self._image.memory(address, _WORD.size)
        if len(data) < _WORD.size:
            raise NoRules
        return int(_WORD.unpack(data)[0])
