"""hang on jobs of a real SLURM: one that does not start, and one of which a node does not answer."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import pytest
import start_srun
from cluster_slurm import Slurm, need_slurm
from jobs import PROGRAMS
from support import wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LATE_S = 8.0
"""How late a command may end on a busy machine; a node that has no time limit of ours costs minutes."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    need_slurm()
    with Slurm(3) as slurm:
        yield slurm


def test_the_line_of_srun_is_printed_with_the_address_of_rank_0(slurm: Slurm) -> None:
    exports = "MASTER_ADDR=mn01 MASTER_PORT=29500 WORLD_SIZE=2"
    fault = dataclasses.replace(start_srun.SRUN_FAULTS["srun-name"], exports=exports, tasks=2)
    output = start_srun.start(fault, slurm)

    def both_look() -> bool:
        return {line[:2] for line in output.read_text().splitlines() if "mn01" in line} >= {"0:", "1:"}

    wait_until(lambda: output.exists() and both_look(), 120, lambda: "they do not look for mn01")
    report = start_srun.ask(slurm, "all")
    assert "mn[1-2] cannot resolve mn01" in report["summary"], report["findings"]
    (line,) = report["findings"][0]["fix"]["commands"]
    assert line.startswith("MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 srun --label --nodes=2")
    slurm.run("scancel", "--user=root")
    slurm.wait_for_idle(3)


def test_a_slurm_node_that_does_not_answer_costs_its_own_row(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.allocate(3)
    env = {"JOB_FOLDER": str(tmp_path), "HOW": "sleeps", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    words = [f"{name}={value}" for name, value in env.items()]
    program = str(PROGRAMS / "hangs_in_every_way.py")
    slurm.start_step(job, "env", *words, sys.executable, program, options=("--ntasks=3",))
    wait_until((tmp_path / "bad").exists, 60, lambda: "the fault has not happened")
    slurm.freeze_slurmd("mn2")
    wrap, began, kept = tuple(slurm.client.command()), time.monotonic(), ("--save", str(tmp_path / "kept"))
    where = ("--slurm-job", str(job), "--timeout", "20")
    result = distdiag("hang", "--json", *where, *kept, wrap=wrap, env=slurm.env())
    assert time.monotonic() - began < 20 + LATE_S
    slurm.thaw_slurmd("mn2")
    data = result.report["data"]
    assert (data["class_name"], data["ranks"], result.code) == ("not-in-collective", [2], 1), result.out + result.err
    assert {finding["id"]: finding["where"]["hosts"] for finding in result.report["findings"][1:]} == {
        "hosts.timeout": ["mn2"],
        "hang.unseen": [],
    }
    again = distdiag("hang", "--json", "--from", str(tmp_path / "kept"))
    assert again.report["findings"] == result.report["findings"]
