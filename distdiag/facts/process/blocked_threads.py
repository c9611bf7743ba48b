"""Blocked threads of a process: the cause and duration of each wait, from /proc alone, without stopping or attaching.

The number and arguments of the system call are in /proc/PID/task/TID/syscall; the data they point to is read from the
process's memory. Both need ptrace permission, as reading descriptors does, although nothing is traced.
"""

from __future__ import annotations

import os
import re
import struct
import time
from dataclasses import replace
from functools import cached_property

from distdiag.facts import deadlines, machine
from distdiag.facts.process import off_cpu, procs, syscall_names
from distdiag.facts.process.descriptors import PATIENCE_S, Descriptor, Look, Watch, descriptors, wants
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_POLLED, _MAX_SELECTED, _MAX_PATH = 64, 1024, 4096
_TRIES = 3
_AT_FDCWD = -100
_FUTEX_WAIT, _FUTEX_WAIT_BITSET, _FUTEX_COMMAND, _FUTEX_REALTIME = 0, 9, 0x7F, 0x100
"""linux/futex.h. With FUTEX_WAIT_BITSET the timeout is absolute, on the monotonic or the real-time clock."""
_CONTENDED = 2
"""A contended glibc mutex (sysdeps/nptl/lowlevellock.h); the word after next is the owner."""
_P_PID, _P_PIDFD = 1, 3
_TIMER_ABSTIME = 1
_CLOCKS = (time.CLOCK_REALTIME, time.CLOCK_MONOTONIC)
_FOREVER_S = 1e9
"""Programs wait for the largest number of seconds to wait without end."""
_LOCKS = re.compile(r"(\d+): +(-> )?(FLOCK|POSIX|OFDLCK) +\S+ +(READ|WRITE) +(-?\d+) +\w+:\w+:(\d+) .*")
_WAITS_FOR_LOCK = {7: "POSIX", 38: "OFDLCK"}
"""Waiting commands of fcntl(2): F_SETLKW, F_OFD_SETLKW."""


@record
class Target:
    """A descriptor in a system call, and the event waited for; `descriptor` None: not open (any more)."""

    fd: int
    wants: str
    descriptor: Descriptor | None


@record
class Futex:
    """A futex wait. `waiters`: all waiting threads of the process, including this one.

    `owner`: the thread holding the mutex at that address, as recorded by glibc; None if it does not look like a mutex.
    """

    address: int
    waiters: tuple[int, ...]
    owner: int | None


@record
class Lock:
    """A lock on a file: FLOCK, POSIX, or OFDLCK (owned by no process: `pid` None); `mode`: READ or WRITE."""

    kind: str
    mode: str
    pid: int | None
    comm: str


@record
class Thread:
    """One thread. A running one has no system call; neither has one that waits outside any (state D: a page fault).

    `hidden`: only its name, state and `since_s` (seconds since it last ran) could be read. `unread`: why its arguments'
    memory is missing: "denied", "late" (the memory did not answer), "moved" (the thread ran during the read),
    "unmapped". `targets`: the descriptors it waits for: those watched by poll (at most 64), select and epoll, else the
    one in its arguments. `children`: those it may be waiting for. `locks`: the holders of the lock it waits for.
    `wakes_in_s`: the rest of a sleep, or of a futex wait with a timeout; None without one, or if it is over 30 years.
    """

    tid: int
    comm: str
    state: str
    syscall: str = ""
    arguments: tuple[int, ...] = ()
    wait_channel: str = ""
    since_s: float | None = None
    hidden: bool = False
    unread: str = ""
    targets: tuple[Target, ...] = ()
    path: str = ""
    futex: Futex | None = None
    children: tuple[procs.Proc, ...] = ()
    locks: tuple[Lock, ...] = ()
    wakes_in_s: float | None = None


@record
class Blocked:
    """One process; no threads: exited. `moved`: threads that ran between two readings; `tracer`: pid of its tracer.

    `thaws`: the command to resume it, if its cgroup is frozen.
    """

    pid: int
    state: str
    tracer: int | None
    threads: tuple[Thread, ...]
    moved: tuple[int, ...]
    thaws: str = ""


@record
class _Call:
    """A thread's system call, and the memory its arguments point to, in the order of _extents."""

    tid: int
    words: str
    name: str = ""
    arguments: tuple[int, ...] = ()
    hidden: bool = False
    memory: tuple[bytes, ...] = ()
    unread: str = ""


