"""What `gpu-test --isolate` is asked for, the faults of --inject, the result of each pair, and the verdict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from distdiag.cluster.hosts import name_ranks
from distdiag.commands.gpu_test.types import compute_options
from distdiag.errors import UsageError
from distdiag.launch import types

Edge = tuple[int, int]
NODE, NET = "node", "net"
LEVELS = {NODE: "inside nodes", NET: "between nodes"}


class PairStatus(StrEnum):
    """The result of a pair. FAILED: timed out, or raised. WRONG: the data was.

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
    samples: tuple[float, ...]
    """Its bandwidth each time it was measured, in bytes/s; 0 where that failed."""
    failed: bool
    wrong: int
    error: str

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """The best that was seen; None if it was not measured, which without `failed` is no evidence."""
        return max(self.samples, default=0.0) or None


class Kind(StrEnum):
    """What is at fault. SPLIT: groups that work inside and not across. SEVERAL: independent faults."""

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

    `ranks`, `hosts` and `links` are at fault, or may be where it is undecidable: a bad node is in `hosts` and its
    ranks are not in `ranks`, a bad rank is in `ranks` and its node is not in `hosts`. `groups` are the ranks of a
    split.
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


STAGES = ("start", "connect", "init", "compute", "pairs", "done")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A real fault to inject: packets dropped or a delay before each call, in the pairs it names; or a rank's products
    wrong or slow."""

    option: str
    """As it was typed."""
    kind: str
    """slow, block, split, slow-compute or wrong-compute."""
    first: tuple[int, ...]
    """slow and block: a rank, or the two of a link, or all (empty). split: the ranks of one group. Else a rank."""

    @property
    def in_compute(self) -> bool:
        """Return whether it happens in the stage compute, not in pairs."""
        return self.kind in _IN_COMPUTE

    @property
    def highest_rank(self) -> int | None:
        """The highest rank that it names."""
        return max(self.first, default=None)

    @property
    def words(self) -> str:
        """What it does, and to which pairs."""
        if self.in_compute:
            return f"{self.kind} in rank {self.first[0]}"
        effect = "delay" if self.kind == "slow" else "dropped packets"
        if self.kind == "split":
            return f"{effect} between {name_ranks(self.first)} and the others"
        if len(self.first) == 2:
            return f"{effect} between ranks {self.first[0]} and {self.first[1]}"
        return f"{effect} in every pair" + (f" of rank {self.first[0]}" if self.first else "")

    def meets(self, a: int, b: int) -> bool:
        """Return whether this pair is hit."""
        mine = {a, b} & set(self.first)
        if self.kind == "split":
            return len(mine) == 1
        return len(mine) == len(self.first) if len(self.first) != 1 else bool(mine)


@dataclass(frozen=True, kw_only=True)
class Request(types.Request):
    """What was typed; sizes in bytes, bandwidths in bytes per second."""

    command = "gpu-test"
    stages = STAGES
    size_bytes: int | None = None
    expected_bytes_per_s: float | None = None
    compute_s: float | None = None
    """As for gpu-test without --isolate."""
    fault: Fault | None = None

    @property
    def injected(self) -> Fault | None:
        """The fault to inject."""
        return self.fault

    def own_options(self) -> dict[str, object]:
        """Options that differ from their defaults."""
        expected = None if self.expected_bytes_per_s is None else f"{self.expected_bytes_per_s / 1e9:g}"
        return {"isolate": "", "size": self.size_bytes, "expect": expected, **compute_options(self.compute_s)}

    def less(self) -> dict[str, str]:
        """Options that send less data."""
        return {"size": "1MiB"}


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """The result of a pair; `samples`: how often it was measured; no bandwidth: it never worked, or was not tried."""

    a: int
    b: int
    level: str
    busbw_bytes_per_s: float | None
    status: PairStatus
    samples: int
    wrong: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Isolated(types.RunFacts):
    """The facts of one run. `classification` is None if the pairs were not all measured.

    `left_out`: ranks in no pair, as they computed wrongly or slowly.
    """

    size_bytes: int
    left_out: tuple[int, ...]
    pairs: tuple[PairResult, ...]
    classification: Classification | None
    measuring_s: float | None
    """From the first pair to the last; None if no pair was measured."""


_IN_COMPUTE = ("slow-compute", "wrong-compute")
_HINT = (
    "use slow:RANK, slow:A-B (a link), slow:all, block:RANK, block:A-B, split:RANKS (for example split:0-3), "
    "slow-compute:RANK or wrong-compute:RANK"
)


def parse_fault(text: str) -> Fault:
    """Parse the pairs to slow down, block or split, or the rank to compute badly. Raises UsageError."""
    kind, _, named = text.partition(":")
    if kind not in ("slow", "block", "split", *_IN_COMPUTE):
        raise UsageError(f"--inject {text!r}: unknown fault for --isolate", hint=_HINT)
    if (kind, named) == ("slow", "all"):
        return Fault(option=text, kind=kind, first=())
    pattern = r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*" if kind == "split" else r"\d{1,6}(-\d{1,6})?"
    ends = [list(map(int, part.split("-"))) for part in named.split(",")] if re.fullmatch(pattern, named) else []
    ranks = {rank for part in ends for rank in (range(part[0], part[-1] + 1) if kind == "split" else part)}
    if not ranks or (kind != "split" and len(ranks) != len(ends[0])) or (kind in _IN_COMPUTE and len(ranks) > 1):
        raise UsageError(f"--inject {text!r}: no valid ranks", hint=_HINT)
    return Fault(option=text, kind=kind, first=tuple(sorted(ranks)))
