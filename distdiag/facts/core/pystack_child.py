"""Reads stacks by pystack and prints them as JSON: a program of its own, which imports nothing of distdiag.

Its text is run by whatever Python has pystack, with the arguments "core", its path, that of the program, and "python"
(frames of Python only) or "all"; or "process" and its id. See `pystack.parse` for what it prints.
"""

from __future__ import annotations

import json
import os
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any


def main() -> None:
    """Read what the arguments name, and print it."""
    os.environ.pop("DEBUGINFOD_URLS", None)  # libdw would ask the network
    from pystack import engine

    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer

    def answer() -> None:
        with os.fdopen(out, "w") as file:
            json.dump(_read(engine, *sys.argv[1:]), file, separators=(",", ":"))

    # pystack calls itself for every Python frame: 10,000 of them are more than the usual stack of 8 MiB holds.
    threading.stack_size(1 << 29)
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    # Taking Python apart takes longer than all that was printed.
    os._exit(0)


def _read(engine: ModuleType, kind: str, *target: str) -> dict[str, Any]:
    """Read as much as can be: threads without Python as well, else those with it, else these without C frames."""
    modes = engine.NativeReportingMode
    is_process = kind == "process"
    threads: Sequence[Any] = []
    errors: list[str] = []
    for mode in (modes.OFF,) if target[-1] == "python" else (modes.ALL, modes.PYTHON, modes.OFF):
        try:
            threads = _process(engine, target, mode) if is_process else _core(engine, target, mode)
            break
        except Exception as error:  # noqa: BLE001 - whatever it is, less may be readable
            if str(error) in errors:
                break
            errors.append(str(error))
    return {**_packed(threads), "errors": errors, "live": is_process}


def _process(engine: ModuleType, target: Sequence[str], mode: object) -> Sequence[Any]:
    return list(engine.get_process_threads(int(target[0]), native_mode=mode))


def _core(engine: ModuleType, target: Sequence[str], mode: object) -> Sequence[Any]:
    import pathlib

    core, executable = map(pathlib.Path, target[:2])
    return list(engine.get_process_threads_for_core(core, executable, native_mode=mode))


def _packed(threads: Sequence[Any]) -> dict[str, Any]:
    """Write each frame once and the threads by its number: endless recursion is a hundred thousand equal frames."""
    numbers: dict[tuple[Any, ...], int] = {}

    def number(*frame: str | int) -> int:
        return numbers.setdefault(frame, len(numbers))

    rows = []
    for thread in threads:
        python = []
        for frame in thread.all_frames:
            code = (frame.code.scope, frame.code.filename, frame.code.location.lineno) if frame.code else ()
            python.append([number(*code), int(frame.is_entry), int(frame.is_shim)])
        native = [
            number(frame.symbol, frame.path, frame.linenumber, frame.library, frame.address)
            for frame in thread.native_frames
        ]
        gil = int(thread.holds_the_gil)
        rows.append({"tid": thread.tid, "name": thread.name, "gil": gil, "native": native, "python": python})
    return {"frames": list(numbers), "threads": rows}
