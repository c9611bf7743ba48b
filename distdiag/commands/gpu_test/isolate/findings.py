"""Classifications for each kind of trouble: culprits, evidence, next step; and the wording for pairs. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold, fold_ranks, name_ranks
from distdiag.commands.gpu_test.isolate.pair_graph import across, stars, touching
from distdiag.commands.gpu_test.isolate.slowness import SLOW
from distdiag.commands.gpu_test.isolate.types import LEVELS, NET, NODE, Classification, Kind, PairStatus
from distdiag.diagnosis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from distdiag.commands.gpu_test.isolate.pair_graph import Case
    from distdiag.commands.gpu_test.isolate.types import Edge

_LINES = 8
"""Lines of evidence for each trouble."""
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
"""(is a node, bad levels) -> the partners of the bad pairs, and the conclusion if the other level is good."""
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
    """Return the partners of a culprit's bad pairs, and the conclusion if its pairs at the other level are good."""
    good = Counter(case.pairs[edge].level for edge in touching(ranks, case.good))
    bad = Counter(case.pairs[edge].level for edge in touching(ranks, case.bad))
    levels = frozenset(level for level in bad if bad[level] > good[level])
    elsewhere = [level for level in LEVELS if level not in levels and good[level]]
    named, cause = _PARTNERS.get((case.is_node(ranks), levels), ("", ""))
    if not elsewhere and not case.is_node(ranks):
        named = "with every other rank"
    if any(good[level] for level in levels):
        named = named.replace("every", "nearly every")
    if touching(ranks, case.skipped):
        named += " tested"
    return named, cause if elsewhere and not any(bad[level] for level in elsewhere) else ""


def asunder(case: Case, edges: Collection[Edge]) -> str:
    """Format the state of groups that do not work across these edges."""
    if {case.status[edge] for edge in edges} == {PairStatus.FAILED}:
        return "work inside each group but not across: a configuration difference"
    how = fare(case, edges, "across", are_several=True)
    return f"work inside each group but {how}; a configuration or topology difference"


def fare(case: Case, edges: Collection[Edge], partners: str = "", *, are_several: bool = False) -> str:
    """Format the state of bad pairs: "is slow with ...: 0.21 GB/s (others 1.4 GB/s)"."""
    states = {case.status[edge] for edge in edges}
    verbs = _VERBS[min(states)] if len(states) == 1 else ("is bad", "are bad")
    figures = [counts(case, edges)] if len(states) > 1 else []
    if states in ({PairStatus.SLOW}, {PairStatus.UNSURE}):
        levels = [level for level in LEVELS if case.at(level, edges)]
        figures = [_slow(case, level, edges) + f" {LEVELS[level]}" * (len(levels) > 1) for level in levels]
    return f"{verbs[are_several]} {partners}".rstrip() + (f": {' and '.join(figures)}" if figures else "")


def counts(case: Case, edges: Iterable[Edge]) -> str:
    """Count pairs by status: "2 failed, 1 slow"."""
    by_status = Counter(case.status[edge] for edge in sorted(edges))
    return ", ".join(f"{count} {status}" for status, count in by_status.items())


def _slow(case: Case, level: str, edges: Iterable[Edge]) -> str:
    usual = f"others {speed(case.typical[level])}"
    if not case.at(level, case.good):  # a single pair, below expectation
        usual = f"expected {speed(case.least or 0.0)}"
    return f"{speed(median(map(case.speed, case.at(level, edges))))} ({usual})"


def links(case: Case, edges: Collection[Edge]) -> str:
    """Name links: complete sets between two nodes by the nodes, and those of one rank together."""
    between: dict[tuple[str, ...], set[Edge]] = {}
    for edge in case.at(NET, case.good | case.bad):
        between.setdefault(tuple(case.hosts(edge)), set()).add(edge)
    whole = {hosts: own for hosts, own in between.items() if len(own) > 1 and own.issubset(edges)}
    names = [f"{' and '.join(hosts)} ({len(own)} pairs)" for hosts, own in sorted(whole.items())]
    single = set(edges).difference(*whole.values())
    names += [f"{case.who([rank])} and {case.who(others)}" for rank, others in stars(single)]
    return f"the link{'s' if len(edges) > 1 else ''} between {some(names)}"


