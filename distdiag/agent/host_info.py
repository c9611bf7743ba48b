"""The first message of an agent: identifies the machine."""

from __future__ import annotations

import os

from distdiag.agent.protocol import Hello
from distdiag.facts import carried_tools, machine


def hello() -> Hello:
    """Return host name, machine identity, system, processor, and the path of py-spy, if found."""
    system = os.uname()
    return Hello(
        host=machine.host_name(),
        machine=_machine_id(),
        platform=f"{system.sysname} {system.machine}",
        py_spy=carried_tools.find("py-spy"),
    )


def _machine_id() -> str:
    """Return an identity unique to a machine, container and network namespace."""
    boot = machine.read_text("/proc/sys/kernel/random/boot_id").strip()
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return f"{boot} {network} {machine.host_name()}"
