"""The words for pairs and ranks, of which the sentences of all faults are made. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.commands.gpu_test.isolate import pair_graph
from distdiag.commands.gpu_test.isolate.types import LEVELS, NET, NODE, PairStatus
from distdiag.diagnosis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from distdiag.commands.gpu_test.isolate.pair_graph import Case
    from distdiag.commands.gpu_test.isolate.types import Edge

_LINES = 8
"""Of evidence for each trouble."""
_NAMED = 4
"""Links or groups in a sentence."""
_VERBS = {
    PairStatus.SLOW: ("is slow", "are slow"),
    PairStatus.FAILED: ("fails", "fail"),
    PairStatus.WRONG: ("gets wrong data", "get wrong data"),
    PairStatus.UNSURE: ("looks slow", "look slow"),
}
_PARTNERS = {
    (False, frozenset({NET})): ("with every other node", "fine inside its own node: its NIC or rail"),
    (False, frozenset({NODE})): (
        "with every other rank of its node",
        "fine with other nodes: its path to the other local ranks (NVLink, PCIe, shared memory)",
    ),
    (True, frozenset({NET})): ("with every other node", "fine inside: its network, not one of its ranks"),
    (True, frozenset({NODE})): ("inside", "fine with other nodes: something that its ranks share"),
    (True, frozenset({NODE, NET})): ("inside and with every other node", ""),
}
"""(is a node, bad levels) -> the partners of the bad pairs, and what it means if the other level is good."""
WHY_SPLIT = (
    "not a bad rank or node: seen where only some nodes had the plugin libnccl-net.so (NVIDIA/nccl#1634), or with two "
    "switches or rails that are not connected"
)
WHY_NETWORK = (
    "a setting common to all is wrong (NCCL_SOCKET_IFNAME, NCCL_IB_*), or a firewall blocks them: run distdiag ports"
)
WHY_INSIDE = "inside a node it is P2P or shared memory: IOMMU and ACS, the size of /dev/shm, NCCL_P2P_*, NCCL_SHM_*"
WHY_LAYOUT = "inside a node it may be the topology: NVLink bridges, two CPU sockets (nvidia-smi topo -m)"
NEXT_RANK = "rerun without it; check its GPU (dmesg for Xid, nvidia-smi -q), NIC, cable and switch port"
NEXT_NODE = "rerun without it; check its NICs, cables and switch ports, and how it differs from other nodes"
NEXT_LINK = "check what only these pairs share: a cable, a switch port or uplink, a PCIe path (nvidia-smi topo -m)"
NEXT_SPLIT = "rerun with --nccl-debug and compare the groups: plugins and libraries, NCCL_*, subnets, switches"
NEXT_NOISE = "rerun with nothing else running on these nodes; without GPUs, use no more ranks than cores"
NEXT_THIRD = "whichever of the two is also bad with the third is at fault; if neither is, it is the link"


def partners(case: Case, ranks: Collection[int]) -> tuple[str, str]:
    """Return the partners of a culprit's bad pairs, and what it means if its pairs at the other level are good."""
    good = Counter(case.pairs[edge].level for edge in pair_graph.touching(ranks, case.good))
    bad = Counter(case.pairs[edge].level for edge in pair_graph.touching(ranks, case.bad))
    levels = frozenset(level for level in bad if bad[level] > good[level])
    elsewhere = [level for level in LEVELS if level not in levels and good[level]]
    named, cause = _PARTNERS.get((case.is_node(ranks), levels), ("", ""))
    if not elsewhere and not case.is_node(ranks):
        named = "with every other rank"
    if any(good[level] for level in levels):
        named = named.replace("every", "nearly every")
    if pair_graph.touching(ranks, case.skipped):
        named += " tested"
    return named, cause if elsewhere and not any(bad[level] for level in elsewhere) else ""


def asunder(case: Case, across: Collection[Edge]) -> str:
    """Return how groups fare that do not work across."""
    if {case.status[edge] for edge in across} == {PairStatus.FAILED}:
        return "work inside each group but not across: a configuration difference"
    how = fare(case, across, "across", are_several=True)
    return f"work inside each group but {how}; a configuration or topology difference"


def fare(case: Case, edges: Collection[Edge], partners: str = "", *, are_several: bool = False) -> str:
    """Return how bad pairs fared: "is slow with ...: 0.21 GB/s (others 1.4 GB/s)"."""
    states = {case.status[edge] for edge in edges}
    verbs = _VERBS[min(states)] if len(states) == 1 else ("is bad", "are bad")
    figures = [counts(case, edges)] if len(states) > 1 else []
    if states in ({PairStatus.SLOW}, {PairStatus.UNSURE}):
        levels = [level for level in LEVELS if case.at(level, edges)]
        figures = [_slow(case, level, edges) + f" {LEVELS[level]}" * (len(levels) > 1) for level in levels]
    return f"{verbs[are_several]} {partners}".rstrip() + (f": {' and '.join(figures)}" if figures else "")


