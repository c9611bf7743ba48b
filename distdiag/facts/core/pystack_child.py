"""Standalone program that reads stacks with pystack and prints JSON; it imports nothing from distdiag.

Run by a Python that has pystack, with the path of a core, the program's path, and "python" (Python frames only) or
"all". For the output format see `pystack.parse`.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any


def main() -> None:
    """Read the core in the arguments, and print its stacks."""
    os.environ.pop("DEBUGINFOD_URLS", None)  # stops libdw from querying the network
    from pystack import engine

    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer

    def answer() -> None:
        with os.fdopen(out, "w") as file:
            file.write(_read(engine, *sys.argv[1:]))

    # pystack recurses for every Python frame: 10,000 frames overflow the usual 8 MiB stack.
    threading.stack_size(1 << 29)
    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    # Finalizing the interpreter would take longer than the work itself.
    os._exit(0)


def _read(engine: ModuleType, core: str, executable: str, frames: str) -> str:
    """Read all threads with C frames, else only threads with Python, else those without C frames."""
    modes = engine.NativeReportingMode
    threads: Sequence[Any] = []
    errors: list[str] = []
    for mode in (modes.OFF,) if frames == "python" else (modes.ALL, modes.PYTHON, modes.OFF):
        try:
            paths = pathlib.Path(core), pathlib.Path(executable)
            threads = list(engine.get_process_threads_for_core(*paths, native_mode=mode))
            break
        except Exception as error:  # noqa: BLE001 - whatever it is, less may be readable
            if str(error) in errors:
                break
            errors.append(str(error))
    return _packed(threads, errors)


def _packed(threads: Sequence[Any], errors: Sequence[str]) -> str:
    """Format as JSON, with each distinct frame once: endless recursion has 100,000 equal frames."""
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
    return json.dumps({"frames": list(numbers), "threads": rows, "errors": errors}, separators=(",", ":"))
