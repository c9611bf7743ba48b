"""Graph of waits between processes, and the roots that others wait for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.diagnosis.wait_reasons import ANY_OF, Kind
from distdiag.fold import by_key
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.diagnosis.wait_reasons import Wait


@record
class Edge:
    """One process waits for another in this call of one of its threads."""

    waiter: Key
    to: Key
    wait: Wait


@record
class WaitTree:
    """A root with the processes that wait for it, direct ones first. `is_cycle`: the root waits for one of them."""

    root: Key
    edges: tuple[Edge, ...]
    is_cycle: bool = False


class WaitGraph:
    """The waits of every thread of each process read, main thread first."""

    def __init__(self, by_process: Mapping[Key, Sequence[Wait]], index: ProcessIndex) -> None:
        self.by_process = by_process
        self.index = index

    def main(self, key: Key) -> Wait | None:
        """Return the main thread's wait; None if it was not read or has exited."""
        found = self.by_process.get(key)
        return found[0] if found else None

    def edge(self, key: Key) -> Edge | None:
        """Return the edge to the only process this one waits for; None if unknown or several."""
        main = self.main(key)
        if main is None:
            return None
        if main.kind in (Kind.PEER, Kind.LOCK):
            to = self._single_peer(key, main.peers)
            # An idle worker waits for its rank without blocking it.
            return Edge(key, to, main) if to is not None and not self._are_helpers(to, [key]) else None
        if main.kind is Kind.OWN_THREADS:
            return self._by_other_thread(key)
        return None

    def _by_other_thread(self, key: Key) -> Edge | None:
        """Search the threads that the main thread may wait for: one that reads from a single rank decides.

        A thread that watches many descriptors usually waits for work, which decides nothing, except for the workers of
        this rank, which deliver batches.
        """
        found: dict[Key, Edge] = {}
        for wait in self.by_process[key][1:]:
            is_read = wait.kind is Kind.PEER and "r" in wait.wants
            if not is_read or (wait.call in ANY_OF and not self._are_helpers(key, wait.peers)):
                continue
            to = self._single_peer(key, wait.peers)
            if to is not None and (self.index.rank(to) is not None or self._are_helpers(key, [to])):
                found[to] = Edge(key, to, wait)
        return next(iter(found.values())) if len(found) == 1 else None

    def _single_peer(self, key: Key, peers: Sequence[Key]) -> Key | None:
        """Return the only peer, or the only worker that is not idle."""
        if self._are_helpers(key, peers):
            peers = [peer for peer in peers if not self._is_idle(peer, key)]
        return peers[0] if len(peers) == 1 else None

    def _are_helpers(self, key: Key, peers: Iterable[Key]) -> bool:
        own = self.index.places.get(key)
        places = [self.index.places.get(peer) for peer in peers]
        return own is not None and all(
            place is not None and place.member is own.member and not place.is_rank for place in places
        )

    def _is_idle(self, helper: Key, owner: Key) -> bool:
        main = self.main(helper)
        return main is not None and main.kind is Kind.PEER and owner in main.peers


def wait_trees(graph: WaitGraph) -> list[WaitTree]:
    """Find the processes that others wait for, with their waiters; most waiters first."""
    edges = {edge.waiter: edge for edge in map(graph.edge, graph.by_process) if edge is not None}
    roots = find_roots({key: edge.to for key, edge in edges.items()})
    found = by_key((root, edges[key]) for key, root in roots.items())
    trees = [
        WaitTree(root, tuple(sorted(own, key=lambda edge: edge.to != root)), is_cycle=root in edges)
        for root, own in found.items()
    ]
    return sorted(trees, key=lambda tree: -len(tree.edges))


def find_roots(waits_for: Mapping[Key, Key]) -> dict[Key, Key]:
    """Map each waiting process to the end of its chain of waits; for a cycle, its lowest member."""
    roots: dict[Key, Key] = {}
    for key in waits_for:
        path: dict[Key, int] = {}
        at = key
        while at in waits_for and at not in roots and at not in path:
            path[at] = len(path)
            at = waits_for[at]
        root = min(list(path)[path[at] :]) if at in path else roots.get(at, at)
        roots.update(dict.fromkeys(path, root))
    return roots
