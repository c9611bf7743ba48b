"""Python and C frames of a core or of a live process in one stack, by pystack, in a child that may crash or hang.

Only its stacks are used: what it says of the signal is wrong for SIGBUS, and on a core it names the threads after
those of whatever process has that id now. It looks functions up by their return addresses (1.7.2), so a function that
ends in a call that does not return, as those on the way to abort() do, gets the name of the next one: see `Functions`.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import struct
import sys
from array import array
from bisect import bisect_left
from dataclasses import replace

from distdiag.node import capture, elf, procs, run
from distdiag.node.core import by_gdb, merge, notes
from distdiag.node.core.frames import Frame, Stacks, ThreadStack
from distdiag.node.wire import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

_CHILD = "from __future__ import annotations\n{}\nimport sys\n_tell(*sys.argv[1:])"
_VERSION = re.compile(r"@@?[A-Z][A-Za-z]*_[\w.]+$")  # "@@GLIBC_2.34" after a symbol's name
_INLINED, _RETURN_OF_SIGNAL = " (inlined)", "__restore_rt"
_UNKNOWN = ("???", "??", "")
_MOST_SYMBOLS_BYTES = 256 << 20  # libtorch_cpu.so has 13 MB of them
_PT_LOAD, _PT_GNU_EH_FRAME, _STT_FUNC = 1, 0x6474E550, 2
_HEADER, _SEGMENT = struct.Struct("<32xQ16xH6x"), struct.Struct("<I4xQQ8xQ16x")
_EH_FRAME_HDR = b"\x01\x1b\x03\x3b"  # version 1, encodings that gcc and clang use; then 2 words and pairs of words


def of_core(core: str, executable: str, *, timeout_s: float, python: str = "") -> Stacks:
    """Read all threads of a core, with the program that left it. pystack is asked of `python`, else of this Python."""
    try:
        files = notes.read(core).files
    except (notes.NotACore, OSError, ValueError) as error:
        return Stacks("pystack", (), str(error), 0.0)
    # A virtual environment's python is a link; pystack looks for the name of the real one in the core.
    target = ["core", os.path.abspath(core), os.path.realpath(executable)]
    return _ask(target, Functions(files), timeout_s, python or sys.executable)


def of_process(pid: int, *, timeout_s: float, python: str = "") -> Stacks:
    """Read all threads of a live process, which is paused meanwhile; it is left as it was found."""
    with by_gdb.left_as_found(pid) as hindrance:
        if hindrance:
            return Stacks("pystack", (), hindrance, 0.0)
        functions = Functions(tuple(_mapped(procs.maps(pid) or "")))
        stacks = _ask(["process", str(pid)], functions, timeout_s, python or sys.executable)
    if "not permitted" in stacks.error:
        return replace(stacks, error=capture.why_unreadable(pid, stacks.error)[1])
    return stacks


def _ask(target: Sequence[str], functions: Functions, timeout_s: float, python: str) -> Stacks:
    program = "\n".join(inspect.getsource(part) for part in (_tell, _read, _pack))
    try:
        done = run.run([python, "-B", "-c", _CHILD.format(program), *target], timeout_s=timeout_s)
    except run.CannotRun as error:
        return Stacks("pystack", (), str(error), 0.0)
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
        if name.endswith(_INLINED):
            name = name[: -len(_INLINED)]
        elif address != exact and name != _RETURN_OF_SIGNAL:
            name = functions.before(address, name) or name
        known = file not in (*_UNKNOWN, module)
        yield Frame(
            language="c",
            function="<signal handler called>"
            if name == _RETURN_OF_SIGNAL
            else "??"
            if name in _UNKNOWN
            else printable(name),
            file=printable(file) if known else "",
            line=line or None,
            module="" if module in _UNKNOWN else printable(module),
        )


def _mapped(maps: str) -> Iterator[notes.MappedFile]:
    """Read the text of /proc/PID/maps, see proc(5)."""
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith("/"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            yield notes.MappedFile(start, end, int(words[2], 16), words[5])


class Functions:
    """The functions of the programs and libraries that a process has mapped, by address."""

    def __init__(self, files: Sequence[notes.MappedFile]) -> None:
        self._files = files
        self._libraries: dict[str, _Library] = {}

    def before(self, address: int, name: str) -> str:
        """Name the function whose last call returns to `address`; "" where `name` need not be doubted."""
        one = next((one for one in self._files if one.start < address <= one.end), None)
        try:
            if one is None:
                return ""
            if one.path not in self._libraries:
                self._libraries[one.path] = _Library(one.path)
            return self._libraries[one.path].before(address - one.start + one.offset, is_known=name not in _UNKNOWN)
        except (OSError, ValueError, elf.Malformed, struct.error):  # not here, or not as it was there
            return ""


class _Library:
    """Where the functions of one file begin: the table for exceptions (.eh_frame_hdr, Linux Standard Base 5, 10.6)."""

    def __init__(self, path: str) -> None:
        self._path = path
        with elf.File(path) as file:
            at, count = _HEADER.unpack(file.at(0, _HEADER.size))
            rows = list(_SEGMENT.iter_unpack(file.at(at, count * _SEGMENT.size)))
            self._loaded = [(offset, address, size) for kind, offset, address, size in rows if kind == _PT_LOAD]
            tables = [row[1:] for row in rows if row[0] == _PT_GNU_EH_FRAME]
            if not tables:
                raise elf.Malformed
            offset, self._base, size = tables[0]
            data = file.at(offset, size)
        words = array("i", data[12 : size - (size - 12) % 8] if data.startswith(_EH_FRAME_HDR) else b"")
        self._starts = words[::2]

    def before(self, offset: int, *, is_known: bool) -> str:
        """Name the function whose last call ends at an offset; "" where nothing else begins and the name is known."""
        start, address = next((row[:2] for row in self._loaded if row[0] < offset <= row[0] + row[2]), (0, 0))
        there = offset - start + address - self._base
        at = bisect_left(self._starts, there)
        if at == 0 or (is_known and self._starts[at : at + 1] != array("i", [there])):
            return ""
        return _symbol(self._path, self._starts[at - 1] + self._base)


def _symbol(path: str, address: int) -> str:
    """Name the function that begins at an address of a file; "" if its symbols are stripped."""
    found = elf.read(path)
    sections = {one.name: one for one in found.sections} if found else {}
    with elf.File(path, _MOST_SYMBOLS_BYTES) as file:
        for symbols, names in ((".symtab", ".strtab"), (".dynsym", ".dynstr")):
            if symbols in sections and names in sections:
                size = sections[symbols].size
                # Three words for each: its name, kind and section; its value; its size.
                words = array("Q", file.at(sections[symbols].offset, size - size % 24))
                for at, value in enumerate(words[1::3]):
                    if value == address and words[3 * at] >> 32 & 0xF == _STT_FUNC:
                        return _demangled(file.name_at(sections[names].offset + (words[3 * at] & 0xFFFFFFFF)))
    return ""


def _demangled(name: str) -> str:
    try:
        demangle = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):  # musl, or no C++ here
        return name
    demangle.restype = ctypes.c_char_p
    return (demangle(name.encode(), None, None, None) or name.encode()).decode("utf-8", "replace")


# The functions from here on run in the child, where nothing else of this module is: they import what they use.


def _tell(kind: str, *where: str) -> None:
    """Write what pystack reads of a "core" (its path, the program's path) or a "process" (its id) as one JSON."""
    import os
    import sys

    out = os.dup(1)
    os.dup2(2, 1)
    # A stray ./threading.py must not break a diagnosis.
    sys.path[:] = [path for path in sys.path if path]
    import json
    import threading

    def tell() -> None:
        threads, errors = _read(kind, where)
        with os.fdopen(out, "w") as file:
            json.dump({**_pack(threads), "errors": errors, "live": kind == "process"}, file)

    # pystack calls itself for every Python frame: 10,000 of them are more than the usual stack of 8 MiB holds.
    threading.stack_size(1 << 29)
    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()


def _read(kind: str, where: Sequence[str]) -> tuple[Sequence[Any], list[str]]:
    """Read as much as can be: threads without Python as well, else those with it, else these without C frames."""
    import importlib
    import pathlib

    engine = importlib.import_module("pystack.engine")
    errors: list[str] = []
    for mode in (engine.NativeReportingMode.ALL, engine.NativeReportingMode.PYTHON, engine.NativeReportingMode.OFF):
        try:
            if kind == "core":
                return engine.get_process_threads_for_core(*map(pathlib.Path, where), native_mode=mode), errors
            return engine.get_process_threads(int(where[0]), native_mode=mode), errors
        except Exception as error:  # noqa: BLE001 - whatever it is, less may be readable
            if str(error) in errors:
                break
            errors.append(str(error))
    return [], errors


def _pack(threads: Sequence[Any]) -> dict[str, Any]:
    """Tell each frame once and the threads by its number: endless recursion is a hundred thousand equal frames."""
    numbers: dict[tuple[Any, ...], int] = {}

    def number(*frame: str | int) -> int:
        return numbers.setdefault(frame, len(numbers))

    told = []
    for thread in threads:
        python = []
        for one in thread.all_frames:
            code = (one.code.scope, one.code.filename, one.code.location.lineno) if one.code else ()
            python.append([number(*code), one.is_entry, one.is_shim])
        native = [
            number(one.symbol, one.path, one.linenumber, one.library, one.address) for one in thread.native_frames
        ]
        gil = int(thread.holds_the_gil)
        told.append({"tid": thread.tid, "name": thread.name, "gil": gil, "native": native, "python": python})
    return {"frames": list(numbers), "threads": told}
