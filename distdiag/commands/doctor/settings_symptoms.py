"""Settings of one node that slow down or break jobs: debugging switches, proxies, ports, load. Pure."""

from __future__ import annotations

import ipaddress
from statistics import median
from typing import TYPE_CHECKING

from distdiag.commands.doctor.symptoms import finding_about, symptom
from distdiag.diagnosis.wording import counted, format_age
from distdiag.facts.network.interfaces import is_loopback
from distdiag.report import Level, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.doctor.collect import Disks, System
    from distdiag.commands.doctor.types import NodeDoctor, Symptom
    from distdiag.report import Finding

_FEW_PORTS = 4096
"""Each pair of ranks using TCP has at least one connection, and a closed connection holds its port for a minute."""
_SHORT_QUEUE = 128
"""SOMAXCONN before Linux 5.4. If 1,000 ranks connect to a store at once, some are dropped and retry seconds later."""
_OVERLOAD, _BESIDE_OTHERS = 1.5, 3

_SWITCHES = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "each kernel launch waits for its end: nothing overlaps"),
    ("NCCL_P2P_DISABLE", ("1",), "GPUs of one node exchange data through host memory, not NVLink"),
    ("NCCL_SHM_DISABLE", ("1",), "ranks of one node exchange data through the network"),
    ("NCCL_NVLS_ENABLE", ("0",), "NVLink SHARP is off"),
    ("NCCL_DEBUG", ("TRACE",), "NCCL writes a line for every call"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is compared over all ranks before it runs"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", ("1",), "every allocation calls cudaMalloc, which waits for the GPU"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1",), "every collective blocks the process"),
)
"""(variable, values, cost). Sources: CUDA C++ Programming Guide (CUDA_LAUNCH_BLOCKING), NCCL's and torch's pages of
environment variables, torch c10/cuda/CUDACachingAllocator.cpp."""


def settings_symptoms(node: NodeDoctor) -> Iterator[Symptom]:
    """Yield all settings symptoms."""
    if node.system is not None:
        yield from _switches(node, node.system)
        yield from _proxies(node, node.system)
        if node.system.somaxconn is not None and node.system.somaxconn < _SHORT_QUEUE:
            yield symptom("somaxconn", count=node.system.somaxconn)
    if node.disks is not None:
        yield from _no_exec(node.disks)
    if node.network is not None:
        yield from _ports(node.network.ephemeral_ports)


def _switches(node: NodeDoctor, system: System) -> Iterator[Symptom]:
    active = node.network is not None and any(port.state == "ACTIVE" for port in node.network.ib_ports)
    switches = [*_SWITCHES]
    if active:
        switches.append(("NCCL_IB_DISABLE", ("1",), "NCCL leaves the active RDMA ports of this node unused"))
    for name, values, costs in switches:
        value = system.variables.get(name, "")
        if value.upper() in values:
            yield symptom("debug-switch", subject=name, variable=name, value=value, costs=costs)


def _proxies(node: NodeDoctor, system: System) -> Iterator[Symptom]:
    """Report proxies that intercept traffic between the nodes, since gRPC and HTTP libraries honour them."""
    own = [address for nic in node.network.nics for address in nic.plain_addresses] if node.network is not None else []
    caught = [each for each in own if not (is_loopback(each) or is_excepted(each, system.no_proxy))]
    if system.proxies and caught and not is_excepted(node.host, system.no_proxy):
        names = ",".join([node.host, *caught[:2]])
        yield symptom("proxy", proxy=system.proxies[0], host=node.host, address=caught[0], names=names)


def is_excepted(name: str, no_proxy: str) -> bool:
    """Return whether `no_proxy` covers a host or address: "*", names, suffixes, addresses, networks (10.0.0.0/8)."""
    for entry in (part.strip().lstrip(".") for part in no_proxy.replace(" ", ",").split(",")):
        if entry and (entry == "*" or name == entry or name.endswith(f".{entry}") or _is_within(name, entry)):
            return True
    return False


def _is_within(name: str, entry: str) -> bool:
    try:
        return ipaddress.ip_address(name) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _ports(text: str) -> Iterator[Symptom]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal()) or int(high) - int(low) >= _FEW_PORTS:
        return
    yield symptom("few-ports", count=int(high) - int(low) + 1, range=text)


def _no_exec(disks: Disks) -> Iterator[Symptom]:
    for space in disks.spaces:
        if space.no_exec and space.path in disks.written and not space.error:
            other = "TMPDIR" if space.path == "/tmp" else "TRITON_CACHE_DIR"
            yield symptom(
                "noexec",
                subject=space.path,
                path=space.path,
                quoted=quoted(space.path),
                variable=other,
                evidence=(f"{space.source} on {space.path} type {space.kind}",),
            )


def overloaded(nodes: Sequence[NodeDoctor]) -> Iterator[Finding]:
    """Name nodes with foreign load on the cores: a warning if the other nodes are idle."""
    loads = {node.host: node.jobs.load for node in nodes if node.jobs is not None}
    for node in nodes:
        jobs, system = node.jobs, node.system
        if jobs is None or system is None or jobs.pids or jobs.load <= _OVERLOAD * system.cpus_online + 1:
            continue
        others = [load for host, load in loads.items() if host != node.host]
        level = Level.WARN if others and jobs.load > _BESIDE_OTHERS * median(others) else Level.INFO
        words = {"host": node.host, "load": f"{jobs.load:.0f}", "cpus": counted(system.cpus_online, "CPU")}
        yield finding_about(symptom("load", words, level=level), [node.host])


def rebooted(nodes: Sequence[NodeDoctor]) -> Iterator[Finding]:
    """Name nodes without ranks that booted after the ranks elsewhere started."""
    ages = [node.jobs.oldest_s for node in nodes if node.jobs is not None and node.jobs.oldest_s is not None]
    for node in nodes:
        is_idle = node.jobs is not None and not node.jobs.pids
        if ages and is_idle and node.system is not None and 0 < node.system.up_s < max(ages):
            words = {"host": node.host, "up": format_age(node.system.up_s), "age": format_age(max(ages))}
            yield finding_about(symptom("rebooted", words), [node.host])
