"""The request of `gpu-test --isolate`, the faults of --inject, the result of each pair, and the verdict."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.commands.gpu_test import types as gpu_test
from distdiag.errors import UsageError
from distdiag.launch import types
from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.cluster.records import PairMessage

Edge = tuple[int, int]
_SOURCE_LINE = re.compile(r"^\[[^\]]*:\d+\] ")
"""The position in gloo's source that prefixes its error messages."""
NODE, NET = "node", "net"
LEVELS = {NODE: "inside nodes", NET: "between nodes"}


class PairStatus(StrEnum):
    """The result of a pair. FAILED: timed out, or raised. WRONG: received wrong data.

    SKIPPED: not measured, so no evidence. UNSURE: looks slow, but possibly by noise.
    """

    OK = "ok"
    SLOW = "slow"
    FAILED = "failed"
    SKIPPED = "skipped"
    WRONG = "wrong"
    UNSURE = "unsure"


@record(kw_only=True)
class Pair:
    """An all_reduce of ranks a < b. `level`: node (both on one node) or net. `wrong`: number of wrong elements.

    `samples`: bandwidth of each measurement in bytes/s, 0 if it failed; `busbw_bytes_per_s`: the best, None if it never
    worked or was not tried.
    """

    a: int
    b: int
    level: str
    samples: tuple[float, ...]
    busbw_bytes_per_s: float | None
    status: PairStatus
    wrong: int
    error: str

    @classmethod
    def of(cls, told: PairMessage) -> Pair:
        """Return what rank 0 reported; the pair is compared with no other yet."""
        best = max(told["bandwidths"], default=0.0) or None
        status = PairStatus.OK if best else PairStatus.SKIPPED
        status = PairStatus.FAILED if told["failed"] else PairStatus.WRONG if told["wrong"] else status
        return cls(
            a=told["a"],
            b=told["b"],
            level=told["level"],
            samples=tuple(told["bandwidths"]),
            busbw_bytes_per_s=best,
            status=status,
            wrong=told["wrong"],
            error=_SOURCE_LINE.sub("", told["error"]),
        )


class Kind(StrEnum):
    """The fault. SPLIT: groups that work inside and not across. SEVERAL: independent faults."""

    HEALTHY = "healthy"
    BAD_RANK = "bad-rank"
    BAD_NODE = "bad-node"
    BAD_LINK = "bad-link"
    SPLIT = "split"
    UNIFORMLY_SLOW = "uniformly-slow"
    UNDECIDABLE = "undecidable"
    SEVERAL = "several"


@record(kw_only=True)
class Classification:
    """The explanation of all bad pairs.

    `ranks`, `hosts` and `links` are at fault, or possibly at fault if undecidable: a bad node is only in `hosts`, not
    its ranks in `ranks`, and a bad rank only in `ranks`. `groups` are the ranks of a split.
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
    """What to do, or what would decide it; empty if healthy."""


@record(kw_only=True)
class Fault(types.Fault):
    """A real fault: one end of some pairs never answers or calls late, or a rank computes wrong or slow products.

    `kind`: slow, block, split, slow-compute or wrong-compute. `ranks`: for slow and block a rank, the two ends of a
    link, or all (empty); for split one group.
    """

    @property
    def in_compute(self) -> bool:
        """Return whether it affects the stage compute, not pairs."""
        return self.kind in _IN_COMPUTE

    def meets(self, a: int, b: int) -> bool:
        """Return whether this pair is affected."""
        mine = {a, b} & set(self.ranks)
        if self.kind == "split":
            return len(mine) == 1
        return len(mine) == len(self.ranks) if len(self.ranks) != 1 else bool(mine)


@record(kw_only=True)
class Request(gpu_test.Request):
    """The options of one run."""

    stages = ("start", "connect", "init", "compute", "pairs", "done")
    expected_bytes_per_s: float | None = None
    fault: Fault | None = None

    def own_options(self) -> dict[str, object]:
        """Options that differ from their defaults."""
        expected = None if self.expected_bytes_per_s is None else f"{self.expected_bytes_per_s / 1e9:g}"
        return {"isolate": "", "expect": expected, **super().own_options()}


@record(kw_only=True)
class Isolated(types.RunFacts):
    """The facts of one run. `classification` is None if not all pairs were measured.

    `left_out`: ranks excluded for computing wrongly or slowly. `measuring_s`: from the first pair to the last.
    """

    size_bytes: int = 0
    left_out: tuple[int, ...] = ()
    pairs: tuple[Pair, ...] = ()
    classification: Classification | None = None
    measuring_s: float | None = None


_IN_COMPUTE = ("slow-compute", "wrong-compute")
_RANKS = r"\d{1,6}(?:-\d{1,6})?"
_FAULT = re.compile(
    rf"(slow):(all)|(slow|block):({_RANKS})|(split):({_RANKS}(?:,{_RANKS})*)|({'|'.join(_IN_COMPUTE)}):(\d{{1,6}})"
)
_HINT = (
    "use slow:RANK, slow:A-B (a link), slow:all, block:RANK, block:A-B, split:RANKS (for example split:0-3), "
    "slow-compute:RANK or wrong-compute:RANK"
)


def parse_fault(text: str) -> Fault:
    """Parse the pairs to slow down, block or split, or the rank to compute badly. Raises UsageError."""
    found = _FAULT.fullmatch(text)
    if not found or not found.lastindex:
        raise UsageError(f"--inject {text!r}: no fault for --isolate, or no valid ranks", hint=_HINT)
    kind, named = found[found.lastindex - 1], found[found.lastindex]
    ends = [list(map(int, part.split("-"))) for part in named.split(",")] if named != "all" else []
    ranks = {rank for part in ends for rank in (range(part[0], part[-1] + 1) if kind == "split" else part)}
    return Fault(option=text, kind=kind, ranks=tuple(sorted(ranks)))