def blocked(pid: int, look: Look | None = None, *, patience_s: float = PATIENCE_S) -> tuple[Thread, ...]:
    """Read the wait of each thread of a process; empty if it exited. `look` as for `descriptors`.

    Waits at most `patience_s` for the memory of the process, and for each file system that it uses.
    """
    process = _Process(pid, look or Look(), patience_s)
    tasks = procs.tasks(pid)
    process.calls = _with_memory(pid, [_call(pid, task) for task in tasks], patience_s)
    asleep_s = off_cpu.seconds(pid, [task.tid for task in tasks], process.look.clocks, patience_s=patience_s)
    return tuple(_thread(process, task, call, asleep_s.get(task.tid)) for task, call in zip(tasks, process.calls))


def locks_before(text: str, pid: int, kind: str, inode: int | None) -> tuple[Lock, ...]:
    """Find in /proc/locks the holders of the lock a process waits for: of this kind, on the file with this inode."""
    rows = [row for row in map(_LOCKS.fullmatch, text.splitlines()) if row and row[3] == kind]
    waiting = -1 if kind == "OFDLCK" else pid
    queues = {row[1] for row in rows if row[2] and int(row[5]) == waiting and inode in (None, int(row[6]))}
    return tuple(_lock(row) for row in rows if row[1] in queues and not row[2])


class _Process:
    def __init__(self, pid: int, look: Look, patience_s: float) -> None:
        self.pid = pid
        self.calls: list[_Call] = []
        self.look, self._patience_s = look, patience_s

    @cached_property
    def opened(self) -> dict[int, Descriptor]:
        found = descriptors(self.pid, self.look, patience_s=self._patience_s)
        return {descriptor.fd: descriptor for descriptor in found.descriptors}

    def targets(self, watches: Iterable[Watch]) -> tuple[Target, ...]:
        return tuple(Target(watch.fd, watch.wants, self.opened.get(watch.fd)) for watch in watches)


def _call(pid: int, task: procs.Task) -> _Call:
    """Read the system call of a thread: "running", or "-1 SP PC" (in none), or "NUMBER ARGUMENTS SP PC"."""
    try:
        line = _syscall_line(pid, task.tid)
    except PermissionError:
        return _Call(task.tid, "", hidden=True)
    words = line.split()
    if len(words) < 9 or task.state == "R":
        return _Call(task.tid, line)
    number = int(words[0])
    name = syscall_names.NAMES.get(os.uname().machine, {}).get(number, f"syscall {number}")
    return _Call(task.tid, line, name, tuple(int(word, 16) for word in words[1:7]))


def _syscall_line(pid: int, tid: int) -> str:
    try:
        with open(f"/proc/{pid}/task/{tid}/syscall", encoding="ascii") as file:
            return file.read()
    except PermissionError:
        raise
    except OSError:  # exited, or a kernel without this file
        return ""


def _with_memory(pid: int, calls: list[_Call], patience_s: float) -> list[_Call]:
    """Add the arguments' memory. A thread stuck in the kernel may hold the lock of the memory map."""
    if not any(map(_extents, calls)):
        return calls
    remembered, _ = deadlines.each([pid], lambda _: [_remember(pid, call) for call in calls], patience_s=patience_s)
    return remembered.get(pid) or [replace(call, unread="late") if _extents(call) else call for call in calls]


def _extents(call: _Call) -> tuple[tuple[int, int], ...]:
    """Return the extents of memory to read: (address, bytes)."""
    name, arguments = call.name, call.arguments
    if name in syscall_names.POLLS:
        return ((arguments[0], 8 * min(arguments[1], _MAX_POLLED)),)
    if name in syscall_names.SELECTS:
        size = (min(arguments[0], _MAX_SELECTED) + 63) // 64 * 8
        return tuple((address, size) for address in arguments[1:3])
    if name in syscall_names.PATHS:
        return ((arguments[syscall_names.PATHS[name]], _MAX_PATH),)
    if name in syscall_names.SLEEPS:
        return ((arguments[syscall_names.SLEEPS[name]], 16),)
    if name != "futex":
        return ()
    has_timeout = arguments[1] & _FUTEX_COMMAND == _FUTEX_WAIT_BITSET and arguments[3]
    return ((arguments[0], 12), (arguments[3], 16)) if has_timeout else ((arguments[0], 12),)


