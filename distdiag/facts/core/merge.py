"""One stack for each thread, of Python and C frames, out of what pystack, gdb and we read. Pure."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from distdiag.facts.core.frames import UNKNOWN, Frame, Stacks, ThreadStack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_FRAMES = 512
"""More frames than these are endless recursion: its ends tell as much as the whole."""

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
class Merged:
    """One thread as it is shown. `tools`: who read it; none for a crashed thread of which nobody has the stack."""

    thread: ThreadStack
    crashed: bool
    tools: tuple[str, ...]


def needs_gdb(pystack: Stacks, crashed_tid: int) -> bool:
    """Tell whether pystack's answer lacks what only gdb, which is far slower, may know: where the thread crashed."""
    stack = next((one for one in pystack.threads if one.tid == crashed_tid), None)
    return stack is None or not stack.aligned or not reaches_start(_native(stack.frames))


def merge(pystack: Stacks, gdb: Stacks | None, crashed_tid: int | None) -> tuple[Merged, ...]:
    """Put the answers together, thread by thread: the one that crashed is first, the others stay in their order."""
    first = {one.tid: one for one in pystack.threads}
    second = {one.tid: one for one in gdb.threads} if gdb else {}
    names = pystack.tool, gdb.tool if gdb else ""
    found = []
    for tid in dict.fromkeys([*([] if crashed_tid is None else [crashed_tid]), *first, *second]):
        one, other = first.get(tid), second.get(tid)
        tools = tuple(name for name, has in zip(names, (one, other)) if has)
        found.append(Merged(_of_both(tid, one, other), tid == crashed_tid, tools))
    return tuple(found)


def longer(threads: Sequence[Merged], others: Sequence[Merged]) -> tuple[tuple[Merged, ...], bool]:
    """Take from `others` each thread of which they know more, if it has no Python frames; tell if there was any."""
    known = {one.thread.tid: one for one in threads}
    better = {}
    for one in others:
        frames = known[one.thread.tid].thread.frames if one.thread.tid in known else ()
        if _known(one.thread.frames) > _known(frames) and not any(frame.language == "python" for frame in frames):
            better[one.thread.tid] = one
    return tuple({**known, **better}.values()), bool(better)


def interleave(loops: Sequence[Sequence[Frame]], native: Sequence[Frame]) -> tuple[tuple[Frame, ...], bool]:
    """Put Python frames in the place of the C frames that run them.

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
    """Tell whether a C frame only carries a call from Python to Python, or started the thread.

    A loop that runs Python frames is none: it is left where nobody knows these, and then stands for them.
    """
    if frame.language != "c" or is_eval(frame):
        return False
    if _BOTTOMS.fullmatch(frame.function.partition("@")[0]):
        return True
    # gdb names no module for the program itself, nor where it knows the source.
    ours = not frame.module or bool(_PYTHON.fullmatch(os.path.basename(frame.module)))
    return ours and bool(_CALLS_AND_STARTS.fullmatch(frame.function.partition(".")[0]))


def is_eval(frame: Frame) -> bool:
    """Tell whether a C frame is a loop of the interpreter, which runs Python frames."""
    return frame.language == "c" and bool(_EVAL.match(frame.function))


def reaches_start(native: Sequence[Frame]) -> bool:
    """Tell whether C frames were followed to where the thread began."""
    return any(_BOTTOMS.fullmatch(frame.function.partition("@")[0]) for frame in native[-2:])


def _of_both(tid: int, pystack: ThreadStack | None, gdb: ThreadStack | None) -> ThreadStack:
    if pystack is None or gdb is None:
        return pystack or gdb or ThreadStack(tid, "", (), None)
    told = replace(pystack, name=pystack.name or gdb.name)
    native = _native(pystack.frames)
    if native and pystack.aligned and (reaches_start(native) or not reaches_start(gdb.frames)):
        return told
    frames, aligned = interleave(_loops(pystack.frames), gdb.frames)
    return replace(told, frames=shorten(frames), aligned=aligned) if aligned or not native else told


def _known(frames: Sequence[Frame]) -> tuple[int, int]:
    """Count frames, and those with a name."""
    return len(frames), sum(one.function not in UNKNOWN for one in frames)


def _native(frames: Iterable[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.language == "c"]


def _loops(frames: Iterable[Frame]) -> list[list[Frame]]:
    """Cut a thread's Python frames into the loops that run them, innermost first."""
    loops: list[list[Frame]] = [[]]
    for frame in frames:
        if frame.language == "python":
            loops[-1].append(frame)
            if frame.entry:
                loops.append([])
    return [loop for loop in loops if loop]
