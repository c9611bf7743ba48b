"""Which known line a text is: patterns in their order of trust, tried only where one of their words stands."""

from __future__ import annotations

import re
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CACHED = 4096
_SHAPED = 400  # characters
_SHAPE = re.compile(r"\d+|0x[0-9a-f]+")
_GROUP = 200  # characters


@dataclass(frozen=True)
class Pattern:
    """A known line: `words`, one of which is on each text that fits."""

    id: str
    form: re.Pattern[str]
    words: tuple[str, ...]


class Patterns:
    """Finds the first of many patterns. Lines of a log differ in numbers mostly: what fits is kept by their shape."""

    def __init__(self, rows: Iterable[tuple[str, str, tuple[str, ...]]]) -> None:
        self._patterns = [Pattern(id_, re.compile(form), tuple(words)) for id_, form, words in rows]
        self._by_shape: dict[str, Pattern | None] = {}

    def first(self, text: str, may: Callable[[str], bool] | None = None) -> tuple[str, dict[str, str]] | None:
        """Return the id and the groups of the first pattern that fits. Groups of one name are numbered: error, error2.

        Args:
            may: which ids count, all by default.
        """
        if may is not None:
            return _found(self._search(text, may))
        shape = _SHAPE.sub("#", text[:_SHAPED])
        pattern = self._by_shape.get(shape)
        match = pattern.form.search(text) if pattern is not None else None
        if pattern is not None and match is not None:
            return _found((pattern, match))
        if shape in self._by_shape and pattern is None and "NCCL" not in text:
            return None
        found = self._search(text, None)
        if len(self._by_shape) < _CACHED:
            self._by_shape[shape] = found[0] if found is not None else None
        return _found(found)

    def _search(self, text: str, may: Callable[[str], bool] | None) -> tuple[Pattern, re.Match[str]] | None:
        for pattern in self._patterns:
            if any(word in text for word in pattern.words) and (may is None or may(pattern.id)):
                match = pattern.form.search(text)
                if match is not None:
                    return pattern, match
        return None


def _found(found: tuple[Pattern, re.Match[str]] | None) -> tuple[str, dict[str, str]] | None:
    if found is None:
        return None
    pattern, match = found
    return pattern.id, {name.rstrip("0123456789"): text[:_GROUP] for name, text in match.groupdict().items() if text}
