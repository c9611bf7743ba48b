"""What an earlier run measured, and how it is gathered from a file that nobody vouches for."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace

LARGEST = 2**60
_FASTEST_BYTES_PER_S = 1e18
_LEAST_S, _MOST_S = 1e-9, 1e6
GIGA = 1e9
HINT = "name what `distdiag allreduce-bench --json` wrote, or an output of nccl-tests"
_OPS = "all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|sendrecv|gather|scatter|hypercube"
_OP = re.compile(rf"({_OPS})_perf")
_DTYPES = {
    **{name: name for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "bfloat16")},
    **{"float": "float32", "half": "float16", "double": "float64", "bf16": "bfloat16", "char": "int8", "int": "int32"},
    **{"f8e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2"},
}
"""What nccl-tests and rccl-tests call a type, and what torch does. Another keeps its name, and matches none of ours."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """One measured size.

    `spread` is the inter-quartile range of the iterations' times over p50, None where the file does not tell.
    `p50_s` is a mean where nccl-tests told no times of single iterations; the notes say so then.
    """

    op: str
    size_bytes: int
    dtype: str
    in_place: bool
    p50_s: float
    spread: float | None
    busbw_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a file holds; `made_by` is distdiag, nccl-tests or rccl-tests, with the version where the file has it."""

    rows: tuple[Earlier, ...]
    made_by: str
    world_size: int | None
    device: str | None
    notes: tuple[str, ...]


@dataclass(kw_only=True)
class Found:
    """What was found in a file so far; what is passed over is counted by its reason."""

    rows: dict[tuple[str, int, str, bool], Earlier] = field(default_factory=dict)
    passed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    means: bool = False
    assumed: bool = False

    def add(self, row: Earlier) -> None:
        """Take a row if it makes sense, and is the first of its kind."""
        key = (row.op, row.size_bytes, row.dtype, row.in_place)
        likely = _LEAST_S <= row.p50_s <= _MOST_S and 0 <= row.busbw_bytes_per_s <= _FASTEST_BYTES_PER_S
        if row.size_bytes == 0:
            self.passed["it sent 0 bytes"] += 1
        elif not likely or row.size_bytes > LARGEST:
            self.passed["its numbers make no sense"] += 1
        elif key in self.rows:
            self.passed["another one before it measured the same"] += 1
        else:
            self.rows[key] = row

    def takes(self, op: str, redop: str) -> bool:
        """See whether it is known what was measured; what reduces may be taken for an all_reduce."""
        if not op and redop in ("", "none"):
            self.passed["it could be of any collective: name the file after it, such as all_gather_perf.txt"] += 1
            return False
        self.assumed |= not op
        return True

    def precise(self) -> tuple[Earlier, ...]:
        """Give the rows with bandwidths of all digits: nccl-tests prints two decimals, 0.00 for a small size.

        How much the bus carries for each byte is the same for all sizes of a collective: the fastest tells it best.
        """
        best: dict[str, Earlier] = {}
        for row in self.rows.values():
            best[row.op] = max(best.get(row.op, row), row, key=lambda one: one.busbw_bytes_per_s)
        carried = {op: row.busbw_bytes_per_s * row.p50_s / row.size_bytes for op, row in best.items()}
        return tuple(
            row
            if row.busbw_bytes_per_s >= GIGA
            else replace(row, busbw_bytes_per_s=carried[row.op] * row.size_bytes / row.p50_s)
            for row in self.rows.values()
        )

    def notes(self) -> tuple[str, ...]:
        """Say what a person should know."""
        said = ["the file does not say which collective: all_reduce is assumed"] if self.assumed else []
        said += ["its times are means: nccl-tests tells those of single iterations only with -I 1 -J"] * self.means
        said += [f"wrong data in {_results(self.wrong)}"] if self.wrong else []
        return (*said, *(f"passed over {_results(count)}: {reason}" for reason, count in self.passed.items()))


def _results(count: int) -> str:
    return f"{count} result{'' if count == 1 else 's'}"


def op_in(text: str) -> str:
    """Find the collective that a program of nccl-tests is named after; empty if there is none."""
    match = _OP.search(text)
    return match[1].replace("alltoall", "all_to_all") if match else ""


def number(value: float | str | None) -> float:
    """Read what should be a number; it is nan where it is none, which no comparison lets pass."""
    try:
        return math.nan if value is None else float(value)
    except ValueError:
        return math.nan


def known(spread: float) -> float | None:
    """Give a spread where it makes sense."""
    return spread if 0 <= spread < math.inf else None


def names_of(devices: list[str]) -> str | None:
    """Name each kind of device once; None where none is told."""
    return ", ".join(dict.fromkeys(devices))[:200] or None


def unfilled(op: str, size_bytes: int, dtype: str) -> Earlier:
    """Give an out-of-place row of nccl-tests in our words, without its numbers."""
    return Earlier(
        op=op or "all_reduce",
        size_bytes=size_bytes,
        dtype=_DTYPES.get(dtype, dtype),
        in_place=False,
        p50_s=math.nan,
        spread=None,
        busbw_bytes_per_s=math.nan,
    )
