"""sync-check on files: of an earlier run, and fixes by kind of difference."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
from support_warm import distdiag

from distdiag.commands.sync_check import diagnose
from distdiag.training.sync_check import FORMAT, Entry, Saved

if TYPE_CHECKING:
    from pathlib import Path

WEIGHT = Entry("parameter", "w", "(2,)", 7)


def test_files_of_an_earlier_larger_run_are_left_out_and_reported(tmp_path: Path) -> None:
    for size in (4, 2):  # the smaller run overwrites the files of two ranks only
        for rank in range(size):
            path = tmp_path / f"rank_{rank}.json"
            path.write_text(json.dumps(asdict(Saved(FORMAT, rank, size, [WEIGHT]))))
            os.utime(path, (1000 - size, 1000 - size))
    done = distdiag("sync-check", "--json", str(tmp_path))
    assert (done.code, done.report["summary"]) == (0, "all ranks hold the same state")
    (finding,) = done.report["findings"]
    assert finding["id"] == "sync-check.stale-files"
    assert finding["title"] == "2 files left out: from an earlier run, the newest is of 2 ranks"
    assert done.report["data"]["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "name", "fix"),
    [
        ("dataloader", "length", "drop_last"),
        ("step", "step", "skips or repeats a step"),
        ("optimizer", "param_groups[0].lr", "scheduler.step()"),
        ("parameter", "w", "load one checkpoint"),
    ],
)
def test_the_fix_fits_what_differs(kind: str, name: str, fix: str) -> None:
    values = {rank: [Entry(kind, name, "int", 5 + (rank == 2))] for rank in range(3)}
    (finding,) = diagnose(values, 3).findings
    assert finding.id == "sync-check.out-of-sync"
    assert finding.fix is not None
    assert fix in finding.fix.text


def test_ids_of_ranks_without_a_file_and_of_statistics_of_each_rank() -> None:
    statistics = {rank: [Entry("BatchNorm statistics", "n.running_mean", "(4,)", rank)] for rank in range(3)}
    found = [(finding.id, finding.level) for finding in diagnose(statistics, 4).findings]
    assert sorted(found) == [("sync-check.batchnorm-statistics", "info"), ("sync-check.ranks-missing", "unknown")]


def test_the_rank_where_a_value_is_missing_is_named() -> None:
    (finding,) = diagnose({0: [WEIGHT], 1: [WEIGHT], 2: []}, 3).findings
    assert finding.title == "parameter w: rank 2 differs from ranks 0-1 (missing on rank 2)"
    assert finding.fix is not None
    assert "build the same model" in finding.fix.text
