"""Stacks of many processes at once: the method depends on the state; each has its own deadline, and none is harmed.

A waiting rank, asleep or in a GPU driver, is read from its memory (see waiting_stacks), at a tenth of the cost of
starting py-spy. The others are read by py-spy without pausing them: py-spy would wait forever to pause a process that
is stopped or has a thread in the kernel (D), and fail on a traced one. Afterwards each process is checked to be in its
original state.
"""

from __future__ import annotations

import time
from dataclasses import replace

from distdiag.facts import carried_tools, deadlines, machine
from distdiag.facts.process import procs, ptrace_permission
from distdiag.facts.process.resume import resume
from distdiag.facts.stacks import py_spy, waiting_stacks
from distdiag.facts.stacks.stack_types import (
    LOCALS,
    MAIN,
    WHOLE,
    Frame,
    Sample,
    Thread,
    counters_and_peer,
    leaves_work_to_threads,
    process_groups,
    read_threads,
)
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_PATIENCE_S = 1.0
_MOST_OTHERS = 16


@record
class SampleOptions:
    """Sampling options; `timeout_s` per process."""

    timeout_s: float
    native: bool = False
    all_threads: bool = False


def take_samples(pids: Sequence[int], options: SampleOptions) -> dict[int, Sample]:
    """Sample several processes in parallel, each with its own deadline."""
    clocks: dict[int, float] = {}
    before = {pid: _Before(pid, clocks) for pid in pids}
    found = {pid: process.failed("gone", process.how_it_ended()) for pid, process in before.items() if process.is_gone}
    if not options.native and not options.all_threads:
        found.update(_resting([process for pid, process in before.items() if pid not in found], options))
    living = [pid for pid in pids if pid not in found]
    others = [
        pid for pid, sample in found.items() if sample.threads and leaves_work_to_threads(sample.threads[0].frames)
    ]
    if not living and not others:
        return found
    tool = carried_tools.find("py-spy")
    if tool is not None and others:
        whole = _dump(tool, {pid: before[pid] for pid in others}, options, native=False)
        found.update((pid, sample) for pid, sample in whole.items() if sample.threads)
    if tool is None:
        missing = "py-spy is not installed there and could not be copied"
        return {**found, **{pid: before[pid].failed("failed", missing) for pid in living}}
    if options.native:
        paused = _dump(tool, {pid: before[pid] for pid in living if before[pid].may_be_paused}, options, native=True)
        found.update({pid: sample for pid, sample in paused.items() if sample.threads})
    found.update(_dump(tool, {pid: before[pid] for pid in living if pid not in found}, options, native=False))
    # A running process may change while py-spy reads it, so inconsistent results are read once more.
    torn = {pid: before[pid] for pid in living if found[pid].status == "failed"}
    found.update(_dump(tool, torn, options, native=False))
    return found


def _resting(processes: Sequence[_Before], options: SampleOptions) -> dict[int, Sample]:
    """Read the main threads from memory, except with a thread stuck in the kernel, which may block any reader.

    They are read in turn, within one short deadline in all: if memory has to be read from a disk first, py-spy reads
    many in parallel.
    """
    deadline = time.monotonic() + _PATIENCE_S

    def read(process: _Before) -> Sample | None:
        if time.monotonic() > deadline:
            return None
        try:
            return process.at_rest(waiting_stacks.main_thread(process.pid, LOCALS))
        except waiting_stacks.Unclear:
            return None

    found, _ = deadlines.each([process for process in processes if not process.blocked], read, patience_s=_PATIENCE_S)
    return {process.pid: sample for process, sample in found.items() if sample is not None}


def _dump(tool: str, processes: Mapping[int, _Before], options: SampleOptions, *, native: bool) -> dict[int, Sample]:
    found = py_spy.dump(tool, tuple(processes), timeout_s=options.timeout_s, native=native, locals_too=True)
    return {dump.pid: processes[dump.pid].after(dump, options, native=native) for dump in found}


