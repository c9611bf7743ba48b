"""The request of allreduce-bench, parsing of sizes, and its measurements in seconds and bytes."""

from __future__ import annotations

import re
from enum import StrEnum

from distdiag.errors import UsageError
from distdiag.launch import types
from distdiag.options import parse_size
from distdiag.record import record

STAGES = ("start", "connect", "init", "agree", "bench", "done")
GIGA = 1e9


class FaultKind(StrEnum):
    """Real faults that `--inject` causes."""

    SLOW = "slow"
    CORRUPT = "corrupt"
    DTYPE = "dtype"
    KILL = "kill"
    STOP = "stop"


class Stat(StrEnum):
    """The time of an iteration that represents a size."""

    P50 = "p50"
    MEAN = "mean"
    MIN = "min"
    P99 = "p99"
    MAX = "max"


@record(kw_only=True)
class Times:
    """Times of one iteration, each on its slowest rank. p50 and p99 as in nccl-tests; iqr = p75 - p25.

    A table of nccl-tests has means only.
    """

    p50: float
    p99: float
    min: float
    max: float
    mean: float
    iqr: float


@record(kw_only=True)
class SizeResult:
    """A row. Bandwidths use the median time (or --stat). `wrong` None: not checked."""

    op: str
    size_bytes: int
    count: int = 0
    dtype: str
    in_place: bool
    iterations: int = 0
    time_s: Times | None
    """None: not measured, `skipped` is the reason."""
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    wrong: int | None
    skipped: str = ""


@record(kw_only=True)
class Baseline:
    """The rows of an earlier run; `made_by` is distdiag, nccl-tests or rccl-tests, with the version if known."""

    rows: tuple[SizeResult, ...]
    made_by: str
    world_size: int | None
    device: str | None
    notes: tuple[str, ...]
    nodes: int | None = None
    """Number of hosts; None if not in the file."""
    wrong: int = 0
    """Results with wrong data."""


@record(kw_only=True)
class Request(types.Request):
    """The options of one run; `iterations` None: determined by `min_time_s`. `in_place` None: torch's usual form."""

    command = "allreduce-bench"
    stages = STAGES
    ops: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] | None = None
    sizes_text: str = ""
    dtype: str = "float32"
    warmup: int = 5
    iterations: int | None = None
    min_time_s: float = 0.5
    in_place: bool | None = None
    check: bool = True
    stat: Stat = Stat.P50
    files: tuple[tuple[str, str], ...] = ()
    """--save and --compare, as typed."""
    baseline: Baseline | None = None
    """The earlier run to compare with."""
    nics_bytes_per_s: float | None = None
    """From --nics: the line rate of a node, to judge a table of nccl-tests alone."""

    def own_options(self) -> dict[str, object]:
        """Options of allreduce-bench alone that differ from their defaults."""
        return {
            "op": ",".join(self.ops) if self.ops != ("all_reduce",) else None,
            "sizes": self.sizes_text or None,
            "dtype": self.dtype if self.dtype != "float32" else None,
            "warmup": self.warmup if self.warmup != Request.warmup else None,
            "iters": self.iterations,
            "min-time": f"{self.min_time_s:g}" if self.min_time_s != Request.min_time_s else None,
            "in-place": "" if self.in_place else None,
            "no-check": None if self.check else "",
            "stat": self.stat if self.stat is not Stat.P50 else None,
            **{name: path or None for name, path in self.files},
        }

    def less(self) -> dict[str, str]:
        """Options that send less data."""
        return {"sizes": "1KiB:1MiB"}


@record(kw_only=True)
class Arrival:
    """A rank's entry into the collectives: its median time inside, and its delay after the first rank."""

    rank: int
    host: str
    op: str
    size_bytes: int
    inside_s: float
    late_s: float


@record(kw_only=True)
class Expectation:
    """Known figures for such hardware, and the largest all_reduce relative to them; None if unknown."""

    judgement: str
    size_bytes: int
    expected_busbw_bytes_per_s: float | None
    percent_of_link: float | None
    percent_of_nic: float | None
    lines: tuple[str, ...]
    source: str


@record(kw_only=True)
class Compared:
    """A row of both runs: `ratio` is its time / the earlier time; beyond 1 + `band` it is slower."""

    op: str
    size_bytes: int
    dtype: str
    in_place: bool
    earlier_p50_s: float
    p50_s: float
    ratio: float
    band: float
    slower: bool


@record(kw_only=True)
class Bench(types.RunFacts):
    """The facts of a run."""

    device_name: str | None = None
    nodes: int = 0
    stat: str = Stat.P50
    results: tuple[SizeResult, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    verdict: Expectation | None = None
    compared: tuple[Compared, ...] = ()
    no_core_share: float = 0.0
    """Share of time that the median rank waited for a core: if other programs use the cores, times mean little."""


USUAL = {"cpu": "1KiB:64MiB:x4", "cuda": "1KiB:4GiB:x4"}
_MOST = 200


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes in bytes, ascending in each range, each once. Raises UsageError."""
    found: list[int] = []
    for part in text.split(","):
        found += _range(part.strip())
        if len(found) > _MOST:
            raise UsageError(f"--sizes {text}: more than {_MOST} sizes", hint="use a larger step: 1KiB:1GiB:x4")
    return tuple(dict.fromkeys(found))


def _range(text: str) -> list[int]:
    words = text.split(":")
    factor = _factor(words.pop()) if len(words) == 3 else 2.0
    if len(words) > 2:
        raise UsageError(f"--sizes {text}: too many colons", hint="write FIRST:LAST:xFACTOR, such as 1KiB:1GiB:x4")
    # Suffixes as in nccl-tests: 1K is 1024 bytes, while 1KB is 1000.
    ends = [parse_size(re.sub(r"(?i)(?<=\d)([kmgt])$", r"\1i", word.strip())) for word in words]
    if ends[0] < 1:
        raise UsageError(f"--sizes {text}: a size cannot be 0", hint="start at 4 bytes or more")
    if ends[-1] < ends[0]:
        raise UsageError(f"--sizes {text}: the last size is below the first", hint=f"write {words[-1]}:{words[0]}")
    found: list[int] = []
    size = float(ends[0])
    while size <= ends[-1] and len(found) <= _MOST:
        found.append(int(size))
        size *= factor
    return found


def _factor(text: str) -> float:
    match = re.fullmatch(r"[x*]?(\d+(?:\.\d+)?)", text.strip())
    if match is None or float(match[1]) < 1.1:
        raise UsageError(f"--sizes: {text!r} is not a step", hint="write a factor above 1: x2 or x4")
    return float(match[1])
