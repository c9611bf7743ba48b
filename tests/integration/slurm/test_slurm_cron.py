"""A series of batch jobs on a real SLURM: it continues after any result of the command, and its end is noticed."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

import pytest
from cluster_slurm import Slurm, need_slurm
from support import PROGRAM, Result, wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    need_slurm()
    with Slurm(1) as slurm:
        yield slurm


def on(slurm: Slurm, *words: str) -> Result:
    return distdiag("slurm", *words, env=slurm.env(), wrap=tuple(slurm.client.command()))


def pending(slurm: Slurm, name: str) -> list[list[str]]:
    rows = slurm.run("squeue", f"--name={name}", "--states=PENDING", "--noheader", "--format=%i|%S|%r").stdout
    return [line.split("|") for line in rows.splitlines()]


def runs_of(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "runs").read_text().splitlines()] if (folder / "runs").exists() else []


def logs_of(folder: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text()}" for log in sorted((folder / "logs").iterdir()))


def run_now(slurm: Slurm, name: str) -> None:
    """Let the next run begin, which waits for its time."""
    ((job, *_),) = pending(slurm, name)
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")


def test_a_series_goes_on_after_a_failure_cleans_up_and_stops(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "cron" / "clean"
    typed = (
        "cron",
        "--name",
        "clean",
        "--every",
        "1h",
        "--time",
        "5",
        "--keep",
        "2",
        "--folder",
        str(tmp_path / "cron"),
    )
    script = "echo told $0 && yes | head -c 11000000 && exit 3"
    started = on(slurm, *typed, "--json", "--", "sh", "-c", script, "a b")
    assert started.code == 0, started.err
    first = started.report["data"]["job"]

    wait_until(lambda: len(runs_of(folder)) == 1, 60, lambda: logs_of(folder))
    ((job, began, _, status),) = runs_of(folder)
    assert (job, status) == (str(first), "3")
    ((_, begins, reason),) = pending(slurm, "clean")
    assert abs(datetime.fromisoformat(begins).timestamp() - int(began) - 3600) <= 2, "an hour after the first, exactly"
    assert reason in ("BeginTime", "Dependency")
    # Files other than logs of a run are kept.
    (folder / "logs" / "notes.txt").write_text("mine")
    assert on(slurm, "watch", "clean").code == 0

    twice = on(slurm, *typed, "--", "true")
    assert (twice.code, "in the queue already" in twice.err) == (2, True)

    for number in (2, 3):
        run_now(slurm, "clean")
        wait_until(lambda number=number: len(runs_of(folder)) == number, 90, lambda: logs_of(folder))  # type: ignore[misc]
    wait_until(lambda: len(list((folder / "logs").glob("*.out"))) == 2, 20, lambda: logs_of(folder))
    assert not (folder / "logs" / f"{first}.out").exists()
    assert (folder / "logs" / "notes.txt").read_text() == "mine"
    wait_until(lambda: slurm.state(int(runs_of(folder)[-1][0])) != "RUNNING", 20, lambda: logs_of(folder))
    log = folder / "logs" / f"{runs_of(folder)[-1][0]}.out"
    assert log.stat().st_size == 10 * 2**20, "the end of a log that is too long is kept"

    stopped = on(slurm, "cron", "--stop", "clean", "--folder", str(tmp_path / "cron"), "--json")
    assert (stopped.code, len(stopped.report["data"]["cancelled"])) == (0, 1)
    assert not pending(slurm, "clean")
    assert on(slurm, "watch", "clean").code == 1


def test_the_watcher_in_a_series_fails_when_the_job_is_gone(slurm: Slurm, tmp_path: Path) -> None:
    train = tmp_path / "train.sh"
    train.write_text("#!/bin/bash\nexec sleep 600\n")
    job = slurm.submit(train, "--job-name=train")
    held = re.findall(r"\d+", slurm.run("sbatch", "--hold", "--job-name=held", str(train)).stdout)[0]
    good = on(slurm, "watch", "train", str(job), "--json")
    assert (good.code, good.report["findings"]) == (0, [])
    waits = on(slurm, "watch", "train", "held", "--json")
    assert [finding["id"] for finding in waits.report["findings"]] == ["slurm.will-not-start"]
    assert waits.report["findings"][0]["fix"] == {"text": "release it", "commands": [f"scontrol release {held}"]}

    folder = tmp_path / "cron"
    watch = (PROGRAM, "slurm", "watch", "train")
    begun = on(slurm, "cron", "--name", "is-alive", "--every", "1h", "--folder", str(folder), "--", *watch)
    assert begun.code == 0, begun.err
    wait_until(lambda: len(runs_of(folder / "is-alive")) == 1, 60, lambda: logs_of(folder / "is-alive"))
    slurm.cancel(job)
    wait_until(lambda: slurm.state(job) != "RUNNING", 30, lambda: slurm.state(job))
    run_now(slurm, "is-alive")
    wait_until(lambda: len(runs_of(folder / "is-alive")) == 2, 90, lambda: logs_of(folder / "is-alive"))
    assert [status for *_, status in runs_of(folder / "is-alive")] == ["0", "1"], logs_of(folder / "is-alive")
    assert "train is neither running nor pending; its last job" in logs_of(folder / "is-alive")


def test_what_the_site_does_not_allow_is_said_in_its_words(slurm: Slurm, tmp_path: Path) -> None:
    typed = ("cron", "--name", "big", "--every", "1h", "--folder", str(tmp_path))
    refused = on(slurm, *typed, "--sbatch=--nodelist=nosuch", "--", "true")
    assert (refused.code, "nvalid node name" in refused.err) == (3, True)
    assert not pending(slurm, "big")
    refused = on(slurm, *typed, "--sbatch=--partition=nosuch", "--", "true")
    assert (refused.code, "hint: list the partitions: sinfo -s" in refused.err) == (3, True), refused.err
    two = on(slurm, "watch", "none,nobody", "--json")
    assert [each["asked"] for each in two.report["data"]["watched"]] == ["none", "nobody"]
    assert on(slurm, *typed[:4], "1s", "--", "true").code == 2
    assert on(slurm, "watch").code == 2
    (tmp_path / "slurm.conf").touch()  # for a missing one squeue looks again and again, for 60 s
    assert distdiag("slurm", "watch", "x", env={"SLURM_CONF": str(tmp_path / "slurm.conf")}).code == 3
