"""How every two ranks fared together, and what that can mean. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Edge = tuple[int, int]
NODE, NET = "node", "net"
LEVELS = {NODE: "inside nodes", NET: "between nodes"}


class PairStatus(StrEnum):
    """How two ranks fared. FAILED: timed out, or raised. WRONG: the data was.

    SKIPPED: not measured, so no evidence. UNSURE: it looks slow, but noise explains that as well.
    """

    OK = "ok"
    SLOW = "slow"
    FAILED = "failed"
    SKIPPED = "skipped"
    WRONG = "wrong"
    UNSURE = "unsure"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An all_reduce of ranks a < b. `level`: node (both are on one) or net. `wrong`: elements that were."""

    a: int
    b: int
    level: str
    looks: tuple[float, ...]
    """Its bandwidth each time it was measured, in bytes/s; 0 where that failed."""
    failed: bool
    wrong: int
    error: str

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """The best that was seen; None if it was not measured, which without `failed` is no evidence."""
        return max(self.looks, default=0.0) or None


class Kind(StrEnum):
    """What is at fault. SPLIT: groups that work inside and not across. SEVERAL: independent troubles."""

    HEALTHY = "healthy"
    BAD_RANK = "bad-rank"
    BAD_NODE = "bad-node"
    BAD_LINK = "bad-link"
    SPLIT = "split"
    UNIFORMLY_SLOW = "uniformly-slow"
    UNDECIDABLE = "undecidable"
    SEVERAL = "several"


@dataclass(frozen=True, kw_only=True)
class Classification:
    """What explains all bad pairs.

    `ranks`, `hosts` and `links` are to blame, or may be where it is undecidable: a bad node stands in `hosts` and its
    ranks not in `ranks`, a bad rank in `ranks` and its node not in `hosts`. `groups` are the ranks of a split.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    links: tuple[Edge, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    sentence: str
    reason: tuple[str, ...] = ()
    """The evidence, line by line."""
    next: str = ""
    """What to do, or what would decide it; empty if all is well."""