def rail(members: Iterable[Collection[int]]) -> str:
    """Name a rail by its lowest rank."""
    return f"(rail of rank {min(map(min, members))})"


def some(names: Sequence[str]) -> str:
    """List a few names, and count the rest."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def evidence(case: Case, edges: Collection[Edge]) -> tuple[str, ...]:
    """Return a line for each rank and status of its pairs."""
    lines, left = [], len(edges)
    for rank, others in islice(stars(edges), _LINES):
        by_status: dict[PairStatus, list[Edge]] = {}
        for edge in ((min(rank, other), max(rank, other)) for other in others):
            by_status.setdefault(case.status[edge], []).append(edge)
        for status, own in by_status.items():
            peers = {end for edge in own for end in edge} - {rank}
            lines.append(f"rank {rank} with {name_ranks(peers)}: {_in_figures(case, status, own)}")
        left -= len(others)
    return (*lines, f"and {left} more") if left else tuple(lines)


def _in_figures(case: Case, status: PairStatus, edges: Sequence[Edge]) -> str:
    """Return the figures of pairs of equal status: "slow, 0.18-0.25 GB/s", "failed"."""
    if status is PairStatus.FAILED:
        return "failed"
    if status is PairStatus.WRONG:
        return counted(sum(case.pairs[edge].wrong for edge in edges), "wrong element")
    return f"{status}, {_range(map(case.speed, edges))}"


def measured_at(case: Case, level: str) -> str:
    """Summarize the pairs of a level: the first line of evidence."""
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
    """Format a bandwidth with at least two digits: 0.21 GB/s, 382 GB/s (1e9 bytes/s)."""
    if bytes_per_s < 1e7:
        return f"{bytes_per_s / 1e6:.2g} MB/s"
    return f"{bytes_per_s / 1e9:.2g} GB/s" if bytes_per_s < 1e11 else f"{bytes_per_s / 1e9:.0f} GB/s"


def trouble(
    case: Case, kind: Kind, sentence: str, edges: Collection[Edge], next_: str, *more: str, **who: tuple[Any, ...]
) -> Classification:
    """Make a classification from bad pairs as evidence, and `more` lines; `who`: its ranks, hosts, links, groups."""
    return Classification(kind=kind, sentence=sentence, reason=(*evidence(case, edges), *more), next=next_, **who)


def add_blamed(case: Case) -> None:
    """Add the culprits, grouped by equal trouble."""
    alike: dict[tuple[bool, str, str, frozenset[PairStatus]], list[int]] = {}
    for unit in case.blamed:
        states = frozenset(case.status[edge] for edge in touching(unit, case.bad))
        alike.setdefault((case.is_node(unit), *partners(case, unit), states), []).extend(unit)
    for (is_node, with_, cause, _), ranks in alike.items():
        edges, hosts = touching(ranks, case.bad), case.hosts(ranks)
        are_several = len(hosts if is_node else ranks) > 1
        only = f" ({name_ranks(ranks)})" if len(ranks) == 1 else ""
        name = f"{fold(hosts)}{only}" if is_node else case.who(ranks)
        sentence = f"{name} {fare(case, edges, with_, are_several=are_several)}" + (cause and f"; {cause}")
        kind = Kind.SEVERAL if are_several else Kind.BAD_NODE if is_node else Kind.BAD_RANK
        who = {"hosts": tuple(hosts)} if is_node else {"ranks": tuple(sorted(ranks))}
        case.troubles.append(trouble(case, kind, sentence, edges, NEXT_NODE if is_node else NEXT_RANK, **who))


def add_splits(case: Case) -> None:
    """Add groups of ranks in nodes or rails, joined over nodes: equal splits in several nodes have one cause."""
    for level, cells in case.splits.items():
        edges = {edge for cell in cells for edge in across(cell, case.at(level, case.bad))}
        if level == NODE:
            names = ["ranks " + " and ".join(map(fold_ranks, cell)) for cell in cells]
        else:
            names = [f"{' and '.join(fold(case.hosts(group)) for group in cell)} {rail(cell)}" for cell in cells]
        sides = [group for cell in cells for group in cell]
        case.troubles.append(split(case, f"{some(names)} {asunder(case, edges)}, not a bad rank", sides, edges))


def add_doubtful(case: Case) -> None:
    """Add bad pairs of ranks with no good pair and too few bad pairs to be blamed."""
    working = {end for edge in case.good for end in edge}
    edges = {edge for edge in case.left if not working.issuperset(edge)}
    if not edges:
        return
    ranks = sorted({end for edge in edges for end in edge} - working)
    how = fare(case, edges, are_several=len(edges) > 1)
    sentence = f"{links(case, edges)} {how}; there is no other result for {case.who(ranks)}"
    who = {"ranks": tuple(ranks), "links": tuple(sorted(edges))}
    case.troubles.append(trouble(case, Kind.UNDECIDABLE, sentence, edges, f"{_test(ranks)} as well", **who))
    case.left -= edges


def add_links(case: Case) -> None:
    """Add the remaining bad pairs as one trouble: many may share a cause, such as an uplink."""
    if not case.left:
        return
    unsure: set[int] = set()
    for level in LEVELS:
        working = {end for edge in case.at(level, case.good) for end in edge}
        unsure |= {end for edge in case.at(level, case.left) for end in edge} - working
    doubt = f"{name_ranks(unsure)}: no other pair at that level works, so either an end (a NIC) or the link may be bad"
    named = ("" if case.troubles else "only ") + links(case, case.left)
    how = fare(case, case.left, are_several=len(case.left) > 1)
    ends = "both are" if len(case.left) == 1 else "their ends are"
    well = "otherwise: the link or one of its ends" if unsure else "with all other ranks"
    next_ = f"add a third node or rank: {NEXT_THIRD}" if unsure else NEXT_LINK
    more, who = ([doubt] if unsure else []), {"links": tuple(sorted(case.left))}
    sentence = f"{named} {how}; {ends} fine {well}"
    case.troubles.append(trouble(case, Kind.BAD_LINK, sentence, case.left, next_, *more, **who))


def add_unsure(case: Case) -> None:
    """Add pairs that look slow but may be noise; next to certain trouble, list them as evidence only."""
    if not case.unsure or case.troubles:
        return
    most = max(len(case.pairs[edge].samples) for edge in case.unsure)
    how = fare(case, case.unsure, are_several=len(case.unsure) > 1)
    sentence = f"{links(case, case.unsure)} {how}; this may be noise, so no rank or link is reported as slow"
    more = f"measured up to {most} times: too few, given how often good pairs look slow for a while"
    who = {"links": tuple(sorted(case.unsure))}
    case.troubles.append(trouble(case, Kind.UNDECIDABLE, sentence, case.unsure, NEXT_NOISE, more, **who))


ADDITIONS = (add_blamed, add_splits, add_doubtful, add_links, add_unsure)
"""The last steps of a classification: each adds troubles."""


def split(
    case: Case, sentence: str, sides: Sequence[set[int]], edges: Collection[Edge], why: str = WHY_SPLIT
) -> Classification:
    """Return groups that do not work across, with the likely cause."""
    may_be_layout = any(case.status[edge] is PairStatus.SLOW for edge in case.at(NODE, edges))
    groups = tuple(tuple(sorted(side)) for side in sides)
    return trouble(case, Kind.SPLIT, sentence, edges, NEXT_SPLIT, WHY_LAYOUT if may_be_layout else why, groups=groups)


def perhaps_a_group(case: Case, ranks: Sequence[int], unmet: set[int]) -> Classification:
    """Return ranks that are bad, or form a group with their untested peers."""
    edges = touching(ranks, case.left)
    others = "each other" if unmet.issubset(ranks) else name_ranks(unmet)
    tested = "were not tested" if len(ranks) > 1 else "was not tested"
    how = fare(case, edges, "with every other rank tried", are_several=len(ranks) > 1)
    sentence = f"{case.who(ranks)} {how}, but {tested} with {others}: bad, or part of a group that works inside"
    next_ = f"rerun with {fold(case.hosts(ranks))} alone: if that works, they form a group"
    more = f"a group would mean that configurations differ, {WHY_SPLIT}"
    return trouble(case, Kind.UNDECIDABLE, sentence, edges, next_, more, ranks=tuple(ranks))


def dead_rail(case: Case, bad: set[Edge]) -> Classification:
    """Return a rail without a working pair."""
    hosts = fold(case.hosts({end for edge in bad for end in edge}))
    how = fare(case, bad, "with each other", are_several=True)
    shared = "other ranks there do not: something that the rail shares, such as a switch"
    sentence = f"{hosts} {rail(bad)} {how}; {shared}"
    return trouble(case, Kind.BAD_LINK, sentence, bad, NEXT_LINK, links=tuple(sorted(bad)))


def scattered(case: Case, slow: set[Edge], measured: int) -> Classification:
    """Return many slow pairs without a pattern, out of `measured` pairs."""
    pairs = f"{len(slow)} of {measured} pairs of {fold(case.hosts({end for edge in slow for end in edge}))}"
    sentence = f"{pairs} {fare(case, slow, are_several=True)}; no rank, group or link explains them"
    next_ = "rerun with nothing else running; compare with nvidia-smi topo -m"
    more = "slow pairs without a pattern are noise or topology"
    return trouble(case, Kind.UNDECIDABLE, sentence, slow, next_, more)


def two_nodes(case: Case, hosts: Sequence[str], bad: set[Edge]) -> Classification:
    """Return the undecidable case of two nodes without a working pair between them."""
    inside = "inside each node all pairs are good; "
    is_well = bool(case.at(NODE, case.good)) and not case.at(NODE, case.bad)
    how = fare(case, bad, "with each other", are_several=True)
    doubt = f"{inside * is_well}the network between them or one node's own (two nodes cannot decide)"
    sentence, next_ = f"{' and '.join(hosts)} {how}; {doubt}", f"add a third node to --hosts: {NEXT_THIRD}"
    who = {"hosts": tuple(hosts), "links": tuple(sorted(bad))}
    return trouble(case, Kind.UNDECIDABLE, sentence, bad, next_, **who)


def nothing_works(case: Case) -> Classification:
    """Return the undecidable case without a good pair."""
    if len(case.bad) > 1:
        sentence = f"no pair works ({counts(case, case.bad)}), so no single rank can be identified"
        next_ = "check what all ranks have in common: driver, interface, firewall (distdiag ports), shared memory"
        return trouble(case, Kind.UNDECIDABLE, sentence, case.bad, next_)
    (edge,) = case.bad
    hosts = case.hosts(edge)
    third = "node to --hosts" if len(hosts) > 1 else f"rank, --nproc {max(3, len(case.host_of))}"
    how = fare(case, [edge], "with each other", are_several=True)
    sentence = f"{case.who(edge)} {how}; one of them or the link between them (a single pair cannot decide)"
    who = {"ranks": edge, "hosts": tuple(hosts) if len(hosts) > 1 else (), "links": (edge,)}
    return trouble(case, Kind.UNDECIDABLE, sentence, [edge], f"add a third {third}: {NEXT_THIRD}", **who)


def nothing_measured(case: Case) -> Classification:
    """Return the case without any evidence."""
    if case.pairs:
        return trouble(case, Kind.UNDECIDABLE, "no pair was measured", (), "increase --stall")
    next_ = "use at least two ranks: --nproc 2, or --hosts"
    return trouble(case, Kind.UNDECIDABLE, "no pair to test: there is a single rank", (), next_)


def healthy(case: Case) -> Classification:
    """Return that no pair is bad, and list ranks without a result."""
    fast = {edge for edge in case.good if case.speed(edge) * SLOW > case.typical[case.pairs[edge].level]}
    alike = f"no pair is slow, but {len(fast)} are much faster than the others" if fast else "no pair stands out"
    doubt = "" if case.least is not None else "; pairs alone do not show whether that is good"
    unmet = set(case.host_of).difference(*case.good)
    sentence = f"{alike}: {typical(case, case.typical)}"
    if len(case.pairs) == 1 and case.least is None:
        sentence, doubt = f"{typical(case, case.typical)}, and nothing to compare it with", ""
    if not unmet:
        return trouble(case, Kind.HEALTHY, f"{sentence}{doubt}", fast, "")
    sentence += f"; no result for {case.who(unmet)}"
    return trouble(case, Kind.UNDECIDABLE, sentence, fast, _test(unmet), ranks=tuple(sorted(unmet)))


def _test(ranks: Collection[int]) -> str:
    return f"rerun, so that {name_ranks(ranks)} {'are' if len(ranks) > 1 else 'is'} tested with other ranks"
