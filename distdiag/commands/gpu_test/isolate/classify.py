"""From pairs of ranks to what is at fault: a node, a rank, a link, or groups that do not work together. Pure.

Bad pairs are explained by as few culprits as can be, the largest first: nodes, ranks, groups, and only then single
links. Where the evidence is too little, that is the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.gpu_test.isolate.case import Case
from distdiag.commands.gpu_test.isolate.explain import (
    below_expectation,
    between_nodes,
    cells,
    dead_nodes,
    dead_ranks,
    no_network,
    nothing_inside,
)
from distdiag.commands.gpu_test.isolate.pairs import LEVELS, Classification, Kind
from distdiag.commands.gpu_test.isolate.sentences import measured_at
from distdiag.commands.gpu_test.isolate.troubles import (
    healthy,
    nothing_measured,
    nothing_works,
    say_blamed,
    say_doubtful,
    say_links,
    say_splits,
    say_unsure,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.gpu_test.isolate.pairs import Edge, Pair, PairStatus


def classify(
    pairs: Sequence[Pair], host_of: Mapping[int, str], *, least_bytes_per_s: float | None = None
) -> tuple[Classification, dict[Edge, PairStatus]]:
    """Find the fewest culprits that explain all bad pairs.

    Args:
        pairs: each two ranks once, of both levels, those that were skipped as well.
        host_of: the node of each rank.
        least_bytes_per_s: what a pair of either level should have at least, if that is known. Else pairs are only
            compared with each other, and all may be slow.

    Returns:
        What is at fault, and how each pair (a, b) fared.
    """
    case = Case(pairs, host_of, least_bytes_per_s)
    below_expectation(case)
    if case.good:
        for step in (dead_nodes, no_network, dead_ranks, between_nodes, nothing_inside, cells):
            step(case)
        for say in (say_blamed, say_splits, say_doubtful, say_links, say_unsure):
            say(case)
    else:
        case.troubles.append(nothing_works(case) if case.bad else nothing_measured(case))
    return _sum(case), case.status


def _sum(case: Case) -> Classification:
    """Bring the troubles together, and say what was measured."""
    found = case.troubles or [healthy(case)]
    measured = [measured_at(case, level) for level in LEVELS if case.at(level, case.pairs)]
    reason = (*measured, *(line for one in found for line in one.reason))
    if len(found) == 1:
        return replace(found[0], reason=reason)
    return Classification(
        kind=Kind.SEVERAL,
        ranks=tuple(sorted({rank for one in found for rank in one.ranks})),
        hosts=tuple(dict.fromkeys(host for one in found for host in one.hosts)),
        links=tuple(sorted({link for one in found for link in one.links})),
        groups=tuple(group for one in found for group in one.groups),
        sentence="; and ".join(one.sentence for one in found),
        reason=reason,
        next="; ".join(dict.fromkeys(one.next for one in found)),
    )
