"""Python frames by pystack, in a child that may crash or hang on a damaged core; C frames by `unwinder` or pystack.

Only the stacks are used: pystack misreports SIGBUS, and names the threads of a core after the process that has that id
now. It resolves C frames by their return addresses (1.7.2), so a function that ends in a noreturn call, as on the path
to abort(), is named after the next function: see `Functions`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

from distdiag.facts import programs
from distdiag.facts.core import pystack_child, stacks
from distdiag.facts.core.binary import VERSION, Functions
from distdiag.facts.core.stacks import UNKNOWN, Frame, Stacks, ThreadStack
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from distdiag.facts.core.core_file import MappedFile
    from distdiag.facts.core.unwinder import CFrames

_DIED = "pystack died of"
_INLINED, _RETURN_OF_SIGNAL = " (inlined)", "__restore_rt"


def of_core(
    core: str,
    executable: str,
    files: Sequence[MappedFile],
    own: CFrames | None,
    *,
    timeout_s: float,
    python: str = "",
) -> Stacks:
    """Read all threads of a core with pystack under `python` (default: this Python); `files`: the mapped files.

    `own`: the C frames, None if unwinding failed. If complete, pystack reads only Python frames: reading C frames costs
    it 180 MB for a core of torch, and it reports a caller's line at the return address.
    """
    # A virtual environment's python is a link; pystack searches the core for the name of the real file.
    target = [os.path.abspath(core), os.path.realpath(executable)]
    functions = Functions(files)
    first = None
    if own is not None and own.whole:
        first = _ask([*target, "python"], functions, timeout_s, python, own)
        timeout_s -= first.seconds
        if timeout_s <= 0 or not _is_retry_useful(first):
            return first
    everything = _ask([*target, "all"], functions, timeout_s, python)
    return everything if everything.threads or first is None else first


def _ask(
    target: Sequence[str], functions: Functions, timeout_s: float, python: str, own: CFrames | None = None
) -> Stacks:
    python = python or sys.executable
    # Without the working directory: a stray ./threading.py must not break a diagnosis.
    without = "import sys; sys.path[:] = [path for path in sys.path if path]"
    text = pystack_child.__loader__.get_source(pystack_child.__name__)  # type: ignore[union-attr]
    program = f"{without}\nexec(compile({text!r}, 'child.py', 'exec'))\nmain()"
    try:
        done = programs.run([python, "-B", "-c", program, *target], timeout_s=timeout_s)
    except programs.CannotRun as error:
        return Stacks("pystack", (), str(error), 0.0)
    try:
        threads, error_text = parse(done.stdout.decode("utf-8", "replace"), functions, own)
    except (ValueError, KeyError, TypeError, IndexError):  # the child exited before printing everything
        return Stacks("pystack", (), _why(done, timeout_s, python), done.elapsed_s)
    return Stacks("pystack", threads, error_text, done.elapsed_s)


def parse(text: str, functions: Functions, own: CFrames | None = None) -> tuple[tuple[ThreadStack, ...], str]:
    """Parse the child's output into threads and an error text; `own`: C frames to use instead of pystack's.

    Raises:
        ValueError, KeyError, TypeError, IndexError: the output is incomplete.
    """
    answer = json.loads(text)
    threads: dict[int, ThreadStack] = {}
    c_frames = own.frames() if own is not None else None
    for row in answer["threads"]:
        native = c_frames.get(row["tid"], []) if c_frames is not None else None
        stack = _stack(row, answer["frames"], functions, native)
        above = threads.get(stack.tid)
        # A thread that runs several interpreters has one row for each, innermost last.
        if above:
            stack = replace(stack, frames=stack.frames + above.frames, aligned=stack.aligned and above.aligned)
        threads[stack.tid] = stack
    for tid, frames in (c_frames or {}).items():
        threads.setdefault(tid, stacks.of_c_alone(tid, frames))
    found = (replace(thread, name="") for thread in threads.values())
    errors = answer["errors"]
    if own is not None and own.without_lines:
        errors.append(f"no source lines of C code: {own.without_lines}")
    if threads and not any(row["python"] for row in answer["threads"]):
        errors.append("no Python frames found")
    return tuple(found), printable("; ".join(errors))[:300]


def _is_retry_useful(found: Stacks) -> bool:
    """Return whether to retry with C frames: pystack died, or its Python frames do not fit our C frames."""
    if not found.threads:
        return found.error.startswith(_DIED)
    return any(not stack.aligned and any(f.language == "python" for f in stack.frames) for stack in found.threads)


def _why(done: programs.Done, timeout_s: float, python: str) -> str:
    if done.timed_out:
        return f"pystack did not answer within {timeout_s:g} s"
    if done.status is not None and done.status < 0:
        return f"{_DIED} {programs.signal_name(-done.status)}"
    if len(done.stdout) >= programs.MAX_OUTPUT_BYTES:
        return "pystack found stacks that are too deep to transfer"
    words = (done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"it ended with status {done.status}"])[-1]
    if "No module named 'pystack'" in words:
        return f"pystack is not installed ({python} -m pip install pystack)"
    return f"pystack: {printable(words)[:300]}"


def _stack(
    row: dict[str, Any], frames: Sequence[Sequence[Any]], functions: Functions, own: list[Frame] | None
) -> ThreadStack:
    """Build a thread's stack from its row (outermost frame first), with our own C frames if given.

    The row is the child's JSON, of which fields are missing if the child died: the caller handles the KeyError.
    """
    loops: list[list[Frame]] = []
    for number, entry, shim in row["python"]:
        if entry or not loops:
            loops.append([])
        if not shim:
            function, file, line = frames[number]
            loops[-1].append(Frame("python", printable(function), printable(file), line or None, "", bool(entry)))
    native = own if own is not None else list(_native([frames[n] for n in reversed(row["native"])], functions))
    merged, aligned = stacks.interleave([loop[::-1] for loop in reversed(loops)], native)
    gil = None if row["gil"] < 0 else bool(row["gil"])
    return ThreadStack(int(row["tid"]), printable(row["name"] or ""), stacks.shorten(merged), gil, aligned)


def _native(rows: Sequence[Sequence[Any]], functions: Functions) -> Iterator[Frame]:
    """List C frames, innermost first. The innermost address and one interrupted by a signal follow no call."""
    exact: int | None = rows[0][4] if rows else None
    for at, (symbol, file, line, module, address) in enumerate(rows):
        name = VERSION.sub("", symbol)
        if at and rows[at - 1][0] == _RETURN_OF_SIGNAL:
            exact = address
        path = functions.path(address - (address != exact))
        if path and not _may_be(module, path):  # pystack reads wrong modules from a truncated core
            name, line = "??", 0
        if name.endswith(_INLINED):
            name = name[: -len(_INLINED)]
        elif name == _RETURN_OF_SIGNAL:
            name = "<signal handler called>"
        elif address != exact or name in UNKNOWN:
            name = functions.before(address + (address == exact), name)
        name = "??" if name in UNKNOWN else printable(name)
        module = path or ("" if module in UNKNOWN else module)
        # Without a line, pystack puts the module in the file field.
        yield Frame("c", name, printable(file) if line else "", line or None, printable(module))


def _may_be(module: str, path: str) -> bool:
    """Return whether libc.so.6 (soname) may be libc-2.31.so (path known to the kernel)."""
    shorter, longer = sorted((os.path.basename(name).partition(".so")[0] for name in (module, path)), key=len)
    return longer.startswith(shorter)
