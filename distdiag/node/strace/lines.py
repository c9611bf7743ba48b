"""One line of strace's output -> what it says; any version, any options. Bytes, as logs hold what programs write."""

from __future__ import annotations

import re
from typing import NamedTuple

CALL, BEGUN, RESUMED, SIGNAL, ENDED, STACK, REMARK = "call", "begun", "resumed", "signal", "ended", "stack", "remark"
DECODED = rb"<[^>\n]*(?:(?<=\d-)>[^>\n]*)*>"
"""What -y says of a descriptor; the arrow between the ends of a connection has a ">", and stands after a port."""
STRING = rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
LINE_BYTES = 64 * 1024
_BEGINNING, _ENDING = 32 * 1024, 4 * 1024
"""Longer lines are cut to these; a path has 4 KiB at most, and four times as many where each byte is escaped."""
HEAD = (
    rb"(?:\w+at2?|statx)\((?:AT_FDCWD|-?\d+)(?:" + DECODED + rb"(?:\(deleted\))?)?, " + STRING
    + rb"|\w+\((?:\d+(?:" + DECODED + rb"(?:\(deleted\))?)?|" + STRING + rb"|\[\{fd=\d+(?:" + DECODED + rb")?)?"
)  # fmt: skip
"""A call up to what it is about: its name, and the descriptor or path that comes first."""

AT = rb"\d\d:\d\d:\d\d(?:\.\d{1,9})?|\d{8,12}(?:\.\d{1,9})?"
"""The time of a line: of day (-t, -tt), or since 1970 (-ttt)."""
STEP = rb"\d{1,7}\.\d{1,9}"
"""The time since the line before (-r)."""
TOOK = rb"\d{1,9}\.\d{1,9}"
"""How long a call took (-T)."""
# A pid has 7 digits at most, so more are seconds. Then -r, or -t, -tt, -ttt, or both; then what -n and -i print.
_PREFIX = re.compile(
    rb"(?:\[pid +(?P<pid>\d{1,7})(?:<(?P<comm>.*?)>)?\] |(?P<bare>\d{1,7})(?:<(?P<bare_comm>.*?)>)? +(?! ))?"
    rb"(?:(?P<at>" + AT + rb")(?: \(\+ +\d+\.\d+\))? +"
    rb"| *(?P<step>" + STEP + rb") )?(?:\[ *[0-9a-f?]+\] )*(?=[a-zA-Z_<+-])"
)
_NAME = re.compile(rb"([a-z_][a-z0-9_]*)\(")
_END = re.compile(
    rb"(.*)\) += ((-?\d+|\?|0x[0-9a-f]+)(?![\w.,])(?: (E[A-Z0-9]+)(?: \([^\n]*?\))?)?.*?)(?: <(" + TOOK + rb")>)?$",
    re.DOTALL,
)
_RESUMED = re.compile(rb"<\.\.\. (\w+) resumed>")
_INTERRUPTED = re.compile(rb"<\.\.\. resuming interrupted (\w+) \.\.\.>")
_SIGNAL = re.compile(rb"--- (?:stopped by )?(\w+)(?: \{.*\})?(?: ---)?")
_ENDED = re.compile(rb"\+\+\+ (exited with|killed by|superseded by) (\w+)")
_NOISE = re.compile(rb"strace: |\[ Process PID=|[^ ]*strace: Process \d+ (?:attached|detached)$")
_ATTACHED = re.compile(rb"strace: Process \d+ attached$")
"""On a terminal it comes in the middle of the line of the clone(), after the path of strace where it has one."""


class Line(NamedTuple):
    """One line. `tid`, `comm`, `at`: as they stand there, empty where they do not; `step`: time since the last line.

    `kind`: CALL: a whole call; BEGUN: only its beginning, and `result` says why: "unfinished", "detached", or nothing
    where the line just ends; RESUMED: only its end; SIGNAL: `name`; ENDED: `name` is "exited", "killed" or
    "superseded", `result` the status or signal; STACK: of -k; REMARK: strace speaks of itself.
    """

    kind: str
    name: bytes = b""
    args: bytes = b""
    result: bytes = b""
    error: bytes = b""
    took: bytes = b""
    at: bytes = b""
    tid: bytes = b""
    comm: bytes = b""
    step: bytes = b""


