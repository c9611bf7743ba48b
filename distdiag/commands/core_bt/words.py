"""Words that view, findings and the kept report of core-bt share. Pure."""

from __future__ import annotations

import re
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING

from distdiag.facts.core.frames import UNKNOWN
from distdiag.facts.machine import redacted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.core_bt.result import Core
    from distdiag.facts.core.frames import Frame

_LIBRARY = re.compile(r"/lib/python3|/site-packages/|^<frozen ")
_SENDS = re.compile(r"_*(GI_*)?(pthread_kill\w*|raise|gsignal|t?g?kill)")
_CARRIES_OUT = re.compile(
    rf"{_SENDS.pattern}|(__GI_)?abort|faulthandler_fatal_error|<signal handler called>|(_*Py_)?[Ff]atal_?[Ee]rror\w*"
    r"|__libc_(message|fatal)\w*|malloc_printerr"
    r"|__assert\w*_fail\w*|__(fortify|stack_chk)_fail\w*|__chk_fail"
    r"|std::terminate\b.*|__gnu_cxx::.*|__cxxabiv1::.*|__cxa_\w+|__gxx_\w+|_Unwind_\w+"
)
"""What the C library, C++ and Python do between what went wrong and the signal that ends the process for it."""
_RUNTIME = re.compile(r"(libc|libstdc\+\+|libgcc_s|libc\+\+(abi)?|libpthread|ld-musl-\w+)[.-]")
_PYTHON = re.compile(r"(lib)?python\d?(\.\d+)?[a-z]*(\.so[\d.]*)?$")
_STANDARD = re.compile(r"(void |\w+ )?(std|__gnu_cxx|__cxxabiv1)::|operator (new|delete)\b")
"""Of the standard library, also where that was compiled into somebody's own."""


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
    """Say where it crashed: the innermost Python frame that is no library's, and the C function where it went wrong."""
    frames = _known(core)
    mine = [frame for frame in frames if frame.language == "python"]
    python = next((frame for frame in mine if not _LIBRARY.search(frame.file)), mine[0] if mine else None)
    inner = _asked(core, frames) or (frames[0] if frames else None)
    if python is None:
        return f"in {frame_in_words(inner)}" if inner is not None else ""
    below = "" if inner is python or inner is None else f", in C: {frame_in_words(inner)}"
    return f"at {frame_in_words(python)}{below}"


def _asked(core: Core, frames: Sequence[Frame]) -> Frame | None:
    """Find who asked for what then aborted: the first C frame that is not the C library's, C++'s or Python's own.

    None if there is none before the first Python frame, or if the kernel sent the signal for the innermost itself.
    """
    if core.signal_name != "SIGABRT":
        return None
    native = takewhile(lambda frame: frame.language == "c", frames)
    return next((frame for frame in native if not _is_runtime(frame)), None)


def _is_runtime(frame: Frame) -> bool:
    module = frame.module.rpartition("/")[2]
    named = frame.function not in UNKNOWN
    return bool(_RUNTIME.match(module) or _PYTHON.match(module) or _STANDARD.match(frame.function)) or not named


def alike(said: str) -> str:
    """Give last words without what differs between ranks of the same crash: numbers, but not an assertion's line."""
    return said if "Assertion" in said else re.sub(r"0x[0-9a-f]+|\d+", "#", said)


def _known(core: Core) -> tuple[Frame, ...]:
    """Give the frames from where it went wrong; where that has no name, from what it called."""
    frames, found = core.crash_thread.frames if core.crash_thread is not None else (), guilty(core)
    named = not found or found[0].function not in UNKNOWN or len(found) == len(frames)
    return found if named else frames[len(frames) - len(found) - 1 :]


def guilty(core: Core) -> tuple[Frame, ...]:
    """Give the frames of the thread that crashed without the innermost, which only carry out what went wrong before."""
    frames = core.crash_thread.frames if core.crash_thread is not None else ()
    aborted = core.signal_name == "SIGABRT"
    if not (frames and (aborted or _SENDS.fullmatch(frames[0].function.partition("@")[0]))):
        return frames  # the kernel has sent it for what happened there
    return tuple(dropwhile(lambda frame: _carries_out(frame, aborted=aborted), frames)) or frames


def _carries_out(frame: Frame, *, aborted: bool) -> bool:
    if frame.language != "c":
        return False
    if _CARRIES_OUT.fullmatch(frame.function.partition("@")[0]):
        return True
    # Of a library without its symbols.
    return aborted and frame.function in UNKNOWN and bool(_RUNTIME.match(frame.module.rpartition("/")[2]))
