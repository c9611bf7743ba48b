"""Registers and stacks of a running thread, copied by the kernel's timer without stopping the thread.

perf_event_open(2) with the software task clock, which needs no hardware counters and so works in virtual machines. The
clock counts the thread's own CPU time: a thread that sleeps costs nothing and leaves no sample.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct

from distdiag.facts import machine
from distdiag.facts.stacks import libc
from distdiag.facts.stacks.user_registers import STACK_BYTES, Sample, layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PERIOD_NS = 100_000
"""Of the thread's CPU time: one that yields to busy neighbours may get less than a millisecond per second."""
_SOFTWARE, _TASK_CLOCK = 1, 1
_REGS_USER, _STACK_USER = 1 << 12, 1 << 13
_EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8
_ATTRIBUTES = struct.Struct("<IIQQQQQIIQQQQIi")  # perf_event_attr up to PERF_ATTR_SIZE_VER3
_HEAD_AT, _TAIL_AT = 1024, 1032  # in the ring's first page, struct perf_event_mmap_page
_RING_BYTES = max(64 << 10, mmap.PAGESIZE)
"""7 samples. Users without CAP_IPC_LOCK may lock only 516 KiB per core for all rings (perf_event_mlock_kb)."""
_RECORD, _RECORD_SAMPLE = struct.Struct("<IHH"), 9
_ABI_64 = 2


class Sampler:
    """Samples one thread until closed; call `drain` every few milliseconds, as overflow is lost."""

    def __init__(self, tid: int) -> None:
        """Start. Raises OSError: EPERM, EACCES or ENOSYS if the kernel refuses, ESRCH if the thread exited."""
        self._layout = layout()
        if self._layout is None:
            raise OSError(errno.ENOSYS, "no register layout for this processor")
        bits = [self._layout.perf_sp, self._layout.perf_ip, *(bit for _, bit, _ in self._layout.saved)]
        self._at = {bit: number for number, bit in enumerate(sorted(bits))}
        self._fd = self._open(tid)
        try:
            self._ring = mmap.mmap(self._fd, mmap.PAGESIZE + _RING_BYTES)
        except OSError:
            os.close(self._fd)
            raise

    def _open(self, tid: int) -> int:
        # A thread in a loop of sched_yield is nearly always in the kernel. Its user registers are still valid, but
        # sampling there requires perf_event_paranoid <= 1 or CAP_PERFMON.
        try:
            return self._call(tid, _EXCLUDE_HV)
        except PermissionError:
            return self._call(tid, _EXCLUDE_HV | _EXCLUDE_KERNEL)

    def _call(self, tid: int, flags: int) -> int:
        assert self._layout is not None
        registers = sum(1 << bit for bit in self._at)
        kinds = _REGS_USER | _STACK_USER
        attributes = _ATTRIBUTES.pack(
            *(_SOFTWARE, _ATTRIBUTES.size, _TASK_CLOCK, PERIOD_NS, kinds, 0, flags),
            *(0, 0, 0, 0, 0, registers, STACK_BYTES, 0),
        )
        fd = int(libc.load().syscall(self._layout.perf_event_open, attributes, tid, -1, -1, _CLOSE_ON_EXEC))
        if fd < 0:
            raise libc.last_error()
        return fd

    def drain(self) -> list[Sample]:
        """Return the samples taken since the last call."""
        head, tail = struct.unpack_from("<QQ", self._ring, _HEAD_AT)
        if head == tail:
            return []
        data = self._ring[mmap.PAGESIZE : mmap.PAGESIZE + _RING_BYTES]
        begin = tail % _RING_BYTES
        found = list(self._samples((data[begin:] + data[:begin])[: head - tail]))
        struct.pack_into("<Q", self._ring, _TAIL_AT, head)
        return found

    def _samples(self, data: bytes) -> Iterator[Sample]:
        at = 0
        while at + _RECORD.size <= len(data):
            kind, _, size = _RECORD.unpack_from(data, at)
            if size < _RECORD.size:
                return
            if kind == _RECORD_SAMPLE:
                sample = self._sample(data[at + _RECORD.size : at + size])
                if sample is not None:
                    yield sample
            at += size

    def _sample(self, record: bytes) -> Sample | None:
        """Parse abi, registers, size of the stack, stack, valid bytes; None for 32-bit code and exiting threads."""
        assert self._layout is not None
        if struct.unpack_from("<Q", record)[0] != _ABI_64:
            return None
        words = struct.unpack_from(f"<{len(self._at)}Q", record, 8)
        at = 8 + 8 * len(words)
        (size,) = struct.unpack_from("<Q", record, at)
        if not size:
            return None
        (valid,) = struct.unpack_from("<Q", record, at + 8 + size)
        saved = tuple((number, words[self._at[bit]]) for number, bit, _ in self._layout.saved)
        ip, sp = words[self._at[self._layout.perf_ip]], words[self._at[self._layout.perf_sp]]
        return Sample(ip, sp, record[at + 8 : at + 8 + min(valid, size)], saved)

    def close(self) -> None:
        """End the sampling."""
        self._ring.close()
        os.close(self._fd)


def why_refused(error: OSError) -> tuple[str, str]:
    """Return why perf_event_open failed, and the setting that would allow it."""
    paranoid = machine.read_text("/proc/sys/kernel/perf_event_paranoid").strip()
    if error.errno not in (errno.EPERM, errno.EACCES):
        return f"perf_event_open: {error.strerror}", ""
    if seccomp():
        return (
            "perf_event_open is forbidden (seccomp)",
            "a seccomp profile that permits perf_event_open (Docker: --cap-add PERFMON or --security-opt "
            "seccomp=unconfined; Kubernetes: seccompProfile Unconfined)",
        )
    if paranoid.lstrip("-").isdigit() and int(paranoid) > 2:
        return f"kernel.perf_event_paranoid is {paranoid}", "sysctl kernel.perf_event_paranoid=2, or CAP_PERFMON"
    return "perf_event_open is forbidden", "CAP_PERFMON, or the rights of the job's user"


def seccomp() -> bool:
    """Return whether a seccomp filter is installed for this process (mode 2), as Docker and Kubernetes do."""
    return machine.status_words("self", "Seccomp") == ["2"]
