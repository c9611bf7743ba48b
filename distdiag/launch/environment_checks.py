"""What is worth saying besides the ranks: hosts left out, what was not tested, PCIe paths. Pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from distdiag.cluster.drift import differences
from distdiag.cluster.hosts import fold
from distdiag.cluster.unreached_hosts import host_findings
from distdiag.launch.types import Backend, Device
from distdiag.launch.wording import amount
from distdiag.report import Finding, Fix, Level, Where, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.rank_runs import RankTimeline
    from distdiag.cluster.rendezvous_test import RendezvousTest
    from distdiag.launch.record import Inventory, NodeSlot, Plan
    from distdiag.launch.types import Request


_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
_OFTEN_DIFFER = ("kernel", "machine", "CUDA_VISIBLE_DEVICES", "python")
_MAY_DIFFER = ("IFNAME", "_HCA", "_DEBUG", "_FILE", "_HOSTID")
_SHM_FOR_EACH_RANK = 32 * 2**20
"""NCCL takes about 10 MB of /dev/shm for each peer that a rank reaches through it (nccl#290), and has a few."""


def about_hosts(scene: Inventory) -> list[Finding]:
    """Hosts that could not be used, and names that say the same machine twice."""
    found = host_findings(scene.refusals, scene.rows)
    if scene.duplicates:
        names = fold(scene.duplicates)
        found.append(_info("hosts.duplicate", f"named more than once, used once: {names}", hosts=scene.duplicates))
    for left_out, kept in scene.twins:
        found.append(
            Finding(
                id="hosts.same-machine",
                level=Level.WARN,
                title=f"{left_out} is the same machine as {kept}: its ranks were started once",
                where=Where(hosts=(left_out, kept)),
                fix=Fix(text=f"leave {left_out} out of the list; if it should be another machine, see DNS"),
            )
        )
    return found


def surroundings(request: Request, plan: Plan, places: Sequence[NodeSlot]) -> list[Finding]:
    """What was not tested, and what will hurt the real job."""
    found = []
    if request.injected is not None:
        found.append(_info(f"{request.command}.injected", f"the fault {request.injected.words}, as asked"))
    if plan.device is Device.CPU and request.device is Device.AUTO and request.backend is Backend.AUTO:
        hidden = " (CUDA_VISIBLE_DEVICES hides them)" if any(one.facts.gpus.driver_present for one in places) else ""
        where = fold(one.host for one in places)
        told = f"no GPU is visible on {where}{hidden}: the CPU was tested with gloo, not GPUs and not NCCL"
        found.append(_info(f"{request.command}.cpu-only", told))
    if plan.nproc == 1:
        alone = "one rank alone: nothing was sent, so links between GPUs were not tested"
        found.append(_info(f"{request.command}.single-rank", alone))
    return [*found, *_small_shm(request, plan, places)]


def _small_shm(request: Request, plan: Plan, places: Sequence[NodeSlot]) -> list[Finding]:
    shares = {share.node: share for share in plan.shares}
    small: dict[tuple[int, int], list[str]] = {}
    for one in places:
        free, total = one.facts.shm_free_bytes, one.facts.shm_total_bytes
        if free is not None and total is not None and free <= shares[one.node].nproc * _SHM_FOR_EACH_RANK:
            small.setdefault((free, total), []).append(one.host)
    return [
        Finding(
            id=f"{request.command}.shm-small",
            level=Level.WARN,
            title=f"/dev/shm on {fold(hosts)} has {amount(free)} of {amount(total)} free",
            detail="NCCL inside a node and DataLoader workers need it; when it is full they die by SIGBUS.",
            where=Where(hosts=tuple(hosts)),
            fix=Fix(
                text="remove stale files there, or make it larger (docker: --shm-size=8g; "
                "Kubernetes: an emptyDir of medium Memory at /dev/shm)",
                commands=("mount -o remount,size=8G /dev/shm",),
            ),
        )
        for (free, total), hosts in small.items()
    ]


def nodes_that_differ(request: Request, places: Sequence[NodeSlot], traces: Sequence[RankTimeline]) -> list[Finding]:
    """Facts that should be the same on all nodes and are not; what differs is not always wrong, and often is."""
    facts: dict[str, dict[str, object]] = {
        one.host: {
            "visible GPUs": one.facts.gpus.visible,
            "CUDA_VISIBLE_DEVICES": one.facts.cuda_visible_devices,
            "kernel": one.facts.kernel,
            "NVIDIA driver": one.facts.nvidia_driver or None,
            "machine": one.facts.machine or None,
            "active RDMA ports": ", ".join(f"{count} x {kind}" for kind, count in one.facts.rdma_ports.items()) or None,
            "GPUs on the PCI bus": len(one.facts.pcie.gpus) if one.facts.pcie is not None else None,
            **{f"ulimit {letter}": value for letter, value in one.facts.limits.items()},
        }
        for one in places
    }
    for trace in traces:
        for event in trace.events:
            started = event.payload.get("started")
            if started and trace.host in facts:
                names = ("torch", "cuda", "hip", "nccl", "python", "device_name")
                facts[trace.host].update({name: started.get(name) for name in names})
    return [
        *(
            Finding(
                id=f"{request.command}.nodes-differ",
                level=Level.INFO if difference.fact in _OFTEN_DIFFER else Level.WARN,
                title=f"nodes differ in {difference}",
                where=Where(hosts=difference.odd_hosts),
            )
            for difference in differences(facts)
        ),
        *_variables_differ(request, places),
    ]


def networks_that_differ(request: Request, meeting: RendezvousTest | None) -> list[Finding]:
    """Say that nodes are in different networks: where they were not provisioned together, fast cards do not meet."""
    if meeting is None:
        return []
    networks: dict[str, dict[str, object]] = {}
    for node, name in meeting.interfaces.items():
        own = next((one for one in meeting.networks[node].interfaces if one.name == name), None)
        if own is not None and own.addresses:
            networks[meeting.hosts[node]] = {"network": str(ipaddress.ip_interface(own.addresses[0]).network)}
    return [
        Finding(
            id=f"{request.command}.networks-differ",
            level=Level.INFO,
            title=f"the nodes are not in one {difference}",
            detail="They reach each other through a router. InfiniBand, RoCE or EFA cards of nodes that were not "
            "provisioned together (another rail, fabric, placement group or availability set) often do not: NCCL then "
            "ends with error 12 at its first message.",
            where=Where(hosts=difference.odd_hosts),
        )
        for difference in differences(networks)
    ]


def hangs(request: Request, places: Sequence[NodeSlot]) -> Finding | None:
    """Find the variable that makes torch wait for ever where it is not the same for all ranks."""
    detail = [place for place in places if place.facts.variables.get(_DEBUG, "").upper() == "DETAIL"]
    if not detail or len(detail) == len(places):
        return None
    (difference,) = (one for one in differences(_variables_of(places)) if one.fact == _DEBUG)
    return Finding(
        id=f"{request.command}.debug-differs",
        level=Level.FAIL,
        title=f"{difference}: torch hangs in that",
        detail="With DETAIL torch compares each collective of all ranks before it runs it; ranks that have it wait for "
        "those that do not. No rank was started.",
        where=_where_of(difference.odd_hosts, places),
        fix=Fix(
            text="set it on all nodes, or on none",
            commands=(f"unset {_DEBUG}", request.again(extra=f"--env {_DEBUG}=DETAIL")),
        ),
    )


def _variables_differ(request: Request, places: Sequence[NodeSlot]) -> list[Finding]:
    """Compare what NCCL, Gloo and torch read; names of interfaces and cards, and how much is logged, may differ."""
    return [
        Finding(
            id=f"{request.command}.nodes-differ",
            level=Level.INFO if any(word in difference.fact for word in _MAY_DIFFER) else Level.WARN,
            title=f"the environments differ in {difference}",
            where=_where_of(difference.odd_hosts, places),
            fix=Fix(text="set the same for all ranks, in the script that the launcher runs"),
        )
        for difference in differences(_variables_of(places))
    ]


def _variables_of(places: Sequence[NodeSlot]) -> dict[str, dict[str, object]]:
    return {label: dict(place.facts.variables) for label, place in zip(_labels(places), places, strict=True)}


def _labels(places: Sequence[NodeSlot]) -> list[str]:
    """Call each process that a launcher started by its local rank too, where its node has several."""
    hosts = [place.host for place in places]
    return [
        f"{place.host} (local rank {place.local[0]})" if place.local and hosts.count(place.host) > 1 else place.host
        for place in places
    ]


def _where_of(labels: Sequence[str], places: Sequence[NodeSlot]) -> Where:
    odd = [place.host for label, place in zip(_labels(places), places, strict=True) if label in labels]
    return Where(hosts=tuple(dict.fromkeys(odd)))


def _info(id_: str, title: str, *, hosts: tuple[str, ...] = ()) -> Finding:
    return Finding(id=id_, level=Level.INFO, title=title, where=Where(hosts=hosts))


_BEYOND = "Traffic over NVLink does not go this way; that between GPUs and RDMA cards does."


def pcie_findings(request: Request, places: Sequence[NodeSlot]) -> list[Finding]:
    """Say where bridges redirect what GPUs send each other, or an IOMMU translates it; never of virtual machines.

    Where all GPUs have NVSwitches between them and no RDMA card is there, nothing needs that way: a remark.
    """
    if request.device is Device.CPU:
        return []
    bridges: dict[tuple[str, ...], list[NodeSlot]] = {}
    types: dict[str, list[NodeSlot]] = {}
    for place in places:
        pcie = place.facts.pcie
        if pcie is not None and pcie.virtual is False:
            if pcie.redirecting:
                bridges.setdefault(pcie.redirecting, []).append(place)
            if pcie.translated:
                types.setdefault(pcie.translated, []).append(place)
    return [
        *(_redirected(request, addresses, those) for addresses, those in bridges.items()),
        *(_translated(request, type_, those) for type_, those in types.items()),
    ]


def _redirected(request: Request, bridges: tuple[str, ...], places: Sequence[NodeSlot]) -> Finding:
    return Finding(
        id=f"{request.command}.acs",
        level=_level(places),
        title=f"ACS is on at {len(bridges)} PCIe bridge{'s' * (len(bridges) > 1)} above the GPUs of {_hosts(places)}: "
        "what GPUs and RDMA cards send each other takes the way through the CPU",
        detail=f"That is slow, or hangs. {_BEYOND}",
        where=Where(hosts=_names(places)),
        evidence=tuple(f"{bridge}: ACSCtl has ReqRedir+" for bridge in bridges),
        fix=Fix(
            text="turn it off there until the next boot; for good, turn IO virtualization (VT-d, AMD-Vi) or ACS off in "
            "the BIOS; not on a host that gives its GPUs to virtual machines",
            commands=tuple(f"sudo setpci -s {quoted(bridge)} ECAP_ACS+0x6.w=0000" for bridge in bridges),
        ),
    )


def _translated(request: Request, type_: str, places: Sequence[NodeSlot]) -> Finding:
    return Finding(
        id=f"{request.command}.iommu",
        level=_level(places),
        title=f"the IOMMU of {_hosts(places)} translates the addresses of its GPUs (domain type {type_})",
        detail="On bare metal CUDA does not support peer-to-peer copies over PCIe in that: they are slow, hang or lose "
        f"data. {_BEYOND}",
        where=Where(hosts=_names(places)),
        fix=Fix(
            text="boot with iommu=pt, or turn IO virtualization (VT-d, AMD-Vi) off in the BIOS; until then NCCL can "
            "leave out copies between GPUs over PCIe",
            commands=("export NCCL_P2P_LEVEL=NVL",),
        ),
    )


def _level(places: Sequence[NodeSlot]) -> Level:
    known = [(place.facts, place.facts.pcie) for place in places]
    spared = all(pcie and pcie.nvswitches and facts.rdma_bits_per_s is None for facts, pcie in known)
    return Level.INFO if spared else Level.WARN


def _names(places: Sequence[NodeSlot]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.host for place in places))


def _hosts(places: Sequence[NodeSlot]) -> str:
    return fold(_names(places))
