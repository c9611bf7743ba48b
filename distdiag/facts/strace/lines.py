"""One line of strace's output -> what it says; any version, any options. Bytes, as logs hold what programs write."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

CALL, BEGUN, RESUMED, SIGNAL, ENDED, STACK, REMARK = "call", "begun", "resumed", "signal", "ended", "stack", "remark"
DECODED = rb"<[^>\n]*(?:(?<=\d-)>[^>\n]*)*>"
"""What -y writes of a descriptor; the arrow between the ends of a connection has a ">", and comes after a port."""
STRING = rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
LINE_BYTES = 64 * 1024
_BEGINNING, _ENDING = 32 * 1024, 4 * 1024
"""Longer lines are cut to these; a path has 4 KiB at most, and four times as many where each byte is escaped."""
_LONG = re.compile(rb"^[^\n]{%d,}" % (LINE_BYTES + 1), re.MULTILINE)
_SNIFFED_LINES = 500

# Times: of day (-t, -tt) or since 1970 (-ttt); since the line before (-r); how long a call took (-T).
_AT = rb"\d\d:\d\d:\d\d(?:\.\d{1,9})?|\d{8,12}(?:\.\d{1,9})?"
_STEP = rb"\d{1,7}\.\d{1,9}"
_TOOK = rb"\d{1,9}\.\d{1,9}"
# A pid has 7 digits at most, so more are seconds. Then -r, or -t, -tt, -ttt, or both; then what -n and -i print.
_PREFIX = re.compile(
    rb"(?:\[pid +(\d{1,7})(?:<(.*?)>)?\] |(\d{1,7})(?:<(.*?)>)? +(?! ))?"
    rb"(?:(" + _AT + rb")(?: \(\+ +\d+\.\d+\))? +| *(" + _STEP + rb") )?(?:\[ *[0-9a-f?]+\] )*(?=[a-zA-Z_<+-])"
)
_NAME = rb"([a-z_][a-z0-9_]*)\("
_END = rb"(.*)\) += ((-?\d+|\?|0x[0-9a-f]+)(?![\w.,])(?: (E[A-Z0-9]+)(?: \([^\n]*?\))?)?.*?)(?: <(" + _TOOK + rb")>)?$"
_CALL = re.compile(_NAME + _END, re.DOTALL)
_CALL_END = re.compile(_END, re.DOTALL)
_CALL_BEGINNING = re.compile(_NAME)
_UNFINISHED = (b"<unfinished ...>", b"<detached ...>")
_RESUMED = re.compile(rb"<\.\.\. (\w+) resumed>")
_INTERRUPTED = re.compile(rb"<\.\.\. resuming interrupted (\w+) \.\.\.>")
_SIGNAL = re.compile(rb"--- (?:stopped by )?(\w+)(?: \{.*\})?(?: ---)?")
_ENDED = re.compile(rb"\+\+\+ (exited with|killed by|superseded by) (\w+)")
_NOISE = re.compile(rb"strace: |\[ Process PID=|[^ ]*strace: Process \d+ (?:attached|detached)$")
_ATTACHED = re.compile(rb"strace: Process \d+ attached$")
"""On a terminal it comes in the middle of the line of the clone(), after the path of strace where it has one."""
_SUMMARY = re.compile(rb"^% time +seconds +usecs/call +calls", re.MULTILINE)
_WITH_DECODED = re.compile(rb"(?:\d+|AT_FDCWD)<")


class Line(NamedTuple):
    """One line. `tid`, `comm`, `at`: as written, empty where they are not; `step`: time since the last line.

    `kind`: CALL: a whole call; BEGUN: only its beginning, and `result` says why: "unfinished", "detached", or nothing
    where the line just ends; RESUMED: only its end; SIGNAL: `name`; ENDED: `name` is "exited", "killed" or
    "superseded", `result` the status or signal; STACK: of -k; REMARK: strace on itself.
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


@dataclass(frozen=True)
class Shape:
    """What the lines of a log have. `steps`: times since the line before (-r); `decoded`: what descriptors are (-y)."""

    tids: bool
    timed: bool
    steps: bool
    took: bool
    decoded: bool


def parse(text: bytes) -> Line | None:
    """Parse a line without its end; None if strace did not write it."""
    prefix = _PREFIX.match(text)
    if prefix is not None:
        call = None if text.endswith(_UNFINISHED) else _CALL.match(text, prefix.end())
        pid, comm, bare, bare_comm, at, step = prefix.groups(b"")
        if call is not None:
            name, args, result, _, error, took = call.groups(b"")
            result = result.partition(b" E")[0] if error else result
            return Line(CALL, _name(name, args), args, result, error, took, at, pid or bare, comm or bare_comm, step)
        line = _parse_other(text[prefix.end() :])
        if line is not None:
            return Line(*line[:6], at, pid or bare, comm or bare_comm, step)
    if text.startswith(b" > "):
        return Line(STACK)
    return Line(REMARK) if _NOISE.match(text) else None


