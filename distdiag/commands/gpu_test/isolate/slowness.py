"""Which pairs of a level are slow beside the others, and for which of them chance explains it as well. Pure.

Standard library only: it travels with the ranks, where it decides which pairs are measured again.
"""

from __future__ import annotations

from bisect import bisect_right
from math import comb, exp, log
from statistics import median

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    Pair = tuple[int, int]
    Samples = Mapping[Pair, Sequence[float]]

SLOW = 1 / 2
"""Of the typical bandwidth. Good pairs on a busy machine vary by 30% either way, so that the slowest has 0.54 of the
fastest; PCIe that lost half its lanes, or a bond that lost one of two ports, has half at most."""
_CERTAIN = 1 / 4
"""Of the typical bandwidth: slow, however much good pairs vary, as the spread of few pairs says little."""
_FALSE_ALARMS = 1e-4
"""Of runs in which only noise makes a difference, for each node. Ten times as many come true, as the question is put
again after each sample."""
DOZEN = 12
"""Where so many are proven slow and good pairs are hardly ever, the others need not be measured again."""
_CALM = 1 / 100
"""Of the samples of good pairs may be slow there."""

_FASTEST = 1e15
"""Bytes/s: a thousand times what the fastest link of any node does."""


def judge(samples: Samples, node_of: Mapping[int, int | str]) -> tuple[float, set[Pair], set[Pair]]:
    """Find the slow pairs of a level. The best sample counts, as noise makes slow and never fast.

    Args:
        samples: the bandwidth of each pair that works each time it was measured, in bytes/s.
        node_of: the node of each rank.

    Returns:
        The typical bandwidth in bytes/s, the pairs that are slow, and those that look slow but too seldom so far,
        given how often good pairs do.
    """
    samples = {pair: [_possible(speed) for speed in own] for pair, own in samples.items()}
    best = {pair: max(own) for pair, own in samples.items()}
    typical, least = _norm(list(best.values()))
    below = {pair for pair, speed in best.items() if speed < least}
    slow = _proven(samples, below, node_of) if below else set()
    if len(slow) >= DOZEN:
        good = [sample for pair, own in samples.items() if pair not in below for sample in own]
        if sum(sample < least for sample in good) <= _CALM * len(good):
            slow = below
    return typical, slow, below - slow


def by_chance(own: Sequence[float], good: Sequence[float]) -> float:
    """Return the probability that samples which differ by noise alone fall so that a pair has such slow samples.

    Args:
        own: what was measured of the pair, in bytes/s.
        good: what was measured of good pairs, sorted.

    Returns:
        How often as many samples, drawn from all these blindly, would all be at or below the pair's best.
    """
    as_slow = bisect_right(good, max(own))
    return comb(len(own) + as_slow, len(own)) / comb(len(own) + len(good), len(own))


def _proven(samples: Samples, below: Collection[Pair], node_of: Mapping[int, int | str]) -> set[Pair]:
    """Find the pairs that are slower than noise explains: that of their own nodes, as each has its own."""
    near: dict[int | str, list[float]] = {}
    pairs_of: dict[int | str, int] = {}
    for pair, own in samples.items():
        for node in {node_of[rank] for rank in pair}:
            pairs_of[node] = pairs_of.get(node, 0) + 1
            if pair not in below:
                near.setdefault(node, []).extend(own)
    for seen in near.values():
        seen.sort()
    everywhere = sorted(sample for pair, own in samples.items() if pair not in below for sample in own)

    def chance(pair: Pair) -> float:
        nodes = [node for node in {node_of[rank] for rank in pair} if node in near]
        if not nodes:
            return by_chance(samples[pair], everywhere) * len(samples)
        # Each pair of the node has its chance to be the slow one.
        return max(by_chance(samples[pair], near[node]) * pairs_of[node] for node in nodes)

    return {pair for pair in below if chance(pair) < _FALSE_ALARMS}


def _possible(speed: float) -> float:
    """Return a bandwidth in bytes/s; a value that no link has, as a lying node may report it, counts as 1 byte/s."""
    return speed if 1.0 <= speed <= _FASTEST else 1.0


def _norm(speeds: Sequence[float]) -> tuple[float, float]:
    """Return the typical bandwidth of good pairs, and the limit below which a pair is slow.

    Good pairs need not be most: one bad rank of 3 spoils 2 pairs of 3, one of 4 half of them. But they are the fast
    pairs, so they are sought from the top: what has half at least of the pair that a sixth of all exceeds. So more than
    a sixth must be good (which they are if half of the ranks are, and in a split into two groups), and a few pairs
    with a bridge of their own do not make all others slow. Where good pairs vary much (the MAD of their logarithms), a
    slow pair must be further below them.
    """
    fast = sorted(speeds, reverse=True)[(len(speeds) - 1) // 6]
    good = [speed for speed in speeds if speed >= fast * SLOW]
    typical = median(good)
    deviation = 1.4826 * median(abs(log(speed / typical)) for speed in good)
    return typical, typical * min(SLOW, max(_CERTAIN, exp(-3 * deviation)))
