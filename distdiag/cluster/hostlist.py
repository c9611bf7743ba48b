"""The grammar of host lists: node[08-11,20]-ib[0-1],gpu[1-9/2],[fe80::1],!node09-ib0.

Digits are kept as written, because n1, n01 and n001 are three hosts. So is the order: it may be the order of ranks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import math
import re
from typing import TYPE_CHECKING

from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NAMES = 1_000_000

_ENTRY = re.compile(r"((?:[^\[\],]|\[[^\[\]]*\])*)(,|$)")
"""An entry up to the comma outside of brackets."""
_FIELDS = re.compile(r"\[(?P<inside>[^\]]*)\]|[^\[]+|\[")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?:/([0-9]{1,18}))?)?")
_HINTS = {" ": "separate hosts with commas", ":": "write an IPv6 address in brackets: [fe80::1]"}
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")


@contextlib.contextmanager
def located(place: str) -> Iterator[None]:
    """Put the place of a text in front of its errors."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {error}", hint=error.hint) from None


def quote(text: str) -> str:
    """Quote a token for a sentence, truncated if long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def expand(text: str, *, limit: int = MAX_NAMES) -> list[str]:
    """List the names of a host list once each, in the order written, without those excluded by `!name`.

    Raises:
        UsageError: the list is malformed, or has more than `limit` names.
    """
    wanted: list[str] = []
    unwanted: set[str] = set()
    with located("host list"):
        for entry in entries(text):
            if entry[0] in EXCLUDES:
                unwanted.update(spell(entry[1:], room=limit))
            else:
                wanted += spell(entry, room=limit - len(wanted))
    return [name for name in dict.fromkeys(wanted) if name not in unwanted]


EXCLUDES = "!^"
"""Marks before an excluded name."""


def entries(text: str) -> Iterator[str]:
    """Split a host list at the commas outside brackets; a blank list has no entries. Raises UsageError."""
    if not text.strip():
        return
    at, comma = 0, ","
    while comma:
        match = _ENTRY.match(text, at)
        if match is None:
            raise UsageError(f"unmatched bracket: {quote(text[at:].strip())}")
        if not (entry := match[1].strip()):
            raise UsageError("missing host", hint="separate hosts with one comma: a,b")
        yield entry
        at, comma = match.end(), match[2]


def spell(entry: str, *, room: int = MAX_NAMES) -> list[str]:
    """Spell out one entry, the last bracket fastest: r[1-2]n[1-2] is r1n1, r1n2, r2n1, r2n2.

    Raises:
        UsageError: the entry is malformed, or has more than `room` names; checked before any name is created.
    """
    if not entry:
        raise UsageError("missing host name")
    if match := re.fullmatch(r"\[([^\]]*:[^\]]*)\]", entry):
        return [_ipv6(match[1])]
    fields = [_field(entry, match) for match in _FIELDS.finditer(entry)]
    count = math.prod(sum(len(numbers) for numbers, _ in field) for field in fields if not isinstance(field, str))
    if count > room:
        raise UsageError(
            f"{quote(entry)} expands to {count:,} names; at most {max(room, 0):,} more are allowed",
            hint="name fewer hosts",
        )
    choices = ([field] if isinstance(field, str) else _digits(field) for field in fields)
    return ["".join(parts) for parts in itertools.product(*choices)]


def _ipv6(text: str) -> str:
    number, percent, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(number)
    except ipaddress.AddressValueError as error:
        raise UsageError(f"{quote(text)} is not an IPv6 address", hint="write ranges as [1-4]") from error
    if percent and not _ZONE.fullmatch(zone):
        raise UsageError(f"{quote(zone)} is not an interface name")
    return text


def _field(entry: str, match: re.Match[str]) -> str | list[tuple[range, int]]:
    if match["inside"] is not None:
        return [_range(part, match[0]) for part in match["inside"].split(",")]
    text = match[0]
    if bad := re.search(r"[^A-Za-z0-9_.-]", text):
        shown = "white space" if bad[0].isspace() else repr(bad[0])
        raise UsageError(f"host name {quote(entry)} contains {shown}", hint=_HINTS.get(bad[0], ""))
    # ssh would parse -x as an option, and "..." is no valid file name for a host.
    if match.start() == 0 and text[0] in "-.":
        raise UsageError(f"host name {quote(entry)} starts with {text[0]!r}")
    return text


def _range(part: str, bracket: str) -> tuple[range, int]:
    """Parse "08-11" into numbers, and their minimum number of digits."""
    match = _RANGE.fullmatch(part)
    if not part:
        raise UsageError(f"missing number in {quote(bracket)}")
    if match is None:
        hint = "write [1-4,7], [08-11] or [1-9/2]; an IPv6 address fills its brackets alone: [fe80::1]"
        raise UsageError(f"{quote(part)} is not a number or a range", hint=hint)
    first, last, step = match[1], match[2] or match[1], int(match[3] or 1)
    width = len(first) if first.startswith("0") else 1
    if f"{int(last):0{width}}" != last:
        hint = "give both ends the same number of digits: [08-11], or no zeros at all: [8-11]"
        raise UsageError(f"{quote(part)} has ends with different padding", hint=hint)
    if int(first) > int(last):
        raise UsageError(f"{quote(part)} is descending", hint=f"write {last}-{first}")
    if step == 0:
        raise UsageError(f"{quote(part)} has a step of 0")
    return range(int(first), int(last) + 1, step), width


def _digits(field: list[tuple[range, int]]) -> Iterator[str]:
    return (f"{number:0{width}}" for numbers, width in field for number in numbers)
