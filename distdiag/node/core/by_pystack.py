"""Python and C frames of a core or of a live process in one stack, by pystack, in a child that may crash or hang.

Only its stacks are used: what it says of the signal is wrong for SIGBUS, and on a core it names the threads after
those of whatever process has that id now. It looks functions up by their return addresses (1.7.2), so a function that
ends in a call that does not return, as those on the way to abort() do, gets the name of the next one: see `Functions`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace

from distdiag.node import rights, run
from distdiag.node.core import by_gdb, merge, notes
from distdiag.node.core.asking_pystack import Asked
from distdiag.node.core.frames import UNKNOWN, Frame, Stacks, ThreadStack
from distdiag.node.core.functions import Functions
from distdiag.node.wire import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

_VERSION = re.compile(r"@@?[A-Z][A-Za-z]*_[\w.]+$")  # "@@GLIBC_2.34" after a symbol's name
_INLINED, _RETURN_OF_SIGNAL = " (inlined)", "__restore_rt"


class OfCore:
    """All threads of a core, with the program that left it; read meanwhile, by `python`, else by this Python."""

    def __init__(self, core: str, executable: str, *, python: str = "") -> None:
        self._python = python or sys.executable
        self._core = core
        # A virtual environment's python is a link; pystack looks for the name of the real one in the core.
        target = ["core", os.path.abspath(core), os.path.realpath(executable)]
        self._asked: Asked | None = None
        self._error = ""
        try:
            self._asked = Asked(target, self._python)
        except run.CannotRun as error:
            self._error = str(error)

    def __enter__(self) -> OfCore:
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked is not None:
            self._asked.drop()

    def stacks(self, *, timeout_s: float) -> Stacks:
        """Wait for them."""
        try:
            files = notes.read(self._core).files
        except (notes.NotACore, OSError, ValueError) as error:
            return Stacks("pystack", (), str(error), 0.0)
        if self._asked is None:
            return Stacks("pystack", (), self._error, 0.0)
        return _stacks(self._asked, Functions(files), timeout_s, self._python)


def of_core(core: str, executable: str, *, timeout_s: float, python: str = "") -> Stacks:
    """Read all threads of a core, as `OfCore` does."""
    with OfCore(core, executable, python=python) as reading:
        return reading.stacks(timeout_s=timeout_s)


def of_process(pid: int, *, timeout_s: float, python: str = "") -> Stacks:
    """Read all threads of a live process, which is paused meanwhile; it is left as it was found."""
    python = python or sys.executable
    with by_gdb.left_as_found(pid) as hindrance:
        if hindrance:
            return Stacks("pystack", (), hindrance, 0.0)
        try:
            asked = Asked(["process", str(pid)], python)
        except run.CannotRun as error:
            return Stacks("pystack", (), str(error), 0.0)
        stacks = _stacks(asked, Functions.of_process(pid), timeout_s, python)
    if "not permitted" in stacks.error:
        return replace(stacks, error=rights.why_unreadable(pid, stacks.error)[1])
    return stacks


def _stacks(asked: Asked, functions: Functions, timeout_s: float, python: str) -> Stacks:
    done = asked.answer(timeout_s)
    try:
        threads, error_said = parse(done.stdout.decode("utf-8", "replace"), functions)
    except (ValueError, KeyError, TypeError, IndexError):  # it ended before it had said all
        return Stacks("pystack", (), _why(done, timeout_s, python), done.elapsed_s)
    return Stacks("pystack", threads, error_said, done.elapsed_s)


def parse(text: str, functions: Functions) -> tuple[tuple[ThreadStack, ...], str]:
    """Read the threads, and what went wrong, from what the child says.

    Raises:
        ValueError, KeyError, TypeError, IndexError: the child ended before it had said all.
    """
    told = json.loads(text)
    threads: dict[int, ThreadStack] = {}
    for one in told["threads"]:
        stack = _stack(one, told["frames"], functions)
        above = threads.get(stack.tid)
        # One thread that runs several interpreters is told once for each, the innermost last.
        if above:
            stack = replace(stack, frames=stack.frames + above.frames, aligned=stack.aligned and above.aligned)
        threads[stack.tid] = stack
    found = threads.values() if told["live"] else (replace(one, name="") for one in threads.values())
    errors = told["errors"]
    if threads and not any(one["python"] for one in told["threads"]):
        errors.append("no Python frames were found")
    return tuple(found), printable("; ".join(errors))[:300]


def _why(done: run.Done, timeout_s: float, python: str) -> str:
    if done.timed_out:
        return f"pystack did not answer within {timeout_s:g} s"
    if done.status is not None and done.status < 0:
        return f"pystack died of {run.signal_name(-done.status)}"
    if len(done.stdout) >= run.MAX_OUTPUT_BYTES:
        return "pystack found stacks that are too deep to be handed over"
    words = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"it ended with status {done.status}"])[-1]
    if "No module named 'pystack'" in words:
        return f"pystack is not installed ({python} -m pip install pystack)"
    return f"pystack: {printable(words)[:300]}"


def _stack(told: dict[str, Any], frames: Sequence[Sequence[Any]], functions: Functions) -> ThreadStack:
    """Make one thread's stack of what is told of it, outermost first."""
    loops: list[list[Frame]] = []
    for number, entry, shim in told["python"]:
        if entry or not loops:
            loops.append([])
        if not shim:
            function, file, line = frames[number]
            loops[-1].append(Frame("python", printable(function), printable(file), line or None, "", bool(entry)))
    native = list(_native([frames[number] for number in reversed(told["native"])], functions))
    merged, aligned = merge.interleave([loop[::-1] for loop in reversed(loops)], native)
    gil = None if told["gil"] < 0 else bool(told["gil"])
    return ThreadStack(int(told["tid"]), printable(told["name"] or ""), merge.shorten(merged), gil, aligned)


def _native(told: Sequence[Sequence[Any]], functions: Functions) -> Iterator[Frame]:
    """Make C frames, innermost first: that where the thread is, and that where a signal came, are at no call's end."""
    exact: int | None = told[0][4] if told else None
    for at, (symbol, file, line, module, address) in enumerate(told):
        name = _VERSION.sub("", symbol)
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
