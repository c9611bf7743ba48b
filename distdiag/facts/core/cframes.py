"""The C frames of a core, read beside pystack, which is left with the Python ones: over C it takes long.

Functions are named by their symbols; what has debug information is told by libdw, in the child that asks pystack.
"""

from __future__ import annotations

import os
import struct
import sys

from distdiag.facts import elf
from distdiag.facts.core import merge, unwinding
from distdiag.facts.core.binary import Binary
from distdiag.facts.core.frames import Frame
from distdiag.facts.core.functions import VERSION, demangled
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from distdiag.facts.core.notes import MappedFile
    from distdiag.facts.core.unwinding import Place

    Told = dict[str, list[list[tuple[str, str, int]]]]
    """For each file, and each address that was asked for, what is there: see `libdw.Lines.of`."""

_DEBUG_FOLDER = "/usr/lib/debug"
_MOST_BYTES_COMPARED = 64 << 20


class CFrames:
    """All threads of a core; `whole`: to where each began, and the symbols of all files could be read.

    Raises NoRules, see `unwinding.stacks`.
    """

    def __init__(self, core: str, files: Sequence[MappedFile], unlike: Container[str]) -> None:
        self._stacks = unwinding.stacks(core, files, unlike)
        self.whole = all(one.whole for one in self._stacks.values())
        self._names: dict[tuple[str, int], str] = {}
        self._name_all()
        self.question = self._wanted()

    def frames(self, told: Told) -> dict[int, list[Frame]]:
        """Give the frames of each thread, innermost first, with what was told of `question`, as far as it was."""
        lines = {
            (path, address): found
            for path, addresses in self.question.items()
            for address, found in zip(addresses, told.get(path, ()))
        }
        return {
            tid: [frame for one in stack.places for frame in self._shown(one, lines.get((one.path, one.address)))]
            for tid, stack in self._stacks.items()
        }

    def _name_all(self) -> None:
        begins: dict[str, set[int]] = {}
        for place in self._places():
            if place.begin is not None:
                begins.setdefault(place.path, set()).add(place.begin)
        for path, wanted in begins.items():
            try:
                self._names.update(((path, begin), name) for begin, name in Binary(path).names(wanted).items())
            except (OSError, ValueError, elf.Malformed, struct.error):
                self.whole = False  # others may know more of its symbols

    def _wanted(self) -> dict[str, list[int]]:
        """List the addresses, by file, of which debug information may tell more, and which will be shown."""
        found: dict[str, list[int]] = {}
        for stack in self._stacks.values():
            inside = True
            for place in stack.places:
                plain = Frame("c", self._name(place), "", None, place.path)
                own = merge.is_interpreter(plain) or merge.is_eval(plain)
                inside = inside and own
                if place.begin is not None and (inside or not own):
                    found.setdefault(place.path, []).append(place.address)
        return {
            path: list(dict.fromkeys(addresses)) for path, addresses in found.items() if has_debug_information(path)
        }

    def _places(self) -> Iterator[Place]:
        for stack in self._stacks.values():
            yield from stack.places

    def _name(self, place: Place) -> str:
        return "" if place.begin is None else self._names.get((place.path, place.begin), "")

    def _shown(self, place: Place, told: list[tuple[str, str, int]] | None) -> Iterator[Frame]:
        if place.signal:
            yield Frame("c", "<signal handler called>", "", None, printable(place.path))
            return
        *inlined, last = told or [("", "", 0)]
        for name, file, line in (*inlined, (last[0] or demangled(self._name(place)), *last[1:])):
            function = printable(VERSION.sub("", name)) or "??"
            yield Frame("c", function, printable(file) if line else "", line or None, printable(place.path))


def has_debug_information(path: str) -> bool:
    """Tell whether a file has it, in itself or in a file beside it, as gdb's manual has it (Separate Debug Files)."""
    found = elf.read(path)
    if found is None:
        return False
    if any(one.name in (".debug_info", ".zdebug_info") for one in found.sections):
        return True
    build_id = found.build_id
    if build_id and os.path.isfile(f"{_DEBUG_FOLDER}/.build-id/{build_id[:2]}/{build_id[2:]}.debug"):
        return True
    try:
        beside = [one for one in _beside(path, found.sections) if os.path.exists(one)]
    except (OSError, ValueError, elf.Malformed):
        return False
    # Opening a pipe would wait. Without a build id libdw compares a checksum of the whole file, 80 MB in a second.
    most_bytes = sys.maxsize if build_id else _MOST_BYTES_COMPARED
    return bool(beside) and all(os.path.isfile(one) and os.stat(one).st_size <= most_bytes for one in beside)


def _beside(path: str, sections: Sequence[elf.Section]) -> Iterator[str]:
    """List where the file that .gnu_debuglink names may be."""
    folder = os.path.dirname(os.path.realpath(path))
    for section in sections:
        if section.name == ".gnu_debuglink":
            with elf.File(path) as file:
                name = file.name_at(section.offset)
            yield from (f"{folder}/.debug/{name}", f"{_DEBUG_FOLDER}{folder}/{name}")
            if name != os.path.basename(path):
                yield f"{folder}/{name}"
