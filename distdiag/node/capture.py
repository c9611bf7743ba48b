"""Stacks of many processes at once, each by its state, each with its own deadline, and none of them harmed.

py-spy reads a process without pausing it; it would wait for ever to pause one that is stopped or has a thread in the
kernel (D), and fail on one that is traced. Whatever was done, it is looked after whether the process was left as found.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass

from distdiag.node import machine, patience, procs, run, tools
from distdiag.node.wire import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


_PATIENCE_S = 1.0
COUNTERS = re.compile(
    r"(global_|local_|train_|cur_|current_|num_|n_)?"
    r"(step|steps|iter|iters|iteration|it|epoch|i|idx|batch_idx|batch_i|batch|micro\w{0,16}|mb_idx)(_idx|_i|_num|_count)?"
)
"""Names of loop counters: the only locals that are ever kept, and only where they are whole numbers."""
_WHOLE = re.compile(r"-?[0-9]{1,12}")
"""More digits are no count: a running process may change under the eyes of whoever reads it."""


@dataclass(frozen=True)
class Frame:
    """One Python (or with `native`, C) frame; `line` is 0 where it is not known."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Counter:
    """A loop counter of one frame: `depth` counts from the outermost frame, which is 0."""

    depth: int
    function: str
    name: str
    value: int


@dataclass(frozen=True)
class Thread:
    """One thread's frames, innermost first. `active`: it was not idle, as py-spy sees it."""

    os_thread_id: int
    name: str
    active: bool
    owns_gil: bool
    state: str
    frames: tuple[Frame, ...]
    counters: tuple[Counter, ...]


@dataclass(frozen=True)
class Capture:
    """One look at one process.

    `status`: ok; stopped, traced, kernel (a thread in D): read all the same, with that state; denied, not-python,
    failed, timeout: no stack, `reason` says why; gone: there is no such process any more, or only its zombie.
    `cpu_s` and `main_cpu_s`: processor time so far, of all threads and of the main one, at `at_s` (monotonic clock).
    `gil_holder`: the thread that holds the interpreter lock, if any does. `switches`: how often the main thread went to
    wait so far; one that waits for ever does not wake up to wait again.
    """

    status: str
    reason: str
    state: str
    tracer: int | None
    cpu_s: float
    main_cpu_s: float
    threads: tuple[Thread, ...]
    standstill: tuple[procs.Standstill, ...]
    native: bool
    gil_holder: int | None
    at_s: float
    switches: int = -1
    left_stopped: bool = False


@dataclass(frozen=True)
class Look:
    """How to look at processes."""

    timeout_s: float
    native: bool = False
    counters: bool = True
    all_threads: bool = False


def capture_all(pids: Sequence[int], look: Look) -> dict[int, Capture]:
    """Look at several processes at the same time; each costs its own deadline at most."""
    tool = tools.find("py-spy")
    before = {pid: _Before(pid) for pid in pids}
    found = {pid: one.failed("gone", one.how_it_ended()) for pid, one in before.items() if one.is_gone}
    living = [pid for pid in pids if pid not in found]
    if tool is None:
        missing = "py-spy is not there, and could not be brought"
        return {**found, **{pid: before[pid].failed("failed", missing) for pid in living}}
    if look.native:
        paused = _dump(tool, {pid: before[pid] for pid in living if before[pid].may_be_paused}, look, native=True)
        found.update({pid: one for pid, one in paused.items() if one.threads})
    found.update(_dump(tool, {pid: before[pid] for pid in living if pid not in found}, look, native=False))
    # A running process may change under py-spy's eyes, so what made no sense is read once more.
    torn = {pid: before[pid] for pid in living if found[pid].status == "failed"}
    found.update(_dump(tool, torn, look, native=False))
    return found


def _dump(tool: str, processes: Mapping[int, _Before], look: Look, *, native: bool) -> dict[int, Capture]:
    how = ["--native" if native else "--nonblocking", "--json", *(["--locals"] if look.counters else [])]
    commands = {pid: [tool, "dump", *how, "--pid", str(pid)] for pid in processes}
    ends = run.run_many(commands, timeout_s=look.timeout_s)
    return {pid: processes[pid].after(done, look, native=native) for pid, done in ends}


