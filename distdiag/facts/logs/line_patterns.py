"""Matcher of known lines: patterns in order of trust, each tried only on texts with one of its words."""

from __future__ import annotations

import re
from functools import cached_property

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Rows = Sequence[tuple[str, str, Sequence[str]]]
    """Known lines: (id, regular expression, words)."""

_CACHED = 4096
_SHAPED = 400  # characters
_NUMBER = re.compile(r"\d+")
_EMPTY = re.compile(r"[\r\n]*")
_GROUP = 200  # characters
_AHEAD = 1024  # characters of the following lines, where a match may end, but not start
_BLOCK = 8192  # characters, then to the end of the line
_LONGEST = 1 << 16  # longer lines are cut: not written for people


@record
class Pattern:
    """A known line: every matching text contains one of `words`."""

    id: str
    regex: str
    words: tuple[str, ...]

    @cached_property
    def form(self) -> re.Pattern[str]:
        """Compile it for the first text with one of its words: hundreds of them take longer than a short log."""
        return re.compile(self.regex)

    def may_fit(self, text: str) -> bool:
        """Return whether a text contains one of the words."""
        for word in self.words:  # noqa: SIM110 - half the time of any()
            if word in text:
                return True
        return False


class Patterns:
    """The matcher of known lines: of a single line or message (`first`), or of each line of a text (`lines`).

    Rows are (id, regular expression, words), the most trusted first; the first matching row wins.
    """

    def __init__(self, rows: Iterable[tuple[str, str, Sequence[str]]]) -> None:
        self._all = [Pattern(id_, regex, tuple(words)) for id_, regex, words in rows]
        self._shapes = [(one, [_NUMBER.sub("#", word) for word in one.words]) for one in self._all]
        self._by_shape: dict[str, list[Pattern]] = {}

    def first(self, text: str, may: Callable[[str], bool] | None = None) -> tuple[str, dict[str, str]] | None:
        """Return the id and the groups of the first matching row. Repeated group names are numbered: error, error2.

        Args:
            may: filter of ids.
        """
        for pattern in self._of_shape(text):
            if (may is None or may(pattern.id)) and (match := pattern.form.search(text)) is not None:
                return pattern.id, {name: value[:_GROUP] for name, value in named(match)}
        return None

    def _of_shape(self, text: str) -> list[Pattern]:
        """Return the rows with a word in a text, cached by shape: lines of a log mostly differ in numbers."""
        if len(text) > _SHAPED:
            return [pattern for pattern in self._all if pattern.may_fit(text)]
        shape = _NUMBER.sub("#", text)
        found = self._by_shape.get(shape)
        if found is None:
            found = [pattern for pattern, words in self._shapes if any(word in shape for word in words)]
            if len(self._by_shape) < _CACHED:
                self._by_shape[shape] = found
        return found

    def lines(self, text: str) -> Iterator[tuple[str, int, re.Match[str]]]:
        """Yield (id, offset of the match, match) for each matching line; a match may end in later lines.

        A block without any of the words costs only the search for them.
        """
        start = 0
        while start < len(text):
            end = text.find("\n", start + _BLOCK, start + _LONGEST) + 1 or min(start + _LONGEST, len(text))
            block = text[start : end + _AHEAD]
            rows = [pattern for pattern in self._all if pattern.may_fit(block)]
            while rows and (start := _skip_empty(text, start, end)) < end:
                behind = text.find("\n", start, end) + 1 or end
                if (owned := _owner(rows, text[start : behind + _AHEAD], behind - start)) is not None:
                    pattern, match = owned
                    yield pattern.id, start + match.start(), match
                start = behind
            start = end


def _skip_empty(text: str, start: int, end: int) -> int:
    """Return the start of the next non-empty line: progress bars may end in thousands of carriage returns."""
    empty = _EMPTY.match(text, start, end)
    return start if empty is None else empty.end()


def _owner(rows: Sequence[Pattern], text: str, length: int) -> tuple[Pattern, re.Match[str]] | None:
    """Return the first row with a match that starts within `length` characters."""
    for pattern in rows:
        match = pattern.form.search(text) if pattern.may_fit(text) else None
        if match is not None and match.start() < length:
            return pattern, match
    return None


def named(match: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Yield the non-empty groups of a match, without the numbers in their names."""
    return ((name.rstrip("0123456789"), value) for name, value in match.groupdict().items() if value)
