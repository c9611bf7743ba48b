"""hang treats ranks polling their GPUs as waiting: five jobs of tests/gpu_jobs.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import need, need_mounts, need_root

MATRIX = Path(__file__).parents[1] / "benchmarks" / "gpu_waits_matrix.py"
pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]  # four ranks compute all the time


def answer_to(situation: str, *options: str, command: str = "hang", tmp_path: Path) -> dict[str, Any]:
    """Run a situation, verify the job, and return the scored answer of the command."""
    need_root()
    need_mounts()
    need("gcc", "gdb")
    argv = [sys.executable, str(MATRIX), "--only", situation, "--commands", command, "--out", str(tmp_path / "rows")]
    done = subprocess.run([*argv, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows").read_text())
    assert row["not as claimed"] == ""
    answer: dict[str, Any] = row[command]
    return answer


def test_a_rank_that_reads_a_pipe_while_the_others_poll_their_gpus_holds_up_the_job(tmp_path: Path) -> None:
    answer = answer_to("pipe", tmp_path=tmp_path)
    assert (answer["verdict"], answer["accused"]) == ("fail", [2]), answer


def test_ranks_that_ran_ahead_to_other_lines_are_innocent(tmp_path: Path) -> None:
    answer = answer_to("ahead-lock", tmp_path=tmp_path)
    assert (answer["verdict"], answer["accused"]) == ("fail", [1]), answer


def test_a_job_of_which_all_ranks_poll_their_gpus_is_not_fine_and_no_rank_is_blamed(tmp_path: Path) -> None:
    answer = answer_to("network-rank-0-logs", tmp_path=tmp_path)
    assert (answer["score"], answer["accused"]) == ("right", []), answer


def test_steps_of_five_seconds_are_no_hang(tmp_path: Path) -> None:
    answer = answer_to("steps-of-5-s", tmp_path=tmp_path)
    assert (answer["verdict"], answer["accused"]) == ("ok", []), answer


def test_a_rank_that_evaluates_while_the_others_wait_is_named_as_busy(tmp_path: Path) -> None:
    answer = answer_to("evaluates", tmp_path=tmp_path)
    assert (answer["verdict"], answer["accused"]) == ("warn", [0]), answer


def test_ranks_that_do_not_reach_the_bootstrap_of_nccl_are_named(tmp_path: Path) -> None:
    answer = answer_to("init-two-sleep", tmp_path=tmp_path)
    assert (answer["verdict"], answer["accused"]) == ("fail", [0, 3]), answer


def test_where_all_ranks_wait_in_the_bootstrap_of_nccl_none_is_blamed(tmp_path: Path) -> None:
    answer = answer_to("init-network", tmp_path=tmp_path)
    assert (answer["verdict"], answer["accused"]) == ("unknown", []), answer
    assert "all 4 ranks wait in `ncclCommInitRank`" in answer["titles"][0]
