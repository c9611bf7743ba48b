"""An earlier run to compare with: distdiag's own JSON, or the text of nccl-tests."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec  # noqa: TID253 - this module is only imported when there is a file to read

from distdiag.diagnosis.wording import counted
from distdiag.errors import UsageError
from distdiag.files import as_text
from distdiag.output import SCHEMA

_LARGEST = 2**60
_FASTEST_BYTES_PER_S = 1e18
_LEAST_S, _MOST_S = 1e-9, 1e6
_GIGA = 1e9
_MOST_BYTES = 64 * 2**20
_LONGEST_LINE = 1024
"""Longer lines are cut: no pattern may search a line of many megabytes."""
_IQR_OF_SIGMA = 1.35
"""The inter-quartile range of a normal distribution, in standard deviations."""
_HINT = "use the output of `distdiag allreduce-bench --json`, or the text of nccl-tests"
_AGAIN = "the file is incomplete: use another file, or repeat that run"
_OP = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|sendrecv|gather|scatter|hypercube)_perf"
)
_DTYPES = {
    **{"float": "float32", "half": "float16", "double": "float64", "bf16": "bfloat16", "char": "int8", "int": "int32"},
    **{"f8e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2"},
}
"""Types of nccl-tests and rccl-tests -> of torch. Others have the same name, or match no row."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A measured size. `spread`: the inter-quartile range of the iterations over p50, None if unknown.

    `p50_s` of nccl-tests is a mean.
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
    """The rows of a file; `made_by` is distdiag, nccl-tests or rccl-tests, with the version if the file has it."""

    rows: tuple[Earlier, ...]
    made_by: str
    world_size: int | None
    device: str | None
    notes: tuple[str, ...]
    nodes: int | None = None
    """Hosts of the ranks; None where the file does not name them."""
    wrong: int = 0
    """Results with wrong data."""

    @property
    def is_table(self) -> bool:
        """Return whether it is a text of nccl-tests."""
        return not self.made_by.startswith("distdiag")


@dataclass(kw_only=True)
class _Found:
    """The plausible rows of a file so far, the first of each kind; skipped rows are counted by reason."""

    rows: dict[tuple[str, int, str, bool], Earlier] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    wrong: int = 0

    def add(self, row: Earlier) -> None:
        """Add a row unless it is implausible or a repetition."""
        key = (row.op, row.size_bytes, row.dtype, row.in_place)
        plausible = _LEAST_S <= row.p50_s <= _MOST_S and 0 <= row.busbw_bytes_per_s <= _FASTEST_BYTES_PER_S
        if row.size_bytes == 0:
            self.skipped["0 bytes sent"] += 1
        elif not plausible or row.size_bytes > _LARGEST:
            self.skipped["implausible numbers"] += 1
        elif key in self.rows:
            self.skipped["the same was measured before"] += 1
        else:
            self.rows[key] = row

    def notes(self) -> tuple[str, ...]:
        """List the limits of these rows."""
        wrong = [f"wrong data in {counted(self.wrong, 'result')}"] if self.wrong else []
        return (*wrong, *(f"skipped {counted(count, 'result')}: {reason}" for reason, count in self.skipped.items()))


def read(path: str) -> Baseline:
    """Read the file or pipe of --compare.

    Raises:
        UsageError: it cannot be read, is too large, or has no usable results.
    """
    return read_text_of(as_text(_load(path)), path)


def read_text_of(text: str, path: str) -> Baseline:
    """Read the content of a file, see `read`."""
    text = text.lstrip("\ufeff \t\r\n")
    if not text:
        raise UsageError(f"{path} is empty", hint=_AGAIN)
    baseline = _read_json(text, path) if text.startswith("{") else _read_nccl_tests(text, path)
    if not baseline.rows:
        why = "; ".join(baseline.notes) or "its list of results is empty"
        raise UsageError(f"{path} has no results to compare with: {why}", hint=_HINT)
    return baseline


