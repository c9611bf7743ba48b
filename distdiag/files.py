"""Files named by the user: written atomically, read one by one or from folders."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from distdiag.errors import DistdiagError, UsageError
from distdiag.facts import private_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HEAD_BYTES, _TAIL_BYTES = 16 << 20, 48 << 20


def make_folder(option: str, folder: str) -> None:
    """Make a private folder named by an option. Raises UsageError."""
    try:
        private_files.make_folder(folder)
    except OSError as error:
        raise UsageError(f"{option} {folder}: {error.strerror}", hint="choose a writable folder") from error


def write_whole(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write a file atomically, by default private; see private_files.write_whole. Raises DistdiagError."""
    try:
        private_files.write_whole(path, data, mode)
    except OSError as error:
        raise DistdiagError(f"cannot write {path}: {error.strerror}", hint="choose a writable path") from error


def named_files(paths: Sequence[str]) -> Iterator[Path]:
    """Yield files, expanding folders. Raises UsageError if a path does not exist."""
    for name in paths:
        path = Path(name)
        if name and path.is_dir():
            yield from sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        elif name and path.is_file():
            yield path
        else:
            raise UsageError(f"{name}: no such file or folder", hint="give files, or a folder of files")


def log_text(name: str) -> tuple[str, str]:
    """Read a log, possibly packed, as text; "-" is stdin. Return the text, and a note on omitted parts, else "".

    Raises UsageError: it is unreadable.
    """
    from distdiag.facts.logs.collect import Unreadable, blocks
    from distdiag.facts.packed_files import CannotUnpack

    head, tail, cuts = [], deque[bytes](), [0]
    room, kept, dropped = _HEAD_BYTES, 0, 0
    try:
        for block in blocks(name, cuts):
            if room > 0:  # causes are at the beginning, timeouts at the end
                head.append(block)
                room -= len(block)
                continue
            tail.append(block)
            kept += len(block)
            while kept > _TAIL_BYTES:
                dropped += len(tail[0])
                kept -= len(tail.popleft())
    except (OSError, Unreadable, CannotUnpack, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{name}: {why}", hint="give a log that can be read, or - for stdin") from error
    unread = "lines longer than 256 KiB were cut" if cuts[0] else ""
    if dropped:
        unread = (
            f"only the first {_HEAD_BYTES >> 20} and the last {_TAIL_BYTES >> 20} MiB of the log were read "
            "(line numbers in the last part are too low)"
        )
    return as_text(b"".join((*head, *tail))), unread


def as_text(data: bytes) -> str:
    """Decode a user's file; UTF-16 is written by PowerShell's >."""
    utf_16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    return data.decode("utf-16" if utf_16 else "utf-8", "replace")
