"""One call tree of all ranks: the outermost frame first, with the set of ranks at every node. Pure.

The idea of STAT and padb (prefix trees whose edges carry rank sets), for Python frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distdiag.commands.pyspy_all.result import FrameRow, Group


_ROOM = 80


@dataclass
class _Branch:
    frame: FrameRow | None
    groups: list[Group] = field(default_factory=list)
    below: dict[FrameRow, _Branch] = field(default_factory=dict)
    ends: list[Group] = field(default_factory=list)


def call_tree(groups: Iterable[Group], *, verbose: bool = False) -> Iterator[str]:
    """Write the tree, a line a frame; a rank set stands where it changes. The smallest branch comes first."""
    root = _Branch(None)
    for group in groups:
        branch = root
        branch.groups.append(group)
        for frame in reversed(group.frames):
            branch = branch.below.setdefault(frame, _Branch(frame))
            branch.groups.append(group)
        branch.ends.append(group)
    yield from _lines(root, "", verbose=verbose)


def _lines(branch: _Branch, margin: str, *, verbose: bool) -> Iterator[str]:
    from distdiag.commands.pyspy_all.view import frame_line

    for group in branch.ends:
        odd = ", odd" if group.odd else ""
        yield f"{margin}= {group.class_}{odd}"
    forks = branch.frame is None or len(branch.below) + len(branch.ends) > 1
    for below in sorted(branch.below.values(), key=lambda one: sum(group.count for group in one.groups)):
        assert below.frame is not None
        if forks:
            yield f"{margin}[{_ranks(below.groups)}]"
        inner = margin + "  " if forks else margin
        # A library frame with one way on tells nothing; it is folded away, and the fork after it is not.
        if verbose or below.frame.user or len(below.below) != 1 or below.ends:
            yield f"{inner}{frame_line(below.frame, verbose=verbose)}"
        yield from _lines(below, inner, verbose=verbose)


def _short(folded: str) -> str:
    return folded if len(folded) <= _ROOM else folded[: folded.rfind(",", 0, _ROOM)] + ",..."


def _ranks(groups: Iterable[Group]) -> str:
    groups = list(groups)
    ranks = [rank for group in groups for rank in group.ranks]
    count = sum(group.count for group in groups)
    if len(ranks) == count:
        return f"{_short(fold_ranks(ranks))} ({count})" if count > 1 else f"{fold_ranks(ranks)}"
    return f"pids {fold_ranks(pid for group in groups for pid in group.pids)} ({count})"
