"""The grammar of host lists: node[08-11,20]-ib[0-1],gpu[1-9/2],[fe80::1],!node09-ib0.

Digits are kept as written, because n1, n01 and n001 are three hosts. So is the order: it may be the order of ranks.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NAMES = 1_000_000

_SHOWN = 100  # characters of a long text around an error
_FIELDS = re.compile(r"\[(?P<inside>[^\]]*)\]|[^\[]+|\[")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?:/([0-9]{1,18}))?)?")
_HINTS = {" ": "separate hosts with commas", ":": "write an IPv6 address in brackets: [fe80::1]"}
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Piece:
    """A part of a user's text with its position, for errors. `where` names the source of the text."""

    text: str
    source: str
    at: int = 0
    where: str = "host list"

    def cut(self, start: int, stop: int | None = None) -> Piece:
        """Return the part between two positions of this piece."""
        return Piece(self.text[start:stop], self.source, self.at + start, self.where)

    def strip(self) -> Piece:
        """Strip white space at both ends."""
        text = self.text.lstrip()
        return Piece(text.rstrip(), self.source, self.at + len(self.text) - len(text), self.where)

    def error(self, problem: str, *, at: int = 0, hint: str = "") -> UsageError:
        """Return an error that shows the text with a caret under position `at` of this piece."""
        column = self.at + at
        first = max(0, column - _SHOWN // 2)
        text = "".join(char if char.isprintable() else " " for char in self.source[first : first + _SHOWN])
        caret = " " * (column - first) + "^"
        return UsageError(f"{self.where}, column {column + 1}: {problem}\n  {text}\n  {caret}", hint=hint)


def whole(text: str, where: str = "host list") -> Piece:
    """Return a piece of a whole text."""
    return Piece(text, text, where=where)


def quote(text: str) -> str:
    """Quote a token for a sentence, truncated if long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def expand(text: str, *, limit: int = MAX_NAMES) -> list[str]:
    """List the names of a host list once each, in the order written, without those excluded by `!name`.

    Raises:
        UsageError: the list is malformed, or has more than `limit` names.
    """
    return list(dict.fromkeys(spell_out(text, limit=limit)))


def spell_out(text: str, *, limit: int = MAX_NAMES) -> list[str]:
    """Like `expand`, but keep repeated names."""
    wanted: list[str] = []
    unwanted: set[str] = set()
    for entry in entries(whole(text)):
        if excluded := exclusion(entry):
            unwanted.update(spell(excluded, room=limit))
        else:
            wanted += spell(entry, room=limit - len(wanted))
    return [name for name in wanted if name not in unwanted] if unwanted else wanted


def exclusion(entry: Piece) -> Piece | None:
    """Parse `!name` or `^name` into the excluded name; None for any other entry."""
    return entry.cut(1) if entry.text[0] in "!^" else None


def entries(listed: Piece) -> Iterator[Piece]:
    """Split a host list at the commas outside brackets; a blank list has no entries."""
    if not listed.text.strip():
        return
    start, opened = 0, None
    for mark in re.finditer(r"[\[\],]", listed.text):
        at, char = mark.start(), mark[0]
        if char == "[":
            if opened is not None:
                break
            opened = at
        elif char == "]":
            if opened is None:
                raise listed.error("']' without '['", at=at)
            opened = None
        elif opened is None:
            yield _entry(listed.cut(start, at))
            start = at + 1
    if opened is not None:
        raise listed.error(f"'[' is not closed in {quote(listed.text[start:].strip())}", at=opened)
    yield _entry(listed.cut(start))


def _entry(piece: Piece) -> Piece:
    entry = piece.strip()
    if entry.text:
        return entry
    raise piece.error("missing host", hint="separate hosts with one comma: a,b")


def spell(entry: Piece, *, room: int = MAX_NAMES) -> list[str]:
    """Spell out one entry, the last bracket fastest: r[1-2]n[1-2] is r1n1, r1n2, r2n1, r2n2.

    Raises:
        UsageError: the entry is malformed, or has more than `room` names; checked before any name is created.
    """
    if not entry.text:
        raise entry.error("missing host name")
    if address := _bracketed_address(entry):
        return [address]
    fields = [_field(entry, match) for match in _FIELDS.finditer(entry.text)]
    count = math.prod(sum(len(numbers) for numbers, _ in field) for field in fields if not isinstance(field, str))
    if count > room:
        raise entry.error(
            f"{quote(entry.text)} expands to {count:,} names; at most {max(room, 0):,} more are allowed",
            hint="name fewer hosts",
        )
    choices = ([field] if isinstance(field, str) else _digits(field) for field in fields)
    return ["".join(parts) for parts in itertools.product(*choices)]


def _bracketed_address(entry: Piece) -> str | None:
    if match := re.fullmatch(r"\[([^\]]*:[^\]]*)\]", entry.text):
        return _ipv6(entry.cut(*match.span(1)))
    return None


def _ipv6(piece: Piece) -> str:
    number, percent, zone = piece.text.partition("%")
    try:
        ipaddress.IPv6Address(number)
    except ipaddress.AddressValueError as error:
        raise piece.error(f"{quote(piece.text)} is not an IPv6 address", hint="write ranges as [1-4]") from error
    if percent and not _ZONE.fullmatch(zone):
        raise piece.error(f"{quote(zone)} is not an interface name", at=len(number) + 1)
    return piece.text


def _field(entry: Piece, match: re.Match[str]) -> str | list[tuple[range, int]]:
    if match["inside"] is not None:
        return _ranges(entry.cut(*match.span("inside")))
    text = match[0]
    if bad := re.search(r"[^A-Za-z0-9_.-]", text):
        problem = f"host name {quote(entry.text)} contains {'white space' if bad[0].isspace() else repr(bad[0])}"
        raise entry.error(problem, at=match.start() + bad.start(), hint=_HINTS.get(bad[0], ""))
    # ssh would parse -x as an option, and "..." is no valid file name for a host.
    if match.start() == 0 and text[0] in "-.":
        raise entry.error(f"host name {quote(entry.text)} starts with {text[0]!r}")
    return text


def _ranges(inside: Piece) -> list[tuple[range, int]]:
    """Parse "08-11,20" into numbers, each with its minimum number of digits."""
    if not inside.text:
        raise inside.error("'[]' is empty", at=-1)
    found, start = [], 0
    for part in inside.text.split(","):
        if not part:
            raise inside.error(f"missing number in {quote(f'[{inside.text}]')}", at=start)
        found.append(_range(inside.cut(start, start + len(part))))
        start += len(part) + 1
    return found


def _range(part: Piece) -> tuple[range, int]:
    match = _RANGE.fullmatch(part.text)
    if match is None:
        hint = "write [1-4,7], [08-11] or [1-9/2]; an IPv6 address fills its brackets alone: [fe80::1]"
        raise part.error(f"{quote(part.text)} is not a number or a range", hint=hint)
    first, last, step = match[1], match[2] or match[1], int(match[3] or 1)
    width = len(first) if first.startswith("0") else 1
    if f"{int(last):0{width}}" != last:
        hint = "give both ends the same number of digits: [08-11], or no zeros at all: [8-11]"
        raise part.error(f"{quote(part.text)} has ends with different padding", hint=hint)
    if int(first) > int(last):
        raise part.error(f"{quote(part.text)} is descending", hint=f"write {last}-{first}")
    if step == 0:
        raise part.error(f"{quote(part.text)} has a step of 0")
    return range(int(first), int(last) + 1, step), width


def _digits(field: list[tuple[range, int]]) -> Iterator[str]:
    return (f"{number:0{width}}" for numbers, width in field for number in numbers)
