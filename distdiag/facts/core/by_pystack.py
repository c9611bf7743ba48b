"""Python frames by pystack, in a child that may crash or hang, in one stack with C frames: ours, see `cframes`, or its.

Only its stacks are used: what it says of the signal is wrong for SIGBUS, and on a core it names the threads after
those of whatever process has that id now. Its C frames it looks up by their return addresses (1.7.2), so a function
that ends in a call that does not return, as those on the way to abort() do, gets the name of the next: see `Functions`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import replace

from distdiag.facts import programs, ptrace_permission
from distdiag.facts.core import by_gdb, merge, notes
from distdiag.facts.core.asking_pystack import Asked
from distdiag.facts.core.callframes import NoRules
from distdiag.facts.core.cframes import CFrames
from distdiag.facts.core.frames import UNKNOWN, Frame, Stacks, ThreadStack
from distdiag.facts.core.functions import VERSION, Functions
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from typing import Any

    from distdiag.facts.core.cframes import Told

_DIED = "pystack died of"
_INLINED, _RETURN_OF_SIGNAL = " (inlined)", "__restore_rt"


class OfCore:
    """All threads of a core, with the program that left it; read meanwhile, by `python`, else by this Python."""

    def __init__(self, core: str, executable: str, files: Sequence[notes.MappedFile], *, python: str = "") -> None:
        self._python = python or sys.executable
        self._core, self._files = core, files
        # A virtual environment's python is a link; pystack looks for the name of the real one in the core.
        self._target = ["core", os.path.abspath(core), os.path.realpath(executable)]
        self._asked: Asked | None = None
        self._ours: CFrames | None = None
        self._error = ""
        try:
            self._asked = Asked(self._target, self._python)
        except programs.CannotRun as error:
            self._error = str(error)

    def __enter__(self) -> OfCore:
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked is not None:
            self._asked.drop()

    def stacks(self, *, timeout_s: float, unlike: Container[str] = ()) -> Stacks:
        """Wait for them; `unlike`: mapped files that are no longer what they were."""
        ours = self._followed(unlike)
        if ours and not ours.whole:
            ours = None
        if self._asked is None:
            return Stacks("pystack", (), self._error, 0.0)
        if not self._asked.go_on(ours.question if ours else None):
            ours = None
        functions = Functions(self._files)
        stacks = _stacks(self._asked, functions, timeout_s, self._python, ours)
        left_s = timeout_s - stacks.seconds
        if ours is None or left_s <= 0 or not _may_do_better(stacks):
            return stacks
        try:
            self._asked = Asked(self._target, self._python)
        except programs.CannotRun:
            return stacks
        self._asked.go_on(None)
        again = _stacks(self._asked, functions, left_s, self._python)
        return again if again.threads else stacks

    def c_frames(self, *, timeout_s: float, unlike: Container[str] = ()) -> Stacks:
        """Give what is known without pystack's stacks: C frames, as far as they can be followed."""
        ours = self._followed(unlike)
        if ours is None:
            return Stacks("distdiag", (), "", 0.0)
        lines = self._lines(ours.question, timeout_s) if ours.question else {}
        without = ", without source lines" if ours.question and not lines else ""
        threads = tuple(_untold(tid, frames) for tid, frames in ours.frames(lines).items())
        return Stacks("distdiag", threads, f"C frames alone{without}", 0.0)

    def _followed(self, unlike: Container[str]) -> CFrames | None:
        if self._ours is None:
            with contextlib.suppress(NoRules):
                self._ours = CFrames(self._core, self._files, unlike)
        return self._ours

    def _lines(self, question: dict[str, list[int]], timeout_s: float) -> Told:
        """Ask for debug information alone; there is none if pystack is not there."""
        try:
            asked = Asked(["lines"], self._python)
        except programs.CannotRun:
            return {}
        asked.go_on(question)
        try:
            return _told(asked.answer(timeout_s).stdout.decode("utf-8", "replace"))[1]
        except ValueError:  # pystack is not there, or did not come so far
            return {}


def of_core(core: str, executable: str, *, timeout_s: float, python: str = "") -> Stacks:
    """Read all threads of a core, as `OfCore` does."""
    try:
        told = notes.read(core)
    except (notes.NotACore, OSError, ValueError) as error:
        return Stacks("pystack", (), str(error), 0.0)
    with OfCore(core, executable, told.files, python=python) as reading:
        unlike = {*notes.changed_files(core, told), *notes.missing_files(core, told)}
        return reading.stacks(timeout_s=timeout_s, unlike=unlike)


def of_process(pid: int, *, timeout_s: float, python: str = "") -> Stacks:
    """Read all threads of a live process, which is paused meanwhile; it is left as it was found."""
    python = python or sys.executable
    with by_gdb.left_as_found(pid) as attaching:
        if attaching.hindrance:
            return Stacks("pystack", (), attaching.hindrance, 0.0)
        try:
            asked = Asked(["process", str(pid)], python)
        except programs.CannotRun as error:
            attaching.is_over = True  # it has not begun: the process is to see no signal
            return Stacks("pystack", (), str(error), 0.0)
        stacks = _stacks(asked, Functions.of_process(pid), timeout_s, python)
        attaching.is_over = not stacks.cut_off
    if "not permitted" in stacks.error:
        return replace(stacks, error=ptrace_permission.why_unreadable(pid, stacks.error)[1])
    return stacks


