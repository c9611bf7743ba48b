"""Finds the fault behind bad pairs of ranks: a node, a rank, a link, or groups that cannot communicate. Pure.

Bad pairs are explained by as few culprits as possible, the largest first: nodes, ranks, groups, then single links.
Insufficient evidence is a result as well.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.gpu_test.isolate import findings, pair_graph
from distdiag.commands.gpu_test.isolate.pair_graph import Case
from distdiag.commands.gpu_test.isolate.slowness import parts
from distdiag.commands.gpu_test.isolate.types import LEVELS, NET, NODE, Classification, Kind, PairStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.gpu_test.isolate.types import Edge, Pair

_SCATTERED = 1 / 5
"""Share of the pairs of some members. More slow pairs without a pattern are noise or topology, not that many links."""


def below_expectation(case: Case) -> None:
    """Report levels whose good pairs, too, are below the expected bandwidth.

    A single pair is a bad pair instead, and one of its ranks may be at fault.
    """
    least = case.least or 0.0
    levels = [level for level, typical in case.typical.items() if typical < least]
    slow = {edge for level in levels for edge in case.at(level, case.good) if case.speed(edge) < least}
    case.status.update(dict.fromkeys(slow, PairStatus.SLOW))
    if len(case.good | case.bad) == 1:
        case.good, case.bad = case.good - slow, case.bad | slow
    elif levels:
        some_bad = any(case.at(level, case.bad) for level in levels)
        alike = "even the best pairs are" if some_bad else "all pairs are equally"
        words = {"alike": alike, "typical": findings.typical(case, levels), "least": findings.speed(least)}
        findings.add(case, "uniformly-slow", (), words)


def dead_nodes(case: Case) -> None:
    """Blame nodes of several ranks if none of these has a good pair, and each has two bad ones."""
    working = {end for edge in case.good for end in edge}
    bads = Counter(end for edge in case.bad for end in edge)
    for ranks in case.ranks_of.values():
        if len(ranks) > 1 and case.is_node(ranks) and all(rank not in working and bads[rank] > 1 for rank in ranks):
            case.accuse(ranks, case.left)


def no_network(case: Case) -> None:
    """Blame the network if no pair between nodes is good; such pairs are no evidence about single nodes or ranks."""
    bad = case.at(NET, case.left)
    hosts = case.hosts({end for edge in bad for end in edge})
    if not bad or case.at(NET, case.good):
        return
    if len(hosts) == 2:
        findings.two_nodes(case, hosts, bad)
    elif not any(all(host in case.hosts(edge) for edge in bad) for host in hosts):
        sides = [set(case.ranks_of[host]) for host in hosts]
        findings.add_split(case, "split-network", fold(hosts), sides, bad, "network")


def dead_ranks(case: Case) -> None:
    """Blame ranks that work with no other rank of any node, except possible members of a separate group."""
    dead = pair_graph.culprits(case.good, case.left)
    part_of = {member: part for part in parts(case.good) for member in part}
    unmet = {}
    # Untested peers with which a rank might work: those not connected to a tested peer.
    for rank in dead:
        met = set().union(*pair_graph.touching([rank], case.bad))
        others = set().union(*pair_graph.touching([rank], case.skipped)) - {rank}
        if possible := {other for other in others if met.isdisjoint(part_of.get(other, ()))}:
            unmet[rank] = possible
    if unmet:
        findings.perhaps_a_group(case, unmet)
    for rank in dead:
        if rank not in unmet:
            case.accuse([rank], case.left)


def between_nodes(case: Case) -> None:
    """Classify whole nodes: two nodes work together if any pair of their ranks does."""
    first = {rank: own[0] for own in case.ranks_of.values() for rank in own}
    net = case.at(NET, case.left)
    good, bad = (
        {(min(first[a], first[b]), max(first[a], first[b])) for a, b in edges}
        for edges in (case.at(NET, case.good), net)
    )
    members, groups = pair_graph.shape(good, bad - good)
    for ranks in (case.ranks_of[case.host_of[member]] for member in members):
        measured = {end for edge in pair_graph.touching(ranks, net) for end in edge}.intersection(ranks)
        if len(ranks) == 1 or len(measured) > 1:  # a single one of several: its own NIC may be bad
            case.accuse(ranks, net)
    if groups:
        sides = [{rank for member in group for rank in case.ranks_of[case.host_of[member]]} for group in groups]
        names = " and ".join(fold(case.hosts(side)) for side in sides)
        findings.add_split(case, "split-nodes", names, sides, pair_graph.across(sides, net))


def nothing_inside(case: Case) -> None:
    """Report nodes without a working pair inside, while pairs between nodes work."""
    bad = case.at(NODE, case.left)
    hosts = case.hosts({end for edge in bad for end in edge})
    if len(hosts) > 1 and not case.at(NODE, case.good):
        sides = parts(case.at(NET, case.good))
        findings.add_split(case, "split-inside", fold(hosts), sides, bad, "inside")


def cells(case: Case) -> None:
    """Classify the ranks of each node, and of each rail: the ranks paired between nodes."""
    for level in LEVELS:
        for part in parts(case.at(level, case.pairs)):
            bad = {edge for edge in case.at(level, case.left) if edge[0] in part}
            if bad:
                _cell(case, level, {edge for edge in case.at(level, case.good) if edge[0] in part}, bad)


def _cell(case: Case, level: str, good: set[Edge], bad: set[Edge]) -> None:
    if not good and len(bad) > 2 and not set.intersection(*map(set, bad)):
        if level == NODE:
            case.accuse(case.ranks_of[case.host_of[min(bad)[0]]], bad)
        else:
            findings.dead_rail(case, bad)
        return
    members, groups = pair_graph.shape(good, bad)
    for rank in members:
        elsewhere = case.good - case.at(level, case.good)
        case.accuse([rank], bad if pair_graph.touching([rank], elsewhere) else case.left)
    if groups:
        case.splits.setdefault(level, []).append(groups)
        case.left -= pair_graph.across(groups, bad)
    slow = {edge for edge in bad & case.left if case.status[edge] is PairStatus.SLOW}
    if len(slow) > max(2, _SCATTERED * len(good | bad)):
        findings.scattered(case, slow, len(good | bad))


def classify(
    pairs: Sequence[Pair], host_of: Mapping[int, str], *, least_bytes_per_s: float | None = None
) -> tuple[Classification, dict[Edge, PairStatus]]:
    """Find the fewest culprits that explain all bad pairs; return the fault, and the status of each pair (a, b).

    `pairs`: each once, of both levels, also skipped ones. `least_bytes_per_s`: minimum bandwidth of a pair; without it
    pairs are only compared with each other, and all may be slow.
    """
    case = Case(pairs, host_of, least_bytes_per_s)
    below_expectation(case)
    if case.good:
        for step in (dead_nodes, no_network, dead_ranks, between_nodes, nothing_inside, cells, *findings.ADDITIONS):
            step(case)
    else:
        findings.nothing_works(case)
    if not case.troubles:
        findings.healthy(case)
    return _sum(case), case.status


def _sum(case: Case) -> Classification:
    """Join the troubles into one classification, preceded by the measurements."""
    found = case.troubles
    measured = [findings.measured_at(case, level) for level in LEVELS if case.at(level, case.pairs)]
    reason = (*measured, *(line for trouble in found for line in trouble.reason))
    if len(found) == 1:
        return replace(found[0], reason=reason)
    return Classification(
        kind=Kind.SEVERAL,
        ranks=tuple(sorted({rank for trouble in found for rank in trouble.ranks})),
        hosts=tuple(dict.fromkeys(host for trouble in found for host in trouble.hosts)),
        links=tuple(sorted({link for trouble in found for link in trouble.links})),
        groups=tuple(group for trouble in found for group in trouble.groups),
        sentence="; and ".join(trouble.sentence for trouble in found),
        reason=reason,
        next="; ".join(dict.fromkeys(trouble.next for trouble in found)),
    )
