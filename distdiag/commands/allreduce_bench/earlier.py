"""An earlier run to compare with: distdiag's own JSON, or the text that nccl-tests has printed since 2022."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from typing import TYPE_CHECKING

import msgspec  # noqa: TID253 - this module is only imported when there is a file to read

from distdiag.commands.allreduce_bench.types import GIGA, Baseline, SizeResult, Times
from distdiag.diagnosis.wording import counted
from distdiag.errors import UsageError
from distdiag.files import log_text
from distdiag.output import SCHEMA

if TYPE_CHECKING:
    from distdiag.commands.allreduce_bench.types import Bench

_LARGEST = 2**60
_FASTEST_BYTES_PER_S = 1e18
_LEAST_S, _MOST_S = 1e-9, 1e6
_LONGEST_LINE = 1024
"""Longer lines are truncated, to bound the cost of the patterns."""
_IQR_OF_SIGMA = 1.35
"""The inter-quartile range of a normal distribution, in standard deviations."""
_HINT = "use the output of `distdiag allreduce-bench --json`, or the text of nccl-tests"
_AGAIN = "the file is incomplete: use another file, or repeat that run"
_DTYPES = {
    **{"float": "float32", "half": "float16", "double": "float64"},
    **{"f8e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2"},
}
"""Types of nccl-tests and rccl-tests -> torch. Other types have the same name, or match no row."""


def read(path: str) -> Baseline:
    """Read the file or pipe of --compare.

    Raises:
        UsageError: unreadable, or without usable results.
    """
    text, _ = log_text(path)
    text = text.lstrip("\ufeff \t\r\n")
    if not text:
        raise UsageError(f"{path} is empty", hint=_AGAIN)
    baseline = _read_json(text, path) if text.startswith("{") else _read_nccl_tests(text, path)
    return checked(baseline, path)


def checked(baseline: Baseline, path: str) -> Baseline:
    """Return it. Raises UsageError if it has no rows."""
    if not baseline.rows:
        why = "; ".join(baseline.notes) or "its list of results is empty"
        raise UsageError(f"{path} has no results to compare with: {why}", hint=_HINT)
    return baseline


class _Rows:
    """The plausible rows of a file, the first of each key; skipped rows are counted by reason."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int, str, bool], SizeResult] = {}
        self.skipped: Counter[str] = Counter()
        self.wrong = 0

    def add(self, row: SizeResult) -> None:
        key = (row.op, row.size_bytes, row.dtype, row.in_place)
        self.wrong += (row.wrong or 0) > 0
        if row.time_s is None or row.busbw_bytes_per_s is None:
            self.skipped["not measured"] += 1
        elif row.size_bytes == 0:
            self.skipped["0 bytes sent"] += 1
        elif not (
            _LEAST_S <= row.time_s.p50 <= _MOST_S
            and 0 <= row.busbw_bytes_per_s <= _FASTEST_BYTES_PER_S
            and 0 < row.size_bytes <= _LARGEST
        ):
            self.skipped["implausible numbers"] += 1
        elif key in self._rows:
            self.skipped["the same was measured before"] += 1
        else:
            self._rows[key] = row

    def all(self) -> tuple[SizeResult, ...]:
        return tuple(self._rows.values())

    def notes(self) -> tuple[str, ...]:
        """List the limitations of these rows."""
        wrong = [f"wrong data in {counted(self.wrong, 'result')}"] if self.wrong else []
        return (*wrong, *(f"skipped {counted(count, 'result')}: {reason}" for reason, count in self.skipped.items()))


class _Data(msgspec.Struct):
    results: list[SizeResult]
    world_size: int = 0
    device: str = ""
    device_name: str | None = None
    stat: str = "p50"


class _Document(msgspec.Struct):
    schema: str = ""
    command: str = ""
    version: str = ""
    data: _Data | None = None


def _read_json(text: str, path: str) -> Baseline:
    try:
        document = msgspec.json.decode(text, type=_Document)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} has an unknown format: {error}", hint=_HINT) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a complete JSON document: {error}", hint=_AGAIN) from error
    if (document.schema, document.command) != (SCHEMA, "allreduce-bench"):
        found = f"schema {document.schema[:40] or 'none'}, command {document.command[:40] or 'none'}"
        raise UsageError(f"{path} is not from distdiag allreduce-bench: {found}", hint=_HINT)
    if document.data is None:
        raise UsageError(f"{path} has no results: that run failed", hint=_HINT)
    return of_run(document.data, document.version)


def of_run(data: Bench | _Data, version: str) -> Baseline:
    """Return the measured rows of a run of distdiag."""
    rows = _Rows()
    for row in data.results:
        rows.add(row)
    others = [] if data.stat == "p50" else [f"its bandwidths are of {data.stat} times, not of medians"]
    return Baseline(
        rows=rows.all(),
        made_by=f"distdiag {version}",
        world_size=data.world_size or None,
        device=data.device_name or data.device or None,
        notes=(*others, *rows.notes()),
    )


_OP = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|sendrecv|gather|scatter|hypercube)_perf"
)
_MADE_BY = re.compile(r"\b((?:nccl|rccl)-tests):? [vV]ersion (\S{1,40})")
_RANK = re.compile(
    r"# {1,9}Rank {1,9}(\d{1,9}) {1,9}(?:Group {1,9}(\d{1,9}) )?"
    r".{0,100}?\bon {1,60}(\S{1,255}) {1,9}device {1,9}\d{1,9} \[[^]]{0,40}\] {0,9}(\S.{0,99})"
)
_HEADER = re.compile(r"\bsize +count +type +redop +root +(time .+)")
_ROW = re.compile(r"(?:^|[\s:>\]])(\d{1,19}) +\d+ +([a-z]\w*) +(\S+) +\S+ +(\S.*)")
"""Size, count, type, reduction, root, numbers. A launcher's prefix may touch the widest sizes."""


