"""A kill switch ends real ranks at one step, and nothing else does."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import pytest
from jobs import Job
from support import wait_until
from support_warm import distdiag

from distdiag import KillSwitch

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 12
RANKS = 3


def run_job(folder: Path, **env: str) -> tuple[list[int], str]:
    env |= {"FOLDER": str(folder), "STEPS": str(STEPS)}
    with Job("stops_by_kill_switch", RANKS, env=env, server="shared") as job:
        ends = [folder / f"left-{rank}" for rank in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in ends), 60, lambda: str(list(folder.iterdir())))
        for rank in range(RANKS):
            job.wait_ended(rank)
        stderr = "".join(path.read_text() for path in sorted(job.folder.glob("stderr-*")))
    left = [int((folder / f"left-{rank}").read_text()) for rank in range(RANKS)]
    return left, stderr


def test_all_ranks_leave_at_the_step_after_it_is_on(tmp_path: Path) -> None:
    left, stderr = run_job(tmp_path, ON_AT="4")
    assert left == [5] * RANKS
    assert stderr.count("all ranks stop at this step: maintenance at noon") == 1


def test_a_job_whose_switch_is_off_runs_to_its_end(tmp_path: Path) -> None:
    left, stderr = run_job(tmp_path)
    assert left == [STEPS] * RANKS
    assert "kill switch" not in stderr


def test_rank_0_decides_where_the_others_do_not_see_the_file(tmp_path: Path) -> None:
    left, _ = run_job(tmp_path, ON_AT="4", ONLY_SEEN_BY="0")
    assert left == [5] * RANKS


def test_no_rank_leaves_alone_where_rank_0_does_not_see_the_file(tmp_path: Path) -> None:
    left, _ = run_job(tmp_path, ON_AT="4", ONLY_SEEN_BY="2")
    assert left == [STEPS] * RANKS


def test_every_few_steps_is_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    left, _ = run_job(tmp_path, ON_AT="3", EVERY="5")
    assert left == [4] * RANKS


def test_on_off_and_status(tmp_path: Path) -> None:
    path = str(tmp_path / "switch")
    assert distdiag("kill-switch", "status", path, "--json").report["data"]["on"] is False
    on = distdiag("kill-switch", "on", path, "--reason", "new\ndriver", "--json")
    assert on.code == 0
    assert on.report["data"] == {"path": path, "on": True, "reason": "new driver"}
    assert "on: new driver" in distdiag("kill-switch", "status", path).out
    assert KillSwitch(path).is_on()
    for _ in range(2):
        assert distdiag("kill-switch", "off", path, "--json").report["data"]["on"] is False
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    for action in ("on", "off", "status"):
        result = distdiag("kill-switch", action, str(tmp_path / "nothing" / "switch"))
        assert result.code == 3
        assert f"{tmp_path}/nothing/switch: No such file or directory" in result.err
    assert f"{tmp_path}: Is a directory" in distdiag("kill-switch", "status", str(tmp_path)).err


def test_the_command_that_turns_it_off_pastes(tmp_path: Path) -> None:
    path = str(tmp_path / "a name")
    (command,) = [line for line in distdiag("kill-switch", "on", path).out.splitlines() if "kill-switch off" in line]
    assert distdiag(*shlex.split(command)[1:]).code == 0
    assert not os.path.exists(path)


def test_a_switch_that_cannot_be_read_does_not_end_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "switch").mkdir()
    switch = KillSwitch(tmp_path / "switch")
    assert not switch.is_on()
    assert not switch.is_on()
    assert capsys.readouterr().err.count("cannot read kill switch") == 1


def test_a_pipe_under_its_name_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "switch")
    switch = KillSwitch(tmp_path / "switch")
    assert switch.is_on()
    assert switch.reason == ""


def test_every_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every=0"):
        KillSwitch(tmp_path, every=0)
