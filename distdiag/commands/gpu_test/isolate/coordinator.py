"""Rank 0's part of measuring pairs: which pairs are next, which are left out, and which are measured again.

Noise makes pairs slow as faults do, but not each time: a slow pair is measured again, in turn with good pairs, until
it was fast once or slow so often, beside good pairs that were not, that it is no chance. Standard library only: it
travels with the ranks.
"""

from __future__ import annotations

import time

from distdiag.commands.gpu_test.isolate.slowness import DOZEN, judge

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    Pair = tuple[int, int]
    from typing import Any


def rounds(nodes: list[list[int]]) -> list[list[Pair]]:
    """Arrange all pairs to be measured; no rank is twice in a round, and no pair in two rounds.

    Args:
        nodes: the ranks of each node by local rank; nodes may have different numbers of ranks.

    Returns:
        For each round its pairs (a, b), a < b, sorted. First pairs inside the nodes, all nodes at the same time: for g
        ranks g - 1 rounds, or g where g is odd. Then pairs of nodes, for k nodes k - 1 or k rounds: when two nodes
        meet, local rank i of one meets local rank i of the other, for each i that both have.
    """
    inside = [list(_meetings(len(ranks))) for ranks in nodes]
    found = []
    for turn in range(max(map(len, inside), default=0)):
        now = [(nodes[k], turns[turn]) for k, turns in enumerate(inside) if turn < len(turns)]
        found.append([_pair(ranks[a], ranks[b]) for ranks, meetings in now for a, b in meetings])
    for meetings in _meetings(len(nodes)):
        both = [(nodes[a], nodes[b]) for a, b in meetings]
        found.append([_pair(here[i], there[i]) for here, there in both for i in range(min(len(here), len(there)))])
    return [sorted(pairs) for pairs in found if pairs]


