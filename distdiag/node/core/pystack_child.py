"""Reads stacks by pystack, and tells them as JSON: a program of its own, which imports nothing of distdiag.

Its text is run by whatever Python has pystack. It loads that, and waits to be told on stdin whom to read.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any


def main() -> None:
    """Load pystack, hear what to read, and tell it."""
    heard: list[str] = []
    hearing = threading.Thread(target=_hear, args=(heard,), daemon=True)
    hearing.start()
    try:
        from pystack import engine
    except Exception:  # noqa: BLE001 - whoever asks will hear of it; leaving as usual would wait for the other thread
        traceback.print_exc()
        os._exit(1)
    hearing.join()
    _tell(engine, *json.loads(heard[0]))
    # Taking Python apart takes longer than all that was told.
    os._exit(0)


def _hear(heard: list[str]) -> None:
    """Hear what to read; if nobody will ever say it, end, whatever is being loaded."""
    heard.append(sys.stdin.readline())
    if not heard[0]:
        os._exit(0)


def _tell(engine: ModuleType, kind: str, *where: str) -> None:
    """Write what pystack reads of a "core" (its path, the program's path) or a "process" (its id) as one JSON."""
    out = os.dup(1)
    os.dup2(2, 1)

    def tell() -> None:
        threads, errors = _read(engine, kind, where)
        with os.fdopen(out, "w") as file:
            json.dump({**_pack(threads), "errors": errors, "live": kind == "process"}, file, separators=(",", ":"))

    # pystack calls itself for every Python frame: 10,000 of them are more than the usual stack of 8 MiB holds.
    threading.stack_size(1 << 29)
    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()


def _read(engine: ModuleType, kind: str, where: Sequence[str]) -> tuple[Sequence[Any], list[str]]:
    """Read as much as can be: threads without Python as well, else those with it, else these without C frames."""
    import pathlib

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
            python.append([number(*code), int(one.is_entry), int(one.is_shim)])
        native = [
            number(one.symbol, one.path, one.linenumber, one.library, one.address) for one in thread.native_frames
        ]
        gil = int(thread.holds_the_gil)
        told.append({"tid": thread.tid, "name": thread.name, "gil": gil, "native": native, "python": python})
    return {"frames": list(numbers), "threads": told}


if __name__ == "__main__":
    main()
