"""Host and rank sets in the usual notation: 0-6,8 and user@node[1-4]:8."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hostlist import EXCLUDES, MAX_NAMES, entries, located, quote, spell
from distdiag.errors import UsageError
from distdiag.facts import text
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Longer numbers are text: serial numbers or hashes, which have no ranges.
_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,18})(?![0-9])")
_BRACKET = re.compile(r"\[[^\]]*\]")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
MAX_SLOTS = 100_000


@record(kw_only=True)
class Host:
    """One host as typed; None if not given."""

    name: str
    slots: int | None = None
    user: str | None = None
    port: int | None = None


@record
class HostList:
    """Hosts once each, in the order written; `duplicates` were repeated."""

    hosts: tuple[Host, ...]
    duplicates: tuple[str, ...]


_ROOM_IN_SENTENCE = 60
"""Maximum length of a list of ranks in a sentence; `where.ranks` of the finding has all of them."""


def fold_ranks(numbers: Iterable[int]) -> str:
    """Fold whole numbers into ranges: [8, 0, 1, 2] -> "0-2,8"; empty for none."""
    return text.fold(sorted(set(numbers)))


def name_ranks(numbers: Iterable[int]) -> str:
    """Format ranks in a sentence: "rank 3", "ranks 0-2,8"; many as "249 ranks (1,5,9,...)"."""
    ranks = set(numbers)
    folded = fold_ranks_within(ranks, _ROOM_IN_SENTENCE)
    return folded if folded.endswith(")") else f"rank{'s' if len(ranks) > 1 else ''} {folded}"


def fold_ranks_within(numbers: Iterable[int], room: int) -> str:
    """Fold ranks; beyond `room` characters, the number and the first: "333 ranks (0,6,9,...)"."""
    ranks = set(numbers)
    folded = fold_ranks(ranks)
    if len(folded) <= room:
        return folded
    start = f"{len(ranks)} ranks ("
    cut = folded.rfind(",", 0, max(1, room - len(start) - 5))
    return f"{start}{folded[:cut] if cut > 0 else folded.partition(',')[0]},...)"


def fold_within(names: Iterable[str], room: int) -> str:
    """Fold names; beyond `room` characters, the number and the first: "125 hosts (node0001,...)"."""
    hosts = list(dict.fromkeys(names))
    folded = fold(hosts)
    return folded if len(folded) <= room else f"{len(hosts)} hosts ({hosts[0]},...)"


def fold(names: Iterable[str]) -> str:
    """Fold names, reversibly by `expand`: n1, n2, n01, n02 are "n[1-2],n[01-02]"."""
    families: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in dict.fromkeys(names):
        fields = [f"[{name}]"] if ":" in name else _NUMBER.split(name)
        families.setdefault(tuple(fields[::2]), []).append(tuple(fields[1::2]))
    return ",".join(part for texts, rows in families.items() for part in _fold_family(texts, rows))


def _fold_family(texts: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Fold names that differ in numbers only; `rows` are the digits of each name."""
    if not rows[0]:
        yield texts[0]
        return
    grids: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    columns = [_widths(column) for column in zip(*rows, strict=True)]
    for row, widths in zip(rows, zip(*columns, strict=True), strict=True):
        grids.setdefault(widths, []).append(tuple(map(int, row)))
    for widths, points in grids.items():
        for box in _boxes(points, len(widths)):
            numbers = (_fold_field(*field) for field in zip(box, widths, strict=True))
            yield texts[0] + "".join(number + text for number, text in zip(numbers, texts[1:], strict=True))


def _widths(column: tuple[str, ...]) -> list[int]:
    """Choose the minimum digits of each number in a field: 10 joins 08 and 09, unless a plain 8 or 9 exists."""
    paddings = sorted({len(digits) for digits in column if _is_padded(digits)}, reverse=True)
    if paddings and any(len(digits) < paddings[-1] for digits in column):
        paddings = []
    return [
        len(digits) if _is_padded(digits) else next((width for width in paddings if width <= len(digits)), 1)
        for digits in column
    ]


def _is_padded(digits: str) -> bool:
    return digits[0] == "0" and len(digits) > 1


