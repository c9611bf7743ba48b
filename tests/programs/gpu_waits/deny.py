"""Run a program with system calls that fail with EPERM, as below a container's seccomp profile: deny.py 298,101 CMD."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM
SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2


def deny(numbers: list[int]) -> None:
    """Install a filter: load the call's number, compare it with each, and fail or allow."""
    program = struct.pack("HBBI", LOAD, 0, 0, 0)
    for at, number in enumerate(numbers):
        program += struct.pack("HBBI", EQUAL, len(numbers) - at, 0, number)
    program += struct.pack("HBBI", RETURN, 0, 0, ALLOW) + struct.pack("HBBI", RETURN, 0, 0, FAIL)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        libc.prctl(SET_SECCOMP, FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "prctl")


deny([int(word) for word in sys.argv[1].split(",")])
os.execvp(sys.argv[2], sys.argv[2:])
