"""The file written by `distdiag bundle`; read as untrusted input.

A bundle is a compressed tar whose names all begin with `distdiag-bundle/`: MANIFEST.txt first, then facts/, verdicts/,
nodes/ and logs/. Reading extracts no files: only regular members below facts/ are read, in memory, up to limits of
size, number and time. So a link, device, upward path or decompression bomb is only an error message.
"""

from __future__ import annotations

import io
import re
import shutil
import tarfile
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distdiag.cluster.records import InvalidData
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts import programs
from distdiag.facts.packed_files import CannotUnpack, Packing, packing_of, stream

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
_PACK_S = 120.0
_LEVEL = 10


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
    """Yield (name, content) of the files of --save in a bundle.

    Raises:
        InvalidData: it is damaged, or larger than any bundle.
    """
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
        self._pieces = _pieces(str(path))
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


def _pieces(path: str) -> Any:  # noqa: ANN401 - a generator of bytes
    packing = packing_of(path)
    module = zstd_module() if packing is Packing.ZSTD else None
    if module is None:
        yield from stream(path, packing, _READ_S)
        return
    try:
        with module.open(path, "rb") as file:
            while piece := file.read(2**18):
                yield piece
    except module.ZstdError as error:
        raise ValueError(str(error)) from error


def zstd_module() -> Any:  # noqa: ANN401 - one of two modules
    """Return Python's own module for zstd (3.14), or the package `zstandard`; None without both."""
    for name, parent in (("compression.zstd", "compression"), ("zstandard", "zstandard")):
        if find_spec(parent) is not None:
            try:
                return import_module(name)
            except ImportError:
                continue
    return None


def can_zstd() -> bool:
    """Return whether a .tar.zst can be written here."""
    return shutil.which("zstd") is not None or zstd_module() is not None


def packing_named(target: str) -> str:
    """Return "zst" or "gz" by how a file is named. Raises UsageError."""
    if target.endswith((".tar.gz", ".tgz")):
        return "gz"
    if not target.endswith((".tar.zst", ".tzst")):
        raise UsageError(f"-o {target}: not the name of a bundle", hint="call it FILE.tar.zst or FILE.tar.gz")
    if not can_zstd():
        raise UsageError(
            f"-o {target}: there is no zstd here", hint="call it FILE.tar.gz; or install zstd, or pip install zstandard"
        )
    return "zst"


def pack(members: Iterable[tuple[str, bytes]], packing: str, at: float) -> bytes:
    """Return a compressed tar of (name below the top, content): regular files, 0600, no owner. Raises DistdiagError."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o600, int(at)
            archive.addfile(entry, io.BytesIO(content))
    if packing == "gz":
        import gzip

        return gzip.compress(plain.getvalue(), 6, mtime=int(at))
    module = zstd_module()
    if module is not None:
        compressed: bytes = module.compress(plain.getvalue(), level=_LEVEL)
        return compressed
    return _by_program(plain.getvalue())


def _by_program(data: bytes) -> bytes:
    with tempfile.TemporaryDirectory(prefix="distdiag-") as folder:  # 0700; the content is already redacted
        place, packed = f"{folder}/bundle.tar", f"{folder}/bundle.tar.zst"
        with open(place, "xb") as file:
            file.write(data)
        try:
            done = programs.run(["zstd", "-q", f"-{_LEVEL}", "-o", packed, place], timeout_s=_PACK_S)
        except programs.CannotRun as error:
            raise DistdiagError(str(error), hint="name the file .tar.gz") from error
        if done.status != 0:
            why = done.stderr.decode("utf-8", "replace").strip()[:200]
            raise DistdiagError(f"zstd failed: {why or done.status}", hint="name the file .tar.gz")
        with open(packed, "rb") as file:
            return file.read()
