"""From many closed ways to few culprits: a node that lets nothing in or nothing out, only then single pairs. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Edge = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """What explains some closed ways.

    `kind`: in (nothing comes in at `nodes`), out (nothing leaves them), pair (from `nodes` to `others`), all.
    """

    kind: str
    nodes: tuple[str, ...]
    others: tuple[str, ...] = ()
    edges: tuple[Edge, ...] = ()


def explain(tried: Iterable[Edge], closed: Iterable[Edge]) -> list[Culprit]:
    """Explain the closed ways among those tried, by as few culprits as can be.

    A node is only blamed if none of at least two ways in (or out) works: with one way it may be the other end.
    """
    ways, left = list(dict.fromkeys(tried)), set(closed)
    if left and left == set(ways) and len(left) > 2:
        return [Culprit(kind="all", nodes=tuple(dict.fromkeys(node for edge in ways for node in edge)))]
    into, out = _by(ways, 1), _by(ways, 0)
    found = []
    for kind, sides in (("in", into), ("out", out)):
        nodes = [node for node, edges in sides.items() if len(edges) > 1 and edges <= left]
        # A node that is down for everybody is blamed once, not each of its peers as well.
        for node in sorted(nodes, key=lambda node: -len(sides[node] & left)):
            edges = sides[node] & left
            if edges:
                found.append(Culprit(kind=kind, nodes=(node,), edges=tuple(sorted(edges))))
        for node in nodes:
            left -= sides[node]
    return found + _pairs(left)


def _by(edges: Iterable[Edge], end: int) -> Mapping[str, set[Edge]]:
    found: dict[str, set[Edge]] = defaultdict(set)
    for edge in edges:
        found[edge[end]].add(edge)
    return found


def merged(found: Iterable[Culprit]) -> list[Culprit]:
    """Name nodes with the same trouble together."""
    kinds: dict[tuple[str, tuple[str, ...]], list[Culprit]] = {}
    for one in found:
        kinds.setdefault((one.kind, one.others if one.kind == "pair" else ()), []).append(one)
    return [
        Culprit(
            kind=kind,
            nodes=tuple(dict.fromkeys(node for one in group for node in one.nodes)),
            others=others,
            edges=tuple(edge for one in group for edge in one.edges),
        )
        for (kind, others), group in kinds.items()
    ]


def _pairs(left: set[Edge]) -> list[Culprit]:
    """Bring together sources that fail to reach the same targets."""
    targets: dict[str, set[str]] = defaultdict(set)
    for source, target in left:
        targets[source].add(target)
    groups: dict[tuple[str, ...], list[str]] = {}
    for source in sorted(targets):
        groups.setdefault(tuple(sorted(targets[source])), []).append(source)
    return [
        Culprit(
            kind="pair",
            nodes=tuple(sources),
            others=others,
            edges=tuple((source, other) for source in sources for other in others),
        )
        for others, sources in groups.items()
    ]
