"""A table of nccl-tests alone: judged by its GPUs and NICs without a run, or the options required for that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support_warm import distdiag

if TYPE_CHECKING:
    from support import Result

TABLES = Path(__file__).parents[3] / "recorded" / "nccl_tests"
TWO_NODES = TABLES / "2023_all_reduce_perf.mpirun.txt"


def judged(path: Path, *more: str) -> Result:
    return distdiag("allreduce-bench", "--json", "--compare", str(path), *more)


@pytest.mark.parametrize(
    ("name", "verdict", "finding"),
    [
        ("2023_all_reduce_perf.mpirun.txt", "ok", ""),
        ("2.19.6_all_reduce.per_iteration.txt", "fail", "bandwidth-bad"),
        ("2.17.6_all_reduce.txt", "fail", "table-wrong"),
        ("2023_reduce_scatter_perf.unchecked.txt", "unknown", "table-unjudged"),
    ],
)
def test_every_table_is_judged_without_a_run(name: str, verdict: str, finding: str) -> None:
    result = judged(TABLES / name)
    assert (result.report["verdict"], list(result.findings)) == (verdict, [finding] if finding else [])
    assert (result.report["data"]["ranks"], "starting" in result.err) == ([], False)


def test_the_network_is_said_as_unknown_or_taken_from_the_option() -> None:
    assert "2 x 8 NVIDIA H100 80GB HBM3 (its NICs are unknown)" in judged(TWO_NODES).report["summary"]
    known = judged(TWO_NODES, "--nics", "8x400").report
    assert "unknown" not in known["summary"]
    assert "expected: 320.0 GB/s, 80% of the 400 GB/s of a node's NICs" in known["data"]["verdict"]["lines"]


def test_a_network_of_which_nothing_is_known_names_the_option(tmp_path: Path) -> None:
    table = tmp_path / "all_reduce_perf.txt"
    table.write_text(TWO_NODES.read_text().replace("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"))
    found = judged(table).findings["table-unjudged"]
    assert "the NIC rate is unknown, and there is no published figure for 2 x 8 V100 SXM" in found["title"]
    assert found["fix"]["text"] == "add the NICs of a node, for example --nics 8x400"


def test_lines_without_their_head_are_not_judged(tmp_path: Path) -> None:
    table = tmp_path / "all_reduce_perf.txt"
    lines = (TABLES / "2.17.6_all_reduce.txt").read_text().splitlines(keepends=True)
    table.write_text("".join(line for line in lines if "Rank" not in line))
    assert "does not name its ranks and GPUs" in judged(table).findings["table-unjudged"]["title"]


def test_half_of_the_nics_is_bad(tmp_path: Path) -> None:
    table = tmp_path / "all_reduce_perf.txt"
    half = "20133   53.33  100.00      0"
    row = f"  1073741824     268435456     float     sum      -1    {half}    {half}\n"
    head = TWO_NODES.read_text().splitlines(keepends=True)
    table.write_text("".join(line.partition(">:")[2] for line in head if "#" in line) + row)
    assert list(judged(table, "--nics", "8x400").findings) == ["bandwidth-bad"]


@pytest.mark.parametrize("more", [("--nics", "8"), ("--nics", "8x400", "--nproc", "2")])
def test_wrong_use_of_the_option(more: tuple[str, ...]) -> None:
    assert judged(TWO_NODES, *more).code == 2
