"""Sanitizes text of foreign origin."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace unprintable characters of a foreign text, such as those that move the cursor, by question marks."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)
