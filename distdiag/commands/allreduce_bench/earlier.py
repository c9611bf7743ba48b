"""An earlier run to compare with: the output of distdiag, or of nccl-tests as text or JSON."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

import msgspec  # noqa: TID253 - this module is only imported when there is a file to read

from distdiag.diagnosis.wording import counted
from distdiag.errors import UsageError
from distdiag.files import as_text
from distdiag.output import SCHEMA

LARGEST = 2**60
_FASTEST_BYTES_PER_S = 1e18
_LEAST_S, _MOST_S = 1e-9, 1e6
GIGA = 1e9
HINT = "use the output of `distdiag allreduce-bench --json` or of nccl-tests"
_OPS = "all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|sendrecv|gather|scatter|hypercube"
_OP = re.compile(rf"({_OPS})_perf")
_DTYPES = {
    **{name: name for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "bfloat16")},
    **{"float": "float32", "half": "float16", "double": "float64", "bf16": "bfloat16", "char": "int8", "int": "int32"},
    **{"f8e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2"},
}
"""What nccl-tests and rccl-tests call a type, and what torch does. Other types keep their names and match no row."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A measured size.

    `spread` is the inter-quartile range of the iterations' times over p50, None where the file lacks it.
    `p50_s` is a mean where nccl-tests reported no times of single iterations; a note says that then.
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
    """What was found in a file so far; what is skipped is counted by its reason."""

    rows: dict[tuple[str, int, str, bool], Earlier] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    means: bool = False
    assumed: bool = False

    def add(self, row: Earlier) -> None:
        """Add a row if it is plausible, and the first of its kind."""
        key = (row.op, row.size_bytes, row.dtype, row.in_place)
        plausible = _LEAST_S <= row.p50_s <= _MOST_S and 0 <= row.busbw_bytes_per_s <= _FASTEST_BYTES_PER_S
        if row.size_bytes == 0:
            self.skipped["0 bytes sent"] += 1
        elif not plausible or row.size_bytes > LARGEST:
            self.skipped["implausible numbers"] += 1
        elif key in self.rows:
            self.skipped["the same was measured before"] += 1
        else:
            self.rows[key] = row

    def takes(self, op: str, redop: str) -> bool:
        """Return whether the collective is known; one that reduces is assumed to be an all_reduce."""
        if not op and redop in ("", "none"):
            self.skipped["unknown collective: name the file after it, for example all_gather_perf.txt"] += 1
            return False
        self.assumed |= not op
        return True

    def precise(self) -> tuple[Earlier, ...]:
        """Return the rows with bandwidths of all digits: nccl-tests prints two decimals, 0.00 for a small size.

        How much the bus carries for each byte is the same for all sizes of a collective: the fastest is most precise.
        """
        best: dict[str, Earlier] = {}
        for row in self.rows.values():
            best[row.op] = max(best.get(row.op, row), row, key=lambda candidate: candidate.busbw_bytes_per_s)
        carried = {op: row.busbw_bytes_per_s * row.p50_s / row.size_bytes for op, row in best.items()}
        return tuple(
            row
            if row.busbw_bytes_per_s >= GIGA
            else replace(row, busbw_bytes_per_s=carried[row.op] * row.size_bytes / row.p50_s)
            for row in self.rows.values()
        )

    def notes(self) -> tuple[str, ...]:
        """List what a reader should know of these rows."""
        notes = ["the file does not name the collective: all_reduce is assumed"] if self.assumed else []
        notes += ["its times are means: nccl-tests prints those of single iterations only with -I 1 -J"] * self.means
        notes += [f"wrong data in {counted(self.wrong, 'result')}"] if self.wrong else []
        skipped = (f"skipped {counted(count, 'result')}: {reason}" for reason, count in self.skipped.items())
        return (*notes, *skipped)


def op_in(text: str) -> str:
    """Return the collective that a program of nccl-tests is named after; empty if there is none."""
    match = _OP.search(text)
    return match[1].replace("alltoall", "all_to_all") if match else ""


def number(value: float | str | None) -> float:
    """Parse what should be a number; nan where it is not, which no comparison accepts."""
    try:
        return math.nan if value is None else float(value)
    except ValueError:
        return math.nan


def known(spread: float) -> float | None:
    """Return a spread where it is plausible."""
    return spread if 0 <= spread < math.inf else None


def names_of(devices: list[str]) -> str | None:
    """Return each kind of device once; None where the file has none."""
    return ", ".join(dict.fromkeys(devices))[:200] or None


