"""hang treats ranks polling their GPUs as waiting: six jobs of tests/gpu_jobs.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import need, need_mounts, need_root

MATRIX = Path(__file__).parents[2] / "benchmarks" / "gpu_waits_matrix.py"
Rows = dict[str, dict[str, Any]]
pytestmark = pytest.mark.timeout(400)
SITUATIONS = "network-rank-0-logs,evaluates,ahead-pipe,steps-of-5-s,init-two-sleep,init-network"
"""The longest first: they mostly wait, several at once."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Run the situations; return the row of each, with the answer of hang."""
    need_root()
    need_mounts()
    need("gcc", "gdb")
    out = tmp_path_factory.mktemp("rows") / "rows"
    how = ("--commands", "hang", "--settle", "0", "--at-once", "4", "--only", SITUATIONS, "--out", str(out))
    argv = [sys.executable, str(MATRIX), *how]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as matrix:
        try:
            said, _ = matrix.communicate(timeout=390)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(matrix.pid, signal.SIGKILL)
    assert matrix.returncode == 0, said
    return {row["situation"]: row for row in json.loads(out.read_text())}


def answer_to(situation: str, rows: Rows) -> dict[str, Any]:
    """Return hang's scored answer about a job that was verified afterwards."""
    row = rows[situation]
    assert row["not as claimed"] == ""
    answer: dict[str, Any] = row["hang"]
    return answer


def test_a_rank_that_reads_a_pipe_while_the_others_poll_their_gpus_at_other_lines_holds_up_the_job(rows: Rows) -> None:
    answer = answer_to("ahead-pipe", rows)
    assert (answer["verdict"], answer["accused"]) == ("fail", [1]), answer


def test_a_job_of_which_all_ranks_poll_their_gpus_is_not_fine_and_no_rank_is_blamed(rows: Rows) -> None:
    answer = answer_to("network-rank-0-logs", rows)
    assert (answer["score"], answer["accused"]) == ("right", []), answer


def test_steps_of_five_seconds_are_no_hang(rows: Rows) -> None:
    answer = answer_to("steps-of-5-s", rows)
    assert (answer["verdict"], answer["accused"]) == ("ok", []), answer


def test_a_rank_that_evaluates_while_the_others_wait_is_named_as_busy(rows: Rows) -> None:
    answer = answer_to("evaluates", rows)
    assert (answer["verdict"], answer["accused"]) == ("warn", [0]), answer


def test_ranks_that_do_not_reach_the_bootstrap_of_nccl_are_named(rows: Rows) -> None:
    answer = answer_to("init-two-sleep", rows)
    assert (answer["verdict"], answer["accused"]) == ("fail", [0, 3]), answer


def test_where_all_ranks_wait_in_the_bootstrap_of_nccl_none_is_blamed(rows: Rows) -> None:
    answer = answer_to("init-network", rows)
    assert (answer["verdict"], answer["accused"]) == ("unknown", []), answer
    assert "all 4 ranks wait in `ncclCommInitRank`" in answer["titles"][0]
