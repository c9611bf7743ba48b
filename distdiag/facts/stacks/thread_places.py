"""Libraries and exported functions on threads' stacks, running or asleep.

A rank that waits for its GPU runs: the driver polls memory in user space. So neither its state nor its system call
reveals the wait, but its stack does. A running thread is sampled by perf_event_open, which does not stop it, or if that
is refused by ptrace. For a sleeping one the kernel reports the stack pointer in /proc/PID/task/TID/syscall.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter

from distdiag.facts import deadlines, machine
from distdiag.facts.process import procs, ptrace_permission
from distdiag.facts.stacks import perf_samples, ptrace_samples
from distdiag.facts.stacks.stack_libraries import Binaries, Stacks
from distdiag.facts.stacks.user_registers import STACK_BYTES, Sample
from distdiag.facts.text import printable
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


LONGEST_S = 1.0
"""Limit of the window: 64 spinning ranks on 2 cores run 30 ms of it each."""
_ENOUGH = 5
"""Samples of a running thread that allow the window to end."""
_LOOKS = 6
"""Checks per window: a thread that polls with usleep is asleep in most of them."""
_PATIENCE_S, _STOP_S = 2.0, 0.3
_BACKWARD = "pt_autograd_"
_QUIET = ("S", "T", "t", "I")


@record
class ThreadPlace:
    """The place of one thread during the sampling window.

    `state`: the last one seen (R, S, D, T...). `method`: "perf", "ptrace" or "syscall", as for most samples; "" if its
    place is unknown, with `why` and, if a setting forbids it, `hint`. `samples`: valid ones. `inner`: innermost library
    apart from the C library's (base name such as libcuda.so.550.90.07) and the number of samples with it, most first.
    `libraries` and `calls` (exported functions of the selected libraries): on the stack in most samples, innermost
    first.
    """

    tid: int
    comm: str
    state: str
    method: str
    samples: int
    inner: tuple[tuple[str, int], ...]
    libraries: tuple[str, ...]
    calls: tuple[str, ...]
    why: str = ""
    hint: str = ""


@record
class Places:
    """The main thread of a process, then its backward threads (pt_autograd_N), then other requested ones.

    No threads: it exited.
    """

    pid: int
    threads: tuple[ThreadPlace, ...]


def read(
    pids: Sequence[int],
    named: Sequence[str],
    *,
    window_s: float = 0.05,
    more: Mapping[int, Sequence[int]] | None = None,
) -> list[Places]:
    """Sample the threads of all processes in parallel. A process that blocks costs 2 s, not the result.

    `named`: patterns of library base names with exported functions to name. `more`: further threads by process. The
    window is extended, up to 1 s, until each running thread has 5 samples.
    """
    more = more or {}
    opened, _ = deadlines.each(
        dict.fromkeys(pids), lambda pid: _Process(pid, more.get(pid, ())), patience_s=_PATIENCE_S
    )
    late = _sample([process for process in opened.values() if process.memory is not None], window_s)
    found, stuck = _places(opened, named, late)
    for pid in opened.keys() - late - stuck:  # an abandoned thread may still read through the others
        opened[pid].close()
    return [found.get(pid) or _silent(pid) for pid in pids]


class _Thread:
    def __init__(self, pid: int, tid: int, comm: str) -> None:
        self.tid, self.comm, self.state = tid, comm, ""
        self.samples: list[tuple[str, Sample]] = []
        self.spins = False
        self.syscall_error: OSError | None = None
        self.ptrace_error: OSError | None = None
        self.perf_error: OSError | None = None
        self.sampler: perf_samples.Sampler | None = None
        self._folder, self._pid, self._switches = f"/proc/{pid}/task/{tid}", pid, -1
        try:
            self.sampler = perf_samples.Sampler(tid)
        except OSError as error:
            self.perf_error = error

    def look(self, memory: int) -> None:
        """Read its state; sample it if it sleeps."""
        before, switches = self.state, self._switches
        self.state, self._switches = self._read_state(), self._read_switches()
        # A thread that did not sleep between two checks is unlikely to fall asleep at this very moment.
        self.spins = self.state == before == "R" and self._switches == switches
        if self.state in _QUIET:
            self._sample_asleep(memory)

    def still_spins(self) -> bool:
        """Return whether it runs and has not slept since the last check."""
        return self._read_state() == "R" and self._read_switches() == self._switches

    def drain(self) -> None:
        if self.sampler is not None:
            self.samples += [("perf", sample) for sample in self.sampler.drain()]

    def is_short_of_samples(self) -> bool:
        can = self.sampler is not None or self.ptrace_error is None
        return self.state == "R" and can and len(self.samples) < _ENOUGH

    def _sample_asleep(self, memory: int) -> None:
        try:
            line = self._syscall()
            words = line.split()
            if len(words) < 3:  # it runs again
                return
            sp, ip = (int(word, 16) for word in words[-2:])
            stack = os.pread(memory, STACK_BYTES, sp)
            if self._syscall() == line:
                self.samples.append(("syscall", Sample(ip, sp, stack)))
        except (OSError, OverflowError) as error:
            self.syscall_error = error if isinstance(error, OSError) else None

    def _syscall(self) -> str:
        with open(f"{self._folder}/syscall", encoding="ascii") as file:
            return file.read()

    def _read_state(self) -> str:
        return machine.read_text(f"{self._folder}/stat").rpartition(")")[2][1:2]

    def _read_switches(self) -> int:
        """Count how often it went to sleep, for ptrace; sched_yield does not count."""
        return procs.switches(self._pid, self.tid) if self.sampler is None else -1


class _Process:
    """One process with its open memory (None: unreadable) and the requested threads."""

    def __init__(self, pid: int, more: Sequence[int]) -> None:
        self.pid = pid
        self.memory: int | None = None
        self.maps = procs.maps(pid) or ""
        tasks = {task.tid: task for task in procs.tasks(pid)}
        backward = sorted(tid for tid, task in tasks.items() if task.comm.startswith(_BACKWARD))
        self.wanted = [tasks[tid] for tid in dict.fromkeys((pid, *backward, *more)) if tid in tasks]
        self.threads: list[_Thread] = []
        if not self.maps:
            return
        try:
            self.memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        self._begin = int(self.maps.partition("-")[0], 16)
        self.threads = [_Thread(pid, task.tid, task.comm) for task in self.wanted]

    def look(self) -> None:
        assert self.memory is not None
        for thread in self.threads:
            thread.look(self.memory)

    def spinning(self) -> list[ptrace_samples.Spinning]:
        """List the threads that only ptrace can sample."""
        assert self.memory is not None
        return [
            ptrace_samples.Spinning(thread.tid, self.memory, self._guard(thread))
            for thread in self.threads
            if thread.spins and thread.sampler is None and thread.is_short_of_samples()
        ]

    def _guard(self, thread: _Thread) -> Callable[[], bool]:
        def still_spins() -> bool:
            assert self.memory is not None
            try:
                os.pread(self.memory, 1, self._begin)
            except OSError:
                return False
            return thread.still_spins()

        return still_spins

    def close(self) -> None:
        for thread in self.threads:
            if thread.sampler is not None:
                thread.sampler.close()
        if self.memory is not None:
            os.close(self.memory)


def _sample(processes: Sequence[_Process], window_s: float) -> set[int]:
    """Sample for the window; return the processes that blocked a check."""
    late: set[int] = set()
    began = time.monotonic()
    while True:
        steady = [process for process in processes if process.pid not in late]
        _, slow = deadlines.each(steady, _Process.look, patience_s=_PATIENCE_S)
        late.update(process.pid for process in slow)
        steady = [process for process in steady if process.pid not in late]
        _interrupt(steady)
        threads = [thread for process in steady for thread in process.threads]
        for thread in threads:
            thread.drain()
        elapsed = time.monotonic() - began
        is_enough = elapsed >= window_s and not any(thread.is_short_of_samples() for thread in threads)
        if is_enough or elapsed >= LONGEST_S:
            return late
        time.sleep(window_s / _LOOKS)


def _interrupt(processes: Iterable[_Process]) -> None:
    """Sample by ptrace, in an OS thread whose end detaches from threads that did not stop in time."""
    spinning = [thread for process in processes for thread in process.spinning()]
    if not spinning:
        return
    done, _ = deadlines.together({0: lambda: ptrace_samples.take(spinning, patience_s=_STOP_S)}, patience_s=_PATIENCE_S)
    by_tid = {thread.tid: thread for process in processes for thread in process.threads}
    for taken in done.values():
        for tid, sample in taken.samples.items():
            by_tid[tid].samples.append(("ptrace", sample))
        for tid, error in taken.refused.items():
            by_tid[tid].ptrace_error = error


def _places(opened: Mapping[int, _Process], named: Sequence[str], late: set[int]) -> tuple[dict[int, Places], set[int]]:
    """Return the places by process, and the processes that blocked reading their files or memory."""
    binaries = Binaries()

    def analyse(pid: int) -> Places:
        process = opened[pid]
        if process.memory is None:
            return Places(pid, tuple(_denied(pid, task) for task in process.wanted))
        stacks = Stacks(pid, process.maps, process.memory, named, binaries)
        return Places(pid, tuple(_thread_place(thread, stacks) for thread in process.threads))

    found, stuck = deadlines.each([pid for pid in opened if pid not in late], analyse, patience_s=_PATIENCE_S)
    return found, set(stuck)


def _silent(pid: int) -> Places:
    main = procs.read(pid)
    if main is None:
        return Places(pid, ())
    why = "its memory did not answer in time"
    return Places(pid, (_unknown(pid, printable(main.comm), main.state, why),))


def _denied(pid: int, task: procs.Task) -> ThreadPlace:
    scope = ptrace_permission.ptrace_scope()
    hint = "CAP_SYS_PTRACE (Docker: --cap-add SYS_PTRACE), or the rights of the job's user"
    if scope:
        hint = f"sysctl kernel.yama.ptrace_scope=0, or {hint}" if scope < 3 else "a reboot with a lower ptrace_scope"
    return _unknown(task.tid, printable(task.comm), task.state, ptrace_permission.why_denied(pid), hint)


def _unknown(tid: int, comm: str, state: str, why: str, hint: str = "") -> ThreadPlace:
    return ThreadPlace(tid, comm, state, "", 0, (), (), (), why, hint)


def _thread_place(thread: _Thread, stacks: Stacks) -> ThreadPlace:
    comm = printable(thread.comm)
    if not thread.samples:
        return _unknown(thread.tid, comm, thread.state, *_why(thread))
    places = [stacks.place(sample) for _, sample in thread.samples]
    methods = Counter(method for method, _ in thread.samples)
    return ThreadPlace(
        tid=thread.tid,
        comm=comm,
        state=thread.state,
        method=methods.most_common(1)[0][0],
        samples=len(places),
        inner=tuple(Counter(place.inner for place in places if place.inner).most_common()),
        libraries=_in_most([place.libraries for place in places]),
        calls=_in_most([place.calls for place in places]),
    )


def _in_most(stacks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names on more than half of the stacks, ordered by mean depth."""
    depths: dict[str, list[int]] = {}
    for stack in stacks:
        for depth, name in enumerate(stack):
            depths.setdefault(name, []).append(depth)
    common = {name: sum(found) / len(found) for name, found in depths.items() if 2 * len(found) > len(stacks)}
    return tuple(sorted(common, key=lambda name: common[name]))


def _why(thread: _Thread) -> tuple[str, str]:
    """Return why a thread has no sample, and the setting that would allow one."""
    if thread.state in ("", "Z", "X"):
        return "it has ended", ""
    if thread.state == "D":
        return "it waits in the kernel (state D)", ""
    if thread.state != "R":
        error = thread.syscall_error
        return f"its system call cannot be read: {error.strerror if error else 'it changes too fast'}", ""
    if thread.perf_error is None:
        return f"it got no processor for {LONGEST_S:g} s", ""
    why, hint = perf_samples.why_refused(thread.perf_error)
    if thread.ptrace_error is None:
        return f"{why}, and ptrace got no sample of it in time", hint
    # Its memory is open to us, which requires the same permission as tracing it.
    tracer = procs.tracer(thread.tid)
    if tracer is not None:
        return f"{why}, and process {tracer} traces it", hint
    if perf_samples.seccomp() and thread.ptrace_error.errno != errno.ESRCH:
        return "perf_event_open and ptrace are forbidden (seccomp)", hint
    return f"{why}, and ptrace failed: {thread.ptrace_error.strerror}", hint