def _meetings(members: int) -> Iterator[list[Pair]]:
    """Pair members 0, 1, ... with each other once by the circle method: one stays, the others move on by one seat.

    With an odd number, the partner of the member that stays is idle.
    """
    circle = members - 1 + members % 2
    for turn in range(circle if members > 1 else 0):
        pairs = [((turn + i) % circle, (turn - i) % circle) for i in range(1, (circle + 1) // 2)]
        yield pairs if members % 2 else [(turn, circle), *pairs]


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)


_HOPELESS = 3
"""A rank that failed with so many others and worked with none is not tried with the peers of those: each try costs a
timeout. It is tried with others, to distinguish groups that do not reach each other from a bad rank."""
_PATIENCE = 5.0
_AGAIN_FAILED = 2
"""Of the pairs that failed are tried again, once: it costs a timeout."""
_SAMPLES = 24
"""How often a pair that may be slow is measured again, at most."""
_DIM = 0.6
"""Below this part of the best of its level a good pair, too, is measured again: slow pairs are compared with it."""
_SAMPLES_DIM = 3
_FEW = 12
"""So often where need be, however long it takes: that proves a slow pair beside a single good one."""
_SAMPLING_S = 20.0
"""After so long, what may be chance stays so."""


class Coordinator:
    """Plans rounds of pairs, one after the other; `results` has the result of each pair, with all its samples."""

    def __init__(
        self,
        nodes: list[list[int]],
        at_once: int | None,
        patience_s: tuple[float, float],
        pause_s: float,
        left_out: Collection[int] = (),
    ) -> None:
        """`nodes`: the ranks of each; `at_once`: pairs that a node can have at the same time, None for any number;
        `patience_s`: the least and the most that a pair is waited for; `pause_s`: how long to rest before each time
        that slow pairs are measured again; `left_out`: ranks to be in no pair."""
        self._pause_s = pause_s
        self._patience_s = patience_s
        self._longest_s: float | None = None
        self._node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        wanted = ([pair for pair in pairs if not {*left_out}.intersection(pair)] for pairs in rounds(nodes))
        self._rounds = [part for pairs in wanted for part in self._parts(pairs, at_once)]
        self.results: dict[tuple[int, int], dict[str, Any]] = {}

    def plan(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield the name and the pairs of each round; its results must be noted before the next round is requested."""
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
            time.sleep(self._pause_s)
            for number, pair in enumerate(suspects, 1):
                words = f"sample {sample + 2}, {number} of {len(suspects)}"
                # A good pair just before it has the same noise: what slows both is no evidence.
                yield f"{words}: reference pair", [self._control(pair, good)]
                yield words, [pair]

    def note(self, pair: tuple[int, int], result: dict[str, Any]) -> None:
        """Keep a result; what was wrong once remains so, and a pair that worked once has not failed."""
        if not result["failed"]:
            self._longest_s = max(self._longest_s or 0.0, result["took_s"])
        before = self.results.get(pair, result)
        samples = [*before.get("bandwidths", ()), result["bytes_per_s"] or 0.0]
        better = before if result["failed"] else result
        self.results[pair] = {**better, "bandwidths": samples, "wrong": max(before["wrong"], result["wrong"])}

    def patience_s(self) -> float:
        """Return the seconds that a pair may take for a step, from the longest time of a pair that worked."""
        least, most = self._patience_s
        return most if self._longest_s is None else min(most, max(least, _PATIENCE * self._longest_s))

    def level(self, pair: tuple[int, int]) -> str:
        """Return whether a pair is inside a node or between two: "node" or "net"."""
        return "node" if self._node_of[pair[0]] == self._node_of[pair[1]] else "net"

    def all_results(self) -> list[dict[str, Any]]:
        """List all pairs with their results; pairs never tried have neither samples nor an error."""
        untried: dict[str, Any] = {"bandwidths": [], "failed": False, "wrong": 0, "error": "", "iterations": 0}
        return [
            {"a": pair[0], "b": pair[1], "level": self.level(pair), **self.results.get(pair, untried)}
            for pairs in self._rounds
            for pair in pairs
        ]

    def _parts(self, pairs: list[tuple[int, int]], at_once: int | None) -> list[list[tuple[int, int]]]:
        """Divide a round, so that no node has more pairs than it can serve: they would slow each other down."""
        parts: list[list[tuple[int, int]]] = []
        of_node: dict[int, int] = {}
        for pair in pairs:
            nodes = {self._node_of[rank] for rank in pair}
            part = max(of_node.get(node, 0) for node in nodes) // at_once if at_once else 0
            for node in nodes:
                of_node[node] = of_node.get(node, 0) + 1
            while len(parts) <= part:
                parts.append([])
            parts[part].append(pair)
        return parts

    def suspects(self, *, also_dim: bool) -> tuple[set[tuple[int, int]], list[tuple[int, int]]]:
        """List the good pairs, and those to measure again, as they may be slow: first those with the most samples."""
        good: set[tuple[int, int]] = set()
        found: list[tuple[int, float, tuple[int, int]]] = []
        working = {
            pair: result["bandwidths"]
            for pair, result in self.results.items()
            if not result["failed"] and not result["wrong"]
        }
        for level in ("node", "net"):
            samples = {pair: own for pair, own in working.items() if self.level(pair) == level}
            if samples:
                _, slow, unsure = judge(samples, self._node_of)
                good |= samples.keys() - slow - unsure
                again = unsure | _dim(samples) - slow if also_dim else unsure
                found += [(-len(samples[pair]), max(samples[pair]), pair) for pair in again]
        return good, [pair for _, _, pair in sorted(found)[:DOZEN]]

    def _control(self, suspect: tuple[int, int], good: set[tuple[int, int]]) -> tuple[int, int]:
        """Choose a good pair to measure beside a suspect: of its level, of its node if there is one, with the fewest
        samples."""
        nodes = {self._node_of[rank] for rank in suspect}

        def order(pair: tuple[int, int]) -> tuple[bool, int, tuple[int, int]]:
            is_far = nodes.isdisjoint(self._node_of[rank] for rank in pair)
            return is_far, len(self.results[pair]["bandwidths"]), pair

        others = (pair for pair in good if pair != suspect and self.level(pair) == self.level(suspect))
        return min(others, key=order)

    def _failed(self) -> list[tuple[int, int]]:
        """List failed pairs to be tried again, where others of their level work."""
        working = {self.level(pair) for pair, result in self.results.items() if not result["failed"]}
        failed = [pair for pair, result in self.results.items() if result["failed"] and self.level(pair) in working]
        # First those whose ranks work together by way of others: groups that do not meet fail in any case.
        return sorted(failed, key=lambda pair: (not self._meet(pair), pair))[:_AGAIN_FAILED]

    def _is_hopeless(self, pair: tuple[int, int]) -> bool:
        """Return whether a rank of the pair works with no other, and failed with a peer of its partner."""
        for rank, other in (pair, pair[::-1]):
            mine = [tried for tried in self.results if rank in tried]
            if len(mine) < _HOPELESS or not all(self.results[tried]["failed"] for tried in mine):
                continue
            failed_with = {end for tried in mine for end in tried} - {rank}
            if not failed_with.isdisjoint(self._connected(other)):
                return True
        return False

    def _meet(self, pair: tuple[int, int]) -> bool:
        return pair[1] in self._connected(pair[0])

    def _connected(self, rank: int) -> set[int]:
        """Find all ranks that work with a rank, directly or through others; itself, too."""
        found, waiting = {rank}, [rank]
        while waiting:
            here = waiting.pop()
            for pair, result in self.results.items():
                if here in pair and not result["failed"]:
                    new = set(pair) - found
                    found |= new
                    waiting += new
        return found


def _dim(samples: dict[tuple[int, int], list[float]]) -> set[tuple[int, int]]:
    best = sorted(map(max, samples.values()))[-1 - len(samples) // 10]
    return {pair for pair, own in samples.items() if max(own) < _DIM * best}
