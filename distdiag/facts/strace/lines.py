"""One line of `strace -ttt -T -yy` -> a Line. Bytes, because logs quote arbitrary program output."""

from __future__ import annotations

import re
from typing import NamedTuple

CALL, BEGUN, RESUMED, SIGNAL, ENDED = "call", "begun", "resumed", "signal", "ended"
OPTIONS = "-ttt -T -yy"
"""What a log has to be written with."""
DECODED = rb"<[^>\n]*(?:(?<=\d-)>[^>\n]*)*>"
"""A decoded descriptor (-yy). The arrow inside a connection contains a ">", always after the digit of a port."""
STRING = rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
LINE_BYTES = 64 * 1024
_BEGINNING, _ENDING = 32 * 1024, 4 * 1024
"""Longer lines are cut to these; a path has at most 4 KiB, four times as many when each byte is escaped."""
_LONG = re.compile(rb"^[^\n]{%d,}" % (LINE_BYTES + 1), re.MULTILINE)
_SNIFFED_LINES = 500

_TOOK = rb"\d{1,9}\.\d{1,9}"
# A pid has at most 7 digits, seconds since 1970 have more.
_PREFIX = re.compile(rb"(?:(\d{1,7}) +)?(\d{8,12}\.\d{1,9}) (?=[a-z_<+-])")
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
_LIKE_STRACE = re.compile(
    rb"^[^\n(]{0,80}[a-z_0-9]+\([^\n]*(?:\) += (?:-?\d|\?|0x)|<(?:unfinished|detached) \.\.\.>)", re.MULTILINE
)
_BARE = re.compile(rb"(?:read|write|close|p?poll|recv\w+|send\w+)\((?:\[\{fd=)?\d+[,)]", re.MULTILINE)
_DECODED_FD = re.compile(rb"(?:\d|AT_FDCWD)<[^\d]")


class Line(NamedTuple):
    """One line. `tid`: as written, empty with -ff; `at`: seconds since 1970; `took`: seconds of a call, as text.

    `kind`: CALL: a whole call; BEGUN: its first half, with `result` "unfinished" or "detached", or empty if the line is
    torn; RESUMED: its second half; SIGNAL: `name`; ENDED: `name` is "exited", "killed" or "superseded", `result` the
    status or signal.
    """

    kind: str
    name: bytes = b""
    args: bytes = b""
    result: bytes = b""
    error: bytes = b""
    took: bytes = b""
    at: float = 0.0
    tid: bytes = b""


def parse(text: bytes) -> Line | None:
    """Parse a line without its line feed; None if strace did not write it with OPTIONS."""
    prefix = _PREFIX.match(text)
    if prefix is None:
        return None
    tid, at = prefix[1] or b"", float(prefix[2])
    call = None if text.endswith(_UNFINISHED) else _CALL.match(text, prefix.end())
    if call is not None:
        name, args, result, _, error, took = call.groups(b"")
        result = result.partition(b" E")[0] if error else result
        return Line(CALL, _name(name, args), args, result, error, took, at, tid)
    line = _parse_other(text[prefix.end() :])
    return line._replace(at=at, tid=tid) if line is not None else None


def joined(begun: Line, resumed: Line) -> Line:
    """Return the call of which these are the two halves."""
    return Line(
        CALL, begun.name, begun.args + resumed.args, resumed.result, resumed.error, resumed.took, begun.at, begun.tid
    )


def problem(head: bytes) -> str:
    """Return why a log cannot be read, from its first bytes; empty if it can."""
    head = shorten(head)
    texts = [text for text in head.split(b"\n")[:_SNIFFED_LINES] if text]
    parsed = [line for text in texts if (line := parse(text)) is not None]
    if not texts:
        return "the file is empty"
    if len(parsed) < 20 and len(parsed) < 0.2 * len(texts):
        return f"written by strace without {OPTIONS}" if _LIKE_STRACE.search(head) else "not a strace log"
    whole = [line for line in parsed if line.kind == CALL and line.result != b"?"]
    if whole and not any(line.took for line in whole):
        return "written by strace without -T"
    return "written by strace without -yy" if _BARE.search(head) and not _DECODED_FD.search(head) else ""


def shorten(block: bytes) -> bytes:
    """Cut the middle out of lines too long to parse, keeping the beginning and the end."""
    return _LONG.sub(lambda long: long[0][:_BEGINNING] + b"..." + long[0][-_ENDING:], block)


def _parse_other(body: bytes) -> Line | None:
    """Parse anything but a whole call, after the pid and the time."""
    named = _CALL_BEGINNING.match(body)
    if named:
        return _parse_beginning(named[1], body[named.end() :])
    resumed = _RESUMED.match(body)
    if resumed:
        return _parse_end(resumed[1], body[resumed.end() :])
    signal = _SIGNAL.match(body)
    if signal:
        return Line(SIGNAL, signal[1])
    ended = _ENDED.match(body)
    return Line(ENDED, ended[1].split()[0], result=ended[2]) if ended else None


def _parse_beginning(name: bytes, rest: bytes) -> Line:
    for ending in _UNFINISHED:
        if rest.endswith(ending):
            # strace puts one blank before it; another belongs to the arguments.
            return Line(BEGUN, _name(name, rest), rest[: -len(ending) - 1], ending[1:].partition(b" ")[0])
    return Line(BEGUN, _name(name, rest), rest)


def _parse_end(name: bytes, rest: bytes) -> Line:
    end = _CALL_END.match(rest)
    if end is None:
        return Line(RESUMED, name, rest)
    args, result, _, error, took = end.groups(b"")
    return Line(RESUMED, name, args, result.partition(b" E")[0] if error else result, error, took)


def _name(written: bytes, args: bytes) -> bytes:
    """Return the name of a call; for a call in progress when strace attached, its real name."""
    interrupted = _INTERRUPTED.match(args)
    return interrupted[1] if interrupted else written
