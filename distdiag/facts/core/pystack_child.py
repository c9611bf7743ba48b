"""Reads stacks by pystack, and tells them as JSON: a program of its own, which imports nothing of distdiag.

Its text is run by whatever Python has pystack. It loads that, and waits to be told on stdin whom to read: a "process"
by its id, with its C frames; or a "core" by its path and that of the program, Python frames first. Who asks for a core
reads the C frames meanwhile, and has a question left, in a second line: what the debug information says of addresses.
If it cannot read them, that is null, and pystack reads them, too. "lines": there is nothing but such a question.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType
    from typing import Any

    Lines = Any  # libdw.Lines, which is not here

_MOST_S_FOR_LINES = 10


def main(lines: type[Lines]) -> None:
    """Load pystack, hear what to read, and tell it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.environ.pop("DEBUGINFOD_URLS", None)  # libdw would ask the network
    heard: list[str] = []
    hearing = threading.Thread(target=_hear, args=(heard,), daemon=True)
    hearing.start()
    try:
        from pystack import engine
    except Exception:  # noqa: BLE001 - whoever asks will hear of it; leaving as usual would wait for the other thread
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    hearing.join()
    _tell(engine, lines, *json.loads(heard[0]))
    # Taking Python apart takes longer than all that was told.
    os._exit(0)


def _hear(heard: list[str]) -> None:
    """Hear what to read; if nobody will ever say it, end, whatever is being loaded."""
    heard.append(sys.stdin.readline())
    if not heard[0]:
        os._exit(0)


def _tell(engine: ModuleType, lines: type[Lines], kind: str, *where: str) -> None:
    """Write what is read, as one JSON or two."""
    out = os.dup(1)
    os.dup2(2, 1)

    def tell() -> None:
        with os.fdopen(out, "w") as file:
            for part in _parts(engine, lines, kind, where):
                json.dump(part, file, separators=(",", ":"))
                file.write("\n")
                file.flush()

    # pystack calls itself for every Python frame: 10,000 of them are more than the usual stack of 8 MiB holds.
    threading.stack_size(1 << 29)
    thread = threading.Thread(target=tell)
    thread.start()
    thread.join()


def _parts(engine: ModuleType, lines: type[Lines], kind: str, where: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Give threads; of a core also lines, after them: whatever these cost or do to us, the threads have been told."""
    if kind == "process":
        yield _all(engine, kind, where)
        return
    threads: Sequence[Any] = []
    errors = []
    if kind == "core":
        try:
            threads = _threads(engine, kind, where, engine.NativeReportingMode.OFF)
        except Exception as error:  # noqa: BLE001 - whatever it is, who asks has the C frames
            errors.append(str(error))
    question = _question()
    if question is None and kind == "core":
        yield _all(engine, kind, where)
        return
    yield _told(kind, threads, errors)
    signal.alarm(_MOST_S_FOR_LINES)  # debug information can be gigabytes
    yield {"lines": _lines(lines, question or {})}


def _question() -> dict[str, list[int]] | None:
    line = sys.stdin.readline()
    if not line:  # nobody is there any more
        os._exit(0)
    wanted: dict[str, list[int]] | None = json.loads(line)
    return wanted


def _lines(lines: type[Lines], question: dict[str, list[int]]) -> dict[str, Any]:
    if not question:
        return {}
    from pystack import _pystack

    reading = lines(_pystack.__file__)
    return {path: reading.of(path, addresses) for path, addresses in question.items()}


def _all(engine: ModuleType, kind: str, where: Sequence[str]) -> dict[str, Any]:
    """Read as much as can be: threads without Python as well, else those with it, else these without C frames."""
    modes = engine.NativeReportingMode
    errors: list[str] = []
    for mode in (modes.ALL, modes.PYTHON, modes.OFF):
        try:
            return _told(kind, _threads(engine, kind, where, mode), errors)
        except Exception as error:  # noqa: BLE001 - whatever it is, less may be readable
            if str(error) in errors:
                break
            errors.append(str(error))
    return _told(kind, [], errors)


def _threads(engine: ModuleType, kind: str, where: Sequence[str], mode: object) -> Sequence[Any]:
    import pathlib

    if kind == "core":
        return list(engine.get_process_threads_for_core(*map(pathlib.Path, where), native_mode=mode))
    return list(engine.get_process_threads(int(where[0]), native_mode=mode))


def _told(kind: str, threads: Sequence[Any], errors: list[str]) -> dict[str, Any]:
    return {**_pack(threads), "errors": errors, "live": kind == "process"}


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
