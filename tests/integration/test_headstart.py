"""The node side that is started before its command is loaded: taken when it was meant, gone when it was not."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from support import PROGRAM, Running, distdiag, need, wait_until

from distdiag import __main__ as entry

if TYPE_CHECKING:
    from pathlib import Path

CHECKS = {
    ("core-bt",): ("distdiag.commands.core_bt.check", "_AGENT"),
    ("pyspy-all",): ("distdiag.commands.pyspy_all.check", "_COLLECT"),
    ("trace", "blocked"): ("distdiag.commands.trace.blocked.check", "_COLLECT"),
    ("trace", "fds"): ("distdiag.commands.trace.fds.check", "_COLLECT"),
}


def test_each_command_is_guessed_by_what_it_collects_by() -> None:
    assert CHECKS.keys() == entry._COLLECTS.keys()
    for words, (module, name) in CHECKS.items():
        value = getattr(importlib.import_module(module), name)
        assert entry._COLLECTS[words][-1] == getattr(value, "collect", value)
        assert entry._here([*words, "12"]) == entry._COLLECTS[words]
        for elsewhere in ("--hosts", "-h", "--help", "--hostfile=x", "--slurm-job", "--via", "--explain"):
            assert entry._here([*words, elsewhere]) is None
    assert entry._here([]) is None
    assert entry._here(["trace", "sys"]) is None


@pytest.mark.parametrize("words", [("pyspy-all",), ("trace", "blocked"), ("trace", "fds")])
def test_what_was_begun_is_what_works(words: tuple[str, ...], tmp_path: Path) -> None:
    """One Python is started beside the command's own, and the answer comes from it."""
    need("strace")
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        target = [str(sleeper.pid)] if words[-1] == "fds" else ["--pid", str(sleeper.pid)]
        # A file for each process: in a common one, a line of another may come into the middle of a line.
        watched = ["strace", "-ff", "-qq", "-e", "trace=execve", "-o", str(tmp_path / "log")]
        try:
            done = distdiag(*words, *target, "--json", wrap=tuple(watched))
        finally:
            sleeper.kill()
    assert str(sleeper.pid) in done.out
    lines = [line for log in tmp_path.glob("log.*") for line in log.read_text().splitlines()]
    agents = [line for line in lines if '"distdiag-agent"' in line and line.endswith("= 0")]
    assert len(agents) == 1
    # START is given a length in this place.
    assert '"distdiag.commands.' in agents[0]


@pytest.mark.parametrize("wrong", [["core-bt", "--no-such-option"], ["core-bt", "--from"], ["pyspy-all", "--pid", "x"]])
def test_a_wrong_guess_leaves_nothing(wrong: list[str]) -> None:
    run = Running(*wrong)
    done = run.finish()
    assert done.code == 2
    assert "Error" in done.err
    wait_until(lambda: not run.left_behind(), 1, lambda: str(run.left_behind()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_us_while_we_load_leaves_nothing(number: signal.Signals) -> None:
    for after_s in (0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2):
        run = Running("core-bt", "/dev/null")
        time.sleep(after_s)
        run.process.send_signal(number)
        run.finish()
        wait_until(lambda: not run.left_behind(), 2, lambda: f"{after_s}: {run.left_behind()}")  # noqa: B023


def test_an_early_end_is_told_as_that_of_the_command() -> None:
    told, after_s = 0, 0.03
    while after_s < 0.4 or (not told and after_s < 10):  # a busy machine takes longer until the command is there
        run = Running("trace", "blocked", "--json")
        time.sleep(after_s)
        run.process.send_signal(signal.SIGTERM)
        done = run.finish()
        if done.out:  # before that it is Python that loads
            told += done.code == 130
            assert (done.report["command"], done.report["exit_code"]) == ("trace blocked", done.code)
        after_s *= 1.3
    assert told


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
        [sys.executable, "-P", PROGRAM, "core-bt", "--pid", str(os.getpid())],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "stray" not in done.stdout + done.stderr
    assert "python" in done.stdout