def _boxes(points: list[tuple[int, ...]], fields: int) -> list[tuple[tuple[int, ...], ...]]:
    """Join points that differ in one field, the last field first; a box is a set of numbers per field."""
    boxes: list[tuple[tuple[int, ...], ...]] = [tuple((number,) for number in point) for point in points]
    for field in reversed(range(fields)):
        joined: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for box in boxes:
            joined.setdefault(box[:field] + box[field + 1 :], []).extend(box[field])
        boxes = [(*rest[:field], tuple(sorted(numbers)), *rest[field:]) for rest, numbers in joined.items()]
    return boxes


def _fold_field(numbers: tuple[int, ...], width: int) -> str:
    folded = re.sub("[0-9]+", lambda digits: digits[0].zfill(width), fold_ranks(numbers))
    return folded if len(numbers) == 1 else f"[{folded}]"


def parse_hosts(text: str) -> HostList:
    """Parse the value of --hosts: `[user@]name[:slots]` or `ssh://[user@]name[:port]`, names with ranges, `!name`.

    A repeated host is kept once; its slots add up if both give some. A host with 0 slots is left out.

    Raises:
        UsageError: the text is malformed, or names no host.
    """
    with located("host list"):
        found = merge(*read_list(text))
    if not found.hosts:
        raise UsageError("host list: no host given", hint="give hosts: node[1-4],gpu7")
    return found


def read_list(text: str, *, room: int = MAX_NAMES) -> tuple[list[Host], set[str]]:
    """Parse a list into (hosts including repeats, excluded names). Raises UsageError."""
    hosts: list[Host] = []
    unwanted: set[str] = set()
    for entry in entries(text):
        if entry[0] in EXCLUDES:
            unwanted.update(spell(entry[1:], room=room))
        else:
            hosts += _read_entry(entry, room - len(hosts))
    return hosts, unwanted


def merge(hosts: Iterable[Host], excluded: set[str]) -> HostList:
    """Keep each host once with all of its values; the first of contradicting ones wins."""
    found: dict[str, Host] = {}
    duplicates: dict[str, None] = {}
    for host in hosts:
        if host.name in found:
            duplicates[host.name] = None
            found[host.name] = _join(found[host.name], host)
        elif host.name not in excluded:
            found[host.name] = host
    return HostList(tuple(host for host in found.values() if host.slots != 0), tuple(duplicates))


def _join(first: Host, again: Host) -> Host:
    slots = again.slots if first.slots is None else first.slots + (again.slots or 0)
    return replace(first, slots=slots, user=first.user or again.user, port=first.port or again.port)


def _read_entry(entry: str, room: int) -> list[Host]:
    is_ssh = entry.startswith("ssh://")
    before, at, after = entry.removeprefix("ssh://").partition("@")
    user = read_user(before) if at else None
    name, colon, number = _split(after if at else before)
    slots = read_slots(number) if colon and not is_ssh else None
    port = read_port(number) if colon and is_ssh else None
    return [Host(name=spelled, slots=slots, user=user, port=port) for spelled in spell(name, room=room)]


def _split(place: str) -> tuple[str, str, str]:
    """Split at the colon before slots or a port; colons inside brackets belong to an address."""
    outside = _BRACKET.sub(lambda bracket: "." * len(bracket[0]), place)
    if outside.count(":") > 1:
        hint = "put the address in brackets: [fe80::1] or [fe80::1]:8"
        raise UsageError(f"{quote(place)} is ambiguous: an IPv6 address, or an address and a number", hint=hint)
    at = outside.find(":")
    return (place, "", "") if at < 0 else (place[:at], ":", place[at + 1 :])


def read_user(text: str) -> str:
    """Parse a login name. Raises UsageError."""
    if not text:
        raise UsageError("missing user before '@'", hint="use --hostfile for a file of hosts")
    if not _USER.fullmatch(text):
        raise UsageError(f"{quote(text)} is not a user name")
    return text


def read_slots(text: str) -> int:
    """Parse a number of slots, 0 to MAX_SLOTS. Raises UsageError."""
    return _read_number(text, range(MAX_SLOTS + 1), "number of slots")


def read_port(text: str) -> int:
    """Parse a TCP port. Raises UsageError."""
    return _read_number(text, range(1, 65536), "port")


def _read_number(text: str, allowed: range, what: str) -> int:
    if re.fullmatch("[0-9]{1,9}", text) and int(text) in allowed:
        return int(text)
    raise UsageError(f"{quote(text)} is not a {what} ({allowed[0]} to {allowed[-1]})")