def unfilled(op: str, size_bytes: int, dtype: str) -> Earlier:
    """Return an out-of-place row of nccl-tests under our names, without its numbers."""
    return Earlier(
        op=op or "all_reduce",
        size_bytes=size_bytes,
        dtype=_DTYPES.get(dtype, dtype),
        in_place=False,
        p50_s=math.nan,
        spread=None,
        busbw_bytes_per_s=math.nan,
    )


_MOST_BYTES = 64 * 2**20
_AGAIN = "the file is incomplete: use another file, or repeat that run"
_Document = TypeVar("_Document", bound=msgspec.Struct)


class _Head(msgspec.Struct):
    schema: str = ""
    command: str = ""
    nccl_version: int | None = None


class _Times(msgspec.Struct):
    p50: float
    iqr: float | None = None


class _Result(msgspec.Struct):
    op: Text
    size_bytes: Size
    dtype: Text
    in_place: bool
    time_s: _Times | None = None
    busbw_bytes_per_s: float | None = None
    wrong: int | None = None


class _Data(msgspec.Struct):
    results: list[_Result]
    world_size: Size | None = None
    device: Text = ""
    device_name: Text | None = None
    stat: Text = "p50"


class _DistdiagDocument(msgspec.Struct):
    version: Text
    data: _Data | None = None


def read(path: str) -> Baseline:
    """Read the file, or the pipe, that --compare names.

    Raises:
        UsageError: it cannot be read, is too large, or has no results that we understand.
    """
    return read_text_of(as_text(_load(path)), path)


def read_text_of(text: str, path: str) -> Baseline:
    """Read what a file held, see `read`."""
    text = text.lstrip("\ufeff \t\r\n")
    if not text:
        raise UsageError(f"{path} is empty", hint=_AGAIN)
    baseline = _read_json(text, path) if text.startswith("{") else read_text(text, path)
    if not baseline.rows:
        why = "; ".join(baseline.notes) or "its list of results is empty"
        raise UsageError(f"{path} has no results to compare with: {why}", hint=HINT)
    return baseline


def _load(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist", hint=HINT) from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a directory", hint="name a file in it") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="choose a readable file") from error
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MiB", hint=HINT)
    return data


def _read_json(text: str, path: str) -> Baseline:
    head = _decode(text, _Head, path)
    if head.schema == SCHEMA:
        if head.command != "allreduce-bench":
            raise UsageError(f"{path} is from distdiag {head.command[:40]}, not from allreduce-bench", hint=HINT)
        return _read_distdiag(_decode(text, _DistdiagDocument, path), path)
    if head.schema:
        raise UsageError(f"{path} has schema {head.schema[:40]}, expected {SCHEMA}", hint=HINT)
    if head.nccl_version is None:
        raise UsageError(f"{path} is JSON, but neither from distdiag nor from nccl-tests", hint=HINT)
    return read_nccl(_decode(text, Nccl, path), path)


def _decode(text: str, type_: type[_Document], path: str) -> _Document:
    try:
        return msgspec.json.decode(text, type=type_)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} has an unknown format: {error}", hint=HINT) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a complete JSON document: {error}", hint=_AGAIN) from error


def _read_distdiag(document: _DistdiagDocument, path: str) -> Baseline:
    data = document.data
    if data is None:
        raise UsageError(f"{path} has no results: that run failed", hint=HINT)
    found = Found()
    for result in data.results:
        found.wrong += (result.wrong or 0) > 0
        if result.time_s is None or result.busbw_bytes_per_s is None:
            found.skipped["not measured"] += 1
            continue
        row = Earlier(
            op=result.op,
            size_bytes=result.size_bytes,
            dtype=result.dtype,
            in_place=result.in_place,
            p50_s=result.time_s.p50,
            spread=known(number(result.time_s.iqr) / (result.time_s.p50 or math.nan)),
            busbw_bytes_per_s=result.busbw_bytes_per_s,
        )
        found.add(row)
    others = [] if data.stat == "p50" else [f"its bandwidths are of {data.stat} times, not of medians"]
    return Baseline(
        rows=tuple(found.rows.values()),
        made_by=f"distdiag {document.version}",
        world_size=data.world_size or None,
        device=data.device_name or data.device or None,
        notes=(*others, *found.notes()),
    )


_IQR_OF_SIGMA = 1.35
"""The inter-quartile range of a normal distribution, in standard deviations."""
Text = Annotated[str, msgspec.Meta(max_length=200)]
Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Number = float | str | None
"""nccl-tests writes the string "nan" for a missing number."""


