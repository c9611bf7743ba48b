"""Text of foreign origin made printable, and numbers folded into text."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def printable(text: str) -> str:
    """Replace unprintable characters of a foreign text, such as those that move the cursor, by question marks."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def fold(numbers: Iterable[int]) -> str:
    """Fold runs of ascending numbers, in the order given: [0, 1, 2, 8, 5] -> "0-2,8,5"; empty for none."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def first_line(data: bytes) -> str:
    """Return the first line of a foreign program's answer, at most 80 letters, printable."""
    return printable(data.strip().split(b"\n")[0][:80].decode("ascii", "replace").strip())
