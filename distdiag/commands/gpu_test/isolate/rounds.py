"""Who meets whom: every two ranks of a node, then every two nodes rank by rank, in rounds of pairs that share no rank.

A round takes as long as its slowest pair, however many pairs it has: n members need about n rounds, not n^2 / 2.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Pair = tuple[int, int]


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
        found.append([_pair(one[i], other[i]) for one, other in both for i in range(min(len(one), len(other)))])
    return [sorted(pairs) for pairs in found if pairs]


def _meetings(members: int) -> Iterator[list[Pair]]:
    """Let members 0, 1, ... meet each other once by the circle method: one stays, the others move on by one seat.

    With an odd number, whoever would meet the one that stays has a break.
    """
    circle = members - 1 + members % 2
    for turn in range(circle if members > 1 else 0):
        pairs = [((turn + i) % circle, (turn - i) % circle) for i in range(1, (circle + 1) // 2)]
        yield pairs if members % 2 else [(turn, circle), *pairs]


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)
