"""Culprits behind many closed paths: nodes that block all their incoming or outgoing paths, else single pairs. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from distdiag.fold import by_key
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

Edge = tuple[str, str]


@record(kw_only=True)
class Culprit:
    """A node or set of pairs that explains some closed paths.

    `kind`: in (paths to `nodes` are closed), out (paths from them are), pair (from `nodes` to `others`), all.
    """

    kind: str
    nodes: tuple[str, ...]
    others: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = ()


def fewest_culprits(tried: Iterable[Edge], closed: Iterable[Edge]) -> list[Culprit]:
    """Explain the closed paths among those tried with as few culprits as possible.

    A node is blamed only if at least two paths in (or out) were tried and none works: a single path may fail at its
    other end. If all tried paths share one end, that node is blamed rather than all.
    """
    edges, left = list(dict.fromkeys(tried)), set(closed)
    if left and left == set(edges) and len(left) > 2 and not _has_common_end(left):
        return [Culprit(kind="all", nodes=tuple(dict.fromkeys(node for edge in edges for node in edge)))]
    found = []
    for kind, sides in (("in", _by_end(edges, 1)), ("out", _by_end(edges, 0))):
        nodes = [node for node, own in sides.items() if len(own) > 1 and own <= left]
        # Most closed paths first, so that a dead node's peers are not blamed as well.
        for node in sorted(nodes, key=lambda node: -len(sides[node] & left)):
            if sides[node] & left:
                found.append(Culprit(kind=kind, nodes=(node,), edges=tuple(sorted(sides[node] & left))))
        for node in nodes:
            left -= sides[node]
    return found + pairs(left)


def _has_common_end(edges: Collection[Edge]) -> bool:
    return any(len({edge[end] for edge in edges}) == 1 for end in (0, 1))


def _by_end(edges: Iterable[Edge], end: int) -> Mapping[str, set[Edge]]:
    found: dict[str, set[Edge]] = defaultdict(set)
    for edge in edges:
        found[edge[end]].add(edge)
    return found


def merged(found: Iterable[Culprit]) -> list[Culprit]:
    """Merge culprits of the same kind."""
    kinds = by_key(((culprit.kind, culprit.others), culprit) for culprit in found)
    return [
        Culprit(
            kind=kind,
            nodes=tuple(dict.fromkeys(node for culprit in group for node in culprit.nodes)),
            others=others,
            edges=tuple(edge for culprit in group for edge in culprit.edges),
        )
        for (kind, others), group in kinds.items()
    ]


def pairs(closed: Collection[Edge]) -> list[Culprit]:
    """Merge sources that fail to reach the same targets."""
    targets = {source: tuple(sorted(set(others))) for source, others in by_key(closed).items()}
    groups = by_key((targets[source], source) for source in sorted(targets))
    return [
        Culprit(
            kind="pair",
            nodes=tuple(sources),
            others=others,
            edges=tuple((source, other) for source in sources for other in others),
        )
        for others, sources in groups.items()
    ]
