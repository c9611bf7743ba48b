"""Stacks of Python and C frames, from pystack and our unwinder. Pure."""

from __future__ import annotations

import os
import re

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UNKNOWN = ("???", "??", "")
"""Placeholders of tools for an unknown function or module."""
MAX_FRAMES = 512
"""A longer stack is endless recursion; its two ends are kept."""

# Objects/call.c, Python/ceval.c, Python/pythonrun.c, Modules/main.c and their like, CPython 3.6 to 3.14.
_CALLS_AND_STARTS = re.compile(
    r"_?PyEval_\w+|_?PyObject_\w*[Cc]all\w*|\w*[Vv]ectorcall\w*|_Py(Function|Method|CFunction)\w*[Cc]all\w*|_?PyRun_\w+"
    r"|c?function_(call|code_fastcall|fastcall)\w*|(instance)?method_call|type_call|slot_tp_(call|init|new)|wrap(per)?_call\w*"
    r"|(class)?methoddescr_call|wrapperdescr_call|proxy_call|weakref_call|do_call_core|call_function|fast_function"
    r"|object_vacall|run_mod|run_eval_code_obj|pyrun_\w+|pymain_\w+|_Py_UnixMain|Py_(Run)?(Bytes)?Main|builtin_exec\w*|main"
    r"|thread_run|pythread_wrapper|t_bootstrap|_TAIL_CALL_\w+|gen_(send_ex2?|iternext)|partial_call\w*"
)
_BOTTOMS = re.compile(r"_start|(__)?libc_start_(call_)?main\w*|start_thread|_*clone3?|thread_start")
_PYTHON = re.compile(r"(lib)?python\d?(\.\d+)?[a-z]*(\.so[\d.]*)?")
_EVAL = re.compile(r"_PyEval_EvalFrameDefault|_TAIL_CALL_\w+\.llvm\.")


@record
class Frame:
    """One frame of one thread. `file`, `line` and `module` are "", None and "" if unknown.

    `language` is "python" or "c" (any compiled code). `module` is the program or shared object of a C frame. `entry`: C
    code started an interpreter loop for this Python frame; its callees may share the loop.
    """

    language: str
    function: str
    file: str
    line: int | None
    module: str
    entry: bool = False


@record
class ThreadStack:
    """One thread's frames, innermost first. `tid` is the kernel's id; `gil`: holds the GIL, None if unknown.

    `aligned`: Python frames match every interpreter loop among the C frames; else their positions are a guess.
    """

    tid: int
    name: str
    frames: tuple[Frame, ...]
    gil: bool | None
    aligned: bool = True


@record
class Stacks:
    """Output of one tool for one core, read in `seconds`. `error`: why threads are missing or doubtful."""

    tool: str
    threads: tuple[ThreadStack, ...]
    error: str
    seconds: float


def crashed_first(found: Stacks, crashed_tid: int) -> tuple[ThreadStack, ...]:
    """Return the threads of a tool, the crashed thread first; without frames if the tool did not find it."""
    crashed = ThreadStack(crashed_tid, "", (), None)
    return tuple({crashed_tid: crashed, **{thread.tid: thread for thread in found.threads}}.values())


def longer(threads: Sequence[ThreadStack], others: Sequence[ThreadStack]) -> tuple[tuple[ThreadStack, ...], bool]:
    """Replace threads without Python frames by longer stacks from `others`; return all, and whether any changed."""
    known = {thread.tid: thread for thread in threads}
    better = {}
    for other in others:
        frames = known[other.tid].frames if other.tid in known else ()
        if _known(other.frames) > _known(frames) and not any(frame.language == "python" for frame in frames):
            better[other.tid] = other
    return tuple({**known, **better}.values()), bool(better)


def interleave(loops: Sequence[Sequence[Frame]], native: Sequence[Frame]) -> tuple[tuple[Frame, ...], bool]:
    """Put Python frames in place of the C frames that run them.

    Args:
        loops: Python frames grouped by interpreter loop; loops and frames innermost first.
        native: C frames, innermost first.

    Returns:
        All frames, innermost first, and whether loops and evaluation frames match in number. If not, match from the
        intact end: from the thread's start if the C frames reach it, as the innermost Python frame may be missing;
        else from the innermost, with unmatched loops at the end.
    """
    places = [at for at, frame in enumerate(native) if is_eval(frame)]
    spare = len(loops) - len(places)
    if reaches_start(native) and places:
        if spare > 0:
            loops = [[frame for loop in loops[: spare + 1] for frame in loop], *loops[spare + 1 :]]
        pairs, last = dict(zip(places[::-1], loops[::-1])), loops[:0]
    else:
        pairs, last = dict(zip(places, loops)), loops[len(places) :]
    found: list[Frame] = []
    for at, frame in enumerate(native):
        found += pairs.get(at) or (frame,)
    found += [frame for loop in last for frame in loop]
    return tuple(found), spare == 0


def of_c_alone(tid: int, native: Sequence[Frame]) -> ThreadStack:
    """Return the stack of a thread with only C frames, innermost first."""
    frames, aligned = interleave([], native)
    return ThreadStack(tid, "", shorten(frames), None, aligned)


def shorten(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Cut the middle of a stack deeper than MAX_FRAMES; a frame in its place counts the omitted frames."""
    if len(frames) <= MAX_FRAMES:
        return tuple(frames)
    end = MAX_FRAMES // 4
    begin = MAX_FRAMES - end
    gap = Frame("c", f"({len(frames) - MAX_FRAMES} frames left out)", "", None, "")
    return (*frames[:begin], gap, *frames[len(frames) - end :])


def essential(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Drop the interpreter's own frames, except innermost frames, which show the thread's position."""
    found: list[Frame] = []
    inside = True
    for frame in frames:
        own = is_interpreter(frame)
        inside = inside and own
        if inside or not own:
            found.append(frame)
    return tuple(found)


def is_interpreter(frame: Frame) -> bool:
    """Return whether a C frame only connects two Python frames, or started the thread.

    An evaluation loop is not such a frame: it replaces Python frames if those are unknown.
    """
    if frame.language != "c" or is_eval(frame):
        return False
    if _BOTTOMS.fullmatch(frame.function.partition("@")[0]):
        return True
    ours = not frame.module or bool(_PYTHON.fullmatch(os.path.basename(frame.module)))
    return ours and bool(_CALLS_AND_STARTS.fullmatch(frame.function.partition(".")[0]))


def is_eval(frame: Frame) -> bool:
    """Return whether a C frame is an evaluation loop, which runs Python frames."""
    return frame.language == "c" and bool(_EVAL.match(frame.function))


def reaches_start(native: Sequence[Frame]) -> bool:
    """Return whether the C frames reach the start of the thread."""
    return any(_BOTTOMS.fullmatch(frame.function.partition("@")[0]) for frame in native[-2:])


def _known(frames: Sequence[Frame]) -> tuple[int, int]:
    """Return the number of frames, and of named frames."""
    return len(frames), sum(frame.function not in UNKNOWN for frame in frames)