def _stacks(asked: Asked, functions: Functions, timeout_s: float, python: str, ours: CFrames | None = None) -> Stacks:
    done = asked.answer(timeout_s)
    try:
        threads, error_said = parse(done.stdout.decode("utf-8", "replace"), functions, ours)
    except (ValueError, KeyError, TypeError, IndexError):  # it ended before it had said all
        return Stacks("pystack", (), _why(done, timeout_s, python), done.elapsed_s, cut_off=done.cut_off)
    return Stacks("pystack", threads, error_said, done.elapsed_s, cut_off=done.cut_off)


def parse(text: str, functions: Functions, ours: CFrames | None = None) -> tuple[tuple[ThreadStack, ...], str]:
    """Read the threads, and what went wrong, from what the child says; the C frames may be `ours`.

    Raises:
        ValueError, KeyError, TypeError, IndexError: the child ended before it had said all.
    """
    told, lines = _told(text)
    threads: dict[int, ThreadStack] = {}
    by_tid = ours.frames(lines) if ours else None
    for one in told["threads"]:
        native = by_tid.get(one["tid"], []) if by_tid is not None else None
        stack = _stack(one, told["frames"], functions, native)
        above = threads.get(stack.tid)
        # One thread that runs several interpreters is told once for each, the innermost last.
        if above:
            stack = replace(stack, frames=stack.frames + above.frames, aligned=stack.aligned and above.aligned)
        threads[stack.tid] = stack
    for tid, frames in (by_tid or {}).items():
        threads.setdefault(tid, _untold(tid, frames))
    found = threads.values() if told["live"] else (replace(one, name="") for one in threads.values())
    errors = told["errors"]
    if ours and ours.question and not lines:
        errors.append("no source lines of C code: their debug information could not be read, or not in time")
    if threads and not any(one["python"] for one in told["threads"]):
        errors.append("no Python frames were found")
    return tuple(found), printable("; ".join(errors))[:300]


def _untold(tid: int, frames: Sequence[Frame]) -> ThreadStack:
    """Make the stack of a thread of which pystack says nothing."""
    merged, aligned = merge.interleave([], frames)
    return ThreadStack(tid, "", merge.shorten(merged), None, aligned)


def _may_do_better(stacks: Stacks) -> bool:
    """Tell whether to ask again: it died of what it was asked, or its Python frames do not fit our C frames."""
    if not stacks.threads:
        return stacks.error.startswith(_DIED)
    return any(not one.aligned and any(f.language == "python" for f in one.frames) for one in stacks.threads)


def _told(text: str) -> tuple[Any, Told]:
    """Split what the child says into threads and lines; these are empty if it ended before it had said them."""
    told, end = json.JSONDecoder().raw_decode(text)
    try:
        lines: Told = json.loads(text[end:])["lines"]
    except ValueError:
        return told, {}
    return told, lines


def _why(done: programs.Done, timeout_s: float, python: str) -> str:
    if done.timed_out:
        return f"pystack did not answer within {timeout_s:g} s"
    if done.status is not None and done.status < 0:
        return f"{_DIED} {programs.signal_name(-done.status)}"
    if len(done.stdout) >= programs.MAX_OUTPUT_BYTES:
        return "pystack found stacks that are too deep to be handed over"
    words = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"it ended with status {done.status}"])[-1]
    if "No module named 'pystack'" in words:
        return f"pystack is not installed ({python} -m pip install pystack)"
    return f"pystack: {printable(words)[:300]}"


def _stack(
    told: dict[str, Any], frames: Sequence[Sequence[Any]], functions: Functions, ours: list[Frame] | None
) -> ThreadStack:
    """Make one thread's stack of what is told of it, outermost first, with our C frames if there are any."""
    loops: list[list[Frame]] = []
    for number, entry, shim in told["python"]:
        if entry or not loops:
            loops.append([])
        if not shim:
            function, file, line = frames[number]
            loops[-1].append(Frame("python", printable(function), printable(file), line or None, "", bool(entry)))
    native = ours if ours is not None else list(_native([frames[n] for n in reversed(told["native"])], functions))
    merged, aligned = merge.interleave([loop[::-1] for loop in reversed(loops)], native)
    gil = None if told["gil"] < 0 else bool(told["gil"])
    return ThreadStack(int(told["tid"]), printable(told["name"] or ""), merge.shorten(merged), gil, aligned)


def _native(told: Sequence[Sequence[Any]], functions: Functions) -> Iterator[Frame]:
    """Make C frames, innermost first: that where the thread is, and that where a signal came, are at no call's end."""
    exact: int | None = told[0][4] if told else None
    for at, (symbol, file, line, module, address) in enumerate(told):
        name = VERSION.sub("", symbol)
        if at and told[at - 1][0] == _RETURN_OF_SIGNAL:
            exact = address
        path = functions.path(address - (address != exact))
        if path and not _may_be(module, path):  # a core that was cut off misleads pystack
            name, line = "??", 0
        if name.endswith(_INLINED):
            name = name[: -len(_INLINED)]
        elif name == _RETURN_OF_SIGNAL:
            name = "<signal handler called>"
        elif address != exact or name in UNKNOWN:
            name = functions.before(address + (address == exact), name)
        name = "??" if name in UNKNOWN else printable(name)
        module = path or ("" if module in UNKNOWN else module)
        # Without a line pystack tells the module in the place of the file.
        yield Frame("c", name, printable(file) if line else "", line or None, printable(module))


def _may_be(module: str, path: str) -> bool:
    """Tell whether libc.so.6, as a program asked for it, may be libc-2.31.so, as the kernel knows it."""
    shorter, longer = sorted((os.path.basename(one).partition(".so")[0] for one in (module, path)), key=len)
    return longer.startswith(shorter)
