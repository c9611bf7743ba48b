"""Slow pairs of a level, those whose slowness may be chance, and the parts of a graph of pairs. Pure.

Standard library only: it is sent to the ranks, to decide which pairs are measured again.
"""

from __future__ import annotations

from bisect import bisect_right
from math import comb, exp, log
from statistics import median

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    Pair = tuple[int, int]
    Samples = Mapping[Pair, Sequence[float]]

SLOW = 1 / 2
"""Fraction of the typical bandwidth. Good pairs on a busy machine vary by 30% either way, so the slowest has 0.54 of
the fastest; PCIe that lost half its lanes, or a bond that lost one of two ports, has at most half."""
_CERTAIN = 1 / 4
"""Fraction of the typical bandwidth: slow despite any variation of good pairs, as the spread of few pairs is
unreliable."""
_FALSE_ALARMS = 1e-4
"""Accepted rate per node in runs with noise alone; ten times that in practice, as each sample repeats the test."""
DOZEN = 12
"""Once this many are proven slow and good pairs hardly ever are, the others need no repetition."""
_CALM = 1 / 100
"""Largest share of slow samples among good pairs for that rule."""

_FASTEST = 1e15
"""Bytes/s: a thousand times the fastest link of any node."""


def judge(samples: Samples, node_of: Mapping[int, int | str]) -> tuple[float, set[Pair], set[Pair]]:
    """Find the slow pairs of a level, from all samples of each working pair. The best counts, as noise only slows.

    Returns the typical bandwidth in bytes/s, the slow pairs, and pairs that look slow but not often enough yet, given
    how often good pairs do.
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


def parts(edges: Iterable[Pair]) -> list[set[int]]:
    """Find the connected parts of a graph, in order of their lowest members."""
    part_of: dict[int, set[int]] = {}
    for edge in edges:
        small, large = sorted((part_of.setdefault(end, {end}) for end in edge), key=len)
        if small is not large:
            large |= small
            part_of.update(dict.fromkeys(small, large))
    return sorted({id(part): part for part in part_of.values()}.values(), key=min)


def by_chance(own: Sequence[float], good: Sequence[float]) -> float:
    """Return the probability that noise alone gives a pair samples this slow; `good`: those of good pairs, sorted.

    That is, as many samples, drawn at random from all of these, are all at or below the pair's best.
    """
    as_slow = bisect_right(good, max(own))
    return comb(len(own) + as_slow, len(own)) / comb(len(own) + len(good), len(own))


def _proven(samples: Samples, below: Collection[Pair], node_of: Mapping[int, int | str]) -> set[Pair]:
    """Find the pairs slower than the noise of their own nodes explains, as noise differs between nodes."""
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
        # Each pair of the node could be the slow one by chance.
        return max(by_chance(samples[pair], near[node]) * pairs_of[node] for node in nodes)

    return {pair for pair in below if chance(pair) < _FALSE_ALARMS}


def _possible(speed: float) -> float:
    """Return a bandwidth in bytes/s; impossible values, as an untrusted node may report, become 1 byte/s."""
    return speed if 1.0 <= speed <= _FASTEST else 1.0


def _norm(speeds: Sequence[float]) -> tuple[float, float]:
    """Return the typical bandwidth of good pairs, and the limit below which a pair is slow.

    Good pairs may be a minority: one bad rank of 3 spoils 2 of 3 pairs, one of 4 half of them. They are the fast pairs,
    so search from the top: pairs with at least half the bandwidth that a sixth of all pairs exceed. This requires that
    more than a sixth are good (true if half of the ranks are, and in a split into two groups), and keeps a few pairs
    with a dedicated bridge from making all others slow. If good pairs vary much (the MAD of their logarithms), a slow
    pair must be further below.
    """
    fast = sorted(speeds, reverse=True)[(len(speeds) - 1) // 6]
    good = [speed for speed in speeds if speed >= fast * SLOW]
    typical = median(good)
    deviation = 1.4826 * median(abs(log(speed / typical)) for speed in good)
    return typical, typical * min(SLOW, max(_CERTAIN, exp(-3 * deviation)))
