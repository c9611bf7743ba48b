"""Which pairs are good and which are bad, and what is blamed for it so far. Pure.

What is slow falls out of the pairs of its level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.commands.gpu_test.isolate import graph, slowness
from distdiag.commands.gpu_test.isolate.pairs import LEVELS, PairStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distdiag.commands.gpu_test.isolate.pairs import Classification, Edge, Pair

_BAD = (PairStatus.SLOW, PairStatus.FAILED, PairStatus.WRONG)


class Case:
    """The pairs, which of them are good and bad, and what is blamed; nothing explains those in `left` so far."""

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
        """No evidence: those that were not measured, and the unsure."""
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
        """Give the bandwidth of a pair, in bytes/s; 0 if it has none."""
        return self.pairs[edge].busbw_bytes_per_s or 0.0

    def hosts(self, ranks: Iterable[int]) -> list[str]:
        """Name the nodes of ranks, each once."""
        return list(dict.fromkeys(self.host_of[rank] for rank in sorted(ranks)))

    def who(self, ranks: Collection[int]) -> str:
        """Name ranks and their nodes: "ranks 0-3 (node0)"."""
        return f"{name_ranks(ranks)} ({fold(self.hosts(ranks))})"

    def is_node(self, ranks: Collection[int]) -> bool:
        """Tell whether these are all ranks of whole nodes, of several."""
        return len(self.ranks_of) > 1 and sum(len(self.ranks_of[host]) for host in self.hosts(ranks)) == len(ranks)

    def accuse(self, ranks: Collection[int], of: Collection[Edge]) -> None:
        """Blame a rank, or all ranks of a node, for those of the pairs that it has part in."""
        self.blamed[tuple(ranks)] = None
        self.left -= graph.touching(ranks, of)


def _judge(pairs: Mapping[Edge, Pair], host_of: Mapping[int, str]) -> tuple[dict[Edge, PairStatus], dict[str, float]]:
    """Judge pairs by themselves, then those of a level by each other; give the typical bandwidth of each level too."""
    status, typical = {edge: _status(pair) for edge, pair in pairs.items()}, {}
    for level in LEVELS:
        looks = {
            edge: pair.looks for edge, pair in pairs.items() if pair.level == level and status[edge] is PairStatus.OK
        }
        if looks:
            typical[level], slow, unsure = slowness.judge(looks, host_of)
            status.update(dict.fromkeys(slow, PairStatus.SLOW))
            status.update(dict.fromkeys(unsure, PairStatus.UNSURE))
    return status, typical


def _status(pair: Pair) -> PairStatus:
    if pair.failed:
        return PairStatus.FAILED
    if pair.wrong:
        return PairStatus.WRONG
    return PairStatus.OK if pair.busbw_bytes_per_s else PairStatus.SKIPPED