class Half(msgspec.Struct):
    """What was measured out-of-place, or in-place; times in microseconds, bandwidths in GB/s."""

    time: _Number = None
    cpu_time: _Number = None
    alg_bw: _Number = None
    bus_bw: _Number = None
    nwrong: _Number = None


class PerIter(msgspec.Struct):
    """The times of single iterations, where they were reported."""

    skipped_iterations: Size = 0
    cv_pct: _Number = None
    times_us: list[float | str] = []


class _NcclResult(msgspec.Struct):
    size: Size
    type: Text
    redop: str = ""
    out_of_place: Half | None = None
    in_place: Half | None = None
    out_of_place_per_iter: PerIter | None = None
    in_place_per_iter: PerIter | None = None


class _Device(msgspec.Struct):
    group: int = 0
    pid: int = 0
    hostname: str = ""
    device_info: str = ""


class _Config(msgspec.Struct):
    nthreads: _Count = 1
    ngpus: _Count = 1
    devices: list[_Device] = []


class Nccl(msgspec.Struct):
    """The document."""

    args: list[str] = []
    config: _Config = msgspec.field(default_factory=_Config)
    results: list[_NcclResult] = []


def read_nccl(document: Nccl, path: str) -> Baseline:
    """Read what is plausible; the collective is that of the program's name, or else of the file's."""
    op = op_in(os.path.basename("".join(document.args[:1]))) or op_in(os.path.basename(path))
    found = Found()
    for result in document.results:
        if not found.takes(op, result.redop):
            continue
        row = unfilled(op, result.size, result.type)
        add_half(row, result.out_of_place, result.out_of_place_per_iter, found)
        add_half(replace(row, in_place=True), result.in_place, result.in_place_per_iter, found)
    config = document.config
    # Of each process only the first GPU is listed.
    unique = {(device.group, device.hostname, device.pid) for device in config.devices}
    processes = Counter(group for group, _, _ in unique)
    return Baseline(
        rows=found.precise(),
        made_by="nccl-tests",
        world_size=max(processes.values()) * config.nthreads * config.ngpus if processes else None,
        device=names_of([device.device_info for device in config.devices]),
        notes=found.notes(),
    )


def add_half(row: Earlier, half: Half | None, per_iter: PerIter | None, found: Found) -> None:
    """Fill in what was measured out-of-place or in-place, and add it."""
    if half is None:
        return
    if half.cpu_time is not None:
        found.skipped["CPU time (-C 1)"] += 1
        return
    mean_us = number(half.time)
    if not _agree(row.size_bytes, mean_us, number(half.alg_bw)):
        found.skipped["size, time and bandwidth do not match"] += 1
        return
    found.wrong += number(half.nwrong) > 0
    p50_us, spread = _middle(mean_us, per_iter or PerIter(), found)
    row = replace(
        row,
        p50_s=p50_us * 1e-6,
        spread=spread,
        busbw_bytes_per_s=number(half.bus_bw) * GIGA * mean_us / (p50_us or math.nan),
    )
    found.add(row)


def _agree(size_bytes: int, mean_us: float, algbw: float) -> bool:
    """Return whether algbw (in GB/s) is size over time: in a torn line other words are in their places.

    Until June 2020 it held the factor (n - 1) / n for some collectives, and it is printed with two decimals.
    """
    rate = size_bytes / (mean_us * 1e3) if mean_us > 0 else math.nan
    return 0.45 * rate - 0.02 <= algbw <= 1.1 * rate + 0.02


def _middle(mean_us: float, per_iter: PerIter, found: Found) -> tuple[float, float | None]:
    """Return the median of the iterations, and how they spread; the mean where they were not reported."""
    times_us = [time_us for time_us in map(number, per_iter.times_us[per_iter.skipped_iterations :]) if time_us > 0]
    if len(times_us) < 2:
        found.means = True
        # A coefficient of variation alone: the times are assumed to have a normal distribution.
        return mean_us, known(_IQR_OF_SIGMA * number(per_iter.cv_pct) / 100)
    low, p50_us, high = statistics.quantiles(times_us, method="inclusive")
    return p50_us, known((high - low) / p50_us)