def _remember(pid: int, call: _Call) -> _Call:
    extents = _extents(call)
    if not extents:
        return call
    try:
        for _ in range(_TRIES):
            memory = _read_in_call(pid, call, extents)
            if memory is not None:
                return replace(call, memory=memory)
    except PermissionError:
        return replace(call, unread="denied")
    except (OSError, OverflowError):
        return replace(call, unread="unmapped")
    return replace(call, unread="moved")


def _read_in_call(pid: int, call: _Call, extents: Iterable[tuple[int, int]]) -> tuple[bytes, ...] | None:
    """Read the memory during one call; None if the thread ran meanwhile, even into the same call again."""
    schedstat = f"/proc/{pid}/task/{call.tid}/schedstat"
    turns = machine.read_text(schedstat)
    if _syscall_line(pid, call.tid) != call.words:
        return None
    with open(f"/proc/{pid}/task/{call.tid}/mem", "rb", buffering=0) as file:
        memory = tuple(os.pread(file.fileno(), size, address) if address else b"" for address, size in extents)
    has_moved = _syscall_line(pid, call.tid) != call.words or machine.read_text(schedstat) != turns
    return None if has_moved else memory


def _thread(process: _Process, task: procs.Task, call: _Call, asleep_s: float | None) -> Thread:
    plain = Thread(
        tid=task.tid,
        comm=task.comm,
        state=task.state,
        syscall=call.name,
        arguments=call.arguments,
        wait_channel=machine.read_text(f"/proc/{process.pid}/task/{task.tid}/wchan").strip("0"),
        since_s=asleep_s,
        hidden=call.hidden,
        unread=call.unread,
    )
    name = call.name
    if name in syscall_names.PATHS and call.memory:
        return _on_path(process, call, plain)
    if name in syscall_names.FUTEXES:
        return replace(plain, futex=_futex(process, call), wakes_in_s=_futex_ends_in_s(call))
    if name in syscall_names.WAITS:
        return replace(plain, children=_children(process.pid, call))
    if name in syscall_names.SLEEPS and call.memory:
        return replace(plain, wakes_in_s=_wakes_in_s(call, plain.since_s))
    return replace(plain, targets=process.targets(_watches(process, call)), locks=_locks(process, call))


