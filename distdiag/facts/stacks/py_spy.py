"""Python stacks of other processes by `py-spy dump`, in parallel, each with its own deadline."""

from __future__ import annotations

import json

from distdiag.facts import carried_tools, programs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    Row = dict[str, Any]
    """A thread or a frame in `py-spy dump --json`, of any version: its fields are checked where they are read."""

_LONGEST_ERROR = 200


@record
class Dump:
    """py-spy's result for one process. `done`: None if py-spy could not be started.

    `threads`: as in `py-spy dump --json`, frames innermost first; empty if unreadable.
    """

    pid: int
    threads: list[Row]
    done: programs.Done | None


@record
class Stack:
    """The main thread's frames, innermost first, as "function (file:line)"; or the error."""

    frames: tuple[str, ...]
    error: str = ""


def dump(
    tool: str, pids: Sequence[int], *, timeout_s: float, native: bool = False, locals_too: bool = False
) -> Iterator[Dump]:
    """Run py-spy on several processes in parallel.

    Only `native` pauses them: py-spy would wait forever to pause a process that is stopped or stuck in the kernel.
    """
    how = ["--native" if native else "--nonblocking", "--json", *(["--locals"] if locals_too else [])]
    commands = {pid: [tool, "dump", *how, "--pid", str(pid)] for pid in pids}
    for pid, done in programs.run_many(commands, timeout_s=timeout_s):
        yield Dump(pid, _threads(done.stdout) if done is not None else [], done)


def main_stacks(pids: Sequence[int], *, timeout_s: float) -> dict[int, Stack]:
    """Read the main threads of several processes in parallel, without pausing any."""
    if not pids:
        return {}
    tool = carried_tools.find("py-spy")
    if tool is None:
        return dict.fromkeys(pids, Stack((), "py-spy is not installed (pip install py-spy)"))
    return {found.pid: _main_stack(found, timeout_s) for found in dump(tool, pids, timeout_s=timeout_s)}


def _main_stack(found: Dump, timeout_s: float) -> Stack:
    if found.done is None:
        return Stack((), "cannot start py-spy")
    if found.done.timed_out:
        return Stack((), f"py-spy did not answer within {timeout_s:g} s")
    named = ((thread, (thread.get("os_thread_id"), thread.get("thread_name"))) for thread in found.threads)
    main = next((thread for thread, (tid, name) in named if tid == found.pid or name == "MainThread"), None)
    try:
        frames = tuple(map(_frame, main["frames"])) if main is not None else ()
    except (KeyError, TypeError):
        frames = ()
    if not frames:
        complaint = found.done.stderr.decode("utf-8", "replace").strip().splitlines()
        return Stack((), complaint[0][:_LONGEST_ERROR] if complaint else "py-spy found no Python frames")
    return Stack(frames)


def _frame(frame: Row) -> str:
    line = f":{frame['line']}" if frame["line"] else ""
    return f"{frame['name']} ({frame.get('short_filename') or frame['filename']}{line})"


def _threads(answer: bytes) -> list[Row]:
    try:
        threads = json.loads(answer)
    except ValueError:  # torn, as the process was running
        return []
    is_list = isinstance(threads, list) and all(isinstance(thread, dict) for thread in threads)
    return threads if is_list else []
