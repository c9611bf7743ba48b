"""Reads where threads are, with some system calls forbidden, as in a container: CALLS TIMES PID...; 40 s at most."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import struct
import sys
import time

from distdiag.facts.stacks import thread_places

_NUMBERS = {"perf_event_open": (298, 241), "ptrace": (101, 117)}
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001


def forbid(calls: list[str]) -> None:
    """Let these calls fail with EPERM, in this process alone (seccomp(2), a filter of classic BPF)."""
    lines = [(0x20, 0, 0, 0)]  # the number of the call
    for call in calls:
        number = _NUMBERS[call][os.uname().machine == "aarch64"]
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, _EPERM)]
    lines.append((0x06, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0, ctypes.get_errno()


forbid([call for call in sys.argv[1].split(",") if call])
pids = [int(word) for word in sys.argv[3:]]
until = time.monotonic() + 40
for _ in range(int(sys.argv[2])):
    if time.monotonic() > until:
        break
    found = thread_places.read(pids, [r"lib(cuda|nccl)\.so[.\d]*"], window_s=0.02)
    print(json.dumps([dataclasses.asdict(one) for one in found]), flush=True)
