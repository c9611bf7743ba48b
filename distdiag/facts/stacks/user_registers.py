"""A thread's user registers needed for unwinding, as delivered by perf, ptrace and /proc."""

from __future__ import annotations

import os
from typing import NamedTuple

STACK_BYTES = 8192
"""Copied from the stack pointer up. A sample of perf must stay below 64 KiB, and the caller of a wait is near."""


class Sample(NamedTuple):
    """One snapshot of a thread: instruction pointer, stack pointer, the stack's bytes from there up.

    `saved`: other registers by DWARF number (x86-64: callee-saved; aarch64: 30, the link register), if known.
    """

    ip: int
    sp: int
    stack: bytes
    saved: tuple[tuple[int, int], ...] = ()


class Layout(NamedTuple):
    """Positions of the registers of one architecture.

    `perf_*`: bits of asm/perf_regs.h. `regset_*`: indices into NT_PRSTATUS's words (sys/user.h). `saved`: per register
    its DWARF number, perf bit and regset index.
    """

    perf_event_open: int
    perf_sp: int
    perf_ip: int
    regset_sp: int
    regset_ip: int
    saved: tuple[tuple[int, int, int], ...]


_LAYOUTS = {
    "x86_64": Layout(
        perf_event_open=298,
        perf_sp=7,
        perf_ip=8,
        regset_sp=19,
        regset_ip=16,
        saved=((3, 1, 5), (6, 6, 4), (12, 20, 3), (13, 21, 2), (14, 22, 1), (15, 23, 0)),
    ),
    "aarch64": Layout(perf_event_open=241, perf_sp=31, perf_ip=32, regset_sp=31, regset_ip=32, saved=((30, 30, 30),)),
}


def layout() -> Layout | None:
    """Return the layout of this machine; None for an architecture without one."""
    return _LAYOUTS.get(os.uname().machine)
