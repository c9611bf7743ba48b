"""Rank 0's part of measuring pairs: who meets whom next, whom to leave out, and what to look at again.

Standard library only: it travels with the ranks.
"""

from __future__ import annotations

from distdiag.commands.gpu_test.isolate.rounds import rounds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_HOPELESS = 3
"""A rank that failed with so many others and worked with none need not be tried with whom those work with, too: each
try costs a timeout. With others it is tried: groups that do not reach each other are to be told from a bad rank."""
_SUSPECT = 0.6
"""Below this part of the best of its level a pair is measured again, alone: a busy machine looks slow, too."""
_AGAIN = 12
_PATIENCE = 5.0
_AGAIN_FAILED = 2
_LOOKS = 3
"""How often what is slow is looked at again, at most; what fails is tried again once, as it costs a timeout."""


class Coordinator:
    """Plans rounds of pairs, one after the other; `results` has the better of what each pair came to."""

    def __init__(self, nodes: list[list[int]], at_once: int | None, patience_s: tuple[float, float]) -> None:
        """`nodes`: the ranks of each; `at_once`: pairs that a node can have at the same time, None for any number;
        `patience_s`: the least and the most that a pair is waited for."""
        self._patience_s = patience_s
        self._longest_s: float | None = None
        self._node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
        self._rounds = [part for pairs in rounds(nodes) for part in self._parts(pairs, at_once)]
        self.results: dict[tuple[int, int], dict[str, Any]] = {}

    def plan(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield what is done and with which pairs; the results of a round are to be there before the next is asked."""
        for number, pairs in enumerate(self._rounds, 1):
            yield f"round {number} of {len(self._rounds)}", [pair for pair in pairs if not self._is_hopeless(pair)]
        for look in range(_LOOKS):
            suspects = self.suspects()
            for number, pair in enumerate(suspects, 1):
                if not look or not self.results[pair]["failed"]:
                    yield f"look {look + 2}, {number} of {len(suspects)}", [pair]

    def note(self, pair: tuple[int, int], result: dict[str, Any]) -> None:
        """Keep a result; a second look counts where it is better."""
        if not result["failed"]:
            self._longest_s = max(self._longest_s or 0.0, result["took_s"])
        before = self.results.get(pair)
        if before is None or (result["bytes_per_s"] or 0) > (before["bytes_per_s"] or 0):
            self.results[pair] = result

    def patience_s(self) -> float:
        """Give the seconds that a pair may take for a step: what has worked tells how long is too long."""
        least, most = self._patience_s
        return most if self._longest_s is None else min(most, max(least, _PATIENCE * self._longest_s))

    def level(self, pair: tuple[int, int]) -> str:
        """Tell whether a pair is inside a node or between two."""
        return "node" if self._node_of[pair[0]] == self._node_of[pair[1]] else "net"

    def told(self) -> list[dict[str, Any]]:
        """List all pairs with what they came to; those never tried have neither a bandwidth nor an error."""
        nothing: dict[str, Any] = {"bytes_per_s": None, "failed": False, "wrong": 0, "error": "", "iterations": 0}
        return [
            {"a": pair[0], "b": pair[1], "level": self.level(pair), **self.results.get(pair, nothing)}
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

    def suspects(self) -> list[tuple[int, int]]:
        """List the pairs to be looked at again, those of each level that are most below the best."""
        found: list[tuple[float, tuple[int, int]]] = []
        for level in ("node", "net"):
            speeds = {
                pair: one["bytes_per_s"] or 0.0 for pair, one in self.results.items() if self.level(pair) == level
            }
            best = sorted(speeds.values())[-1 - len(speeds) // 10] if speeds else 0.0
            found += [(speed, pair) for pair, speed in speeds.items() if best and speed < _SUSPECT * best]
        # First those whose ranks work together by way of others: groups that do not meet fail in any case.
        failed = sorted((pair for speed, pair in found if not speed), key=lambda pair: not self._meet(pair))
        return failed[:_AGAIN_FAILED] + [pair for speed, pair in sorted(found) if speed][:_AGAIN]

    def _is_hopeless(self, pair: tuple[int, int]) -> bool:
        """Tell whether one of the two works with nobody, and failed with somebody that works with the other."""
        for rank, other in (pair, pair[::-1]):
            mine = [one for one in self.results if rank in one]
            if len(mine) < _HOPELESS or not all(self.results[one]["failed"] for one in mine):
                continue
            failed_with = {end for one in mine for end in one} - {rank}
            if not failed_with.isdisjoint(self._connected(other)):
                return True
        return False

    def _meet(self, pair: tuple[int, int]) -> bool:
        return pair[1] in self._connected(pair[0])

    def _connected(self, rank: int) -> set[int]:
        """Find all that work with a rank, if need be by way of others; itself, too."""
        found, waiting = {rank}, [rank]
        while waiting:
            here = waiting.pop()
            for pair, one in self.results.items():
                if here in pair and not one["failed"]:
                    new = set(pair) - found
                    found |= new
                    waiting += new
        return found
