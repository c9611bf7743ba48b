"""The graph of good and bad pairs, its patterns, and the culprits so far. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

from distdiag.commands.gpu_test.isolate import slowness
from distdiag.commands.gpu_test.isolate.types import LEVELS, PairStatus
from distdiag.diagnosis.wording import format_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from distdiag.commands.gpu_test.isolate.types import Classification, Edge, Pair

_NEARLY = 1 / 3
"""Good pairs tolerated in a culprit per bad pair: a faulty part occasionally works once."""


def shape(good: set[Edge], bad: set[Edge]) -> tuple[list[int], list[set[int]]]:
    """Find members that work with no other, then groups that do not work across, then members that work with few."""
    members = culprits(good, bad)
    left = bad - touching(members, bad)
    groups = _groups(good, left)
    return [*members, *culprits(good, left - across(groups, left), _NEARLY)], groups


def culprits(good: Collection[Edge], bad: Collection[Edge], tolerated: float = 0.0) -> list[int]:
    """Find the fewest members that explain bad edges, two at least; `tolerated` good edges for each are allowed.

    With tolerance 0, the greedy choice of the member with most bad edges is not only quick but optimal: the alternative
    would blame all its partners, which work with each other.
    """
    goods = Counter(end for edge in good for end in edge)
    found: list[int] = []
    left = set(bad)
    while True:
        bads = Counter(end for edge in left for end in edge)
        guilty = [member for member, count in bads.items() if count > 1 and goods[member] <= tolerated * count]
        if not guilty:
            return found
        found.append(min(guilty, key=lambda member: (-bads[member], member)))
        left -= touching(found[-1:], left)


def _groups(good: Collection[Edge], bad: Collection[Edge]) -> list[set[int]]:
    """Find groups of at least two members that work inside and not across; [] if the edges do not show that."""
    found = slowness.parts(good)
    of = {member: number for number, part in enumerate(found) for member in part}
    between = Counter((min(of[a], of[b]), max(of[a], of[b])) for a, b in bad if a in of and b in of)
    inside = Counter(of[a] for a, _ in good)
    if len(found) < 2 or any(between[number, number] > _NEARLY * inside[number] for number in inside):
        return []
    # A single bad pair between two groups may be a link: the others were not measured.
    return found if all(between[two] > 1 for two in combinations(range(len(found)), 2)) else []


def across(groups: Iterable[set[int]], edges: Iterable[Edge]) -> set[Edge]:
    """Keep the edges between two groups."""
    of = {member: number for number, group in enumerate(groups) for member in group}
    return {(a, b) for a, b in edges if a in of and b in of and of[a] != of[b]}


def touching(ranks: Collection[int], edges: Iterable[Edge]) -> set[Edge]:
    """Keep the edges with an end among these."""
    ends = set(ranks)
    return {edge for edge in edges if not ends.isdisjoint(edge)}


def stars(edges: Iterable[Edge]) -> Iterator[tuple[int, list[int]]]:
    """Yield ranks with their partners in edges, the rank with most edges first; each edge once."""
    left = set(edges)
    while left:
        degree = Counter(end for edge in left for end in edge)
        rank = min(degree, key=lambda end: (-degree[end], end))
        own = touching([rank], left)
        yield rank, sorted(sum(edge) - rank for edge in own)
        left -= own


_BAD = (PairStatus.SLOW, PairStatus.FAILED, PairStatus.WRONG)


class Case:
    """The pairs, good and bad, and the culprits so far; `left`: bad pairs not yet explained."""

    def __init__(self, pairs: Sequence[Pair], host_of: Mapping[int, str], least: float | None) -> None:
        self.pairs = {(pair.a, pair.b): pair for pair in pairs}
        self.host_of = host_of
        self.ranks_of: dict[str, list[int]] = {}
        for rank in sorted(host_of):
            self.ranks_of.setdefault(host_of[rank], []).append(rank)
        self.least = least
        self.status, self.typical = _judge(self.pairs, host_of)
        self.good = {edge for edge, status in self.status.items() if status is PairStatus.OK}
        self.bad = {edge for edge, status in self.status.items() if status in _BAD}
        self.unsure = {edge for edge, status in self.status.items() if status is PairStatus.UNSURE}
        self.skipped = set(self.pairs) - self.good - self.bad
        """No evidence: unmeasured and unsure pairs."""
        self.left = set(self.bad)
        self.blamed: dict[tuple[int, ...], None] = {}
        """Single ranks, or all ranks of a node."""
        self.splits: dict[str, list[list[set[int]]]] = {}
        """By level, for each node or rail: groups of ranks."""
        self.troubles: list[Classification] = []

    def at(self, level: str, edges: Iterable[Edge]) -> set[Edge]:
        """Keep the pairs of a level."""
        return {edge for edge in edges if self.pairs[edge].level == level}

    def speed(self, edge: Edge) -> float:
        """Return the bandwidth of a pair in bytes/s, 0 if none."""
        return self.pairs[edge].busbw_bytes_per_s or 0.0

    def hosts(self, ranks: Iterable[int]) -> list[str]:
        """Return the distinct nodes of ranks."""
        return list(dict.fromkeys(self.host_of[rank] for rank in sorted(ranks)))

    def who(self, ranks: Collection[int]) -> str:
        """Format ranks and their nodes: "ranks 0-3 (node0)"."""
        return format_ranks(ranks, self.hosts(ranks))

    def is_node(self, ranks: Collection[int]) -> bool:
        """Return whether these are all ranks of whole nodes, while other nodes exist."""
        return len(self.ranks_of) > 1 and sum(len(self.ranks_of[host]) for host in self.hosts(ranks)) == len(ranks)

    def accuse(self, ranks: Collection[int], of: Collection[Edge]) -> None:
        """Blame a rank, or all ranks of a node, for those of the pairs that include it."""
        self.blamed[tuple(ranks)] = None
        self.left -= touching(ranks, of)


def _judge(pairs: Mapping[Edge, Pair], host_of: Mapping[int, str]) -> tuple[dict[Edge, PairStatus], dict[str, float]]:
    """Judge each pair alone, then compare the pairs of a level; also return each level's typical bandwidth."""
    status, typical = {edge: pair.status for edge, pair in pairs.items()}, {}
    for level in LEVELS:
        samples = {
            edge: pair.samples for edge, pair in pairs.items() if pair.level == level and status[edge] is PairStatus.OK
        }
        if samples:
            typical[level], slow, unsure = slowness.judge(samples, host_of)
            status.update(dict.fromkeys(slow, PairStatus.SLOW))
            status.update(dict.fromkeys(unsure, PairStatus.UNSURE))
    return status, typical