def _watches(process: _Process, call: _Call) -> list[Watch]:
    if call.name in syscall_names.POLLS and call.memory:
        whole = call.memory[0][: len(call.memory[0]) // 8 * 8]
        return [Watch(fd, wants(events)) for fd, events, _ in struct.iter_unpack("=ihh", whole) if fd >= 0]
    if call.name in syscall_names.SELECTS and call.memory:
        reads, writes = (int.from_bytes(bits, "little") for bits in call.memory)
        letters = ((fd, "r" * (reads >> fd & 1) + "w" * (writes >> fd & 1)) for fd in range(call.arguments[0]))
        return [Watch(fd, some) for fd, some in letters if some]
    if call.name in syscall_names.EPOLLS:
        epoll = process.opened.get(_signed(call.arguments[0]))
        return list(epoll.watches) if epoll else []
    used = syscall_names.DESCRIPTORS.get(call.name, ())
    return [Watch(_signed(call.arguments[place]), wanted) for place, wanted in used]


def _on_path(process: _Process, call: _Call, plain: Thread) -> Thread:
    """Return the path; if it is empty (AT_EMPTY_PATH) the call uses a descriptor."""
    path = call.memory[0].split(b"\0")[0].decode("utf-8", "replace")
    start = _signed(call.arguments[0]) if syscall_names.PATHS[call.name] == 1 else _AT_FDCWD
    if not path and start >= 0:
        return replace(plain, targets=process.targets([Watch(start, "")]))
    if path.startswith("/"):
        return replace(plain, path=path)
    if start == _AT_FDCWD:
        return replace(plain, path=os.path.join(machine.link_target(f"/proc/{process.pid}/cwd"), path))
    folder = process.opened.get(start)
    return replace(plain, path=os.path.join(folder.target if folder else "", path))


def _futex(process: _Process, call: _Call) -> Futex:
    address = call.arguments[0]
    waiters = (
        other for other in process.calls if other.name in syscall_names.FUTEXES and other.arguments[0] == address
    )
    return Futex(address, tuple(other.tid for other in waiters), _owner(process, call))


def _owner(process: _Process, call: _Call) -> int | None:
    """Read the owner of a glibc mutex (int lock, unsigned count, int owner); None unless a thread of this process."""
    waits_at_mutex = call.arguments[1] & _FUTEX_COMMAND == _FUTEX_WAIT and call.arguments[2] == _CONTENDED
    if not waits_at_mutex or not call.memory or len(call.memory[0]) < 12:
        return None
    word, _, owner = struct.unpack("=III", call.memory[0])
    known = {_numbers(f"{process.pid}/task/{other.tid}", other.tid)[-1]: other.tid for other in process.calls}
    return known.get(owner) if word == _CONTENDED else None


def _children(pid: int, call: _Call) -> tuple[procs.Proc, ...]:
    """List the children that wait4 or waitid may be waiting for, by their pids in its namespace."""
    children = [child for child in procs.table().values() if child.parent == pid]
    kind, number = _signed(call.arguments[0]), _signed(call.arguments[1])
    if call.name == "waitid" and kind == _P_PIDFD:
        own = re.search(r"^Pid:\s*(\d+)", machine.read_text(f"/proc/{pid}/fdinfo/{number}"), re.MULTILINE)
        return tuple(child for child in children if own and child.pid == int(own[1]))
    wanted = kind if call.name == "wait4" else number if kind == _P_PID else -1
    if wanted <= 0:  # any, or those of a process group
        return tuple(children)
    depth = len(_numbers(str(pid), pid))
    return tuple(child for child in children if _numbers(str(child.pid), child.pid)[:depth][-1] == wanted)


def _numbers(process: str, number: int) -> list[int]:
    """List the ids of a process or thread, from our pid namespace down to its own."""
    return [int(word) for word in machine.status_words(process, "NSpid")] or [number]


def _locks(process: _Process, call: _Call) -> tuple[Lock, ...]:
    kind = "FLOCK" if call.name == "flock" else ""
    if call.name == "fcntl":
        kind = _WAITS_FOR_LOCK.get(call.arguments[1], "")
    if not kind:
        return ()
    file = process.opened.get(_signed(call.arguments[0]))
    return locks_before(machine.read_text("/proc/locks"), process.pid, kind, file.inode if file else None)


def _lock(row: re.Match[str]) -> Lock:
    pid = int(row[5]) if int(row[5]) > 0 else None
    holder = procs.read(pid) if pid else None
    return Lock(kind=row[3], mode=row[4], pid=pid, comm=holder.comm if holder else "")


def _wakes_in_s(call: _Call, since_s: float | None) -> float | None:
    asked_s = _timespec_s(call.memory[0])
    if asked_s is None:
        return None
    if call.name == "clock_nanosleep" and call.arguments[1] & _TIMER_ABSTIME:
        return _rest_s(asked_s, time.clock_gettime(call.arguments[0])) if call.arguments[0] in _CLOCKS else None
    return None if since_s is None else _rest_s(asked_s, since_s)


def _futex_ends_in_s(call: _Call) -> float | None:
    """Return the seconds until a futex wait times out; None without a timeout."""
    ends_at_s = _timespec_s(call.memory[1]) if len(call.memory) > 1 else None
    if ends_at_s is None:
        return None
    clock = time.CLOCK_REALTIME if call.arguments[1] & _FUTEX_REALTIME else time.CLOCK_MONOTONIC
    return _rest_s(ends_at_s, time.clock_gettime(clock))


def _timespec_s(memory: bytes) -> float | None:
    """Read a timespec; None if it is not one that the kernel takes, as another thread may have overwritten it."""
    if len(memory) < 16:
        return None
    seconds, nanoseconds = struct.unpack("=qq", memory)
    return seconds + nanoseconds / 1e9 if seconds >= 0 and 0 <= nanoseconds < 10**9 else None


def _rest_s(whole_s: float, past_s: float) -> float | None:
    rest_s = max(0.0, whole_s - past_s)
    return rest_s if rest_s < _FOREVER_S else None


def _signed(argument: int) -> int:
    """Read an argument of type int: only the lower half of its register is defined."""
    return (argument & 0xFFFFFFFF) - ((argument & 0x80000000) << 1)
