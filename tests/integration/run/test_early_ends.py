"""A command that is ended while it loads, started without streams or files, or typed wrongly: nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from support import PROGRAM, Running, wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("wrong", [["core-bt", "--no-such-option"], ["core-bt", "--from"], ["pyspy-all", "--pid", "x"]])
def test_a_wrong_command_line_leaves_nothing(wrong: list[str]) -> None:
    run = Running(*wrong)
    done = run.finish()
    assert done.code == 2
    assert "Error" in done.err
    wait_until(lambda: not run.left_behind(), 1, lambda: str(run.left_behind()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_us_while_we_load_leaves_nothing(number: signal.Signals) -> None:
    for after_s in (0.0, 0.03, 0.06, 0.09, 0.13, 0.2):
        run = Running("core-bt", "/dev/null")
        time.sleep(after_s)
        run.process.send_signal(number)
        run.finish()
        wait_until(lambda: not run.left_behind(), 2, lambda: f"{after_s}: {run.left_behind()}")  # noqa: B023


def test_an_early_end_is_told_as_that_of_the_command() -> None:
    reported, after_s = 0, 0.03
    while after_s < 0.4 or (not reported and after_s < 10):  # a busy machine takes longer to load the command
        run = Running("trace", "blocked", "--json")
        time.sleep(after_s)
        run.process.send_signal(signal.SIGTERM)
        done = run.finish()
        if done.out:  # before that it is Python that loads
            reported += done.code == 130
            assert (done.report["command"], done.report["exit_code"]) == ("trace blocked", done.code)
        after_s *= 1.5
    assert reported


def test_without_standard_streams_it_is_done_as_ever() -> None:
    for closed in ("<&-", ">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{PROGRAM} core-bt /dev/null {closed}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 3
        assert "/dev/null" in done.stdout or ">&-" in closed.split()


@pytest.mark.parametrize("files", [6, 7, 8, 9])
def test_where_no_more_files_may_be_opened_that_is_said(files: int) -> None:
    shell = f'ulimit -n {files}; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", PROGRAM, "core-bt", "/dev/null", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    message = json.loads(done.stdout)["error"]["message"]
    assert "ulimit -n" in message or "Too many open files" in message


def test_a_module_in_the_working_directory_is_not_taken_for_pythons(tmp_path: Path) -> None:
    for name in ("json", "threading", "pathlib", "zlib", "subprocess"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stray module was imported')\n")
    done = subprocess.run(
        [sys.executable, "-P", PROGRAM, "trace", "fds", str(os.getpid())],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "stray" not in done.stdout + done.stderr
    assert "python" in done.stdout


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["no-such-command", "--json"], ""),
        (["trace", "--json"], "trace"),
        (["trace", "blocked", "--json", "--no-such-option"], "trace blocked"),
        (["overflow", "show", "--no-such-option", "--json"], "overflow show"),
        (["ports", "--connect-timeout", "x", "--json"], "ports"),
    ],
)
def test_a_wrong_command_line_is_one_document_where_json_is_wanted(words: list[str], command: str) -> None:
    done = distdiag(*words)
    assert (done.code, done.report["exit_code"], done.report["command"]) == (2, 2, command)
    assert done.report["error"]["id"] == "usage"
    assert f"Error: {done.report['error']['message']}" in done.err


def test_json_that_is_the_jobs_own_word_is_not_asked_of_us() -> None:
    done = distdiag("overflow", "--no-such-option", "--", "train.py", "--json")
    assert (done.code, done.out) == (2, "")


def test_of_the_ranks_of_a_launcher_one_gives_the_document() -> None:
    for rank in range(2):
        env = {"SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
        done = distdiag("gpu-test", "--no-such-option", "--json", env=env)
        assert done.code == 2
        assert "No such option" in done.err
        assert bool(done.out) == (rank == 0)


def test_what_was_typed_cannot_command_the_terminal() -> None:
    done = distdiag("\x1b]0;owned\x07\x1b[2J")
    assert done.code == 2
    assert "owned" in done.err
    assert not {"\x1b", "\x07"} & set(done.err)
