"""gpu-test on ranks that fail for real, each in one named way."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from json_schema import check
from support_warm import WarmRunning, distdiag, enough_of_torch, gpu_test

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support import Result

# Ranks need less than 25 s for torch beside eight busy processes; such a rank is no fault.
RUN = ("gpu-test", "--json", "--no-compute", "--stall", "25")
# To the others a stopped rank is like a late one, and connect like agree, memory and done. For reduce see below.
HELD_UP = (("stop", 0, "start"), ("late", 1, "connect"), ("stop", 0, "init"))


@pytest.mark.timed
def test_healthy_ranks_are_ok_and_everything_was_checked() -> None:
    result = gpu_test("--nproc", "2", computes=True)
    check(result.out, 0)
    assert result.report["verdict"] == "ok"
    data = result.report["data"]
    assert data["world_size"] == 2
    assert (data["backend"], data["device"]) == ("gloo", "cpu")
    assert data["memory_bytes"] == 64 * 2**20
    assert data["versions"]["torch"]
    assert data["versions"]["python"].startswith("3.")
    assert [(rank["rank"], rank["stage"], rank["status"]) for rank in data["ranks"]] == [
        (rank, "done", "ok") for rank in range(2)
    ]
    # Another timed test may take the cores of one rank, which is said.
    found = [finding["id"] for finding in result.report["findings"] if not finding["title"].endswith("used its cores")]
    assert found == ["gpu-test.cpu-only"]


@pytest.mark.timed
def test_a_rank_that_does_not_come_is_named_alone_and_in_time(tmp_path: Path) -> None:
    result = gpu_test("--nproc", "3", "--stall", "12", "--inject", "stop:1@connect", env=enough_of_torch(tmp_path))
    assert result.code == 1
    assert list(result.findings) == ["rank-missing"]
    finding = result.findings["rank-missing"]
    assert finding["where"]["ranks"] == [1]
    assert result.statuses == ["waiting", "missing", "waiting"]
    assert any("Rank.enter (distdiag/launch/rank.py" in line for line in finding["evidence"]), finding["evidence"]
    assert result.seconds_after_last_news < 12 + 5


@pytest.mark.parametrize(
    ("works_by", "level", "code"),
    [("open('/proc/kallsyms').read(); time.sleep(0.1)", "unknown", 3), ("time.sleep(60)", "fail", 1)],
)
def test_a_torch_that_loads_and_loads_is_slow_and_one_that_does_nothing_is_stuck(
    tmp_path: Path, works_by: str, level: str, code: int
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"import time\nwhile True:\n    {works_by}\n")
    result = gpu_test("--nproc", "2", "--stall", "2", env={"PYTHONPATH": str(tmp_path)})
    assert result.code == code
    assert {one: finding["level"] for one, finding in result.findings.items()} == {"all-busy": level}


# In agree it is killed below, from outside; amid a collective with allreduce-bench.
def test_a_rank_killed_before_it_has_torch_is_named_with_signal_and_stage(tmp_path: Path) -> None:
    result = gpu_test("--nproc", "2", "--inject", "kill:1@start", env=enough_of_torch(tmp_path))
    check(result.out, 1)
    assert list(result.findings) == ["rank-died"]
    finding = result.findings["rank-died"]
    assert finding["where"]["ranks"] == [1]
    assert "SIGKILL" in finding["title"]
    assert "in stage start " in finding["title"]
    assert result.statuses == ["waiting", "died"]


@pytest.mark.timed
def test_a_death_is_reported_at_once_and_nccl_debug_keeps_what_the_dead_rank_printed() -> None:
    run = WarmRunning("gpu-test", "--nproc", "2", "--json", "--no-compute", "--nccl-debug", "--inject", "late:0@agree")
    run.wait_for("agree: all ranks")
    killed = run.pid_of_rank(1)
    os.kill(killed, signal.SIGKILL)
    killed_at = time.monotonic()
    result = run.finish()
    assert result.ended_at - killed_at < 4  # a second, and the program's own end
    assert list(result.findings) == ["rank-died"]
    assert "SIGKILL" in result.findings["rank-died"]["title"]
    assert "in stage agree " in result.findings["rank-died"]["title"]
    assert result.statuses == ["waiting", "died"]
    assert result.findings["rank-died"]["where"] == {
        "hosts": [result.report["data"]["ranks"][1]["host"]],
        "ranks": [1],
        "pids": [killed],
    }
    folder = Path(next(iter(result.report["data"]["log_dirs"].values())))
    try:
        assert sorted(path.name for path in folder.iterdir()) == ["rank-0.log", "rank-1.log"]
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def held_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int, str], Result]]:
    """One run for each of HELD_UP; the next starts once the previous has reached its fault, so they wait together."""
    no_torch_yet = enough_of_torch(tmp_path_factory.mktemp("enough"))
    runs: dict[tuple[str, int, str], WarmRunning] = {}
    try:
        # The buffer is large so that the reduction is still under way when the signal comes.
        run = runs["signal", 1, "reduce"] = WarmRunning(*RUN, "--size", "256MiB", "--nproc", "2")
        run.wait_for("reduce: all ranks")
        os.kill(run.pid_of_rank(1), signal.SIGSTOP)
        for kind, rank, stage in HELD_UP:
            env = no_torch_yet if stage in ("start", "connect") else {}
            fault = ("--inject", f"{kind}:{rank}@{stage}")
            run = WarmRunning(*RUN, "--size", "4MiB", "--nproc", "2", *fault, env=env)
            runs[kind, rank, stage] = run
            run.wait_for(f"{stage}: all ranks")
        yield {case: run.finish() for case, run in runs.items()}
    finally:
        for run in runs.values():
            run.close()


def assert_held_up(result: Result, rank: int, stage: str) -> dict[str, Any]:
    assert result.code == 1
    assert list(result.findings) == ["rank-missing"]
    found = result.findings["rank-missing"]
    assert found["where"]["ranks"] == [rank]
    assert f"stage {stage} " in found["title"]
    statuses = result.statuses
    assert statuses.pop(rank) == "missing"
    assert set(statuses) == {"waiting"}
    return found


@pytest.mark.parametrize(("kind", "rank", "stage"), HELD_UP)
def test_a_rank_that_is_stopped_or_late_where_the_others_wait_is_told_from_them_rank_zero_too(
    held_up: dict[tuple[str, int, str], Result], kind: str, rank: int, stage: str
) -> None:
    found = assert_held_up(held_up[kind, rank, stage], rank, stage)
    assert f"hung in stage {stage} " in found["title"]
    assert any("Rank.enter (distdiag/launch/rank.py" in line for line in found["evidence"]), found["evidence"]


def test_a_rank_that_another_program_stops_amid_a_collective_is_named(
    held_up: dict[tuple[str, int, str], Result],
) -> None:
    assert_held_up(held_up["signal", 1, "reduce"], 1, "reduce")


def test_another_dtype_of_a_minority_is_found_before_the_collective(tmp_path: Path) -> None:
    # A draw is tested with allreduce-bench.
    result = gpu_test("--nproc", "3", "--inject", "dtype:1", "--save", str(tmp_path))
    assert result.code == 1
    assert list(result.findings) == ["mismatch"]
    finding = result.findings["mismatch"]
    assert finding["where"]["ranks"] == [1]
    assert "float64 on rank 1" in finding["title"]
    assert {rank["stage"] for rank in result.report["data"]["ranks"]} == {"agree"}
    assert_fits_80_columns(distdiag("gpu-test", "--from", str(tmp_path)).out)


def assert_fits_80_columns(text: str) -> None:
    lines = text.splitlines()
    assert lines[0] == "distdiag gpu-test: FAIL"
    assert [line for line in lines if line.startswith(("0,2 ", "1 "))], "equal ranks fold into one row"
    assert max(len(line) for line in lines if not line.startswith("    ")) <= 80
    assert "\x1b" not in text
    assert "rank 1 (" in text


def test_a_rank_without_torch_is_named_with_its_python(tmp_path: Path) -> None:
    result = gpu_test("--nproc", "3", "--inject", "no-import:0", env=enough_of_torch(tmp_path))
    assert result.code == 1
    assert list(result.findings) == ["no-torch"]
    finding = result.findings["no-torch"]
    assert finding["where"]["ranks"] == [0]
    assert "No module named 'torch'" in finding["title"]
    assert finding["fix"]["commands"][0].endswith("-m pip install torch")
    assert result.statuses == ["failed", "waiting", "waiting"]
    assert result.report["data"]["versions"]["torch"], "the others had come far enough to tell"
