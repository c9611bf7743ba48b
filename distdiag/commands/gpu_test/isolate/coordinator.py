"""Rank 0's part of measuring pairs: chooses the next pairs, skips some, and repeats others.

Noise slows pairs as faults do, but not every time: a slow pair is measured again, alternating with good pairs, until it
was fast once, or slow so often, next to good pairs that were not, that chance is excluded. That takes samples as
independent, but other programs slow a pair for seconds; so repeated samples of ranks that lacked a core do not count.
Standard library only: it is sent to the ranks.
"""

from __future__ import annotations

import time
from itertools import chain, zip_longest

from distdiag.commands.gpu_test.isolate.slowness import DOZEN, judge, parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from typing import Literal

    from distdiag.cluster.records import PairMessage

    Pair = tuple[int, int]


def rounds(nodes: list[list[int]]) -> list[list[Pair]]:
    """Arrange all pairs (a, b), a < b, in sorted rounds; no rank is twice in a round, and no pair in two rounds.

    First pairs inside the nodes, all nodes in parallel: for g ranks g - 1 rounds, or g if g is odd. Then pairs of
    nodes, for k nodes k - 1 or k rounds: local rank i of one node meets local rank i of the other.
    """
    inside = ([[(ranks[a], ranks[b]) for a, b in met] for met in _meetings(len(ranks))] for ranks in nodes)
    found = [[*chain.from_iterable(turn)] for turn in zip_longest(*inside, fillvalue=())]
    found += [[pair for a, b in met for pair in zip(nodes[a], nodes[b])] for met in _meetings(len(nodes))]  # noqa: B905 - Python 3.9
    return [sorted((min(pair), max(pair)) for pair in pairs) for pairs in found if pairs]


