"""distdiag run in SLURM and on two machines: a recorder on each node, one verdict from the folder they share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Network, need_network
from cluster_slurm import Slurm, need_slurm
from support import PROGRAM, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRAMS = Path(__file__).parents[2] / "programs"
_TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
_NAMES = ("OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0", "PYTHONDONTWRITEBYTECODE=1")
_LATE_S = 240.0
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    need_slurm()
    with Slurm(2) as made:
        yield made


def _judge(folder: Path) -> dict[str, Any]:
    done = subprocess.run([PROGRAM, "run", "--from", str(folder), "--json"], capture_output=True, check=False)
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def _job(folder: Path, master: str, *, more: tuple[str, ...] = ()) -> list[str]:
    torchrun = [_TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *more]
    torchrun += ["--master-addr", master, "--master-port", "29511"]
    program = [str(_PROGRAMS / "fails_in_many_ways.py"), "kill"]
    return ["env", *_NAMES, PROGRAM, "run", "--save", str(folder), "--", *torchrun, *program]


def test_srun_starts_it_on_each_node_and_one_rank_of_all_failed_first(slurm: Slurm, tmp_path: Path) -> None:
    slurm.wait_for_idle(2)
    job = slurm.allocate(2)
    master = slurm.nodes[0].address
    words = _job(tmp_path / "kept", master)
    launch = " ".join(words).replace("--nnodes 2", "--nnodes 2 --node-rank $SLURM_NODEID")
    options = ("-N", "2", "-n", "2", "--kill-on-bad-exit=0")
    step = slurm.start_step(job, "sh", "-c", f"exec {launch}", options=options)
    assert step.wait(_LATE_S) != 0
    slurm.cancel(job)
    _rank_2_failed_first(tmp_path / "kept", {"mn1", "mn2"}, "mn2")


def test_it_runs_on_two_machines_without_a_scheduler(tmp_path: Path) -> None:
    need_network()
    with Network(2) as network:
        master = network.nodes[0].address
        jobs = []
        for number, node in enumerate(network.nodes):
            with (tmp_path / f"log{number}").open("w") as log:
                words = _job(tmp_path / "kept", master, more=("--node-rank", str(number)))
                jobs.append(node.start(*words, output=log))
        assert [job.wait(_LATE_S) != 0 for job in jobs] == [True, True]
    _rank_2_failed_first(tmp_path / "kept", {"node1", "node2"}, "node2")


def _rank_2_failed_first(folder: Path, hosts: set[str], guilty: str) -> None:
    report = _judge(folder)
    finding = report["findings"][0]
    assert (finding["level"], finding["where"]["ranks"]) == ("fail", [2])
    assert finding["where"]["hosts"] == [guilty]
    assert {(rank["rank"], rank["host"]) for rank in report["data"]["ranks"]} >= {(0, min(hosts)), (2, max(hosts))}
    assert {rank["host"] for rank in report["data"]["ranks"]} == hosts


def test_a_signal_of_sbatch_is_reported_as_an_end_from_outside(slurm: Slurm, tmp_path: Path) -> None:
    slurm.wait_for_idle(2)
    kept = tmp_path / "kept"
    script = tmp_path / "job.sh"
    torchrun = f"{_TORCHRUN} --standalone --nproc-per-node 3 {_PROGRAMS / 'recorded_healthy.py'} stall"
    script.write_text(f"#!/bin/sh\nexec env {' '.join(_NAMES)} {PROGRAM} run --save {kept} -- {torchrun}\n")
    job = slurm.submit(script, "--nodes=1", "--signal=B:TERM@60")
    logs = "output.*/rank0.g0.*.log"
    wait_until(lambda: any(b"step 4" in log.read_bytes() for log in kept.glob(logs)), _LATE_S, lambda: "no step 4")
    slurm.run("scancel", "--batch", "--signal=TERM", str(job))  # what --signal=B:TERM@60 sends, without the minute
    wait_until(lambda: any(kept.glob("report.*.json")), _LATE_S, lambda: "no report")
    report = _judge(kept)
    assert report["findings"][0]["id"] == "run.terminated"
    (picture,) = report["data"]["pictures"]
    assert (picture["reason"], picture["ranks_seen"]) == ("SIGTERM", 3)
