"""`slurm watch` on a real SLURM: jobs that run, wait, are held and are gone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from cluster_slurm import Slurm, need_slurm
from support import Result, wait_until
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


def test_a_job_that_is_gone_is_a_fault(slurm: Slurm, tmp_path: Path) -> None:
    train = tmp_path / "train.sh"
    train.write_text("#!/bin/bash\nexec sleep 600\n")
    job = slurm.submit(train, "--job-name=train")
    held = re.findall(r"\d+", slurm.run("sbatch", "--hold", "--job-name=held", str(train)).stdout)[0]
    good = on(slurm, "watch", "train", str(job), "--json")
    assert (good.code, good.report["findings"]) == (0, [])
    waits = on(slurm, "watch", "train", "held", "--json")
    assert [finding["id"] for finding in waits.report["findings"]] == ["slurm.will-not-start"]
    assert waits.report["findings"][0]["fix"] == {"text": "release it", "commands": [f"scontrol release {held}"]}

    slurm.cancel(job)
    wait_until(lambda: slurm.state(job) != "RUNNING", 30, lambda: slurm.state(job))
    gone = on(slurm, "watch", "train")
    assert (gone.code, "train is neither running nor pending; its last job" in gone.out) == (1, True)


def test_each_name_is_watched_and_a_silent_slurm_is_unknown(slurm: Slurm, tmp_path: Path) -> None:
    two = on(slurm, "watch", "none,nobody", "--json")
    assert [each["asked"] for each in two.report["data"]["watched"]] == ["none", "nobody"]
    assert on(slurm, "watch").code == 2
    assert distdiag("slurm", "watch", "x", env={"SLURM_CONF": str(tmp_path / "none")}).code == 3