def _meetings(members: int) -> Iterator[list[Pair]]:
    """Pair members 0, 1, ... with each other once by the circle method: one stays, the others move on by one seat.

    With an odd number, the partner of the fixed member is idle.
    """
    circle = members - 1 + members % 2
    for turn in range(circle if members > 1 else 0):
        pairs = [((turn + i) % circle, (turn - i) % circle) for i in range(1, (circle + 1) // 2)]
        yield pairs if members % 2 else [(turn, circle), *pairs]


_HOPELESS = 3
"""A rank that failed with this many others and worked with none skips the peers of those: each try costs a timeout.
Other peers are tried, to distinguish unconnected groups from a bad rank."""
_PATIENCE = 5.0
_AGAIN_FAILED = 2
"""Failed pairs to retry, once: each retry costs a timeout."""
_SAMPLES = 24
"""Maximum number of repetitions for a possibly slow pair."""
_DIM = 0.6
"""Good pairs below this fraction of their level's best are measured again as well, as the reference for slow pairs."""
_SAMPLES_DIM = 3
_FEW = 12
"""Repetitions allowed regardless of time: enough to prove a pair slow next to a single good one."""
_SAMPLING_S = 20.0
"""Afterwards, pairs that may be slow by chance stay unsure."""


class Coordinator:
    """Plans rounds of pairs sequentially; `results` has the result of each pair, with all its samples."""

    def __init__(
        self,
        nodes: list[list[int]],
        at_once: int | None,
        patience_s: tuple[float, float],
        pause_s: float,
        left_out: Collection[int] = (),
    ) -> None:
        """Plan all pairs of the nodes' ranks, but those `left_out`.

        `at_once`: maximum number of concurrent pairs of a node, None: unlimited. `patience_s`: minimum and maximum
        timeout of a pair. `pause_s`: rest before each repetition of slow pairs.
        """
        self._pause_s = pause_s
        self._patience_s = patience_s
        self._longest_s: float | None = None
        self._node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        wanted = ([pair for pair in pairs if not {*left_out}.intersection(pair)] for pairs in rounds(nodes))
        self._rounds = [part for pairs in wanted for part in self._parts(pairs, at_once)]
        self._suspects: list[Pair] = []
        self.results: dict[Pair, PairMessage] = {}

    def plan(self) -> Iterator[tuple[str, list[Pair]]]:
        """Yield the name and the pairs of each round; note its results before requesting the next round."""
        for number, pairs in enumerate(self._rounds, 1):
            yield f"round {number} of {len(self._rounds)}", [pair for pair in pairs if not self._is_hopeless(pair)]
        failed = self._failed()
        for number, pair in enumerate(failed, 1):
            yield f"retry of failed pair {number} of {len(failed)}", [pair]
        began = time.monotonic()
        for sample in range(_SAMPLES):
            good, suspects = self.suspects(also_dim=sample < _SAMPLES_DIM)
            if not suspects or (sample >= _FEW and time.monotonic() - began > _SAMPLING_S):
                return
            self._suspects = suspects
            time.sleep(self._pause_s)
            for number, pair in enumerate(suspects, 1):
                words = f"sample {sample + 2}, {number} of {len(suspects)}"
                # A good pair measured just before has the same noise: a slowdown of both is no evidence.
                yield f"{words}: reference pair", [self._control(pair, good)]
                yield words, [pair]

    def note(self, pair: Pair, bytes_per_s: float, wrong: int, error: str, took_s: float, *, delayed: bool) -> None:
        """Record a measurement, which failed if it has an error.

        Wrong data once is wrong for good, and a pair that worked once has not failed. `delayed`: a rank lacked a core,
        which explains slowness: of a possibly slow pair, such a repetition is no further sample, and can only improve
        the first one. Of a good pair it is one, as it shows how far noise slows.
        """
        known = self.results.setdefault(pair, {**self._untried(pair), "failed": True, "error": error})
        samples = known["bandwidths"]
        if delayed and pair in self._suspects:
            samples[0] = max(samples[0], bytes_per_s)
        else:
            samples.append(bytes_per_s)
        known["wrong"] = max(known["wrong"], wrong)
        if not error:
            self._longest_s = max(self._longest_s or 0.0, took_s)
            known["failed"], known["error"] = False, ""

    def patience_s(self) -> float:
        """Return the timeout of a pair's step in seconds, from the longest time of a working pair."""
        least, most = self._patience_s
        return most if self._longest_s is None else min(most, max(least, _PATIENCE * self._longest_s))

    def level(self, pair: Pair) -> Literal["node", "net"]:
        """Return whether a pair is inside a node or between two: "node" or "net"."""
        return "node" if self._node_of[pair[0]] == self._node_of[pair[1]] else "net"

    def all_results(self) -> list[PairMessage]:
        """List all pairs with their results; untried pairs have neither samples nor an error."""
        return [self.results.get(pair) or self._untried(pair) for pairs in self._rounds for pair in pairs]

    def _untried(self, pair: Pair) -> PairMessage:
        level = self.level(pair)
        return {"a": pair[0], "b": pair[1], "level": level, "bandwidths": [], "failed": False, "wrong": 0, "error": ""}

    def _parts(self, pairs: list[Pair], at_once: int | None) -> list[list[Pair]]:
        """Split a round to bound the concurrent pairs of a node: beyond that, pairs slow each other down."""
        found: dict[int, list[Pair]] = {}
        of_node = dict.fromkeys(self._node_of.values(), 0)
        for pair in pairs:
            nodes = {self._node_of[rank] for rank in pair}
            part = max(of_node[node] for node in nodes) // at_once if at_once else 0
            of_node |= {node: of_node[node] + 1 for node in nodes}
            found.setdefault(part, []).append(pair)
        return list(found.values())

    def suspects(self, *, also_dim: bool) -> tuple[set[Pair], list[Pair]]:
        """List the good pairs, and the possibly slow pairs to repeat, those with the most samples first."""
        good: set[Pair] = set()
        found: list[tuple[int, float, Pair]] = []
        by_level: dict[str, dict[Pair, list[float]]] = {"node": {}, "net": {}}
        for pair, result in self.results.items():
            if not result["failed"] and not result["wrong"]:
                by_level[self.level(pair)][pair] = result["bandwidths"]
        for samples in by_level.values():
            if samples:
                _, slow, unsure = judge(samples, self._node_of)
                good |= samples.keys() - slow - unsure
                best = sorted(map(max, samples.values()))[-1 - len(samples) // 10]
                dim = {pair for pair, own in samples.items() if also_dim and max(own) < _DIM * best}
                again = unsure | dim - slow
                found += [(-len(samples[pair]), max(samples[pair]), pair) for pair in again]
        return good, [pair for _, _, pair in sorted(found)[:DOZEN]]

    def _control(self, suspect: Pair, good: set[Pair]) -> Pair:
        """Choose the good pair to measure next to a suspect: same level, preferably same node, fewest samples."""
        nodes = {self._node_of[rank] for rank in suspect}

        def order(pair: Pair) -> tuple[bool, int, Pair]:
            is_far = nodes.isdisjoint(self._node_of[rank] for rank in pair)
            return is_far, len(self.results[pair]["bandwidths"]), pair

        others = (pair for pair in good if pair != suspect and self.level(pair) == self.level(suspect))
        return min(others, key=order)

    def _failed(self) -> list[Pair]:
        """List failed pairs to retry, if others of their level work."""
        working = {self.level(pair) for pair, result in self.results.items() if not result["failed"]}
        failed = [pair for pair, result in self.results.items() if result["failed"] and self.level(pair) in working]
        # First pairs with ranks connected through others: unconnected groups fail in any case.
        return sorted(failed, key=lambda pair: (pair[1] not in self._connected(pair[0]), pair))[:_AGAIN_FAILED]

    def _is_hopeless(self, pair: Pair) -> bool:
        """Return whether a rank of the pair works with no other, and failed with a peer of its partner."""
        for rank, other in (pair, pair[::-1]):
            mine = [tried for tried in self.results if rank in tried]
            if len(mine) < _HOPELESS or not all(self.results[tried]["failed"] for tried in mine):
                continue
            failed_with = {end for tried in mine for end in tried} - {rank}
            if not failed_with.isdisjoint(self._connected(other)):
                return True
        return False

    def _connected(self, rank: int) -> set[int]:
        """Find all ranks connected to a rank by working pairs, including itself."""
        working = (pair for pair, result in self.results.items() if not result["failed"])
        return next((part for part in parts(working) if rank in part), {rank})