class _Before:
    """What a process was like before it was looked at."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.at_s = time.monotonic()
        self.switches = procs.switches(pid)
        self.proc = procs.read(pid)
        self.tasks = procs.tasks(pid)
        self.tracer = procs.tracer(pid)
        self.blocked = [task.tid for task in self.tasks if task.state == "D"]

    @property
    def is_gone(self) -> bool:
        """There is nothing to look at."""
        return self.proc is None or self.proc.state in "ZX"

    @property
    def may_be_paused(self) -> bool:
        """Whether pausing it for a moment, as --native needs, can neither hang nor collide with a debugger."""
        return not self.blocked and self.tracer is None and self.proc is not None and self.proc.state in "RS"

    def how_it_ended(self) -> str:
        """Tell of a process that is gone."""
        return "it has ended" if self.proc is None else "it has ended and is a zombie"

    def failed(self, status: str, reason: str, *, left_stopped: bool = False) -> Capture:
        """Tell why there are no stacks, and what the kernel says instead."""
        return self._capture(status, reason, (), native=False, left_stopped=left_stopped)

    def after(self, done: run.Done | None, look: Look, *, native: bool) -> Capture:
        """Judge what py-spy said."""
        left_stopped = native and self._let_go()
        if done is None:
            return self.failed("failed", "py-spy could not be started", left_stopped=left_stopped)
        threads = _threads(done.stdout, {task.tid: task for task in self.tasks})
        if threads:
            status, reason = self._standing()
            return self._capture(
                status,
                reason,
                threads if look.all_threads else threads[:1],
                native=native,
                left_stopped=left_stopped,
                gil_holder=next((thread.os_thread_id for thread in threads if thread.owns_gil), None),
            )
        now = procs.read(self.pid)
        if now is None or now.state in "ZX":
            return self.failed("gone", "it ended while it was looked at")
        if done.timed_out:
            return self.failed(
                "timeout", f"py-spy did not answer within {done.elapsed_s:.1f} s", left_stopped=left_stopped
            )
        status, reason = why_unreadable(self.pid, done.stderr.decode("utf-8", "replace"))
        return self.failed(status, reason, left_stopped=left_stopped)

    def _standing(self) -> tuple[str, str]:
        state = self.proc.state if self.proc else ""
        if self.tracer is not None:
            return "traced", f"traced by {machine.command_line(self.tracer) or 'a program'} (pid {self.tracer})"
        if state in machine.STOPPED:
            return "stopped", machine.why_it_stands_still(state)
        if self.blocked:
            return (
                "kernel",
                f"{len(self.blocked)} of its threads {'is' if len(self.blocked) == 1 else 'are'} in D state",
            )
        return "ok", ""

    def _let_go(self) -> bool:
        """Let a process run again that is stopped now and was not before; tells whether that was needed."""
        now = procs.read(self.pid)
        if now is None or now.state != "T" or self.proc is None or self.proc.state in machine.STOPPED:
            return False
        if not self.may_be_paused or procs.tracer(self.pid) is not None:
            return False
        try:
            os.kill(self.pid, signal.SIGCONT)
        except OSError:
            return True
        return True

    def _capture(
        self,
        status: str,
        reason: str,
        threads: tuple[Thread, ...],
        *,
        native: bool,
        left_stopped: bool,
        gil_holder: int | None = None,
    ) -> Capture:
        main = next((task for task in self.tasks if task.tid == self.pid), None)
        # The main thread, and whoever is stuck in the kernel.
        stuck = [] if self.is_gone else sorted({self.pid, *self.blocked[:4]})
        return Capture(
            status=status,
            reason=reason,
            state=self.proc.state if self.proc else "",
            tracer=self.tracer,
            cpu_s=self.proc.cpu_s if self.proc else 0.0,
            main_cpu_s=main.cpu_s if main else 0.0,
            threads=threads,
            standstill=tuple(
                patience.each(stuck, lambda tid: procs.standstill(self.pid, tid), patience_s=_PATIENCE_S)[0].values()
                if self.blocked
                else (procs.standstill(self.pid, tid) for tid in stuck)
            ),
            native=native,
            gil_holder=gil_holder,
            at_s=self.at_s,
            switches=self.switches,
            left_stopped=left_stopped,
        )


def _threads(data: bytes, tasks: dict[int, procs.Task]) -> tuple[Thread, ...]:
    """Read py-spy's JSON; the main thread comes first. Of the locals nothing but loop counters is kept."""
    try:
        return read_threads(json.loads(data), tasks)
    except (ValueError, KeyError, TypeError):  # torn while the process went on
        return ()