def _load(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MiB", hint=_HINT)
    return data


_Text = Annotated[str, msgspec.Meta(max_length=200)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]


class _Times(msgspec.Struct):
    p50: float
    iqr: float | None = None


class _Result(msgspec.Struct):
    op: _Text
    size_bytes: _Size
    dtype: _Text
    in_place: bool
    time_s: _Times | None = None
    busbw_bytes_per_s: float | None = None
    wrong: int | None = None


class _Data(msgspec.Struct):
    results: list[_Result]
    world_size: _Size | None = None
    device: _Text = ""
    device_name: _Text | None = None
    stat: _Text = "p50"


class _Document(msgspec.Struct):
    schema: str = ""
    command: str = ""
    version: _Text = ""
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
    data = document.data
    if data is None:
        raise UsageError(f"{path} has no results: that run failed", hint=_HINT)
    found_rows = _Found()
    for result in data.results:
        found_rows.wrong += (result.wrong or 0) > 0
        if result.time_s is None or result.busbw_bytes_per_s is None:
            found_rows.skipped["not measured"] += 1
            continue
        p50_s, iqr_s = result.time_s.p50, result.time_s.iqr
        row = Earlier(
            op=result.op,
            size_bytes=result.size_bytes,
            dtype=result.dtype,
            in_place=result.in_place,
            p50_s=p50_s,
            spread=None if iqr_s is None or p50_s <= 0 else _known(iqr_s / p50_s),
            busbw_bytes_per_s=result.busbw_bytes_per_s,
        )
        found_rows.add(row)
    others = [] if data.stat == "p50" else [f"its bandwidths are of {data.stat} times, not of medians"]
    return Baseline(
        rows=tuple(found_rows.rows.values()),
        made_by=f"distdiag {document.version}",
        world_size=data.world_size or None,
        device=data.device_name or data.device or None,
        notes=(*others, *found_rows.notes()),
    )


def _known(spread: float) -> float | None:
    return spread if 0 <= spread < math.inf else None


_MADE_BY = re.compile(r"\b((?:nccl|rccl)-tests):? [vV]ersion (\S{1,40})")
_RANK = re.compile(
    r"# {1,9}Rank {1,9}(\d{1,9}) {1,9}(?:Group {1,9}(\d{1,9}) )?"
    r".{0,100}?(?:\bon {1,60}(\S{1,255}) {1,9})?\bdevice {1,9}\d{1,9} \[[^]]{0,40}\] {0,9}(\S.{0,99})"
)
_BLANK_HALF = " " * 25
"""The gap in a line where only in-place was measured; the columns of a whole line are closer."""


def _read_nccl_tests(text: str, path: str) -> Baseline:
    """Read all tables of a text.

    Raises:
        UsageError: there is no table, or they are of different numbers of ranks.
    """
    if text[-1] not in "\r\n":
        # The last word may be the first half of a number.
        text = text.rpartition(" ")[0]
    tables = _Tables(path)
    for line in text.splitlines():
        tables.take(line[:_LONGEST_LINE])
    if tables.columns is None:
        raise UsageError(f"{path} has an unknown format", hint=f"{_HINT}, including the lines that begin with #")
    sizes = tables.world_sizes()
    if len(sizes) > 1:
        several = " and ".join(map(str, sorted(sizes)))
        raise UsageError(f"{path} has runs of {several} ranks", hint="split it: one run per file")
    return Baseline(
        rows=tables.precise(),
        made_by=tables.made_by,
        world_size=next(iter(sizes), None),
        device=", ".join(dict.fromkeys(tables.devices))[:200] or None,
        notes=tables.notes(),
        nodes=len(tables.hosts) or None,
        wrong=tables.wrong,
    )


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Positions of columns, counted from the size: for out-of-place and in-place, each by name."""

    halves: tuple[dict[str, int], ...]
    redop: int | None
    unit_s: float


class _Tables:
    """The state of reading a text line by line."""

    def __init__(self, path: str) -> None:
        self.made_by = "nccl-tests"
        self.devices: list[str] = []
        self.hosts: set[str] = set()
        self.columns: _Columns | None = None
        self._found = _Found()
        self._named = _op_in(os.path.basename(path))
        self._op = ""
        self._assumed = self._in_table = False
        self._mentioned: set[str] = set()
        self._ranks: dict[str, set[int]] = {}
        self._sizes: set[int] = set()

    def take(self, line: str) -> None:
        """Read a line."""
        if "_perf" in line and (op := _op_in(line)):
            if "Collective test starting" in line:
                self._mentioned.clear()
            self._mentioned.add(op)
        if "-tests" in line and (match := _MADE_BY.search(line)):
            self.made_by = f"{match[1]} {match[2]}"
        if "Rank" in line and (match := _RANK.search(line)):
            self._take_rank(match)
        words = line.split()
        if columns := _columns_in(words):
            self.columns = columns
            # Of several commands mentioned before a header, each may have printed the table.
            if self._mentioned:
                self._op = self._mentioned.pop() if len(self._mentioned) == 1 else ""
            self._mentioned.clear()
        elif self.columns and (row := _row_in(words)):
            self._take_row(row, self.columns, only_in_place=_BLANK_HALF in line.strip())

    def world_sizes(self) -> set[int]:
        """Return the numbers of ranks of the runs; of groups side by side, that of the largest."""
        return self._sizes | {max(map(len, self._ranks.values()), default=0)} - {0}

    def precise(self) -> tuple[Earlier, ...]:
        """Return the rows with bandwidths of all digits: nccl-tests prints two decimals, 0.00 for a small size.

        busbw / algbw is the same for all sizes of a collective: its fastest row has it most precisely.
        """
        factors: dict[str, float] = {}
        rows = self._found.rows.values()
        for row in sorted(rows, key=lambda row: -row.busbw_bytes_per_s):
            factors.setdefault(row.op, row.busbw_bytes_per_s * row.p50_s / row.size_bytes)
        return tuple(
            row
            if row.busbw_bytes_per_s >= _GIGA
            else replace(row, busbw_bytes_per_s=factors[row.op] * row.size_bytes / row.p50_s)
            for row in rows
        )

    @property
    def wrong(self) -> int:
        """The number of results with wrong data."""
        return self._found.wrong

    def notes(self) -> tuple[str, ...]:
        """List the limits of these rows."""
        assumed = ["the file does not name the collective: all_reduce is assumed"] if self._assumed else []
        means = ["its times are means, as nccl-tests prints them"] if self._found.rows else []
        return (*assumed, *means, *self._found.notes())

    def _take_rank(self, match: re.Match[str]) -> None:
        if self._in_table:
            self._sizes = self.world_sizes()
            self._ranks.clear()
        self._in_table = False
        self._ranks.setdefault(match[2] or "", set()).add(int(match[1]))
        self.hosts |= {match[3]} - {None}
        self.devices.append(match[4].strip())

    def _take_row(self, words: list[str], columns: _Columns, *, only_in_place: bool) -> None:
        self._in_table = True
        op = self._op or self._named
        redop = "" if columns.redop is None else "".join(words[columns.redop :][:1])
        # Collectives that reduce nothing left that column blank before 2022: a time is in its place.
        blank = not math.isnan(_number(redop))
        if not op and (blank or redop in ("", "none")):
            self._found.skipped["unknown collective: name the file after it, for example all_gather_perf.txt"] += 1
            return
        self._assumed |= not op
        back = blank + (len(columns.halves[0]) if only_in_place else 0)
        for in_place, names in enumerate(columns.halves):
            if in_place or not only_in_place:
                cells = {name: words[at - back] for name, at in names.items() if at - back < len(words)}
                dtype = _DTYPES.get(words[2], words[2])
                self._take_half(op or "all_reduce", int(words[0]), dtype, cells, columns.unit_s, bool(in_place))

    def _take_half(
        self, op: str, size_bytes: int, dtype: str, cells: dict[str, str], unit_s: float, in_place: bool
    ) -> None:
        if "cputime" in cells:
            self._found.skipped["CPU time (-C 1)"] += 1
            return
        time_s = _number(cells.get("time")) * unit_s
        # In a torn line other words are in the places of time and algbw. Until June 2020 algbw held the factor
        # (n - 1) / n for some collectives, and it is printed with two decimals.
        rate = size_bytes / time_s / _GIGA if time_s > 0 else math.nan
        if not 0.45 * rate - 0.02 <= _number(cells.get("algbw")) <= 1.1 * rate + 0.02:
            self._found.skipped["size, time and bandwidth do not match"] += 1
            return
        self._found.wrong += _number(cells.get("#wrong")) > 0
        row = Earlier(
            op=op,
            size_bytes=size_bytes,
            dtype=dtype,
            in_place=in_place,
            p50_s=time_s,
            spread=_known(_IQR_OF_SIGMA * _number(cells.get("i_cv%")) / 100),
            busbw_bytes_per_s=_number(cells.get("busbw")) * _GIGA,
        )
        self._found.add(row)


def _op_in(text: str) -> str:
    """Return the collective of a program's name; empty if there is none."""
    match = _OP.search(text)
    return match[1].replace("alltoall", "all_to_all") if match else ""


def _number(text: str | None) -> float:
    """Parse a number; nan if it is none, which no comparison accepts."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _columns_in(words: list[str]) -> _Columns | None:
    """Parse a line that may be a header; those of 2019 and before begin with bytes, and their times are in ms."""
    start = next((at for at, word in enumerate(words) if word in ("size", "bytes")), None)
    if start is None or words[start + 1 : start + 2] not in (["count"], ["N"]):
        return None
    names = words[start:]
    times = [at for at, name in enumerate(names) if name in ("time", "cputime")][:2]
    if not times:
        return None
    ends = [*times[1:], len(names)]
    return _Columns(
        halves=tuple({names[at]: at for at in range(first, end)} for first, end in zip(times, ends, strict=True)),
        redop=next((at for at, name in enumerate(names) if name in ("redop", "op")), None),
        unit_s=1e-3 if names[0] == "bytes" else 1e-6,
    )


def _row_in(words: list[str]) -> list[str]:
    """Return the words from the size on, without the prefix of a launcher; none if it is not a row."""
    for at in range(min(len(words) - 2, 12)):
        # `[1,0]<stdout>:137438953472`: the widest sizes leave no space.
        size = re.split(r"[:>\]]", words[at])[-1]
        if len(size) < 20 and size.isdecimal() and words[at + 1].isdecimal() and words[at + 2][0].isalpha():
            return [size, *words[at + 1 :]]
    return []
