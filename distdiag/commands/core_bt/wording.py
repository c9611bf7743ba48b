"""Wording shared by the view and the findings of core-bt. Pure."""

from __future__ import annotations

import re
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING

from distdiag.facts.core.stacks import UNKNOWN
from distdiag.facts.machine import redacted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.core_bt.types import Core
    from distdiag.facts.core.stacks import Frame

_LIBRARY = re.compile(r"/lib/python3|/site-packages/|^<frozen ")
_SENDS_SIGNAL = re.compile(r"_*(GI_*)?(pthread_kill\w*|raise|gsignal|t?g?kill)")
_ABORTS = re.compile(
    rf"{_SENDS_SIGNAL.pattern}|(__GI_)?abort|faulthandler_fatal_error|<signal handler called>"
    r"|(_*Py_)?[Ff]atal_?[Ee]rror\w*"
    r"|__libc_(message|fatal)\w*|malloc_printerr"
    r"|__assert\w*_fail\w*|__(fortify|stack_chk)_fail\w*|__chk_fail"
    r"|std::terminate\b.*|__gnu_cxx::.*|__cxxabiv1::.*|__cxa_\w+|__gxx_\w+|_Unwind_\w+"
)
"""Functions of the C library, C++ and Python between the failure and the fatal signal."""
_RUNTIME = re.compile(r"(libc|libstdc\+\+|libgcc_s|libc\+\+(abi)?|libpthread|ld-musl-\w+)[.-]")
_PYTHON = re.compile(r"(lib)?python\d?(\.\d+)?[a-z]*(\.so[\d.]*)?$")
_STANDARD = re.compile(r"(void |\w+ )?(std|__gnu_cxx|__cxxabiv1)::|operator (new|delete)\b")
"""The C++ standard library, including code inlined into other libraries."""


def who(core: Core) -> str:
    """Format a process: rank 1 (node1, pid 4711, train.py)."""
    name = core.cmdline or core.exe.rpartition("/")[2] or "a process"
    rank = f"rank {core.rank}" if core.rank is not None else redacted(name)
    about = [core.host, f"pid {core.pid}", *([redacted(name)] if core.rank is not None else [])]
    return f"{rank} ({', '.join(about)})"


def format_frame(frame: Frame) -> str:
    """Format a frame: `deep dies.py:12` for Python, `strlen (libc.so.6)` for C."""
    file = frame.file.rpartition("/")[2]
    place = f"{file}:{frame.line}" if file and frame.line is not None else file
    if frame.language == "python":
        return f"{frame.function} {place}".rstrip()
    module = frame.module.rpartition("/")[2]
    return " ".join(filter(None, (frame.function, place, f"({module})" if module else "")))


def where(core: Core) -> str:
    """Format the place of the crash: the innermost Python frame outside libraries, and the C function that failed."""
    frames = _named_frames(core)
    mine = [frame for frame in frames if frame.language == "python"]
    python = next((frame for frame in mine if not _LIBRARY.search(frame.file)), mine[0] if mine else None)
    inner = _caller_of_abort(core, frames) or (frames[0] if frames else None)
    if python is None:
        return f"in {format_frame(inner)}" if inner is not None else ""
    below = "" if inner is python or inner is None else f", in C: {format_frame(inner)}"
    return f"at {format_frame(python)}{below}"


def _caller_of_abort(core: Core, frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost C frame outside the C library, C++ and Python, if the process aborted.

    None if no such frame precedes the first Python frame, or if the kernel sent the signal.
    """
    if core.signal_name != "SIGABRT":
        return None
    native = takewhile(lambda frame: frame.language == "c", frames)
    return next((frame for frame in native if not _is_runtime(frame)), None)


def _is_runtime(frame: Frame) -> bool:
    module = frame.module.rpartition("/")[2]
    named = frame.function not in UNKNOWN
    return bool(_RUNTIME.match(module) or _PYTHON.match(module) or _STANDARD.match(frame.function)) or not named


def without_numbers(text: str) -> str:
    """Strip the numbers from the last message, as they differ between ranks; keep the line of an assertion."""
    return text if "Assertion" in text else re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def _named_frames(core: Core) -> tuple[Frame, ...]:
    """Return the frames from the failing function on; if unnamed, from its callee."""
    frames, found = core.crash_thread.frames if core.crash_thread is not None else (), faulting_frames(core)
    named = not found or found[0].function not in UNKNOWN or len(found) == len(frames)
    return found if named else frames[len(frames) - len(found) - 1 :]


def faulting_frames(core: Core) -> tuple[Frame, ...]:
    """Return the frames of the crashed thread, without the innermost frames that only abort."""
    frames = core.crash_thread.frames if core.crash_thread is not None else ()
    aborted = core.signal_name == "SIGABRT"
    if not (frames and (aborted or _SENDS_SIGNAL.fullmatch(frames[0].function.partition("@")[0]))):
        return frames  # sent by the kernel for a fault in this frame
    return tuple(dropwhile(lambda frame: _aborts(frame, aborted=aborted), frames)) or frames


def _aborts(frame: Frame, *, aborted: bool) -> bool:
    if frame.language != "c":
        return False
    if _ABORTS.fullmatch(frame.function.partition("@")[0]):
        return True
    # A library without symbols.
    return aborted and frame.function in UNKNOWN and bool(_RUNTIME.match(frame.module.rpartition("/")[2]))
