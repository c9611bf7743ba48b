"""A log that does not grow without end: of a long one the beginning and the end are kept, and its middle is let go."""

from __future__ import annotations

import ctypes
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import BinaryIO

_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # linux/falloc.h
_BLOCK = 512


class Bounded:
    """Keeps a file that another program writes below `limit_bytes` on its disk, by a hole in its middle."""

    def __init__(self, file: BinaryIO, limit_bytes: int) -> None:
        self.file, self._limit = file, limit_bytes
        self.head = limit_bytes // 4
        """So many bytes of its beginning are kept."""
        self.tail = 0
        """Where what is kept of its end begins; 0 while all is kept."""

    def check(self) -> None:
        """Make room, if it has become too long; call it often."""
        told = os.fstat(self.file.fileno())
        if told.st_blocks * _BLOCK <= self._limit:
            return
        tail = max(self.head, told.st_size - self._limit // 2)
        # Not every file system can do it; there the log grows.
        if _punch(self.file.fileno(), self.head, tail - self.head):
            self.tail = tail

    def copy_to(self, other: BinaryIO) -> None:
        """Write what was kept into another file, in whole lines."""
        self.file.seek(0)
        head = self.file.read(self.head) if self.tail else b""
        other.write(head[: head.rfind(b"\n") + 1])
        self.file.seek(self.tail)
        if self.tail:
            self.file.readline()
        shutil.copyfileobj(self.file, other, 2**20)
        other.flush()


def _punch(fd: int, start: int, length: int) -> bool:
    libc = ctypes.CDLL(None)
    done = libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_longlong(start), ctypes.c_longlong(length))
    return bool(length > 0 and done == 0)
