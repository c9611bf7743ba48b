"""Registers and stacks of running threads by ptrace(2), where perf_event_open is refused.

Each thread is stopped alone, for the time of two system calls. Rules that keep the job unharmed:

- PTRACE_SEIZE and PTRACE_INTERRUPT send no signal and leave no group-stop. A signal that arrives first is passed on.
- Only a thread that spins is interrupted: some system calls (epoll_wait, semop) return EINTR to a thread interrupted
  in its sleep.
- A thread that has not stopped in time cannot be detached by PTRACE_DETACH. The kernel detaches it when the OS thread
  that seized it ends, even if distdiag is killed. So run `take` in a separate thread that ends with it.
"""

from __future__ import annotations

import os
import struct
import time
from typing import NamedTuple

from distdiag.facts.stacks import libc
from distdiag.facts.stacks.user_registers import STACK_BYTES, Sample, layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.facts.stacks.user_registers import Layout

_DETACH, _GETREGSET, _SEIZE, _INTERRUPT = 17, 0x4204, 0x4206, 0x4207
_NT_PRSTATUS = 1
_REGSET_BYTES = 34 * 8  # of aarch64; x86-64 has 27 words
_IOVEC = struct.Struct("@PN")
_WALL = 0x40000000
_SPIN_S, _POLL_S = 0.0002, 0.00005
"""A running thread stops some 20 us after the interrupt: polling without a pause at first keeps its stop as short."""


class Spinning(NamedTuple):
    """A thread to stop, and its process's open /proc/PID/mem.

    `still_spins` is called just before the interrupt. It also reads the process's memory: if the memory map is locked,
    it blocks there while no thread is stopped.
    """

    tid: int
    memory: int
    still_spins: Callable[[], bool]


class Taken(NamedTuple):
    """Samples and refusals (OSError of PTRACE_SEIZE) by thread; a thread that did not stop in time is in neither."""

    samples: dict[int, Sample]
    refused: dict[int, OSError]


def take(threads: Sequence[Spinning], *, patience_s: float) -> Taken:
    """Sample each thread once, within `patience_s` seconds in all. Call it in a separate thread, see above."""
    registers = layout()
    taken = Taken({}, {})
    if registers is None:
        return taken
    try:
        tracer = _Tracer(registers, taken)
    except OSError as error:
        taken.refused.update((thread.tid, error) for thread in threads)
        return taken
    until = time.monotonic() + patience_s
    todo = list(threads)
    began = time.monotonic()
    while (todo or tracer.pending) and time.monotonic() < until:
        if todo:
            tracer.interrupt(todo.pop())
            began = time.monotonic()
        if not tracer.collect() and time.monotonic() - began > _SPIN_S and not todo:
            time.sleep(_POLL_S)
    return taken


class _Tracer:
    """Seized threads not released yet; `pending`: those still to stop for the interrupt."""

    def __init__(self, registers: Layout, taken: Taken) -> None:
        self.pending: set[int] = set()
        self._seized: dict[int, Spinning] = {}
        self._layout, self._taken = registers, taken
        self._ptrace_of_libc = libc.load().ptrace
        import ctypes

        self._ptrace_of_libc.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self._ptrace_of_libc.restype = ctypes.c_long
        self._words = ctypes.create_string_buffer(_REGSET_BYTES)
        vector = _IOVEC.pack(ctypes.addressof(self._words), _REGSET_BYTES)
        self._vector = ctypes.create_string_buffer(vector, len(vector))
        self._vector_at = ctypes.addressof(self._vector)

    def _ptrace(self, request: int, tid: int, address: int = 0, data: int = 0) -> OSError | None:
        if self._ptrace_of_libc(request, tid, address or None, data or None) == -1:
            return libc.last_error()
        return None

    def interrupt(self, thread: Spinning) -> None:
        if not thread.still_spins():
            return
        error = self._ptrace(_SEIZE, thread.tid)
        if error is not None:
            self._taken.refused[thread.tid] = error
            return
        self._seized[thread.tid] = thread
        if thread.still_spins() and self._ptrace(_INTERRUPT, thread.tid) is None:
            self.pending.add(thread.tid)

    def collect(self) -> bool:
        """Sample and release the threads that stopped since; return whether any did.

        A signal also stops a seized thread, so those not interrupted are checked as well.
        """
        stopped = False
        for tid, thread in list(self._seized.items()):
            try:
                found, status = os.waitpid(tid, os.WNOHANG | _WALL)
            except ChildProcessError:
                found, status = tid, 0
            if found:
                del self._seized[tid]
                self.pending.discard(tid)
                stopped = True
                if os.WIFSTOPPED(status):
                    self._sample(thread)
                    self._release(tid, status)
        return stopped

    def _sample(self, thread: Spinning) -> None:
        if self._ptrace(_GETREGSET, thread.tid, _NT_PRSTATUS, self._vector_at) is not None:
            return
        words = struct.unpack(f"<{_REGSET_BYTES // 8}Q", self._words)
        ip, sp = words[self._layout.regset_ip], words[self._layout.regset_sp]
        try:
            stack = os.pread(thread.memory, STACK_BYTES, sp)
        except OSError:
            return
        saved = tuple((number, words[index]) for number, _, index in self._layout.saved)
        self._taken.samples[thread.tid] = Sample(ip, sp, stack, saved)

    def _release(self, tid: int, status: int) -> None:
        """Detach; a signal that stopped the thread before the interrupt is delivered now."""
        is_event = status >> 16 != 0
        self._ptrace(_DETACH, tid, 0, 0 if is_event else os.WSTOPSIG(status))
