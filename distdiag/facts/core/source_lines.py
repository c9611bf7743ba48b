"""Names, source lines and inlined calls of C code, from debug information, by addr2line of binutils."""

from __future__ import annotations

import os
import re
import time

from distdiag.facts import carried_tools, elf, programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Line = tuple[str, str, int]
    """Function, source file and line ("" and 0 if unknown)."""

_MAX_S = 10.0  # debug information can be gigabytes
_DEBUG_FOLDER = "/usr/lib/debug"
_PLACE = re.compile(r"(.*):(\d+)(?: \(discriminator \d+\))?")


def read(
    addresses: Mapping[str, Sequence[int]], timeout_s: float = _MAX_S
) -> tuple[dict[tuple[str, int], list[Line]], str]:
    """Look up link-time addresses of each file; an inlined call precedes its caller.

    Returns:
        The lines by file and address, and why some are missing, else "".
    """
    found: dict[tuple[str, int], list[Line]] = {}
    tool = carried_tools.find("addr2line")
    if addresses and tool is None:
        return found, "addr2line (binutils) is not installed"
    deadline = time.monotonic() + min(timeout_s, _MAX_S)
    environment = {**os.environ, "LC_ALL": "C", "DEBUGINFOD_URLS": ""}  # stops addr2line from querying the network
    for path, wanted in addresses.items():
        argv = [tool or "", "-a", "-i", "-f", "-C", "-e", path, *map(hex, wanted)]
        try:
            done = programs.run(argv, timeout_s=max(0.1, deadline - time.monotonic()), env=environment)
        except programs.CannotRun as error:
            return found, str(error)
        if done.timed_out:
            return found, "addr2line did not answer in time"
        groups = re.split(r"^0x\w+\n", done.stdout.decode("utf-8", "replace"), flags=re.MULTILINE)[1:]
        found.update(((path, address), list(_lines(group))) for address, group in zip(wanted, groups))
    return found, ""


def _lines(group: str) -> Iterator[Line]:
    """Parse pairs of lines: a function and its place, "FILE:LINE" or "??:0"."""
    rows = group.splitlines()
    for function, place in zip(rows[::2], rows[1::2]):
        match = _PLACE.fullmatch(place)
        known = match is not None and match[1] != "??"
        name = "" if function == "??" else function
        yield (name, match[1], int(match[2])) if match is not None and known else (name, "", 0)


def has_debug_information(path: str) -> bool:
    """Return whether a file has debug information, or a separate debug file (gdb manual, Separate Debug Files)."""
    found = elf.read(path)
    if found is None:
        return False
    if any(section.name in (".debug_info", ".zdebug_info") for section in found.sections):
        return True
    by_id = f"{_DEBUG_FOLDER}/.build-id/{found.build_id[:2]}/{found.build_id[2:]}.debug"
    try:
        return os.path.isfile(by_id) or any(map(os.path.isfile, _linked_debug_files(path, found.sections)))
    except (OSError, ValueError, elf.Malformed):
        return False


def _linked_debug_files(path: str, sections: Sequence[elf.Section]) -> Iterator[str]:
    folder = os.path.dirname(os.path.realpath(path))
    for section in sections:
        if section.name == ".gnu_debuglink":
            with elf.File(path) as file:
                name = file.name_at(section.offset)
            yield from (f"{folder}/.debug/{name}", f"{_DEBUG_FOLDER}{folder}/{name}")
            if name != os.path.basename(path):
                yield f"{folder}/{name}"