_LONGEST_LINE = 1024
"""Longer lines are cut: those of a table are shorter, and no pattern should search a line of many megabytes."""
_MADE_BY = re.compile(r"\b((?:nccl|rccl)-tests):? [vV]ersion (\S{1,40})")
_RANK = re.compile(
    r"# {1,9}Rank {1,9}(\d{1,9}) {1,9}(?:Group {1,9}(\d{1,9}) )?"
    r".{0,200}?\bdevice {1,9}\d{1,9} \[[^]]{0,40}\] {0,9}(\S.{0,99})"
)
_BLANK_HALF = " " * 25
"""The gap in a line where only in-place was measured; between the columns of a whole line there is less."""


def read_text(text: str, path: str) -> Baseline:
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
        raise UsageError(f"{path} has an unknown format", hint=f"{HINT}, including the lines that begin with #")
    sizes = tables.world_sizes()
    if len(sizes) > 1:
        several = " and ".join(map(str, sorted(sizes)))
        raise UsageError(f"{path} has runs of {several} ranks", hint="split it: one run per file")
    return Baseline(
        rows=tables.found.precise(),
        made_by=tables.made_by,
        world_size=next(iter(sizes), None),
        device=names_of(tables.devices),
        notes=tables.found.notes(),
    )


class _Tables:
    """Reads a text line by line."""

    def __init__(self, path: str) -> None:
        self.found = Found()
        self.made_by = "nccl-tests"
        self.devices: list[str] = []
        self.columns: _Columns | None = None
        self._named = op_in(os.path.basename(path))
        self._op = ""
        self._mentioned: set[str] = set()
        self._ranks: dict[str, set[int]] = {}
        self._sizes: set[int] = set()
        self._in_table = False

    def take(self, line: str) -> None:
        """Read a line."""
        if "_perf" in line and (op := op_in(line)):
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
            self._settle_op()
        elif self.columns and (row := _row_in(words)):
            self._take_row(row, self.columns, only_in_place=_BLANK_HALF in line.strip())

    def world_sizes(self) -> set[int]:
        """Return how many ranks the runs had; of groups that ran side by side, how many the largest had."""
        return self._sizes | {max(map(len, self._ranks.values()), default=0)} - {0}

    def _settle_op(self) -> None:
        """Keep the command that was mentioned before a header; of several, each may have printed the table."""
        if self._mentioned:
            self._op = self._mentioned.pop() if len(self._mentioned) == 1 else ""
        self._mentioned.clear()

    def _take_rank(self, match: re.Match[str]) -> None:
        if self._in_table:
            self._sizes = self.world_sizes()
            self._ranks.clear()
        self._in_table = False
        self._ranks.setdefault(match[2] or "", set()).add(int(match[1]))
        self.devices.append(match[3].strip())

    def _take_row(self, words: list[str], columns: _Columns, *, only_in_place: bool) -> None:
        self._in_table = True
        op = self._op or self._named
        redop = "" if columns.redop is None else "".join(words[columns.redop :][:1])
        # Collectives that reduce nothing left that column blank before 2022: there is a time in its place.
        blank = not math.isnan(number(redop))
        if not self.found.takes(op, "" if blank else redop):
            return
        back = blank + (len(columns.halves[0]) if only_in_place else 0)
        for in_place, names in enumerate(columns.halves):
            if only_in_place and not in_place:
                continue
            cells = {name: words[at - back] for name, at in names.items() if at - back < len(words)}
            half = Half(
                time=number(cells.get("time")) * columns.unit_us,
                cpu_time=cells.get("cputime"),
                alg_bw=cells.get("algbw"),
                bus_bw=cells.get("busbw"),
                nwrong=cells.get("#wrong"),
            )
            row = replace(unfilled(op, int(words[0]), words[2]), in_place=bool(in_place))
            add_half(row, half, PerIter(cv_pct=cells.get("i_cv%")), self.found)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """The columns of a header, counted from the size; of each half its columns by name."""

    halves: tuple[dict[str, int], ...]
    redop: int | None
    unit_us: float


def _columns_in(words: list[str]) -> _Columns | None:
    """Parse a line that may be a header; in those of 2019 and before, which begin with bytes, times are ms."""
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
        unit_us=1e3 if names[0] == "bytes" else 1.0,
    )


def _row_in(words: list[str]) -> list[str]:
    """Return the words from the size on, without what a launcher puts before a line; none where it is not a row."""
    for at in range(min(len(words) - 2, 12)):
        # `[1,0]<stdout>:137438953472`: the widest sizes leave no space.
        size = re.split(r"[:>\]]", words[at])[-1]
        if len(size) < 20 and size.isdecimal() and words[at + 1].isdecimal() and words[at + 2][0].isalpha():
            return [size, *words[at + 1 :]]
    return []
