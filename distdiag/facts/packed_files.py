"""Packed files (gzip, xz, zstd, lz4), unpacked as streams.

gzip and xz are read by Python's own modules, zstd and lz4 by their programs. What a file is, its bytes show.
"""

from __future__ import annotations

import enum
import importlib
import os
import selectors
import time

from distdiag.facts import carried_tools, programs
from distdiag.facts.elf import File

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

_CHUNK_BYTES = 1 << 20
_CUT_OFF = ("premature end", "unfinished stream", "unexpected end")  # as zstd 1.5 and lz4 1.9 write it


class Packing(enum.Enum):
    """How a file is packed, by the name of the program that does it."""

    NONE = ""
    GZIP = "gzip"
    XZ = "xz"
    ZSTD = "zstd"
    LZ4 = "lz4"


BY_PROGRAM = (Packing.ZSTD, Packing.LZ4)
_MAGIC = {
    Packing.GZIP: (b"\x1f\x8b",),
    Packing.XZ: (b"\xfd7zXZ\0",),
    Packing.ZSTD: (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"),  # pzstd begins with a frame to skip
    Packing.LZ4: (b"\x04\x22\x4d\x18", b"\x02\x21\x4c\x18"),
}


class CannotUnpack(Exception):
    """A packed file that cannot be unpacked: the text is the reason, to follow "FILE: "."""


class CutOff(CannotUnpack):
    """A packed file whose end is missing."""


def packing_of(path: str) -> Packing:
    """Return how a file is packed.

    Raises:
        OSError, ValueError: it cannot be opened or read, or is not a regular file; this is no path.
    """
    with File(path) as file:
        start = file.at(0, min(8, file.size))
    return next((packing for packing, magic in _MAGIC.items() if start.startswith(magic)), Packing.NONE)


def stream(path: str, packing: Packing, timeout_s: float) -> Generator[bytes, None, None]:
    """Unpack piece by piece, for at most `timeout_s` seconds; closing it ends the work."""
    deadline = time.monotonic() + timeout_s
    if packing in BY_PROGRAM:
        in_time = yield from _by_program(path, packing, deadline)
    else:
        in_time = yield from _by_module(path, packing, deadline)
    if not in_time:
        raise CannotUnpack(f"not unpacked within {timeout_s:g} s")


def _by_module(path: str, packing: Packing, deadline: float) -> Generator[bytes, None, bool]:
    name = "gzip" if packing is Packing.GZIP else "lzma"
    try:
        module = importlib.import_module(name)
    except ImportError:  # a Python that was built without zlib or liblzma
        raise CannotUnpack(f"this Python has no {name}, which is needed for {packing.value}") from None
    try:
        with module.open(path) as file:
            while piece := file.read1(_CHUNK_BYTES):
                yield piece
                if time.monotonic() > deadline:
                    return False
    except EOFError as error:
        raise CutOff("this file is truncated") from error
    except Exception as error:  # each module has errors of its own
        raise CannotUnpack(f"damaged: {error}") from error
    return True


def _by_program(path: str, packing: Packing, deadline: float) -> Generator[bytes, None, bool]:
    program = carried_tools.find(packing.value)
    if program is None:
        raise CannotUnpack(f"{packing.value} is not installed: apt-get install {packing.value}")
    try:
        process = programs.start([program, "-dcq", os.path.realpath(path)])  # zstd does not follow links
    except programs.CannotRun as error:
        raise CannotUnpack(str(error)) from error
    try:
        programs.say(process, b"")
        yield from _output(process, deadline)
        done = programs.collect_output(process, timeout_s=max(0.0, deadline - time.monotonic()))
    except BaseException:
        programs.end_group(process)
        raise
    if done.timed_out:
        return False
    if done.status:
        complaint = done.stderr.decode("utf-8", "replace").strip()[:1000]
        if any(words in complaint.lower() for words in _CUT_OFF):
            raise CutOff("this file is truncated")
        raise CannotUnpack(f"damaged: {complaint or f'{program} ended with status {done.status}'}")
    return True


def _output(process: programs.Process[bytes], deadline: float) -> Iterator[bytes]:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < deadline and selector.select(deadline - time.monotonic()):
            piece = os.read(process.stdout.fileno(), _CHUNK_BYTES)
            if not piece:
                return
            yield piece
