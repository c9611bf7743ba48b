"""sync_check on real Gloo ranks: a planted difference is named with its rank, and equal ranks are silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from jobs import Job
from support_warm import distdiag

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases in one job: torch is imported once."""
    top = tmp_path_factory.mktemp("sync")
    cases = [*(fault for fault, *_ in PLANTED), "none", "same-rng", "rng", "pair", "batchnorm", "sharded"]
    cases += [*SHARDED_AND_GOOD, *SHARDED_AND_BROKEN]
    with Job("checks_sync", RANKS, arguments=[str(top), *cases], forked=True) as job:
        job.wait_ready(timeout=100)
    return top


def found_by(top: Path, fault: str) -> list[str]:
    """Return what all ranks found: the same lines on each."""
    found = [path.read_text() for path in (top / fault).glob("found-*")]
    assert len(found) == (2 if fault == "pair" else RANKS)
    assert len(set(found)) == 1
    return found[0].splitlines()


PLANTED = [
    ("parameter", "parameter module.last.weight", "values"),
    ("swapped", "parameter module.last.weight", "values"),
    ("buffer", "buffer module.mask", "values"),
    ("optimizer", "optimizer state module.first.bias.exp_avg", "values"),
    ("lr", "optimizer param_groups[0].lr", "values"),
    ("step", "step step", "values"),
    ("dataloader", "dataloader length", "values"),
    ("numpy", "RNG numpy", "values"),
    ("missing", "optimizer state module.first.bias.exp_avg", "missing on rank 2"),
]


SHARDED_AND_GOOD = {
    "zero": True,
    "zero-replicas": True,
    "fsdp": True,
    "fsdp-orig": True,
    "fsdp-inner-orig": True,
    "fsdp-none": False,
}
"""FSDP 1 and ZeroRedundancyOptimizer, and whether anything of it is sharded."""
SHARDED_AND_BROKEN = {
    "zero-replicas-broken": "optimizer state module.0.weight.exp_avg: rank 2 differs from ranks 0-1 (values)",
    "fsdp-none-broken": "parameter _fsdp_wrapped_module._flat_param: rank 2 differs from ranks 0-1 (values)",
    "fsdp-whole-broken": "parameter _fsdp_wrapped_module.1.bias: rank 2 differs from ranks 0-1 (values)",
    "fsdp-inner-broken": "parameter 1.module.bias: rank 2 differs from ranks 0-1 (values)",
}
"""What each rank keeps whole beside shards, or holds the same shard of as others, is compared."""


@pytest.mark.parametrize(("fault", "name", "why"), PLANTED)
def test_a_planted_difference_names_value_and_rank(folder: Path, fault: str, name: str, why: str) -> None:
    head, first, *_ = found_by(folder, fault)
    assert head == "ok=False sharded=False"
    assert first == f"{name}: rank 2 differs from ranks 0-1 ({why})"
    result = distdiag("sync-check", "--json", str(folder / fault / "saved"))
    assert result.code == 1
    assert result.report["findings"][0]["where"]["ranks"] == [2]
    assert name in result.report["findings"][0]["title"]


@pytest.mark.parametrize("same", ["none", "same-rng"])
def test_equal_ranks_are_silent(folder: Path, same: str) -> None:
    assert found_by(folder, same) == ["ok=True sharded=False"]
    result = distdiag("sync-check", "--json", str(folder / same / "saved"))
    assert result.code == 0
    assert result.report["findings"] == []
    (folder / same / "saved" / "rank_1.json").unlink()
    result = distdiag("sync-check", "--json", str(folder / same / "saved"))
    assert result.code == 3, "the file of a rank is missing"


def test_two_ranks_that_differ_accuse_neither(folder: Path) -> None:
    _, first, *_ = found_by(folder, "pair")
    assert first == "parameter module.last.weight: rank 0 and rank 1 differ (values)"
    result = distdiag("sync-check", "--json", str(folder / "pair" / "saved"))
    assert result.report["findings"][0]["where"]["ranks"] == []


def test_generators_that_differ_are_named(folder: Path) -> None:
    head, first, *_ = found_by(folder, "rng")
    assert head == "ok=False sharded=False"
    assert first == "RNG torch: rank 0 and rank 1 and rank 2 differ (values)"


def test_batchnorm_statistics_of_each_rank_are_no_fault(folder: Path) -> None:
    head, *lines = found_by(folder, "batchnorm")
    assert head == "ok=True sharded=False"
    assert lines
    assert all(line.startswith("expected: BatchNorm statistics module.norm.") for line in lines)


def test_shards_are_not_taken_for_differences(folder: Path) -> None:
    head, *lines = found_by(folder, "sharded")
    assert head == "ok=True sharded=True"
    assert all(line.startswith("expected: ") for line in lines)


@pytest.mark.parametrize("case", SHARDED_AND_GOOD)
def test_shards_of_fsdp1_and_zero_are_told_from_replicas(folder: Path, case: str) -> None:
    assert found_by(folder, case) == [f"ok=True sharded={SHARDED_AND_GOOD[case]}"]
    assert distdiag("sync-check", str(folder / case / "saved")).code == 0


@pytest.mark.parametrize("case", SHARDED_AND_BROKEN)
def test_what_two_ranks_hold_beside_shards_is_compared(folder: Path, case: str) -> None:
    assert found_by(folder, case)[1] == SHARDED_AND_BROKEN[case]


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0.json").write_text("[]")
    assert distdiag("sync-check", str(tmp_path)).code == 2
    assert distdiag("sync-check", str(tmp_path / "nothing")).code == 2
