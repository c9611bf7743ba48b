"""Reads tables written as literals in third-party Python source, without running or importing it.

So the rules are those of the installed version.
"""

from __future__ import annotations

import ast
import re

from distdiag.facts import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_MOST_LINES = 120


class Source:
    """One Python file."""

    def __init__(self, path: str) -> None:
        self._lines = machine.read_text(path).splitlines()

    def literal(self, name: str) -> Any:  # noqa: ANN401 - any literal
        """Evaluate the literal assigned to a name anywhere in the file; None if missing or not a literal.

        Names in capitals within it are resolved in the same file; a single wrapping call (OrderedDict) is removed.
        """
        text = self._assigned(name)
        if not text:
            return None
        for other in set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", text)):
            value = self.literal(other) if other != name else None
            text = re.sub(rf"\b{other}\b", lambda _, value=value: repr(value), text)  # type: ignore[misc]
        try:
            node = ast.parse(text.strip(), mode="eval").body
            return ast.literal_eval(node.args[0] if isinstance(node, ast.Call) and node.args else node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None

    def _assigned(self, name: str) -> str:
        start = re.compile(rf"\s*{re.escape(name)}\s*(?::[^=]+)?=\s*(.*)$")
        for number, line in enumerate(self._lines):
            found = start.match(line)
            if found is None:
                continue
            for last in range(number, min(number + _MOST_LINES, len(self._lines))):
                text = "\n".join([found[1], *self._lines[number + 1 : last + 1]])
                if not _is_open(text):
                    return text
        return ""


def _is_open(text: str) -> bool:
    plain = re.sub(r"#.*", "", text)
    return any(plain.count(left) > plain.count(right) for left, right in ("[]", "{}", "()"))
