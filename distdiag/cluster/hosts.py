"""Host and rank sets as people write them: 0-6,8."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def fold_ranks(numbers: Iterable[int]) -> str:
    """Fold whole numbers into ranges: [8, 0, 1, 2] -> "0-2,8"; empty for none."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def name_ranks(numbers: Iterable[int]) -> str:
    """Name ranks in a sentence: "rank 3", "ranks 0-2,8"."""
    ranks = set(numbers)
    return f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)}"
