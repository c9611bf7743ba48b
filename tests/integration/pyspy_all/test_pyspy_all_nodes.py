"""pyspy-all across nodes: over ssh, and into a SLURM job from outside; one table, the same answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from cluster_slurm import Slurm, need_slurm
from cluster_ssh import SSHD, serve_ssh
from jobs import PROGRAMS, outliers, wait_still
from support import need, wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from pathlib import Path

SOON = ("--interval", "0.3")


def wait_ready(folder: Path, ranks: int) -> None:
    def missing() -> set[str]:
        return {f"ready-{rank}" for rank in range(ranks)} - {path.name for path in folder.glob("ready-*")}

    wait_until(lambda: not missing(), 60, lambda: f"not ready: {missing()}")
    wait_still(folder)


def test_a_job_on_three_nodes_over_ssh(tmp_path: Path) -> None:
    need_network()
    need("ssh", SSHD)
    with Network(3) as network:
        serve_ssh(network)
        for rank, node in enumerate(network.nodes):
            place = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
            env = {**place, **meeting, "JOB_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
            node.start(sys.executable, str(PROGRAMS / "hangs_in_load_batch.py"), env=env)
        wait_ready(tmp_path, 3)
        wrap, env = tuple(network.client.command()), network.client_env()
        result = distdiag("pyspy-all", "--json", "--hosts", network.hosts, *SOON, wrap=wrap, env=env)
        assert (result.code, outliers(result)) == (1, [([2], "load_batch")]), result.out + result.err
        assert result.findings["not-in-collective"]["where"]["hosts"] == ["node3"]
        assert [(row["rank"], row["host"]) for row in result.report["data"]["processes"]] == [
            (0, "node1"),
            (1, "node2"),
            (2, "node3"),
        ]
        # Without the stuck one's node the ranks that wait are no proof against anybody.
        part = distdiag("pyspy-all", "--json", "--hosts", "node1,node2", *SOON, wrap=wrap, env=env)
        assert (part.code, outliers(part)) == (3, [])
        assert "rank 2 of 3 not found on node[1-2]" in part.findings["unseen"]["title"]


def test_a_slurm_job_from_outside(tmp_path: Path) -> None:
    need_slurm()
    with Slurm(2) as slurm:
        job = slurm.allocate(2)
        rank = f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS JOB_FOLDER={tmp_path}"
        words = f"{rank} exec {sys.executable} {PROGRAMS / 'stands_still.py'}"
        slurm.start_step(job, "sh", "-c", words, options=("-n", "2"))
        wait_ready(tmp_path, 2)
        wrap, env = tuple(slurm.client.command()), {**slurm.network.client_env(), **slurm.env()}
        result = distdiag("pyspy-all", "--json", "--slurm-job", str(job), *SOON, wrap=wrap, env=env)
    (seen,) = result.report["data"]["jobs"]
    assert (seen["launcher"] in ("srun", "environment"), seen["ranks"]) == (True, 2), result.out + result.err
    rows = result.report["data"]["processes"]
    assert [(row["rank"], row["host"], row["threads"][0]["frames"][0]["function"]) for row in rows] == [
        (0, "mn1", "load_batch"),
        (1, "mn2", "load_batch"),
    ]
    assert (result.code, outliers(result)) == (3, [])
    found = result.findings["unknown"]
    assert "no rank waits for another: ranks 0-1: `load_batch`" in found["title"]
    assert found["fix"]["commands"][0].endswith(f" hang --slurm-job {job}")


pytestmark = pytest.mark.timeout(180)
