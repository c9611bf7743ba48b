"""pyspy-all on processes that py-spy alone hangs on or fails at: each has its own reason, and is left as found."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from jobs import Job, states, wait_for_state
from support import distdiag, need, wait_until

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 3.0


def test_stopped_blocked_traced_dead_and_foreign_ranks_are_reported_in_time_and_left_alone(tmp_path: Path) -> None:
    need("strace")
    how = {1: {"HOW": "vfork"}, 5: {"HOW": "not-python"}}
    log = tmp_path / "log"
    with Job("stands_still", 6, rank_env=how, wrap=("sh", "-c", _MAYBE_PYTHON, "sh")) as job:
        job.wait_still()
        os.kill(job.pid(0), signal.SIGSTOP)
        os.kill(job.pid(3), signal.SIGKILL)
        with subprocess.Popen(["strace", "-o", log, "-p", str(job.pid(2))], stderr=subprocess.DEVNULL) as strace:
            try:
                # It is traced before it may go on; and then it is back in its call, which strace notes.
                wait_until(lambda: log.exists() and log.stat().st_size > 0, 20, lambda: "strace does not attach")
                for rank, letter in ((0, "T"), (1, "D"), (2, "S"), (3, "Z")):
                    wait_for_state(job.pid(rank), letter)
                assert _tracer(job.pid(2)) == strace.pid
                pids = [job.pid(rank) for rank in range(6)]
                before = states(pids)
                began = time.monotonic()
                result = job.look("--timeout", str(TIMEOUT_S), "--interval", "0.1")
                assert time.monotonic() - began < TIMEOUT_S + 1
                assert states(pids) == before
            finally:
                strace.kill()
    rows = {row["rank"]: row for row in result.report["data"]["processes"] if row["role"] == "rank"}
    status = {rank: row["status"] for rank, row in rows.items()}
    assert status == {0: "stopped", 1: "kernel", 2: "traced", 3: "gone", 4: "ok", 5: "not-python"}
    assert [rows[rank]["state"] for rank in range(6)] == ["T", "D", "S", "Z", "S", "S"]
    assert "strace" in rows[2]["reason"]
    assert all(rows[rank]["threads"][0]["frames"] for rank in (0, 1, 2, 4))
    assert {tuple(one["ranks"]) for one in result.report["data"]["odd"]} == {(0,), (3,)}
    assert result.findings["odd-rank"]["fix"]["commands"] == [f"kill -CONT {job.pid(0)}"]
    assert result.findings["unreadable"]["where"]["ranks"] == [5]


_MAYBE_PYTHON = 'if [ "$HOW" = not-python ]; then touch "$JOB_FOLDER/ready-$RANK"; exec sleep 600; fi; exec "$@"'


def _tracer(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("TracerPid"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop a right that others lack from the start")
def test_without_the_right_to_read_it_is_said_which_and_how_to_get_it() -> None:
    need("setpriv")
    without = ("setpriv", "--bounding-set", "-sys_ptrace")
    with Job("stands_still", 3, rank_env={1: {"HOW": "other-user"}}, wrap=without) as job:
        job.wait_still()
        result = job.look("--interval", "0.1", wrap=without)
    assert result.code == 3
    found = result.findings["unreadable"]
    assert found["where"]["ranks"] == [1]
    assert "uid 65534" in found["title"]
    assert "SYS_PTRACE" in found["fix"]["text"]
    rows = result.report["data"]["processes"]
    assert [row["status"] for row in rows] == ["ok", "denied", "ok"]


def test_a_wrapper_around_python_is_seen_through() -> None:
    with Job("stands_still", 2, wrap=("sh", "-c", 'sleep 600 & "$@" & wait', "sh")) as job:
        job.wait_still()
        result = job.look("--samples", "1")
    frames = [row["threads"][0]["frames"][0]["function"] for row in result.report["data"]["processes"]]
    assert frames == ["load_batch"] * 2


def test_pids_that_are_asked_for(tmp_path: object) -> None:
    with Job("stands_still", 3) as job:
        job.wait_ready()
        one = distdiag("pyspy-all", "--json", "--samples", "1", "--pid", str(job.pid(1)))
        # The other ranks were not asked for; that does not make them missing.
        assert [row["rank"] for row in one.report["data"]["processes"]] == [1]
        assert "exited" not in one.findings
    gone = distdiag("pyspy-all", "--json", "--pid", str(job.pid(1)))
    assert gone.code == 1
    assert gone.findings["exited"]["title"].startswith(f"there is no process {job.pid(1)} on ")


def test_where_there_is_no_job_it_says_what_was_looked_for() -> None:
    result = distdiag("pyspy-all", "--json", "--job", "10.9.8.7:1")
    assert (result.code, list(result.findings)) == (3, ["no-job"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "/nowhere"), "there is no such file"),
        (("--from", "/etc/hostname"), "there is no dump in"),
        (("--from", "/etc/hostname", "--hosts", "a"), "leave out"),
        (("--groups", "tp:0-1"), "is not NAME=RANKS/RANKS"),
        (("--html", "/nowhere/page.html"), "cannot be written"),
        (("--pid", "0"), "is not in the range x>=1"),
        (("--samples", "0"), "is not in the range 1<=x<=100"),
    ],
)
def test_wrong_input_is_a_usage_error(arguments: tuple[str, ...], words: str) -> None:
    result = distdiag("pyspy-all", "--json", *arguments)
    error = result.report["error"]
    assert result.code == 2
    assert words in error["message"] + error["hint"]