def joined(begun: Line, resumed: Line) -> Line:
    """Return the call of which these are the two halves."""
    args = begun.args + resumed.args
    return Line(CALL, begun.name, args, resumed.result, resumed.error, resumed.took, begun.at)


def continued(begun: Line, rest: bytes) -> Line | None:
    """Return a call whose line was broken, as by the program's own output; None if `rest` is not its end."""
    end = _parse_end(begun.name, rest)
    return joined(begun, end) if end.result else None


def sniff(head: bytes) -> Shape | str:
    """Return how a log's lines look, or why it is none; `head` is the file's beginning."""
    texts = [text for text in shorten(head).split(b"\n")[:_SNIFFED_LINES] if text]
    parsed = [line for text in texts if (line := parse(text)) and line.kind not in (STACK, REMARK)]
    calls = [line for line in parsed if line.kind in (CALL, BEGUN, RESUMED)]
    if not texts:
        return "the file is empty"
    has_summary = _SUMMARY.search(head) is not None
    if not any(line.result for line in calls) and not (parsed and len(parsed) == len(texts)):
        return "only a summary (-c), not a log" if has_summary else "not a strace log"
    if len(parsed) < 20 and len(parsed) < 0.2 * len(texts) and not has_summary:
        return "not a strace log"
    return Shape(
        tids=_is_most([line.tid for line in parsed]) or b"[pid " in head,
        timed=_is_most([line.at or line.step for line in parsed]),
        steps=_is_most([line.step for line in parsed]),
        took=any(line.took for line in calls),
        decoded=any(_WITH_DECODED.match(line.args) for line in calls if line.kind != RESUMED),
    )


def shorten(block: bytes) -> bytes:
    """Return lines without the middle of each that is too long to be parsed; its beginning and its end stay."""
    return _LONG.sub(lambda long: long[0][:_BEGINNING] + b"..." + long[0][-_ENDING:], block)


def seconds(at: bytes) -> float | None:
    """Return the time of a line: of day or since 1970; None without one."""
    if not at:
        return None
    if b":" in at:
        return int(at[0:2]) * 3600 + int(at[3:5]) * 60 + float(at[6:])
    return float(at)


def _parse_other(body: bytes) -> Line | None:
    """Parse what is no whole call, after the pid and the time; None if strace did not write it."""
    named = _CALL_BEGINNING.match(body)
    if named:
        return _parse_beginning(named[1], body[named.end() :])
    resumed = _RESUMED.match(body)
    if resumed:
        return _parse_end(resumed[1], body[resumed.end() :])
    signal = _SIGNAL.match(body)
    if signal:
        return Line(SIGNAL, signal[1], result=b"stopped" if body.startswith(b"--- stopped") else b"")
    ended = _ENDED.match(body)
    return Line(ENDED, ended[1].split()[0], result=ended[2]) if ended else None


def _parse_beginning(name: bytes, rest: bytes) -> Line:
    for ending in _UNFINISHED:
        if rest.endswith(ending):
            # One blank is put before it, and another is part of what strace wrote until then.
            return Line(BEGUN, _name(name, rest), rest[: -len(ending) - 1], ending[1:].partition(b" ")[0])
    attached = _ATTACHED.search(rest)
    return Line(BEGUN, _name(name, rest), _before_program(rest, attached.start()) if attached else rest)


def _parse_end(name: bytes, rest: bytes) -> Line:
    end = _CALL_END.match(rest)
    if end is None:
        return Line(RESUMED, name, rest)
    args, result, _, error, took = end.groups(b"")
    return Line(RESUMED, name, args, result.partition(b" E")[0] if error else result, error, took)


def _name(written: bytes, args: bytes) -> bytes:
    """Return the name of a call, also of one that strace started again when it came."""
    interrupted = _INTERRUPTED.match(args)
    return interrupted[1] if interrupted else written


def _before_program(text: bytes, at: int) -> bytes:
    """Return what comes before the program's name at `at`, and before the folder that it is in."""
    return text[: text.rfind(b" ", 0, at) + 1 if text[at - 1 : at] == b"/" else at]


def _is_most(values: list[bytes]) -> bool:
    return 2 * sum(map(bool, values)) > len(values)