def parse(line: bytes) -> Line | None:
    """Read a line without its end; None if strace did not write it."""
    if line.startswith(b" > "):
        return Line(STACK)
    if _NOISE.match(line):
        return Line(REMARK)
    prefix = _PREFIX.match(line)
    body = parse_body(line[prefix.end() :]) if prefix else None
    if prefix is None or body is None:
        return None
    return body._replace(
        at=prefix["at"] or b"",
        step=prefix["step"] or b"",
        tid=prefix["pid"] or prefix["bare"] or b"",
        comm=prefix["comm"] or prefix["bare_comm"] or b"",
    )


def parse_body(body: bytes) -> Line | None:
    """Read what comes after the pid and the time; None if strace did not write it."""
    named = _NAME.match(body)
    if named:
        return _call(named[1], body[named.end() :])
    resumed = _RESUMED.match(body)
    if resumed:
        return _end(RESUMED, resumed[1], body[resumed.end() :])
    signal = _SIGNAL.match(body)
    if signal:
        return Line(SIGNAL, signal[1], result=b"stopped" if body.startswith(b"--- stopped") else b"")
    ended = _ENDED.match(body)
    return Line(ENDED, ended[1].split()[0], result=ended[2]) if ended else None


def joined(begun: Line, resumed: Line) -> Line:
    """Put the two halves of a call together."""
    return resumed._replace(kind=CALL, name=begun.name, args=begun.args + resumed.args, at=begun.at)


def continued(begun: Line, rest: bytes) -> Line | None:
    """Put together a call whose line was broken, as by the program's own output; None if that is not its end."""
    end = _end(RESUMED, begun.name, rest)
    return None if end.kind != RESUMED or not end.result else joined(begun, end)


def _call(name: bytes, rest: bytes) -> Line:
    interrupted = _INTERRUPTED.match(rest)
    if interrupted:
        name = interrupted[1]
    for ending in (b"unfinished", b"detached"):
        if rest.endswith(b"<" + ending + b" ...>"):
            # One blank is put before it, and another is part of what strace wrote until then.
            return Line(BEGUN, name, rest[: -len(ending) - 7], ending)
    return _end(CALL, name, rest)


def _end(kind: str, name: bytes, rest: bytes) -> Line:
    end = _END.match(rest)
    if end is None:
        attached = _ATTACHED.search(rest)
        rest = _before_program(rest, attached.start()) if attached else rest
        return Line(BEGUN, name, rest) if kind == CALL else Line(kind, name, rest)
    args, result, _, error, took = end.groups(b"")
    result = result.partition(b" E")[0] if error else result
    return Line(kind, name, args, result, error, took)


def _before_program(text: bytes, at: int) -> bytes:
    """Return what comes before the program's name at `at`, and before the folder that it is in."""
    return text[: text.rfind(b" ", 0, at) + 1 if text[at - 1 : at] == b"/" else at]


def shorten(block: bytes) -> bytes:
    """Cut the middle out of each line that is too long to be read; what it is, and how it ended, stays."""
    parts, done = [], 0
    for at in range(LINE_BYTES, len(block), LINE_BYTES):  # no line that is too long lies between two of these
        if at < done:
            continue
        start, end = block.rfind(b"\n", done, at) + 1 or done, block.find(b"\n", at)
        end = len(block) if end < 0 else end
        if end - start > LINE_BYTES:
            parts += [block[done : start + _BEGINNING], b"...", block[end - _ENDING : end]]
            done = end
    return b"".join([*parts, block[done:]]) if parts else block


def seconds(at: bytes) -> float | None:
    """Give the time of a line: of day or since 1970; None without one."""
    if not at:
        return None
    if b":" in at:
        return int(at[0:2]) * 3600 + int(at[3:5]) * 60 + float(at[6:])
    return float(at)