def counts(case: Case, edges: Iterable[Edge]) -> str:
    """Count pairs by how they fared: "2 failed, 1 slow"."""
    by_status = Counter(case.status[edge] for edge in sorted(edges))
    return ", ".join(f"{count} {status}" for status, count in by_status.items())


def _slow(case: Case, level: str, edges: Iterable[Edge]) -> str:
    usual = f"others {speed(case.typical[level])}"
    if not case.at(level, case.good):  # a single pair, below what was expected
        usual = f"expected {speed(case.least or 0.0)}"
    return f"{speed(median(map(case.speed, case.at(level, edges))))} ({usual})"


def links(case: Case, edges: Collection[Edge]) -> str:
    """Name links: all those between two nodes by the nodes, and those of one rank together."""
    between: dict[tuple[str, ...], set[Edge]] = {}
    for edge in case.at(NET, case.good | case.bad):
        between.setdefault(tuple(case.hosts(edge)), set()).add(edge)
    whole = {hosts: own for hosts, own in between.items() if len(own) > 1 and own.issubset(edges)}
    names = [f"{' and '.join(hosts)} ({len(own)} pairs)" for hosts, own in sorted(whole.items())]
    single = set(edges).difference(*whole.values())
    names += [f"{case.who([rank])} and {case.who(others)}" for rank, others in pair_graph.stars(single)]
    return f"the link{'s' if len(edges) > 1 else ''} between {some(names)}"


def rail(members: Iterable[Collection[int]]) -> str:
    """Name a rail by its lowest rank."""
    return f"(rail of rank {min(map(min, members))})"


def some(names: Sequence[str]) -> str:
    """List a few, and count the others."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def evidence(case: Case, edges: Collection[Edge]) -> tuple[str, ...]:
    """Return a line for each rank and status of its pairs."""
    lines, left = [], len(edges)
    for rank, others in islice(pair_graph.stars(edges), _LINES):
        by_status: dict[PairStatus, list[Edge]] = {}
        for edge in ((min(rank, other), max(rank, other)) for other in others):
            by_status.setdefault(case.status[edge], []).append(edge)
        for status, own in by_status.items():
            peers = {end for edge in own for end in edge} - {rank}
            lines.append(f"rank {rank} with {name_ranks(peers)}: {_in_figures(case, status, own)}")
        left -= len(others)
    return (*lines, f"and {left} more") if left else tuple(lines)


def _in_figures(case: Case, status: PairStatus, edges: Sequence[Edge]) -> str:
    """Return the figures of pairs of the same status: "slow, 0.18-0.25 GB/s", "failed"."""
    if status is PairStatus.FAILED:
        return "failed"
    if status is PairStatus.WRONG:
        return counted(sum(case.pairs[edge].wrong for edge in edges), "wrong element")
    return f"{status}, {_range(map(case.speed, edges))}"


def measured_at(case: Case, level: str) -> str:
    """Return what the pairs of a level are like: the first line of evidence."""
    good, bad, unsure = (case.at(level, edges) for edges in (case.good, case.bad, case.unsure))
    unmeasured = case.at(level, case.skipped - unsure)
    return (
        f"{LEVELS[level]}: {len(bad)} of {len(good) + len(bad)} pairs bad"
        + (f", {len(unsure)} unsure" if unsure else "")
        + (f", {len(unmeasured)} not measured" if unmeasured else "")
        + (f"; good pairs: {_range(map(case.speed, good))}" if good else "")
    )


def _range(speeds: Iterable[float]) -> str:
    known = sorted(speeds)
    least, most = speed(known[0]), speed(known[-1])
    return most if least == most else f"{least.removesuffix(most[-5:])}-{most}"


def typical(case: Case, levels: Iterable[str]) -> str:
    """Return the typical bandwidth of each of these levels."""
    is_single = len(case.typical) == 1
    return " and ".join(speed(case.typical[level]) + f" {LEVELS[level]}" * (not is_single) for level in levels)


def speed(bytes_per_s: float) -> str:
    """Format a bandwidth with two digits at least: 0.21 GB/s, 382 GB/s (1e9 bytes/s)."""
    if bytes_per_s < 1e7:
        return f"{bytes_per_s / 1e6:.2g} MB/s"
    return f"{bytes_per_s / 1e9:.2g} GB/s" if bytes_per_s < 1e11 else f"{bytes_per_s / 1e9:.0f} GB/s"
