"""The text of nccl-tests, between whatever else the ranks and their launcher say.

The formats are those that NVIDIA/nccl-tests prints with src/util.cu, and before 2022 with a header for each collective
(src/all_gather.cu etc.).
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace

from distdiag.commands.allreduce_bench.earlier import HINT, Baseline, Found, names_of, number, op_in, unfilled
from distdiag.commands.allreduce_bench.nccl_tests_json import Half, PerIter, add_half
from distdiag.errors import UsageError

_LONGEST_LINE = 1024
"""Longer lines are cut: none of a table is, and no pattern is to walk over one of many megabytes."""
_MADE_BY = re.compile(r"\b((?:nccl|rccl)-tests):? [vV]ersion (\S{1,40})")
_RANK = re.compile(
    r"# {1,9}Rank {1,9}(\d{1,9}) {1,9}(?:Group {1,9}(\d{1,9}) )?"
    r".{0,200}?\bdevice {1,9}\d{1,9} \[[^]]{0,40}\] {0,9}(\S.{0,99})"
)
_BLANK_HALF = " " * 25
"""Stands where only in-place was measured; between the columns of a whole line there is less."""


def read_text(text: str, path: str) -> Baseline:
    """Read all tables of a text.

    Raises:
        UsageError: there is none, or they are of different numbers of ranks.
    """
    if text[-1] not in "\r\n":
        # What stands last may be the first half of a number.
        text = text.rpartition(" ")[0]
    tables = _Tables(path)
    for line in text.splitlines():
        tables.take(line[:_LONGEST_LINE])
    if tables.columns is None:
        raise UsageError(f"{path} is of no format that we know", hint=f"{HINT}, with its lines that begin with #")
    sizes = tables.world_sizes()
    if len(sizes) > 1:
        several = " and ".join(map(str, sorted(sizes)))
        raise UsageError(f"{path} holds runs of {several} ranks", hint="keep each run in a file of its own")
    return Baseline(
        rows=tables.found.precise(),
        made_by=tables.made_by,
        world_size=next(iter(sizes), None),
        device=names_of(tables.devices),
        notes=tables.found.notes(),
    )


class _Tables:
    """Takes a text line by line."""

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
        """Learn what a line tells."""
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
        """Tell how many ranks the runs had; of groups that ran side by side, how many the largest had."""
        return self._sizes | {max(map(len, self._ranks.values()), default=0)} - {0}

    def _settle_op(self) -> None:
        """Take the one command that was mentioned before a header; of several, each may have made the table."""
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
        # Collectives that reduce nothing left that column blank before 2022: a time stands there.
        blank = not math.isnan(number(redop))
        if not self.found.takes(op, "" if blank else redop):
            return
        back = blank + (len(columns.halves[0]) if only_in_place else 0)
        for in_place, names in enumerate(columns.halves):
            if only_in_place and not in_place:
                continue
            said = {name: words[at - back] for name, at in names.items() if at - back < len(words)}
            half = Half(
                time=number(said.get("time")) * columns.unit_us,
                cpu_time=said.get("cputime"),
                alg_bw=said.get("algbw"),
                bus_bw=said.get("busbw"),
                nwrong=said.get("#wrong"),
            )
            row = replace(unfilled(op, int(words[0]), words[2]), in_place=bool(in_place))
            add_half(row, half, PerIter(cv_pct=said.get("i_cv%")), self.found)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Where a header says that things stand, counted from the size; of each half its columns by name."""

    halves: tuple[dict[str, int], ...]
    redop: int | None
    unit_us: float


def _columns_in(words: list[str]) -> _Columns | None:
    """Read a line that may be a header; in those of 2019 and before, which begin with bytes, times are ms."""
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
    """Give the words from the size on, without what a launcher puts before a line; none where it is no row."""
    for at in range(min(len(words) - 2, 12)):
        # `[1,0]<stdout>:137438953472`: the widest sizes leave no space.
        size = re.split(r"[:>\]]", words[at])[-1]
        if len(size) < 20 and size.isdecimal() and words[at + 1].isdecimal() and words[at + 2][0].isalpha():
            return [size, *words[at + 1 :]]
    return []
