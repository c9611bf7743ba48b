"""Findings about the environment: hosts left out, untested parts, differing nodes, PCIe paths. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.diagnosis import pcie_paths
from distdiag.diagnosis.hosts.drift import differences
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.pcie_paths import PcieNode
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import format_size
from distdiag.facts.network.interfaces import network_of
from distdiag.launch.types import Backend, Device
from distdiag.launch.wording import found
from distdiag.report import Level, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.rendezvous_test import RendezvousTest
    from distdiag.launch.rank_runs import RankTimeline
    from distdiag.launch.record import Inventory, NodeSlot, Plan
    from distdiag.launch.types import NodeFacts, Request
    from distdiag.report import Finding


_DEBUG = "TORCH_DISTRIBUTED_DEBUG"
_OFTEN_DIFFER = ("kernel", "machine", "CUDA_VISIBLE_DEVICES", "python")
_MAY_DIFFER = ("IFNAME", "_HCA", "_DEBUG", "_FILE", "_HOSTID")
_SHM_FOR_EACH_RANK = 32 * 2**20
"""NCCL uses about 10 MB of /dev/shm per peer reached through it (nccl#290), and a rank has a few."""


def about_hosts(scene: Inventory) -> list[Finding]:
    """Return unusable hosts, and duplicate names of one machine."""
    about = host_findings(scene.refusals, scene.rows)
    if scene.duplicates:
        where = Where(hosts=scene.duplicates)
        about.append(finding("hosts-duplicate", where=where, names=fold(scene.duplicates)))
    for left_out, kept in scene.twins:
        where = Where(hosts=(left_out, kept))
        about.append(finding("hosts-same-machine", where=where, left_out=left_out, kept=kept))
    return about


def surroundings(request: Request, plan: Plan, places: Sequence[NodeSlot]) -> list[Finding]:
    """Return the limits of this test, and settings that will hurt the real job."""
    limits = []
    if request.fault is not None:
        limits.append(found("injected", request, option=request.fault.option))
    if plan.device is Device.CPU and request.device is Device.AUTO and request.backend is Backend.AUTO:
        hider = "CUDA_VISIBLE_DEVICES" if any(place.facts.gpus.driver_present for place in places) else ""
        limits.append(found("cpu-only", request, hosts=fold(place.host for place in places), hider=hider))
    if plan.nproc == 1:
        limits.append(found("single-rank", request))
    return [*limits, *_small_shm(request, plan, places)]


def _small_shm(request: Request, plan: Plan, places: Sequence[NodeSlot]) -> list[Finding]:
    shares = {share.node: share for share in plan.shares}
    small: dict[tuple[int, int], list[str]] = {}
    for place in places:
        free, total = place.facts.shm_free_bytes, place.facts.shm_total_bytes
        if free is not None and total is not None and free <= shares[place.node].nproc * _SHM_FOR_EACH_RANK:
            small.setdefault((free, total), []).append(place.host)
    return [
        found(
            "shm-small",
            request,
            Where(hosts=tuple(hosts)),
            hosts=fold(hosts),
            free=format_size(free),
            total=format_size(total),
        )
        for (free, total), hosts in small.items()
    ]


def nodes_that_differ(request: Request, places: Sequence[NodeSlot], traces: Sequence[RankTimeline]) -> list[Finding]:
    """Return differences between nodes, which are not always faults."""
    facts = {place.host: _facts_to_compare(place.facts) for place in places}
    for trace in traces:
        for event in trace.events:
            started = event.payload.get("started")
            if started and trace.host in facts:
                names = ("torch", "cuda", "hip", "nccl", "python", "device_name")
                facts[trace.host].update({name: started.get(name) for name in names})
    return [
        *(
            found(
                "nodes-differ",
                request,
                Where(hosts=difference.odd_hosts),
                level=Level.INFO if difference.fact in _OFTEN_DIFFER else None,
                difference=difference,
            )
            for difference in differences(facts)
        ),
        *_variables_differ(request, places),
    ]


def _facts_to_compare(node: NodeFacts) -> dict[str, object]:
    return {
        "visible GPUs": node.gpus.visible,
        "CUDA_VISIBLE_DEVICES": node.cuda_visible_devices,
        "kernel": node.kernel,
        "NVIDIA driver": node.nvidia_driver or None,
        "machine": node.machine or None,
        "active RDMA ports": ", ".join(f"{count} x {kind}" for kind, count in node.rdma_ports.items()) or None,
        "GPUs on the PCI bus": len(node.pcie.gpus) if node.pcie is not None else None,
        **{f"ulimit {letter}": value for letter, value in node.limits.items()},
    }


def networks_that_differ(request: Request, meeting: RendezvousTest | None) -> list[Finding]:
    """Return nodes on different networks: RDMA cards of separately provisioned nodes may not reach each other."""
    if meeting is None:
        return []
    networks: dict[str, dict[str, object]] = {}
    for node, name in meeting.interfaces.items():
        own = next((nic for nic in meeting.networks[node].interfaces if nic.name == name), None)
        network = network_of(own.addresses[0]) if own is not None and own.addresses else None
        if network is not None:
            networks[meeting.hosts[node]] = {"network": str(network)}
    return [
        found("networks-differ", request, Where(hosts=difference.odd_hosts), difference=difference)
        for difference in differences(networks)
    ]


def hangs(request: Request, places: Sequence[NodeSlot]) -> Finding | None:
    """Return a variable that makes torch hang unless equal on all ranks, if it differs."""
    detail = [place for place in places if place.facts.variables.get(_DEBUG, "").upper() == "DETAIL"]
    if not detail or len(detail) == len(places):
        return None
    (difference,) = (each for each in differences(_variables_of(places)) if each.fact == _DEBUG)
    again = request.again(extra=f"--env {_DEBUG}=DETAIL")
    return found("debug-differs", request, _where_of(difference.odd_hosts, places), difference=difference, again=again)


def _variables_differ(request: Request, places: Sequence[NodeSlot]) -> list[Finding]:
    """Compare the variables of NCCL, Gloo and torch; interface and card names and log levels may differ."""
    return [
        found(
            "environments-differ",
            request,
            _where_of(difference.odd_hosts, places),
            level=Level.INFO if any(word in difference.fact for word in _MAY_DIFFER) else None,
            difference=difference,
        )
        for difference in differences(_variables_of(places))
    ]


def _variables_of(places: Sequence[NodeSlot]) -> dict[str, dict[str, object]]:
    return {label: dict(place.facts.variables) for label, place in zip(_labels(places), places, strict=True)}


def _labels(places: Sequence[NodeSlot]) -> list[str]:
    """Label each process started by a launcher, with its local rank if its node has several."""
    hosts = [place.host for place in places]
    return [
        f"{place.host} (local rank {place.local[0]})" if place.local and hosts.count(place.host) > 1 else place.host
        for place in places
    ]


def _where_of(labels: Sequence[str], places: Sequence[NodeSlot]) -> Where:
    named = [place.host for label, place in zip(_labels(places), places, strict=True) if label in labels]
    return Where(hosts=tuple(dict.fromkeys(named)))


def pcie_findings(request: Request, places: Sequence[NodeSlot]) -> list[Finding]:
    """Return bridges that redirect traffic between GPUs, and IOMMUs that translate it."""
    if request.device is Device.CPU:
        return []
    nodes = [PcieNode(place.host, place.facts.pcie, place.facts.rdma_bits_per_s is not None) for place in places]
    return pcie_paths.findings(request.command, nodes)
