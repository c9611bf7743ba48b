"""What went wrong, read from the log of a build or a load of CUDA extensions.

`read_log(text)` searches the text for the known failures (lines/builds.toml). A log
is read in blocks of whole lines: a block without any word of a failure costs no more than being split into words.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from distdiag.knowledge.known_lines import KnownLine, Role, fill, known_builds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BLOCK = 8192  # characters, and then to the end of the line
_LONGEST = 1 << 16  # a longer line is cut: it is none that a person reads
_TAIL = 1024  # of the following lines: a sentence may end there, but not begin
_QUOTE = 200
_MARK = "..."
_GROUP = 80
_LONGEST_PATH = 400

# What is no letter, digit or _ becomes a space.
_APART = bytes(char if re.match(rb"\w", bytes((char,))) else ord(" ") for char in range(256))

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_])")
_PACKAGE = re.compile(r"(?:site|dist)-packages/([A-Za-z]\w{1,60})(?:/|[\w.]*\.so)|\b(flash_attn)\w*\.cpython")
"""The package that a compiled file is of, by its folder."""
_BUILT = re.compile(
    r"(?:ERROR: Failed building wheel for|Building wheel for|Failed to build(?: installable wheels for)?) "
    r"([A-Za-z][\w.-]{1,60})|"
    r"/pip-install-\w{1,20}/([A-Za-z][A-Za-z-]{1,40}?)(?:_[0-9a-f]{32})?/"
)
_BUILT_WITHIN = 4 << 20  # characters
"""The package that pip builds in this log."""
_BEFORE_MESSAGE = re.compile(r"(\S+?)(?::\d{1,9}(?::\d{1,9})?|\(\d{1,9}\)):\s*\Z")

_ROLES: tuple[Role, ...] = ("cause", "consequence", "note")


@dataclass(frozen=True, kw_only=True)
class Match:
    """A known failure in a log: where it is first (1-based), its words there, and in how many lines it is.

    `means`, `breaks`, `fix` and `commands` are those of `known` with what the log says filled in.
    """

    known: KnownLine
    line: int
    quote: str
    means: str
    breaks: str
    fix: str
    commands: tuple[str, ...]
    count: int
    last: int
    """The last line that it is in."""
    groups: Mapping[str, str]
    """What the log says at the groups of the pattern."""
    file: str
    """The file that a compiler's message is about; empty if it is no such message."""


@dataclass(frozen=True)
class _Hit:
    """A failure in a block: its first and last line there, its words, its groups, and in how many lines."""

    index: int
    line: int
    last: int
    start: int
    quote: str
    groups: tuple[tuple[str, str], ...]
    count: int
    file: str


def read_log(text: str) -> tuple[Match, ...]:
    """Find the known failures in a log: causes in the order of the log, then consequences, then notes."""
    first: dict[int, tuple[_Hit, int, int]] = {}
    count: dict[int, int] = {}
    last: dict[int, int] = {}
    line = 1
    for number, (block, tail) in enumerate(_blocks(text)):
        for hit in _read_block(block, tail):
            first.setdefault(hit.index, (hit, number, line + hit.line))
            count[hit.index] = count.get(hit.index, 0) + hit.count
            last[hit.index] = line + hit.last
        line += block.count("\n")
    found = sorted(first.values(), key=lambda seen: (_role(seen[0]), seen[1], seen[0].start))
    built = _BUILT.search(text, 0, _BUILT_WITHIN) if found else None
    package = built[built.lastindex or 0] if built is not None else ""
    return tuple(_match(hit, (line, last[hit.index]), count[hit.index], package) for hit, _, line in found)


def _role(hit: _Hit) -> int:
    return _ROLES.index(_all()[hit.index][0].role)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Cut the text at ends of lines, each part with the beginning of what follows."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _BLOCK, start + _LONGEST) + 1 or start + _LONGEST
        yield text[start:end], text[end : end + _TAIL]
        start = end


@lru_cache(maxsize=64)  # a log that repeats itself repeats its blocks
def _read_block(block: str, tail: str) -> tuple[_Hit, ...]:
    """Find what begins in the block; of the failures that fit one line the first in the file owns it."""
    head, owned = _clean(block), set[int]()
    text = head + _clean(tail)
    words = _words().keys() & text.encode(errors="replace").translate(_APART).split()
    wanted = sorted(set(chain.from_iterable(_words()[word] for word in words)))
    hits = (_search(index, text, len(head), owned) for index in wanted)
    return tuple(hit for hit in hits if hit)


