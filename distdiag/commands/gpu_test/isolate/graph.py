"""What good and bad edges tell of their ends: members that are at fault, groups that do not work across. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from distdiag.commands.gpu_test.isolate.pairs import Edge

_NEARLY = 1 / 3
"""Good pairs for each bad one that a culprit may have: now and then something broken works once."""


def shape(good: set[Edge], bad: set[Edge]) -> tuple[list[int], list[set[int]]]:
    """Find members that work with nobody, then groups that do not work across, then members that work with few."""
    members = culprits(good, bad)
    left = bad - touching(members, bad)
    groups = _groups(good, left)
    return [*members, *culprits(good, left - across(groups, left), _NEARLY)], groups


def culprits(good: Collection[Edge], bad: Collection[Edge], tolerated: float = 0.0) -> list[int]:
    """Find the fewest members that explain bad edges, with two at least; `tolerated` good ones for each are allowed.

    If none are, then taking the member with most bad edges first is not only quick but right: in its stead, all those
    that work with each other would have to be blamed.
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
    """Find groups of two at least that work inside and not across; none if that is not what the edges show."""
    found = parts(good)
    of = {member: number for number, part in enumerate(found) for member in part}
    between = Counter((min(of[a], of[b]), max(of[a], of[b])) for a, b in bad if a in of and b in of)
    inside = Counter(of[a] for a, _ in good)
    if len(found) < 2 or any(between[number, number] > _NEARLY * inside[number] for number in inside):
        return []
    # A single bad pair between two groups may be a link: the others were not measured.
    return found if all(between[two] > 1 for two in combinations(range(len(found)), 2)) else []


def parts(edges: Iterable[Edge]) -> list[set[int]]:
    """Find the connected parts of a graph, in order of their lowest members."""
    part_of: dict[int, set[int]] = {}
    for edge in edges:
        small, large = sorted((part_of.setdefault(end, {end}) for end in edge), key=len)
        if small is not large:
            large |= small
            part_of.update(dict.fromkeys(small, large))
    return sorted({id(part): part for part in part_of.values()}.values(), key=min)


def across(groups: Iterable[set[int]], edges: Iterable[Edge]) -> set[Edge]:
    """Keep the edges between two groups."""
    of = {member: number for number, group in enumerate(groups) for member in group}
    return {(a, b) for a, b in edges if a in of and b in of and of[a] != of[b]}


def touching(ranks: Collection[int], edges: Iterable[Edge]) -> set[Edge]:
    """Keep the edges with an end among these."""
    ends = set(ranks)
    return {edge for edge in edges if not ends.isdisjoint(edge)}


def stars(edges: Iterable[Edge]) -> Iterator[tuple[int, list[int]]]:
    """Give ranks with those they share edges with, the rank with most of them first; each edge once."""
    left = set(edges)
    while left:
        degree = Counter(end for edge in left for end in edge)
        rank = min(degree, key=lambda end: (-degree[end], end))
        own = touching([rank], left)
        yield rank, sorted(sum(edge) - rank for edge in own)
        left -= own
