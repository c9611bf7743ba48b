"""Selects the lines of a log to parse: those with a word of a known line, or of a failure.

A log of gigabytes has few such lines, and most of the others differ in numbers only.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_SIGNS = (
    b"rror", b"raceback", b"xception", b"ailure", b"ailed", b"ailing", b"fail", b"bort", b"xit", b"imed out", b"imeout",
    b"atchdog", b"ast enqueued", b"will restart", b"Root Cause (first", b"FAILED", b"ERROR", b"FATAL", b"ritical",
    b"annot ", b"ould not", b"nable", b"enied", b"efused", b"illed", b"o such", b"ot found", b"NotFound", b"nsupported",
    b"nvalid", b"nreachable", b"orrupt", b"ismatch", b"anic", b"atal", b"nterrupt", b"ERR", b"NCCL WARN",
    b"NCCL version", b"NCCL INFO Bootstrap", b"- Init ", b"NCCL INFO NET/", b"NCCL INFO Trees", b"NCCL INFO Connected",
    b"NCCL INFO Using",
)  # fmt: skip
"""In addition to the words of the known lines. `Channel ... via` of NCCL's INFO is read by block."""
_MOST_SHAPES, _LONGEST_SHAPE = 20_000, 500


class Signs:
    """Finds the signs in blocks and lines; caches lines without any, ignoring digits."""

    def __init__(self, words: Iterable[str]) -> None:
        own = set(words)
        for sign in map(bytes.decode, _SIGNS):  # five times as fast as to search in bytes
            own = {word for word in own if sign not in word}
        self._signs = [*_SIGNS, *map(str.encode, own)]
        self._ordinary: set[bytes] = set()

    def on(self, line: bytes) -> bool:
        """Return whether a line has a sign."""
        return any(sign in line for sign in self._signs)

    def places(self, block: bytes) -> list[int]:
        """Return the positions of signs in a block, in order: at least one per line that has any."""
        if self._is_ordinary(block):
            return []
        found: list[int] = []
        for sign in self._signs:
            at = block.find(sign)
            while at >= 0:
                found.append(at)
                at = block.find(b"\n", at)
                at = block.find(sign, at) if at >= 0 else -1
        return sorted(found)

    def _is_ordinary(self, block: bytes) -> bool:
        shapes = set(block.translate(None, b"0123456789").split(b"\n")) - self._ordinary
        if self.on(b"\n".join(shapes)):
            return False
        if len(self._ordinary) + len(shapes) > _MOST_SHAPES:
            self._ordinary.clear()
        self._ordinary.update(shape for shape in shapes if len(shape) < _LONGEST_SHAPE)
        return True