class _Before:
    """The state of a process before it was sampled."""

    def __init__(self, pid: int, clocks: dict[int, float]) -> None:
        self.pid = pid
        self._clocks = clocks
        self.at_s = time.monotonic()
        self.switches = procs.switches(pid)
        self.ran_s = procs.ran_s(pid)
        self.proc = procs.read(pid)
        self.tasks = procs.tasks(pid)
        self.tracer = procs.tracer(pid)
        self.blocked = [task.tid for task in self.tasks if task.state == "D"]

    @property
    def is_gone(self) -> bool:
        return self.proc is None or self.proc.state in "ZX"

    @property
    def may_be_paused(self) -> bool:
        """Whether pausing it for a moment, as --native needs, can neither hang nor collide with a debugger."""
        return not self.blocked and self.tracer is None and self.proc is not None and self.proc.state in "RS"

    def how_it_ended(self) -> str:
        return "exited" if self.proc is None else "exited, not yet reaped by its parent"

    def failed(self, status: str, reason: str, *, left_stopped: bool = False) -> Sample:
        """Return a sample without stacks: the reason, and the kernel's view instead."""
        return self._sample(status, reason, (), native=False, left_stopped=left_stopped)

    def at_rest(self, main: waiting_stacks.Main) -> Sample:
        """Return a sample of a waiting main thread read from memory."""
        status, reason = self._status()
        counters, peer = counters_and_peer(
            [(frame.function, frame.file, _short(frame.whole_numbers)) for frame in main.frames]
        )
        thread = Thread(
            os_thread_id=self.pid,
            name=MAIN,
            active=bool(self.proc and self.proc.state == "R"),
            owns_gil=main.gil_holder == self.pid,
            state=next((task.state for task in self.tasks if task.tid == self.pid), ""),
            frames=tuple(Frame(frame.function, frame.file, frame.line) for frame in main.frames),
            counters=counters,
            peer=peer,
            digests=tuple(frame.digest for frame in main.frames),
            reader="memory",
        )
        return self._sample(status, reason, (thread,), native=False, left_stopped=False, gil_holder=main.gil_holder)

    def after(self, dump: py_spy.Dump, options: SampleOptions, *, native: bool) -> Sample:
        done = dump.done
        left_stopped = native and self._let_go(cut_off=done is not None and done.cut_off)
        if done is None:
            return self.failed("failed", "cannot start py-spy", left_stopped=left_stopped)
        threads = _threads(dump, {task.tid: task for task in self.tasks})
        if threads:
            status, reason = self._status()
            is_whole = options.all_threads or leaves_work_to_threads(threads[0].frames)
            return self._sample(
                status,
                reason,
                tuple(map(self._with_switches, threads)) if is_whole else threads[:1],
                native=native,
                left_stopped=left_stopped,
                gil_holder=next((thread.os_thread_id for thread in threads if thread.owns_gil), None),
            )
        now = procs.read(self.pid)
        if now is None or now.state in "ZX":
            return self.failed("gone", "exited while it was sampled")
        if done.timed_out:
            return self.failed(
                "timeout", f"py-spy did not answer within {done.elapsed_s:.1f} s", left_stopped=left_stopped
            )
        status, reason = ptrace_permission.why_unreadable(self.pid, done.stderr.decode("utf-8", "replace"))
        return self.failed(status, reason, left_stopped=left_stopped)

    def _with_switches(self, thread: Thread) -> Thread:
        return (
            replace(thread, switches=procs.switches(self.pid, thread.os_thread_id)) if thread.os_thread_id else thread
        )

    def _status(self) -> tuple[str, str]:
        state = self.proc.state if self.proc else ""
        if self.tracer is not None:
            return "traced", f"traced by {machine.command_line(self.tracer) or 'a program'} (pid {self.tracer})"
        if state == "t":  # its tracer has left since
            return "traced", "a tracer held it for a moment"
        if state in machine.STOPPED:
            return "stopped", machine.why_it_stands_still(state)
        if thaws := procs.thaws_by(self.pid):
            return "frozen", f"frozen with its cgroup (docker pause, a freezer): {thaws}"
        if self.blocked:
            return (
                "kernel",
                f"{len(self.blocked)} of its threads {'is' if len(self.blocked) == 1 else 'are'} in D state",
            )
        return "ok", ""

    def _standstill(self, tid: int) -> procs.Standstill:
        return procs.standstill(self.pid, tid, self._clocks)

    def _let_go(self, *, cut_off: bool) -> bool:
        """Resume a process that was not stopped before the sample; return whether it was found stopped."""
        return self.may_be_paused and resume(self.pid, may_come=cut_off)

    def _sample(
        self,
        status: str,
        reason: str,
        threads: tuple[Thread, ...],
        *,
        native: bool,
        left_stopped: bool,
        gil_holder: int | None = None,
    ) -> Sample:
        main = next((task for task in self.tasks if task.tid == self.pid), None)
        in_ticks_s = main.cpu_s if main else 0.0
        # The main thread first, then threads stuck in the kernel, then possible workers.
        known = {task.tid for task in self.tasks}
        others = [thread.os_thread_id for thread in threads[1 : 1 + _MOST_OTHERS] if thread.os_thread_id in known]
        stuck = [] if self.is_gone else list(dict.fromkeys([self.pid, *self.blocked[:4], *others]))
        return Sample(
            status=status,
            reason=reason,
            state=self.proc.state if self.proc else "",
            tracer=self.tracer,
            cpu_s=self.proc.cpu_s if self.proc else 0.0,
            main_cpu_s=in_ticks_s if self.ran_s is None else self.ran_s,
            threads=threads,
            standstill=tuple(
                deadlines.each(stuck, self._standstill, patience_s=_PATIENCE_S)[0].values()
                if self.blocked
                else map(self._standstill, stuck)
            ),
            native=native,
            gil_holder=gil_holder,
            at_s=self.at_s,
            switches=self.switches,
            left_stopped=left_stopped,
            groups=process_groups(self.tasks),
        )


def _short(numbers: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in numbers if WHOLE.fullmatch(str(value)))


def _threads(dump: py_spy.Dump, tasks: dict[int, procs.Task]) -> tuple[Thread, ...]:
    """Parse py-spy's threads, the main one first, keeping only loop counters of the locals."""
    try:
        return read_threads(dump.threads, tasks)
    except (ValueError, KeyError, TypeError):  # torn, as the process was running
        return ()
