"""Words that view, findings and the kept report of core-bt share. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdiag.commands.core_bt.result import Core
    from distdiag.node.core.frames import Frame

_SECRET = re.compile(r"(?i)([\w-]*(?:token|secret|passw|api[-_]?key|credential|auth)[\w-]*(?:=|\s+))(\S+)")
_LIBRARY = re.compile(r"/lib/python3|/site-packages/|^<frozen ")
_LIKELY_KEY = re.compile(r"\b(?:hf_|sk-|ghp_|AKIA|xox[bp]-)[\w-]{8,}")


def redacted(text: str) -> str:
    """Put stars where an argument looks like a secret."""
    return _LIKELY_KEY.sub("***", _SECRET.sub(r"\1***", text))


def who(core: Core) -> str:
    """Name a process: rank 1 (node1, pid 4711, train.py)."""
    name = core.cmdline or core.exe.rpartition("/")[2] or "a process"
    rank = f"rank {core.rank}" if core.rank is not None else redacted(name)
    about = [core.host, f"pid {core.pid}", *([redacted(name)] if core.rank is not None else [])]
    return f"{rank} ({', '.join(about)})"


def frame_in_words(frame: Frame) -> str:
    """Write a frame: `deep dies.py:12` for Python, `strlen (libc.so.6)` for C."""
    file = frame.file.rpartition("/")[2]
    place = f"{file}:{frame.line}" if file and frame.line is not None else file
    if frame.language == "python":
        return f"{frame.function} {place}".rstrip()
    module = frame.module.rpartition("/")[2]
    return " ".join(one for one in (frame.function, place, f"({module})" if module else "") if one)


def where(core: Core) -> str:
    """Say where it crashed: the innermost Python frame that is no library's, and the C function at the end."""
    frames = core.crash_thread.frames if core.crash_thread is not None else ()
    mine = [frame for frame in frames if frame.language == "python"]
    python = next((frame for frame in mine if not _LIBRARY.search(frame.file)), mine[0] if mine else None)
    inner = frames[0] if frames else None
    if python is None:
        return f"in {frame_in_words(inner)}" if inner is not None else ""
    below = "" if inner is python or inner is None else f", in C: {frame_in_words(inner)}"
    return f"at {frame_in_words(python)}{below}"