def _read_nccl_tests(text: str, path: str) -> Baseline:
    """Read all tables of a text.

    Raises:
        UsageError: no table, or tables of different numbers of ranks.
    """
    if text[-1] not in "\r\n":
        # The text may end in the middle of a number.
        text = text.rpartition(" ")[0]
    tables = _Tables(_op_in(os.path.basename(path)))
    for line in text.splitlines():
        tables.take(line[:_LONGEST_LINE])
    if not tables.halves:
        raise UsageError(f"{path} has an unknown format", hint=f"{_HINT}, including the lines that begin with #")
    if len(tables.world_sizes) > 1:
        several = " and ".join(map(str, sorted(tables.world_sizes)))
        raise UsageError(f"{path} has runs of {several} ranks", hint="split it: one run per file")
    return Baseline(
        rows=tables.rows.all(),
        made_by=tables.made_by,
        world_size=next(iter(tables.world_sizes), None),
        device=", ".join(dict.fromkeys(tables.devices))[:200] or None,
        notes=tables.notes(),
        nodes=len(tables.hosts) or None,
        wrong=tables.rows.wrong,
    )


class _Tables:
    """State of the line-by-line parser. `halves`: the column names of the out-of-place and the in-place results."""

    def __init__(self, named: str) -> None:
        self.rows = _Rows()
        self.made_by = "nccl-tests"
        self.devices: list[str] = []
        self.hosts: set[str] = set()
        self.world_sizes: set[int] = set()
        self.halves: list[list[str]] = []
        self._op = named
        self._mentioned: set[str] = set()
        self._assumed = False
        self._ranks: dict[str, set[int]] = {}

    def take(self, line: str) -> None:
        if "_perf" in line and (op := _op_in(line)):
            if "Collective test starting" in line:
                self._mentioned.clear()
            self._mentioned.add(op)
        if "-tests" in line and (match := _MADE_BY.search(line)):
            self.made_by = f"{match[1]} {match[2]}"
        if "Rank" in line and (match := _RANK.search(line)):
            self._ranks.setdefault(match[2] or "", set()).add(int(match[1]))
            self.hosts.add(match[3])
            self.devices.append(match[4].strip())
        elif match := _HEADER.search(line):
            self._begin(match[1].split())
        elif self.halves and (match := _ROW.search(line)):
            self._take_row(int(match[1]), match[2], match[3], match[4].split())

    def _begin(self, names: list[str]) -> None:
        """Start a table. Several commands before it: any of them may have printed it. Of parallel groups the largest
        counts."""
        if self._mentioned:
            self._op = self._mentioned.pop() if len(self._mentioned) == 1 else ""
        self._mentioned.clear()
        if self._ranks:
            self.world_sizes.add(max(map(len, self._ranks.values())))
            self._ranks.clear()
        second = next((at for at, name in enumerate(names) if at and name == names[0]), len(names))
        self.halves = [names[:second], names[second:]]

    def _take_row(self, size_bytes: int, dtype: str, redop: str, cells: list[str]) -> None:
        op = self._op
        if not op and redop == "none":
            self.rows.skipped["unknown collective: name the file after it, for example all_gather_perf.txt"] += 1
            return
        self._assumed |= not op
        for in_place, names in enumerate(self.halves):
            numbers = {name: _number(cell) for name, cell in zip(names, cells, strict=False)}
            cells = cells[len(names) :]
            time_s = numbers.get("time", math.nan) * 1e-6
            rate = size_bytes / time_s if time_s > 0 else math.nan
            # In a torn line other words take the positions of time and algbw; algbw has two decimals.
            if 0.9 * rate - 2e7 <= numbers.get("algbw", math.nan) * GIGA <= 1.1 * rate + 2e7:
                self._add(op or "all_reduce", size_bytes, _DTYPES.get(dtype, dtype), numbers, bool(in_place))
            elif numbers:
                self.rows.skipped["size, time and bandwidth do not match"] += 1

    def _add(self, op: str, size_bytes: int, dtype: str, numbers: dict[str, float], in_place: bool) -> None:
        mean, wrong = numbers["time"] * 1e-6, numbers.get("#wrong", math.nan)
        iqr = mean * _IQR_OF_SIGMA * numbers.get("i_cv%", 0.0) / 100
        row = SizeResult(
            op=op,
            size_bytes=size_bytes,
            dtype=dtype,
            in_place=in_place,
            time_s=Times(p50=mean, p99=mean, min=mean, max=mean, mean=mean, iqr=iqr),
            algbw_bytes_per_s=numbers["algbw"] * GIGA,
            busbw_bytes_per_s=numbers.get("busbw", math.nan) * GIGA,
            wrong=int(wrong > 0),
        )
        self.rows.add(row)

    def notes(self) -> tuple[str, ...]:
        assumed = ["the file does not name the collective: all_reduce is assumed"] if self._assumed else []
        means = ["its times are means, as nccl-tests prints them"] if self.rows.all() else []
        return (*assumed, *means, *self.rows.notes())


def _op_in(text: str) -> str:
    """Return the collective in a program's name, else ""."""
    match = _OP.search(text)
    return match[1].replace("alltoall", "all_to_all") if match else ""


def _number(text: str) -> float:
    """Parse a number; nan, which fails every comparison, if invalid."""
    try:
        return float(text)
    except ValueError:
        return math.nan