def _search(index: int, text: str, end: int, owned: set[int]) -> _Hit | None:
    """Find one failure in the lines that nobody owns yet, and own them."""
    pattern, at, count = _all()[index][1], 0, 0
    first: re.Match[str] | None = None
    last = 0
    while (match := pattern.search(text, at)) and match.start() < end:
        start, at = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end()) + 1 or len(text)
        if start not in owned:
            owned.add(start)
            first, count, last = first or match, count + 1, match.start()
    return _hit(index, first, last, count) if first else None


def _hit(index: int, match: re.Match[str], last: int, count: int) -> _Hit:
    text, start = match.string, match.start()
    # A lone \r has become "\r\n" and is no line of the log.
    line, last = (text.count("\n", 0, at) - text.count("\r\n", 0, at) for at in (start, last))
    groups = tuple((name.rstrip("0123456789"), value) for name, value in match.groupdict().items() if value is not None)
    return _Hit(index, line, last, start, _quote(text, start), groups, count, _file(text, start))


def _clean(text: str) -> str:
    """Remove colours, and end a line where a progress bar begins it anew."""
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\r\n")
    return text


def _quote(text: str, at: int) -> str:
    """Show the line of an offset; of a long one its beginning and what is at the offset."""
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    return shortened(text[start : end if end >= 0 else len(text)], at - start)


def shortened(line: str, at: int = 0, longest: int = _QUOTE) -> str:
    """Format a line in at most `longest` printable characters: its beginning and what is at an offset; ... is a cut."""
    whole = "".join(char if char.isprintable() else " " for char in line).rstrip()
    at, whole = at - (len(whole) - len(whole.lstrip())), whole.lstrip()
    if len(whole) <= longest:
        return whole
    if at <= longest // 2:
        return _cut(whole, longest)
    head = _cut(whole, longest // 3)
    return f"{head} {_cut(whole[at:], longest - len(head) - 1)}".rstrip()


def _cut(text: str, longest: int) -> str:
    """Cut a text at the end of a word, if there is one near, and mark the cut."""
    if len(text) <= longest:
        return text
    part = text[: longest - len(_MARK)]
    space = part.rfind(" ", len(part) - 20)
    return (part[: space + 1] if space > 0 else part) + _MARK


def _file(text: str, at: int) -> str:
    """Return the file that a compiler names before its message: x.h:137:2: error, maybe on the line before (CMake)."""
    found = _BEFORE_MESSAGE.search(text[max(0, at - _LONGEST_PATH) : at])
    return _printable(found[1]) if found else ""


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _match(hit: _Hit, lines: tuple[int, int], count: int, built: str) -> Match:
    known = _all()[hit.index][0]
    groups = {name: _printable(value)[:_GROUP] for name, value in hit.groups}
    package = _PACKAGE.search(hit.quote)
    name = (package[1] or package[2]) if package is not None else built
    if name:
        groups.setdefault("package", "flash-attn" if name.startswith("flash_attn") else name.replace("_", "-"))
    commands = known.commands_for({name: shlex.quote(value) for name, value in groups.items()})
    means, breaks, fix = (fill(words, groups) for words in (known.means, known.breaks, known.fix))
    return Match(
        known=known,
        line=lines[0],
        quote=hit.quote,
        means=means,
        breaks=breaks,
        fix=fix,
        commands=commands,
        count=count,
        last=lines[1],
        groups=groups,
        file=hit.file,
    )


@cache
def _words() -> dict[bytes, tuple[int, ...]]:
    """List every word with the failures it may be the sign of."""
    places: dict[bytes, tuple[int, ...]] = {}
    for index, (known, _) in enumerate(_all()):
        for word in known.words:
            places[word.encode()] = (*places.get(word.encode(), ()), index)
    return places


@cache
def _all() -> tuple[tuple[KnownLine, re.Pattern[str]], ...]:
    rows = known_builds()
    return tuple((row, re.compile(row.pattern.replace(" ", r"\s+"), re.MULTILINE)) for row in rows)
