"""Cores as they lie: plain, or packed by systemd-coredump, a cron job or a hand. What they are is told by their bytes.

gzip and xz are read by Python. For zstd and lz4 there has to be the program, or the module of that name.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import selectors
import time
from dataclasses import dataclass

from distdiag.facts import carried_tools, programs
from distdiag.facts.core.image import Bytes, Image
from distdiag.facts.elf import File, Malformed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from typing import BinaryIO

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 16 << 20
"""Enough for the headers of 250,000 mappings."""
_MORE_THAN_PROMISED_BYTES = 64 << 20
"""What may follow the memory: section headers, as gdb's gcore writes them."""
_LEFT_FREE_BYTES = 64 << 20
_HEAD_TIMEOUT_S = 20.0
_LONGEST_COMPLAINT = 1000
_CUT_OFF = ("premature end", "unfinished stream", "unexpected end")  # as zstd 1.5 and lz4 1.9 say it


class Kind(enum.Enum):
    """How a file is packed, by the name of the program that unpacks it."""

    PLAIN = ""
    GZIP = "gzip"
    XZ = "xz"
    ZSTD = "zstd"
    LZ4 = "lz4"


@dataclass(frozen=True)
class _Way:
    """How to read a kind: a module with an `open`, and how to get it; by its program rather than by the module."""

    magic: tuple[bytes, ...]
    module: str
    install: str
    by_program: bool = False


