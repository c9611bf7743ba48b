"""distdiag run in SLURM and on two machines: a recorder on each node, one verdict from the folder they share."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from cluster_slurm import Slurm, need_slurm
from support import PROGRAM, wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PROGRAMS = Path(__file__).parents[2] / "programs"
_NAMES = ("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0", "PYTHONDONTWRITEBYTECODE=1")
_LATE_S = 240.0
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    need_slurm()
    with Slurm(2) as made:
        yield made


def _job(folder: Path, launcher: Sequence[str], program: str, *words: str) -> tuple[str, ...]:
    """Return a job of a rank on each node, of which rank 1 is killed; the other fails when its connection closes."""
    words = (str(_PROGRAMS / program), *words, "kill")
    return ("env", *_NAMES, "GUILTY=1", PROGRAM, "run", "--save", str(folder), "--", *launcher, *words)


def test_srun_starts_it_on_each_node_and_one_rank_of_all_failed_first(slurm: Slurm, tmp_path: Path) -> None:
    slurm.wait_for_idle(2)
    job = slurm.allocate(2)
    (tmp_path / "meet").mkdir()
    place = ("RANK=$SLURM_PROCID", "WORLD_SIZE=2", f"MASTER_ADDR={slurm.nodes[0].address}", "MASTER_PORT=29511")
    words = _job(tmp_path / "kept", ("env", *place, sys.executable), "ranks_without_torch.py", str(tmp_path / "meet"))
    launch = " ".join(words)
    options = ("-N", "2", "-n", "2", "--kill-on-bad-exit=0")
    step = slurm.start_step(job, "sh", "-c", f"exec {launch}", options=options)
    assert step.wait(_LATE_S) != 0
    slurm.cancel(job)
    _rank_1_failed_first(tmp_path / "kept", ["mn1", "mn2"])


def test_it_runs_on_two_machines_without_a_scheduler_or_a_launcher(tmp_path: Path) -> None:
    need_network()
    with Network(2) as network:
        jobs = []
        for rank, node in enumerate(network.nodes):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": network.nodes[0].address}
            with (tmp_path / f"log{rank}").open("w") as log:
                words = _job(tmp_path / "kept", [sys.executable], "fails_in_many_ways.py")
                jobs.append(node.start(*words, env={**place, "MASTER_PORT": "29511"}, output=log))
        assert [job.wait(_LATE_S) != 0 for job in jobs] == [True, True]
    _rank_1_failed_first(tmp_path / "kept", ["node1", "node2"])


def _rank_1_failed_first(folder: Path, hosts: list[str]) -> None:
    report = distdiag("run", "--from", str(folder), "--json").report
    finding = report["findings"][0]
    assert (finding["level"], finding["where"]["ranks"]) == ("fail", [1]), finding
    assert finding["where"]["hosts"] == [hosts[1]]
    assert "SIGKILL" in finding["title"]
    ranks = {rank["rank"]: (rank["host"], rank["status"]) for rank in report["data"]["ranks"]}
    assert [ranks[rank][0] for rank in sorted(ranks)] == hosts
    assert (ranks[1][1], ranks[0][1] == 0) == (-signal.SIGKILL, False)


def test_a_signal_of_sbatch_is_reported_as_an_end_from_outside(slurm: Slurm, tmp_path: Path) -> None:
    slurm.wait_for_idle(2)
    kept = tmp_path / "kept"
    script = tmp_path / "job.sh"
    (tmp_path / "meet").mkdir()
    ranks = f"{sys.executable} {_PROGRAMS / 'ranks_without_torch.py'} {tmp_path / 'meet'} waits"
    starts = 'for RANK in 0 1 2; do export RANK; "$@" & all="$all $!"; done; trap "kill $all" TERM; wait'
    launcher = f"env WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 sh -c '{starts}' sh {ranks}"
    script.write_text(f"#!/bin/sh\nexec env {' '.join(_NAMES)} {PROGRAM} run --save {kept} -- {launcher}\n")
    job = slurm.submit(script, "--nodes=1", "--signal=B:TERM@60")
    logs = "output.*/rank0.g0.*.log"
    wait_until(lambda: any(b"step 4" in log.read_bytes() for log in kept.glob(logs)), _LATE_S, lambda: "no step 4")
    slurm.run("scancel", "--batch", "--signal=TERM", str(job))  # what --signal=B:TERM@60 sends, without the minute
    wait_until(lambda: any(kept.glob("report.*.json")), _LATE_S, lambda: "no report")
    report = distdiag("run", "--from", str(kept), "--json").report
    assert report["findings"][0]["id"] == "run.terminated"
    (picture,) = report["data"]["pictures"]
    assert (picture["reason"], picture["ranks_seen"]) == ("SIGTERM", 3)