def read_threads(told: Sequence[dict[str, Any]], tasks: Mapping[int, procs.Task]) -> tuple[Thread, ...]:
    """Read the threads of one process from what `py-spy dump --json` tells. Raises ValueError, KeyError, TypeError."""
    found = []
    for one in told:
        tid = int(one.get("os_thread_id") or 0)
        task = tasks.get(tid)
        name = str(one.get("thread_name") or "") or (task.comm if task else "")
        frames = tuple(
            Frame(printable(str(f["name"])), printable(str(f["filename"])), int(f["line"]))
            for f in one["frames"]
            if not str(f["name"]).startswith("0x")  # an address without a name differs in every process
        )
        found.append(
            Thread(
                os_thread_id=tid,
                name=name,
                active=bool(one.get("active")),
                owns_gil=bool(one.get("owns_gil")),
                state=task.state if task else "",
                frames=frames,
                counters=_counters(one["frames"]),
            )
        )
    pid = int(told[0]["pid"]) if told else 0
    found.sort(key=lambda thread: (thread.os_thread_id != pid, thread.name != "MainThread"))
    return tuple(found)


def _counters(frames: Sequence[dict[str, Any]]) -> tuple[Counter, ...]:
    found = []
    for depth, frame in enumerate(reversed(frames)):
        for local in frame.get("locals") or ():
            text = str(local["repr"])
            if COUNTERS.fullmatch(str(local["name"])) and _WHOLE.fullmatch(text):
                found.append(Counter(depth, str(frame["name"]), str(local["name"]), int(text)))
    return tuple(found)


def why_unreadable(pid: int, complaint: str) -> tuple[str, str]:
    """Say why py-spy could not read a process: status and reason. Its own words mislead where rights are missing."""
    last = next((line for line in complaint.strip().splitlines() if line.startswith("Error")), complaint.strip())
    denied = "ermission" in complaint or "not permitted" in complaint
    words = procs.command_words(pid)
    if not denied and not procs.is_python(pid, words):
        return "not-python", f"not a Python program: {machine.command_line(pid) or 'unknown'}"
    if denied:
        return "denied", _why_denied(pid)
    return "failed", f"py-spy: {last[:200]}" if last else "py-spy saw no Python frames"


def _why_denied(pid: int) -> str:
    theirs, mine = procs.owner(pid), os.geteuid()
    if mine != 0 and theirs != mine:
        return f"it runs as another user (uid {theirs}, we are {mine})"
    scope = ptrace_scope()
    if scope:
        return f"kernel.yama.ptrace_scope is {scope}"
    if not may_trace():
        whose = f"it runs as uid {theirs}, and " if theirs != mine else ""
        return f"{whose}distdiag lacks CAP_SYS_PTRACE there"
    return "the kernel does not let us read it (a setuid program, or one that may not be dumped)"


def ptrace_scope() -> int | None:
    """Read kernel.yama.ptrace_scope: 0 own processes, 1 descendants, 2 CAP_SYS_PTRACE, 3 nobody; None without yama."""
    text = machine.read_text("/proc/sys/kernel/yama/ptrace_scope").strip()
    return int(text) if text.isdigit() else None


def may_trace() -> bool:
    """Tell whether we have CAP_SYS_PTRACE (bit 19, linux/capability.h)."""
    for line in machine.read_text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 19 & 1)
    return False
