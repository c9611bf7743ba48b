"""The file written by `distdiag bundle`; read as untrusted input.

A bundle is a compressed tar whose names all begin with `distdiag-bundle/`: MANIFEST.txt first, then facts/, verdicts/,
nodes/ and logs/. Reading extracts no files: only regular members below facts/ are read, in memory, up to limits of
size, number and time. So a link, device, upward path or decompression bomb is only an error message.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import time
from typing import TYPE_CHECKING

from distdiag.cluster.checked_json import InvalidData
from distdiag.facts.packed_files import CannotUnpack, packing_of, stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TOP = "distdiag-bundle"
_FACTS = re.compile(rf"{TOP}/facts/[\w.-]{{1,220}}\.json")
_MOST_BYTES = 256 * 2**20
"""Limit on unpacked bytes, and on one file of --save."""
_MOST_MEMBERS = 20_000
_READ_S = 60.0
_BLOCK = 512


def is_bundle(path: Path) -> bool:
    """Return whether a file is a packed tar that begins as a bundle does."""
    try:
        with path.open("rb") as file:
            packed = file.read(4)
        if not packed.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
            return False
        with _Unpacked(path) as unpacked:
            head = unpacked.read(_BLOCK)
    except (OSError, InvalidData):
        return False
    return head[257:262] == b"ustar" and head.startswith(f"{TOP}/".encode())


def saved_facts(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files of --save in a bundle. Raises InvalidData."""
    try:
        with _Unpacked(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for number, member in enumerate(archive):
                if number >= _MOST_MEMBERS:
                    raise InvalidData(f"has more than {_MOST_MEMBERS} files")
                # Anything but a regular file of such a name is skipped, and never written.
                if not member.isreg() or member.issparse() or not _FACTS.fullmatch(member.name):
                    continue
                content = archive.extractfile(member)
                if content is not None:
                    yield member.name.rpartition("/")[2], content.read()
    except InvalidData:
        raise
    except (tarfile.TarError, OSError, ValueError, EOFError, OverflowError, RecursionError) as error:
        raise InvalidData(f"is a damaged bundle: {type(error).__name__}") from error


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a file, as a stream that fails once it is too large or too slow."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._pieces = stream(str(path), packing_of(str(path)), _READ_S)
        self._rest = b""
        self._left = _MOST_BYTES
        self._until = time.monotonic() + _READ_S

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes, fewer only at the end. Raises InvalidData."""
        parts, have = [self._rest], len(self._rest)
        try:
            while size < 0 or have < size:
                piece = next(self._pieces, b"")
                if not piece:
                    break
                parts.append(piece)
                have += len(piece)
                self._left -= len(piece)
                if self._left < 0:
                    raise InvalidData(f"unpacks to more than {_MOST_BYTES >> 20} MiB")
                if time.monotonic() > self._until:
                    raise InvalidData(f"is not unpacked within {_READ_S:g} s")
        except (CannotUnpack, OSError, ValueError, EOFError, RuntimeError) as error:
            raise InvalidData(f"cannot be unpacked: {str(error)[:200] or type(error).__name__}") from error
        data = b"".join(parts)
        end = len(data) if size < 0 else size
        self._rest = data[end:]
        return data[:end]

    def close(self) -> None:
        self._pieces.close()
        super().close()


def pack(members: Iterable[tuple[str, bytes]], at: float) -> bytes:
    """Return a compressed tar of (name below the top, content): regular files, 0600, no owner."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=int(at)) as packing,
        tarfile.open(fileobj=packing, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in members:
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(at)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
