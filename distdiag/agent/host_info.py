"""The first message of an agent: which machine this is."""

from __future__ import annotations

import os

from distdiag.agent.protocol import Hello
from distdiag.facts import carried_tools, machine


def who_is_here() -> Hello:
    """Return host name, identity of the machine, its system and processor, and py-spy's path if there is one."""
    system = os.uname()
    return Hello(
        host=machine.host_name(),
        machine=_machine_id(),
        platform=f"{system.sysname} {system.machine}",
        py_spy=carried_tools.find("py-spy"),
    )


def _machine_id() -> str:
    """Return what differs between machines, and containers and network namespaces of one machine too."""
    boot = machine.read_text("/proc/sys/kernel/random/boot_id").strip()
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return f"{boot} {network} {machine.host_name()}"