_WAYS = {
    Kind.GZIP: _Way((b"\x1f\x8b",), "gzip", "rebuild this Python with zlib"),
    Kind.XZ: _Way((b"\xfd7zXZ\0",), "lzma", "rebuild this Python with liblzma"),
    # By its program, because the module does not notice that a file was cut off; pzstd begins with a frame to skip.
    Kind.ZSTD: _Way(
        (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18"), "zstandard", "apt-get install zstd, or pip install zstandard", True
    ),
    Kind.LZ4: _Way(
        (b"\x04\x22\x4d\x18", b"\x02\x21\x4c\x18"), "lz4.frame", "apt-get install lz4, or pip install lz4", True
    ),
}


class CannotUnpack(Exception):
    """A packed file that cannot be unpacked: the text says why, to stand behind "FILE: "."""


class CutOff(CannotUnpack):
    """A packed file whose end is missing; its `head` may be all that is needed. `unpack` says how much came out."""

    unpacked_bytes = 0


def kind(path: str) -> Kind:
    """Tell how a file is packed.

    Raises:
        OSError, ValueError: it cannot be opened or read, or is not a regular file; this is no path.
    """
    with File(path) as file:
        start = file.at(0, min(8, file.size))
    return next((kind for kind, way in _WAYS.items() if start.startswith(way.magic)), Kind.PLAIN)


def head(path: str, most_bytes: int, *, timeout_s: float = _HEAD_TIMEOUT_S) -> bytes:
    """Give the first bytes of the core in a file, unpacked; of one that was cut off what there is, if that is less.

    Raises:
        CannotUnpack: it is damaged from the beginning, or there is nothing to unpack it with, or that takes too long.
        OSError, ValueError: as of `kind`.
    """
    packing = kind(path)
    if packing is Kind.PLAIN:
        with File(path, most_bytes) as file:
            return file.at(0, min(file.size, most_bytes))
    data = bytearray()
    with contextlib.closing(_pieces(path, packing, timeout_s)) as pieces:
        try:
            for piece in pieces:
                data += piece
                if len(data) >= most_bytes:
                    break
        except CutOff:
            if not data:
                raise
    return bytes(data[:most_bytes])


def unpack(path: str, folder: str, *, most_bytes: int, timeout_s: float) -> str:
    """Unpack a core into a new file in a folder, which nobody else may read; its path. The caller removes it.

    There must be room for the size that its own headers promise, and much more than that is not written.

    Raises:
        CannotUnpack: there is no core in it, or it would have more than `most_bytes` or than there is room for, or
            `head`'s reasons, or it was cut off (`CutOff`); then no file is left behind.
        OSError, ValueError: as of `kind`, and if there is no such folder; also if `path` is not packed.
    """
    packing = kind(path)
    if packing is Kind.PLAIN:
        raise ValueError(f"not packed: {path}")
    promised = _promised_bytes(head(path, _HEAD_BYTES, timeout_s=timeout_s))
    _check_room(promised, folder, most_bytes)
    import tempfile

    fd, unpacked = tempfile.mkstemp(prefix="core-", dir=folder)
    try:
        with open(fd, "wb") as file, contextlib.closing(_pieces(path, packing, timeout_s)) as pieces:
            _write(file, pieces, promised)
    except BaseException as error:
        if isinstance(error, CutOff):
            error.unpacked_bytes = os.path.getsize(unpacked)
        os.unlink(unpacked)
        if isinstance(error, OSError):
            raise CannotUnpack(f"cannot be unpacked into {folder}: {error.strerror}") from error
        raise
    return unpacked


def _write(file: BinaryIO, pieces: Iterator[bytes], promised: int) -> None:
    for piece in pieces:
        if file.tell() + len(piece) > promised + _MORE_THAN_PROMISED_BYTES:
            raise CannotUnpack(f"damaged: there is more in it than the {_mib(promised)} that its headers promise")
        file.write(piece)


def _promised_bytes(start: bytes) -> int:
    try:
        return Image(Bytes(start)).whole_bytes
    except Malformed:
        raise CannotUnpack("what is packed in it is not a core of 64 bits") from None


def _check_room(promised: int, folder: str, most_bytes: int) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize - _LEFT_FREE_BYTES
    if promised > most_bytes:
        raise CannotUnpack(f"unpacked it would have {_mib(promised)}, and {_mib(most_bytes)} are allowed")
    if promised > free:
        room = f"{folder} has room for {_mib(max(0, free))}; TMPDIR can name another folder"
        raise CannotUnpack(f"unpacked it would have {_mib(promised)}, and {room}")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _pieces(path: str, packing: Kind, timeout_s: float) -> Generator[bytes, None, None]:
    """Unpack piece by piece; closing it ends the work."""
    way = _WAYS[packing]
    program = carried_tools.find(packing.value) if way.by_program else None
    if program:  # the real path, because zstd does not follow links
        yield from _by_program([program, "-dcq", os.path.realpath(path)], timeout_s)
    else:
        yield from _by_module(path, packing, timeout_s)


def _by_module(path: str, packing: Kind, timeout_s: float) -> Iterator[bytes]:
    way = _WAYS[packing]
    try:
        module = importlib.import_module(way.module)
    except ImportError:
        raise CannotUnpack(f"{packing.value} is not installed: {way.install}") from None
    deadline = time.monotonic() + timeout_s
    try:
        with module.open(path, "rb") as file:
            while piece := file.read1(_CHUNK_BYTES):
                yield piece
                _check_time(deadline, timeout_s)
    except CannotUnpack:
        raise
    except EOFError as error:
        raise CutOff("this file is cut off") from error
    except Exception as error:  # each module has errors of its own
        raise CannotUnpack(f"damaged: {error}") from error


def _by_program(argv: Sequence[str], timeout_s: float) -> Iterator[bytes]:
    try:
        process = programs.start(argv)
    except programs.CannotRun as error:
        raise CannotUnpack(str(error)) from error
    deadline = time.monotonic() + timeout_s
    complaint = bytearray()
    try:
        yield from _output(process, complaint, deadline, timeout_s)
        while process.poll() is None:  # it has closed its streams, and is about to leave
            _check_time(deadline, timeout_s)
            time.sleep(0.001)
    finally:
        programs.end_group(process)
    if process.returncode:
        said = complaint.decode("utf-8", "replace").strip()
        if any(words in said.lower() for words in _CUT_OFF):
            raise CutOff("this file is cut off")
        raise CannotUnpack(f"damaged: {said or f'{argv[0]} ended with status {process.returncode}'}")


def _output(
    process: programs.Process[bytes], complaint: bytearray, deadline: float, timeout_s: float
) -> Iterator[bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.close()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.get_map():
            _check_time(deadline, timeout_s)
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                piece = os.read(key.fd, _CHUNK_BYTES)
                if not piece:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    yield piece
                elif len(complaint) < _LONGEST_COMPLAINT:
                    complaint += piece


def _check_time(deadline: float, timeout_s: float) -> None:
    if time.monotonic() > deadline:
        raise CannotUnpack(f"not unpacked within {timeout_s:g} s")
