"""The first thing an agent says: which machine this is, which Python, and how its clock stands."""

from __future__ import annotations

import os
import sys
import time

from distdiag.node import machine, tools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def who_is_here() -> dict[str, Any]:
    """Give host name, identity of the machine, Python, user, pid, wall clock, and py-spy's path if there is one."""
    system = os.uname()
    return {
        "host": machine.host_name(),
        "machine": _machine_id(),
        "pid": os.getpid(),
        "user": os.geteuid(),
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "platform": f"{system.sysname} {system.machine}",
        "kernel": system.release,
        "clock_s": time.time(),
        "py_spy": tools.find("py-spy"),
    }


def _machine_id() -> str:
    """Tell machines apart, and containers and network namespaces of one machine too."""
    boot = machine.read_text("/proc/sys/kernel/random/boot_id").strip()
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return f"{boot} {network} {machine.host_name()}"
