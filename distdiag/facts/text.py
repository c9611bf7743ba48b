"""Text of somebody else, made harmless."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return it with a question mark for what would move the cursor or worse: it is somebody else's."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)
