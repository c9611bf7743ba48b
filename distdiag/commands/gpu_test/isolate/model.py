"""What `gpu-test --isolate` is asked, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.commands.gpu_test.isolate.pairs import PairStatus  # noqa: TC001 - msgspec reads it
from distdiag.workload import model

STAGES = ("start", "connect", "init", "pairs", "done")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault to make for real: packets dropped, or a delay before each call, in the pairs it names."""

    option: str
    """As it was typed."""
    kind: str
    """slow, block or split."""
    first: tuple[int, ...]
    """slow and block: a rank, or the two of a link, or all (empty). split: the ranks of one group."""

    @property
    def highest_rank(self) -> int | None:
        """The highest rank that it names."""
        return max(self.first, default=None)

    @property
    def words(self) -> str:
        """What is done."""
        return f"{self.option} was made"

    def meets(self, a: int, b: int) -> bool:
        """Tell whether this pair is hit."""
        mine = {a, b} & set(self.first)
        if self.kind == "split":
            return len(mine) == 1
        return len(mine) == len(self.first) if len(self.first) != 1 else bool(mine)


@dataclass(frozen=True, kw_only=True)
class Request(model.Request):
    """What was typed; sizes in bytes, bandwidths in bytes per second."""

    command = "gpu-test"
    stages = STAGES
    size_bytes: int | None = None
    expected_bytes_per_s: float | None = None
    fault: Fault | None = None

    @property
    def injected(self) -> Fault | None:
        """The fault that is to be made."""
        return self.fault

    def own_options(self) -> dict[str, object]:
        """Options that differ from their defaults."""
        expected = None if self.expected_bytes_per_s is None else f"{self.expected_bytes_per_s / 1e9:g}"
        return {"isolate": "", "size": self.size_bytes, "expect": expected}

    def less(self) -> dict[str, str]:
        """Options that send less data."""
        return {"size": "1MiB"}


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """How two ranks fared together: the bandwidth of an all_reduce between them, None if there is none."""

    a: int
    b: int
    level: str
    """node: both on one. net: between two nodes."""
    busbw_bytes_per_s: float | None
    status: PairStatus
    looks: int
    """How often it was measured."""
    wrong: int
    error: str


@dataclass(frozen=True, kw_only=True)
class Classified:
    """What explains the pairs."""

    kind: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    links: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    reason: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Isolated(model.RunFacts):
    """The facts of one run. `classification` is None if the pairs were not all measured."""

    size_bytes: int
    pairs: tuple[PairResult, ...]
    classification: Classified | None
    measuring_s: float | None
    """From the first pair to the last; None if it never came to that."""
