"""Settings of one node that slow jobs down or break them: switches for debugging, proxies, ports, NFS, load. Pure."""

from __future__ import annotations

import ipaddress
from statistics import median
from typing import TYPE_CHECKING

from distdiag.commands.doctor.types import Symptom
from distdiag.report import Fix, Level, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.doctor.collect import Disks, Jobs, System
    from distdiag.commands.doctor.types import NodeDoctor

_FEW_PORTS = 4096
"""Each pair of ranks that meets over TCP has a connection or more, and closed ones hold their port for a minute."""
_SHORT_QUEUE = 128
"""SOMAXCONN before Linux 5.4. A store that 1,000 ranks connect to at once drops some, which retry seconds later."""
_MANY_REQUESTS = 10_000
_SLOW_QUEUE_MS = 10.0
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
"""(variable, values, what it costs). Sources: CUDA C++ Programming Guide (CUDA_LAUNCH_BLOCKING), NCCL's and torch's
pages of environment variables, torch c10/cuda/CUDACachingAllocator.cpp."""


def settings_symptoms(node: NodeDoctor) -> Iterator[Symptom]:
    """Yield all of them."""
    if node.system is not None:
        yield from _switches(node, node.system)
        yield from _proxies(node, node.system)
        if node.system.somaxconn is not None and node.system.somaxconn < _SHORT_QUEUE:
            yield Symptom(
                id="somaxconn",
                level=Level.WARN,
                title=f"only {node.system.somaxconn} connections may wait at a listening socket",
                detail="Ranks of a large job connect to the store at once; those without a place retry seconds later.",
                fix=Fix(text="raise it", commands=("sudo sysctl -w net.core.somaxconn=4096",)),
            )
    if node.disks is not None:
        yield from _no_exec(node.disks)
        yield from _nfs(node.disks)
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
            yield Symptom(
                id="debug-switch",
                level=Level.WARN,
                subject=name,
                title=f"{name}={value} is set: {costs}",
                detail="It helps while a fault is sought; left on, it slows every job down.",
                fix=Fix(text="remove it from the script or profile that sets it", commands=(f"unset {name}",)),
            )


def _proxies(node: NodeDoctor, system: System) -> Iterator[Symptom]:
    """Report proxies that connections between the nodes go through, as gRPC and HTTP libraries follow them."""
    own = [address for nic in node.network.nics for address in nic.plain_addresses] if node.network is not None else []
    own = [address for address in own if not (address.startswith("127.") or address == "::1")]
    caught = [address for address in own if not is_excepted(address, system.no_proxy)]
    if system.proxies and caught and not is_excepted(node.host, system.no_proxy):
        yield Symptom(
            id="proxy",
            level=Level.WARN,
            title=f"{system.proxies[0]} is set, and no_proxy does not except this node ({node.host}, {caught[0]})",
            detail="torch's store and NCCL ignore proxies; Ray, vLLM, etcd and other users of gRPC or HTTP between the "
            "nodes connect to the proxy instead, and fail or wait.",
            fix=Fix(
                text="except the cluster's names and addresses on all nodes",
                commands=(f'export no_proxy="$no_proxy,localhost,127.0.0.1,{",".join([node.host, *caught[:2]])}"',),
            ),
        )


def is_excepted(name: str, no_proxy: str) -> bool:
    """Return whether `no_proxy` has a host or address: "*", names, suffixes, addresses, networks (10.0.0.0/8)."""
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
    yield Symptom(
        id="few-ports",
        level=Level.WARN,
        title=f"only {int(high) - int(low) + 1} ports for outgoing connections ({text})",
        detail='Ranks fail with "Cannot assign requested address" when they are used up.',
        fix=Fix(text="widen it", commands=("sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'",)),
    )


def _no_exec(disks: Disks) -> Iterator[Symptom]:
    for space in disks.spaces:
        if space.no_exec and space.path in disks.written and not space.error:
            other = "TMPDIR" if space.path == "/tmp" else "TRITON_CACHE_DIR"
            yield Symptom(
                id="noexec",
                level=Level.WARN,
                subject=space.path,
                title=f"{space.path} is mounted noexec: libraries that are compiled there cannot be loaded",
                detail='Triton, torch.compile and extensions fail with "failed to map segment from shared object".',
                evidence=(f"{space.source} on {space.path} type {space.kind}",),
                fix=Fix(
                    text="let them write elsewhere, or remount it",
                    commands=(
                        f"export {other}=/path/that/may/execute",
                        f"sudo mount -o remount,exec {quoted(space.path)}",
                    ),
                ),
            )


def _nfs(disks: Disks) -> Iterator[Symptom]:
    for mount in disks.nfs:
        each_ms = mount.queue_ms / mount.operations if mount.operations else 0.0
        if mount.operations < _MANY_REQUESTS or each_ms < _SLOW_QUEUE_MS or mount.queue_ms < mount.server_ms:
            continue
        yield Symptom(
            id="nfs-slots",
            level=Level.WARN,
            subject=mount.path,
            title=f"requests to {mount.path} wait {each_ms:.0f} ms in this node's own queue, "
            f"{mount.server_ms / mount.operations:.0f} ms for the server",
            detail="Too few requests may be under way at once; data loaders and checkpoints wait for a slot.",
            evidence=(
                f"{mount.server}: {mount.operations} requests since it was mounted, at most {mount.slots} at once",
            ),
            fix=Fix(
                text="allow more requests (before the mount), or more connections",
                commands=(
                    "echo 'options sunrpc tcp_slot_table_entries=128' | sudo tee /etc/modprobe.d/sunrpc.conf",
                    f"grep ' {mount.path} ' /etc/fstab  # add nconnect=8",
                ),
            ),
        )


def overloaded(nodes: Sequence[NodeDoctor]) -> Iterator[tuple[NodeDoctor, Jobs, System, bool]]:
    """Yield each node whose cores other programs use, and whether the other nodes are free of them."""
    loads = {node.host: node.jobs.load for node in nodes if node.jobs is not None}
    for node in nodes:
        jobs, system = node.jobs, node.system
        if jobs is None or system is None or jobs.pids or jobs.load <= _OVERLOAD * system.cpus_online + 1:
            continue
        others = [load for host, load in loads.items() if host != node.host]
        yield node, jobs, system, bool(others) and jobs.load > _BESIDE_OTHERS * median(others)


def rebooted(nodes: Sequence[NodeDoctor]) -> Iterator[tuple[NodeDoctor, float, float]]:
    """Yield each node that has no rank and started later than the ranks of the others.

    Yields:
        The node, seconds since its start, and the age of the oldest rank elsewhere in seconds.
    """
    ages = [node.jobs.oldest_s for node in nodes if node.jobs is not None and node.jobs.oldest_s is not None]
    for node in nodes:
        if node.jobs is None or node.jobs.pids or node.system is None or not ages:
            continue
        if 0 < node.system.up_s < max(ages):
            yield node, node.system.up_s, max(ages)
