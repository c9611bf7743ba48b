"""Python stacks of other processes, by py-spy, without stopping them."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.node import run, tools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Stack:
    """The main thread's frames, innermost first, as "function (file:line)"; or why there are none."""

    frames: tuple[str, ...]
    error: str = ""


def dump_all(pids: Sequence[int], *, timeout_s: float) -> dict[int, Stack]:
    """Read the stacks of several processes at the same time, all within about `timeout_s` seconds."""
    if not pids:
        return {}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=min(8, len(pids))) as pool:
        return dict(zip(pids, pool.map(lambda pid: dump(pid, timeout_s=timeout_s), pids)))


def dump(pid: int, *, timeout_s: float) -> Stack:
    """Read one process's stack. It is never paused: a stopped or stuck process is read as it is."""
    tool = tools.find("py-spy")
    if tool is None:
        return Stack((), "py-spy is not installed (pip install py-spy)")
    try:
        done = run.run([tool, "dump", "--nonblocking", "--pid", str(pid)], timeout_s=timeout_s)
    except run.CannotRun as error:
        return Stack((), str(error))
    if done.timed_out:
        return Stack((), f"py-spy did not answer within {timeout_s:g} s")
    frames = main_thread(done.stdout.decode("utf-8", "replace"), pid)
    if not frames:
        complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return Stack((), complaint[0][:200] if complaint else "py-spy saw no Python frames")
    return Stack(frames)


def main_thread(text: str, pid: int) -> tuple[str, ...]:
    """Take the main thread's frames out of `py-spy dump` text: thread id = process id, or by its name."""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith("Thread "):
            if frames:
                break
            inside = line.startswith(f"Thread {pid} ") or '"MainThread"' in line
        elif inside and line.startswith("    ") and line.strip():
            frames.append(line.strip())
    return tuple(frames)
