"""How the lines of one log look: found out from its first ones, so that one regular expression reads most others."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from distdiag.node.strace import descriptors, lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from re import Pattern

SNIFFED_BYTES = 256 * 1024
_SNIFFED_LINES = 500
TID, AT, NAMED, RESULT, ERROR, TOOK, REST, OTHER, WHOLE = range(9)
"""The fields of a row. A call: all up to TOOK, its beginning (lines.HEAD) as NAMED, and RESULT or ERROR. A call that
did not end there: NAMED and REST. Any other line: OTHER, and WHOLE if it does not even begin as most do."""

# These are read with care, each one: what they return or are given matters.
_CAREFULLY = rb"clone3?|v?fork|execve(?:at)?|prctl|restart_syscall|connect|bind|getsockopt"
_DESCRIPTORS = b"|".join(sorted(descriptors.CHANGES))
_TIDS = {"": rb"()", "bare": rb"(\d{1,7}(?:<.*?>)?) +", "bracket": rb"(?:\[pid +(\d{1,7}(?:<.*?>)?)\] )?"}
_SUMMARY = re.compile(rb"^% time +seconds +usecs/call +calls", re.MULTILINE)


@dataclass(frozen=True)
class Shape:
    """`tid`: "", "bare" (-o), or "bracket" (on a terminal). `step`: times are since the line before (-r).

    `decoded`: descriptors come with what they stand for (-y).
    """

    tid: str
    timed: bool
    step: bool
    took: bool
    decoded: bool

    @property
    def in_order(self) -> bool:
        """Tell whether a line can be understood only after all that come before it."""
        return not self.decoded or self.step or self.tid == "bracket"


def sniff(head: bytes) -> Shape | str:
    """Tell how a log's lines look, or why it is none; `head` is the file's beginning."""
    parsed = [(line, lines.parse(line)) for line in lines.shorten(head).split(b"\n")[:_SNIFFED_LINES] if line]
    speaking = [(line, one) for line, one in parsed if one and one.kind not in (lines.STACK, lines.REMARK)]
    calls = [(line, one) for line, one in speaking if one.kind in (lines.CALL, lines.BEGUN, lines.RESUMED)]
    if not parsed:
        return "it is empty"
    if not [one for _, one in calls if one.result] and not (speaking and len(speaking) == len(parsed)):
        return "only a summary (-c), no log" if _SUMMARY.search(head) else "no log of strace"
    if len(speaking) < 20 and len(speaking) < 0.2 * len(parsed) and not _SUMMARY.search(head):
        return "no log of strace"
    tids = Counter(_tid_kind(line, one) for line, one in speaking)
    return Shape(
        tid="bracket" if tids["bracket"] else tids.most_common(1)[0][0],
        timed=_most([bool(one.at or one.step) for _, one in speaking]),
        step=_most([bool(one.step) for _, one in speaking]),
        took=any(one.took for _, one in calls),
        decoded=any(_DECODED.match(line[line.find(one.name + b"(") :]) for line, one in calls if one.name),
    )


_DECODED = re.compile(rb"\w+\((?:\d+|AT_FDCWD)<")


def pattern(shape: Shape) -> Pattern[bytes]:
    """Make the expression whose findall() gives the rows of a block of whole lines."""
    careful = _CAREFULLY if shape.decoded else _CAREFULLY + b"|" + _DESCRIPTORS
    clock = rb"(" + (lines.STEP + rb"|" + lines.AT) + rb") " if shape.timed else rb"()"
    took = rb"[ <].*<(" + lines.TOOK + rb")>" if shape.took else rb"(?:[ <].*)?()"
    # A line with many results, and no time at its end, is seen at once not to be one.
    timed = rb"(?=.*<" + lines.TOOK + rb">\n)" if shape.took else b""
    done = timed + rb".*\) += (?:((?:0x)?[0-9a-f]+)|-1 (E[A-Z0-9]+))" + took
    body = rb"(?!(?:" + careful + rb")\()(" + lines.HEAD + rb")(?:" + done + rb"|(.*))"
    return re.compile(rb"^(?:" + _TIDS[shape.tid] + clock + rb"(?:" + body + rb"|([a-z_<+-].*))|(.*))\n", re.MULTILINE)


def _tid_kind(line: bytes, one: lines.Line) -> str:
    if not one.tid:
        return ""
    return "bracket" if line.startswith(b"[pid") else "bare"


def _most(flags: list[bool]) -> bool:
    return 2 * sum(flags) > len(flags)
