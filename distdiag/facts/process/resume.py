"""Resumes a process after a tool was attached to it."""

from __future__ import annotations

import contextlib
import os
import signal

from distdiag.facts.process import procs


def resume(pid: int, *, may_come: bool) -> bool:
    """Send SIGCONT to a process that a tool may have left stopped; return whether it was.

    The SIGSTOP of PTRACE_ATTACH persists if its sender dies before detaching. It may still be pending, and invisible,
    in a process waiting for a processor; SIGCONT cancels it. `may_come`: the tool was killed.
    """
    now = procs.read(pid)
    if now is None or procs.tracer(pid) is not None:
        return False
    stopped = now.state == "T"
    if stopped or may_come:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    return stopped
