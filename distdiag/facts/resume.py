"""A process that a tool attached to runs again afterwards."""

from __future__ import annotations

import contextlib
import os
import signal

from distdiag.facts import procs


def resume(pid: int, *, may_come: bool) -> bool:
    """Send SIGCONT to a process that was not stopped before a tool attached to it; tells whether it was found stopped.

    The SIGSTOP of PTRACE_ATTACH stays where its sender ends before it has detached. It may still be on its way to a
    process that waits for a processor, where nobody sees it; SIGCONT takes it back. `may_come`: the tool was ended.
    """
    now = procs.read(pid)
    if now is None or procs.tracer(pid) is not None:
        return False
    stopped = now.state == "T"
    if stopped or may_come:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    return stopped
