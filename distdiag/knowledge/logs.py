"""Finds failures in the log of a build or a load of CUDA extensions, by the rows of lines/builds.toml.

A log is read in blocks of whole lines: a block without any word of a row costs only the search for the words.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from distdiag.facts.logs.line_patterns import named
from distdiag.knowledge.known_lines import in_builds, job_line, known_builds, known_exceptions
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.knowledge.known_lines import KnownException, KnownLine, Role

_QUOTE = 200
_MARK = "..."
_GROUP = 80
_LONGEST_PATH = 400

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_])")
_PACKAGE = re.compile(r"(?:site|dist)-packages/([A-Za-z]\w{1,60})(?:/|[\w.]*\.so)|\b(flash_attn)\w*\.cpython")
"""The package of a compiled file, by its folder."""
_BUILT = re.compile(
    r"(?:ERROR: Failed building wheel for|Building wheel for|Failed to build(?: installable wheels for)?) "
    r"([A-Za-z][\w.-]{1,60})|"
    r"/pip-install-\w{1,20}/([A-Za-z][A-Za-z-]{1,40}?)(?:_[0-9a-f]{32})?/"
)
_BUILT_WITHIN = 4 << 20  # characters
"""The package being built by pip in this log."""
_BEFORE_MESSAGE = re.compile(r"(\S+?)(?::\d{1,9}(?::\d{1,9})?|\(\d{1,9}\)):\s*\Z")

_OF_JOB = re.compile(
    r"\[rank\d|\[[Rr]ank \d|torchrun|ChildFailedError|Watchdog|NCCL (?:WARN|INFO)|exitcode|srun: error|slurmstepd|NVRM|"
    r"mpirun|DataLoader worker|Gloo|TCPStore|\bpid=\d"
)
_OF_BUILD = re.compile(
    r"\bnvcc\b|\b(?:g\+\+|gcc|cc1plus|clang|ninja|cmake|make)(?:\[\d+\])?: |CMake Error|pip(?:3)? install|"
    r"[Bb]uilding wheel|subprocess-exited|cpp_extension|fatal error: \S+\.h|undefined (?:symbol|reference)|"
    r"cannot open shared object|\bld: |setup\.py"
)
_OF_ANY = {"out-of-memory"}
"""Rows of builds that match lines of any program: "Killed"."""

_ROLES: tuple[Role, ...] = ("cause", "consequence", "note")


@record(kw_only=True)
class Match:
    """A known failure in a log: its first line (1-based), quoted, its last line, and the number of lines with it.

    `known`: its row, with `groups` of the line filled in; `file`: the file of a compiler's message, else empty.
    """

    known: KnownLine
    line: int
    quote: str
    groups: Mapping[str, str]
    file: str
    last: int
    count: int = 1


def read_log(text: str) -> tuple[Match, ...]:
    """Find the known failures in a log: causes in the order of the log, then consequences, then notes."""
    text, found = _clean(text), dict[str, Match]()
    line, counted = 1, 0
    package = ""
    for id_, at, match in in_builds().lines(text):
        # A lone \r has become "\r\n", which does not count as a line.
        line += text.count("\n", counted, at) - text.count("\r\n", counted, at)
        counted = at
        if id_ in found:
            found[id_] = replace(found[id_], last=line, count=found[id_].count + 1)
            continue
        if not found and (built := _BUILT.search(text, 0, _BUILT_WITHIN)) is not None:
            package = built[built.lastindex or 0]
        found[id_] = _match(id_, match, line, text, at, package)
    return tuple(sorted(found.values(), key=lambda match: _ROLES.index(match.known.role)))


def recognise(text: str) -> KnownLine | None:
    """Return the row that explains a rank's failure by this text: of jobs, else a cause of builds."""
    return job_line(text) or _build_cause(text)


def known_exception(text: str) -> KnownLine | KnownException | None:
    """Return the row for an exception's text, its type first: a cause of builds, else a row of exceptions."""
    return _build_cause(text) or next((row for row in known_exceptions() if re.search(row.pattern, text)), None)


def _build_cause(text: str) -> KnownLine | None:
    return next((match.known for match in read_log(text) if match.known.role == "cause"), None)


def content(text: str) -> Literal["build", "job", ""]:
    """Classify a text as output of a build or start of CUDA, of a job or kernel, or neither."""
    causes = {match.known.id for match in read_log(text) if match.known.role == "cause"} - _OF_ANY
    tools = _OF_BUILD.search(text) is not None
    if _OF_JOB.search(text):
        return "build" if causes and tools else "job"
    line = job_line(text)
    return "build" if tools or (causes and line is None) else "job" if line is not None else ""


def _match(id_: str, match: re.Match[str], line: int, text: str, at: int, built: str) -> Match:
    groups = {name: _printable(value)[:_GROUP] for name, value in named(match)}
    quote = _quote(text, at)
    package = _PACKAGE.search(quote)
    name = (package[1] or package[2]) if package is not None else built
    if name:
        groups.setdefault("package", "flash-attn" if name.startswith("flash_attn") else name.replace("_", "-"))
    known = known_builds()[id_].filled(groups, {name: shlex.quote(value) for name, value in groups.items()})
    return Match(known=known, line=line, quote=quote, groups=groups, file=_file(text, at), last=line)


def _clean(text: str) -> str:
    """Remove colours, and split lines where a progress bar redraws them."""
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\r\n")
    return text


def _quote(text: str, at: int) -> str:
    """Quote the line at an offset; if long, its start and the part at the offset."""
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    return shortened(text[start : end if end >= 0 else len(text)], at - start)


def shortened(line: str, at: int = 0, longest: int = _QUOTE) -> str:
    """Shorten a line to `longest` printable characters: its start and the part at an offset, cuts marked "..."."""
    whole = line if line.isprintable() else "".join(char if char.isprintable() else " " for char in line)
    whole = whole.rstrip()
    at, whole = at - (len(whole) - len(whole.lstrip())), whole.lstrip()
    if len(whole) <= longest:
        return whole
    if at <= longest // 2:
        return _cut(whole, longest)
    head = _cut(whole, longest // 3)
    return f"{head} {_cut(whole[at:], longest - len(head) - 1)}".rstrip()


def _cut(text: str, longest: int) -> str:
    """Cut a text, preferably at a nearby end of a word, and mark the cut."""
    if len(text) <= longest:
        return text
    part = text[: longest - len(_MARK)]
    space = part.rfind(" ", len(part) - 20)
    return (part[: space + 1] if space > 0 else part) + _MARK


def _file(text: str, at: int) -> str:
    """Return the file named before a compiler's message: x.h:137:2: error, maybe on the line before (CMake)."""
    found = _BEFORE_MESSAGE.search(text[max(0, at - _LONGEST_PATH) : at])
    return _printable(found[1]) if found else ""


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()
