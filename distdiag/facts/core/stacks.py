"""Stacks in which Python and C frames are one, and how those of pystack, gdb and our unwinder are merged. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UNKNOWN = ("???", "??", "")
"""How tools write a function or module that they do not know."""
MAX_FRAMES = 512
"""A stack with more frames is endless recursion, of which both ends are enough."""

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


@dataclass(frozen=True)
class Frame:
    """One frame of one thread. `file`, `line` and `module` are "", None and "" where not known.

    `language` is "python" or "c" (whatever is compiled). `module` is the program or shared object of a C frame.
    `entry`: C code started a loop of the interpreter for this Python frame; those that it called may share the loop.
    """

    language: str
    function: str
    file: str
    line: int | None
    module: str
    entry: bool = False


@dataclass(frozen=True)
class ThreadStack:
    """One thread's frames, innermost first. `tid` as the kernel counts; `gil`: it holds the GIL, None if not known.

    `aligned`: every loop of the interpreter among the C frames has its Python frames; else their places are a guess.
    """

    tid: int
    name: str
    frames: tuple[Frame, ...]
    gil: bool | None
    aligned: bool = True


@dataclass(frozen=True)
class Stacks:
    """What one tool read from one core or process in `seconds`.

    `error` says why there are no threads or, beside threads, what makes them doubtful. `cut_off`: the tool was ended
    before it was done.
    """

    tool: str
    threads: tuple[ThreadStack, ...]
    error: str
    seconds: float
    cut_off: bool = False


@dataclass(frozen=True)
class Merged:
    """One thread as it is shown. `tools` read it: none for a crashed thread whose stack no tool has."""

    thread: ThreadStack
    crashed: bool
    tools: tuple[str, ...]


def needs_gdb(pystack: Stacks, crashed_tid: int) -> bool:
    """Return whether pystack lacks where the thread crashed, which gdb, far slower, may know."""
    stack = next((thread for thread in pystack.threads if thread.tid == crashed_tid), None)
    return stack is None or not stack.aligned or not reaches_start(_native(stack.frames))


def merge(pystack: Stacks, gdb: Stacks | None, crashed_tid: int | None) -> tuple[Merged, ...]:
    """Join the answers, thread by thread: the one that crashed is first, the others stay in their order."""
    by_pystack = {thread.tid: thread for thread in pystack.threads}
    by_gdb = {thread.tid: thread for thread in gdb.threads} if gdb else {}
    names = pystack.tool, gdb.tool if gdb else ""
    found = []
    for tid in dict.fromkeys([*([] if crashed_tid is None else [crashed_tid]), *by_pystack, *by_gdb]):
        threads = by_pystack.get(tid), by_gdb.get(tid)
        tools = tuple(name for name, thread in zip(names, threads) if thread)
        found.append(Merged(_of_both(tid, *threads), tid == crashed_tid, tools))
    return tuple(found)


def longer(threads: Sequence[Merged], others: Sequence[Merged]) -> tuple[tuple[Merged, ...], bool]:
    """Replace threads without Python frames of which `others` know more; return all, and whether any was replaced."""
    known = {merged.thread.tid: merged for merged in threads}
    better = {}
    for other in others:
        tid = other.thread.tid
        frames = known[tid].thread.frames if tid in known else ()
        if _known(other.thread.frames) > _known(frames) and not any(frame.language == "python" for frame in frames):
            better[tid] = other
    return tuple({**known, **better}.values()), bool(better)


def interleave(loops: Sequence[Sequence[Frame]], native: Sequence[Frame]) -> tuple[tuple[Frame, ...], bool]:
    """Put Python frames where the C frames are that run them.

    Args:
        loops: the Python frames by the loop of the interpreter that runs them; loops and frames innermost first.
        native: C frames, innermost first.

    Returns:
        All frames, innermost first, and whether there are as many loops as frames of them. Where there are not, they
        are counted from the end that is whole: from the start of the thread if the C frames reach it, as the innermost
        Python frame may be gone or not yet there; else from the innermost, and those without a place come last.
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
    """Return the stack of a thread of which only C frames are known, innermost first."""
    frames, aligned = interleave([], native)
    return ThreadStack(tid, "", shorten(frames), None, aligned)


def shorten(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Keep both ends of a stack that is deeper than MAX_FRAMES, with a frame between that counts what is left out."""
    if len(frames) <= MAX_FRAMES:
        return tuple(frames)
    end = MAX_FRAMES // 4
    begin = MAX_FRAMES - end
    gap = Frame("c", f"({len(frames) - MAX_FRAMES} frames left out)", "", None, "")
    return (*frames[:begin], gap, *frames[len(frames) - end :])


def essential(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Leave the interpreter's calls out, but not where the thread is: what comes before any other frame stays."""
    found: list[Frame] = []
    inside = True
    for frame in frames:
        own = is_interpreter(frame)
        inside = inside and own
        if inside or not own:
            found.append(frame)
    return tuple(found)


def is_interpreter(frame: Frame) -> bool:
    """Return whether a C frame only carries a call from Python to Python, or started the thread.

    A loop that runs Python frames is none: where these are not known it is shown instead of them.
    """
    if frame.language != "c" or is_eval(frame):
        return False
    if _BOTTOMS.fullmatch(frame.function.partition("@")[0]):
        return True
    # gdb names no module for the program itself, nor where it knows the source.
    ours = not frame.module or bool(_PYTHON.fullmatch(os.path.basename(frame.module)))
    return ours and bool(_CALLS_AND_STARTS.fullmatch(frame.function.partition(".")[0]))


def is_eval(frame: Frame) -> bool:
    """Return whether a C frame is a loop of the interpreter, which runs Python frames."""
    return frame.language == "c" and bool(_EVAL.match(frame.function))


def reaches_start(native: Sequence[Frame]) -> bool:
    """Return whether C frames were followed to where the thread began."""
    return any(_BOTTOMS.fullmatch(frame.function.partition("@")[0]) for frame in native[-2:])


def _of_both(tid: int, pystack: ThreadStack | None, gdb: ThreadStack | None) -> ThreadStack:
    if pystack is None or gdb is None:
        return pystack or gdb or ThreadStack(tid, "", (), None)
    named = replace(pystack, name=pystack.name or gdb.name)
    native = _native(pystack.frames)
    if native and pystack.aligned and (reaches_start(native) or not reaches_start(gdb.frames)):
        return named
    frames, aligned = interleave(_loops(pystack.frames), gdb.frames)
    return replace(named, frames=shorten(frames), aligned=aligned) if aligned or not native else named


def _known(frames: Sequence[Frame]) -> tuple[int, int]:
    """Return the number of frames, and of those with a name."""
    return len(frames), sum(frame.function not in UNKNOWN for frame in frames)


def _native(frames: Iterable[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.language == "c"]


def _loops(frames: Iterable[Frame]) -> list[list[Frame]]:
    """List the Python frames by the loops that run them, innermost first."""
    loops: list[list[Frame]] = [[]]
    for frame in frames:
        if frame.language == "python":
            loops[-1].append(frame)
            if frame.entry:
                loops.append([])
    return [loop for loop in loops if loop]
