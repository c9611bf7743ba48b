"""gpu-test under SLURM, Open MPI, MPICH and torchrun: started by them, beside them, and in spite of a broken node."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from cluster_slurm import Slurm, need_slurm
from cluster_ssh import SSHD, serve_ssh
from support import Running, need
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support import Result

SMALL = ("--json", "--size", "1MiB", "--stall", "60")
"""On a busy machine three imports of torch may take half a minute."""
QUICK = (*SMALL, "--no-compute")
MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    need_slurm()
    with Slurm(3) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def job(slurm: Slurm) -> int:
    return slurm.allocate(3)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    need("ssh", SSHD)
    with Network(2) as network:
        serve_ssh(network)
        yield network


def hosts_of_ranks(result: Result) -> list[str]:
    assert result.statuses == ["ok"] * len(result.statuses), result.out
    return [rank["host"] for rank in result.report["data"]["ranks"]]


def beside(slurm: Slurm, *arguments: str) -> Result:
    return distdiag("gpu-test", *QUICK, *arguments, env=slurm.env(), wrap=tuple(slurm.client.command()))


def as_ranks(slurm: Slurm, job: int, shape: str, *arguments: str) -> Result:
    srun = ("srun", "--overlap", f"--jobid={job}", *shape.split())
    return Running("gpu-test", *QUICK, *arguments, env=slurm.env(), wrap=(*slurm.client.command(), *srun)).finish()


def by_mpirun(network: Network, mpirun: list[str], *arguments: str) -> Result:
    wrap = (*network.client.command(), *mpirun)
    return Running("gpu-test", *SMALL, *arguments, env=network.client_env(), wrap=wrap).finish()


def test_slurm_from_outside_while_a_step_holds_all_cpus(slurm: Slurm, job: int) -> None:
    step = slurm.start_step(job, "sleep", "600", options=("--ntasks=6", "--nodes=3"))
    try:
        result = beside(slurm, "--slurm-job", str(job), "--nproc", "1")
    finally:
        step.kill()
    assert result.code == 0
    assert hosts_of_ranks(result) == ["mn1", "mn2", "mn3"]


def test_slurm_from_outside_with_a_dropped_port(slurm: Slurm, job: int) -> None:
    slurm.nodes[0].drop(29500)
    try:
        result = beside(slurm, "--slurm-job", str(job), "--nproc", "1", "--master-port", "29500")
    finally:
        slurm.nodes[0].heal()
    assert result.code == 1
    assert "mn1 drops inbound packets on port 29500" in result.findings["port-filtered"]["title"]


def test_ports_and_cuda_env_among_the_nodes_of_a_slurm_job(slurm: Slurm, job: int) -> None:
    first, _, third = slurm.nodes
    third.drop(29500)
    where = ("--slurm-job", str(job))
    wrap, env = tuple(slurm.client.command()), {**slurm.network.client_env(), **slurm.env()}
    try:
        result = distdiag("ports", "--json", *where, wrap=wrap, env=env)
    finally:
        third.heal()
    finding = result.findings["port-filtered"]
    assert (result.code, finding["title"].split()[0]) == (1, third.name), result.out + result.err
    found = distdiag("cuda-env", "--json", "--goal", "build", *where, wrap=wrap, env=env)
    assert first.name in found.findings["torch.build"]["where"]["hosts"]
    assert len(found.report["data"]["nodes"]) == 3


def test_inside_an_allocation_its_nodes_are_found(slurm: Slurm, job: int, tmp_path: Path) -> None:
    """A real batch script with eight tasks per node: each node gets one agent, and the script is not a rank."""
    log = tmp_path / "report.json"
    script = tmp_path / "job.sh"
    program = Path(sys.executable).with_name("distdiag")
    script.write_text(
        f"#!/bin/bash\n{program} gpu-test --json --size 1MiB --nproc 1 >{log}.part 2>{log}.err\n"
        f"echo $? >{log}.code\nmv {log}.part {log}\nsleep 300\n"
    )
    other = Slurm(2)
    with other:
        other.submit(script, "--nodes=2", "--ntasks-per-node=2")
        from support import wait_until

        wait_until(log.exists, 60, lambda: Path(f"{log}.err").read_text())
    import json

    report = json.loads(log.read_text())
    assert Path(f"{log}.code").read_text().strip() == "0", Path(f"{log}.err").read_text()
    assert [rank["host"] for rank in report["data"]["ranks"]] == ["mn1", "mn2"]


def test_ranks_started_by_srun_which_knows_better_than_a_master_addr_of_another_job(slurm: Slurm, job: int) -> None:
    srun = ("srun", "--overlap", f"--jobid={job}", "-N", "2", "-n", "3", "--ntasks-per-node=2")
    wrap = (*slurm.client.command(), *srun, "env", "MASTER_ADDR=nosuchnode17")
    result = Running("gpu-test", *QUICK, env=slurm.env(), wrap=wrap).finish()
    assert result.code == 0
    finding = result.findings["rank-variables"]
    assert "MASTER_ADDR=nosuchnode17 in rank 0" in finding["title"]
    assert finding["where"]["ranks"] == [0]
    assert hosts_of_ranks(result) == ["mn1", "mn1", "mn2"]
    assert [rank["local_rank"] for rank in result.report["data"]["ranks"]] == [0, 1, 0]


def test_one_task_per_node_starts_its_own_ranks_and_names_the_stopped_one(slurm: Slurm, job: int) -> None:
    result = as_ranks(slurm, job, "-N 2 -n 2", "--nproc", "2", "--stall", "25", "--inject", "stop:3")
    assert result.code == 1
    assert result.findings["rank-missing"]["where"] == {
        "hosts": ["mn2"],
        "ranks": [3],
        "pids": result.findings["rank-missing"]["where"]["pids"],
    }
    assert result.findings["rank-missing"]["fix"]["commands"]


def test_rank_variables_that_contradict_srun_are_told(slurm: Slurm, job: int) -> None:
    srun = ("srun", "--overlap", f"--jobid={job}", "-N", "2", "-n", "2", "env", "RANK=0", "WORLD_SIZE=1")
    running = Running("gpu-test", *QUICK, env=slurm.env(), wrap=(*slurm.client.command(), *srun))
    result = running.finish()
    assert result.statuses == ["ok", "ok"]
    assert "srun set rank 0 of 2" in result.findings["rank-variables"]["title"]


def test_mpirun_in_every_task_of_srun_is_told(slurm: Slurm, job: int) -> None:
    need("mpirun.openmpi")
    srun = ("srun", "--overlap", f"--jobid={job}", "-N", "2", "-n", "2", "--mpi=none")
    # Open MPI would start its daemon by srun inside a job; as a plain program it does what users see.
    inner = (*MPIRUN, "--mca", "plm", "isolated", "--mca", "ras", "^slurm", "-np", "2")
    result = Running("gpu-test", *QUICK, env=slurm.env(), wrap=(*slurm.client.command(), *srun, *inner)).finish()
    assert result.code != 0
    assert result.out.count('"gpu-test.nested-launchers"') == 2, result.out + result.err


def test_a_frozen_slurmd_and_then_a_dead_one_cost_their_own_node_only() -> None:
    need_slurm()
    with Slurm(2) as own:
        job = ("--slurm-job", str(own.allocate(2)), "--nproc", "1")
        own.freeze_slurmd("mn2")
        try:
            frozen = beside(own, *job)
        finally:
            own.thaw_slurmd("mn2")
        own.kill_slurmd("mn2")
        dead = beside(own, *job)
    for result in (frozen, dead):
        assert result.code == 3
        assert hosts_of_ranks(result) == ["mn1"]
        (row,) = [row for row in result.report["data"]["hosts"] if row["state"] != "ok"]
        assert row["host"] == "mn2"
        assert row["state"] in ("timeout", "failed")
    assert (row["state"], "slurmd there does not respond" in row["message"]) == ("failed", True)


def test_a_slurm_job_that_is_not_there(slurm: Slurm) -> None:
    result = beside(slurm, "--slurm-job", "987654")
    assert result.code == 3
    assert "no running SLURM job 987654" in result.report["error"]["message"]


def test_ranks_of_mpich_on_two_nodes(network: Network) -> None:
    need("mpirun.mpich")
    address = ("-genv", "MASTER_ADDR", network.nodes[0].address)
    result = by_mpirun(network, ["mpirun.mpich", "-hosts", "node1,node2", "-ppn", "2", *address, "-n", "3"])
    assert result.code == 0
    assert hosts_of_ranks(result) == ["node1", "node1", "node2"]


def test_ranks_of_open_mpi_on_two_nodes_and_the_variables_that_two_of_them_have_of_another_job(
    network: Network,
) -> None:
    need(MPIRUN[0])
    mpirun = [*MPIRUN, "--host", "node1:2,node2:1", "--mca", "oob_tcp_if_include", "eth0", "-np", "3"]
    stale = (
        "case $OMPI_COMM_WORLD_RANK in 0) export MASTER_ADDR=10.99.0.1;; 1) export WORLD_SIZE=7 NCCL_ALGO=Ring;; esac; "
        'exec "$@"'
    )
    result = by_mpirun(network, [*mpirun, "bash", "-c", stale, "bash"], "--stall", "60")
    assert (result.code, result.report["verdict"]) == (0, "warn")
    assert hosts_of_ranks(result) == ["node1", "node1", "node2"]
    reported = result.findings["rank-variables"]["title"]
    assert "WORLD_SIZE=7 in rank 1" in reported
    assert "MASTER_ADDR=10.99.0.1 in rank 0" in reported
    assert any("NCCL_ALGO: " in one["title"] for one in result.report["findings"])


def test_a_killed_rank_of_mpirun_does_not_lose_the_report(network: Network) -> None:
    need(MPIRUN[0])
    mpirun = [*MPIRUN, "--host", "node1:1,node2:1", "--mca", "oob_tcp_if_include", "eth0", "-np", "2"]
    result = by_mpirun(network, mpirun, "--inject", "kill:1@memory")
    assert result.code == 1, result.out + result.err
    assert list(result.findings) == ["rank-died"]
    assert result.findings["rank-died"]["where"]["hosts"] == ["node2"]


def test_ranks_of_two_torchrun_agents_with_a_fault(network: Network) -> None:
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={network.nodes[0].address}:29400", "--rdzv-id=1")
    results: list[Result] = []

    def launch(number: int) -> None:
        node = network.nodes[number]
        torchrun = (TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *rendezvous, f"--local-addr={node.address}")
        wrap = (*node.command(), *torchrun, "--no-python")
        results.append(Running("gpu-test", *QUICK, "--inject", "corrupt:1", wrap=wrap).finish())

    threads = [threading.Thread(target=launch, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.code for result in results] == [1, 1]
    (reported,) = [result for result in results if result.out]
    assert list(reported.findings) == ["wrong-result"]
    assert reported.findings["wrong-result"]["where"]["ranks"] == [1]


def test_ranks_that_never_come_are_named() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 9999)}
    result = Running("gpu-test", "--json", "--stall", "2", env=alone).finish()
    assert result.code == 1
    assert result.findings["rank-missing"]["where"]["ranks"] == [1, 2]


def test_a_master_addr_that_leads_elsewhere_is_at_fault_and_not_those_whom_it_misled() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "10.99.0.1"}
    result = Running("gpu-test", "--json", "--stall", "2", env=alone).finish()
    assert result.code == 1
    (finding,) = result.findings.values()
    assert "MASTER_ADDR=10.99.0.1 is not" in finding["title"]
    assert finding["where"]["ranks"] == []


def test_a_rank_without_its_rank_0_says_so_and_ends() -> None:
    alone = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 9999)}
    result = Running("gpu-test", "--stall", "2", env=alone).finish()
    assert result.code == 3
    assert "did not find rank 0 at 127.0.0.1" in result.err


def test_a_rank_0_that_is_long_silent_is_not_taken_for_a_lost_node() -> None:
    need("mpirun.openmpi")
    mpirun = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2")
    result = Running("gpu-test", *QUICK, "--stall", "25", "--inject", "late:0@reduce", wrap=mpirun).finish()
    assert list(result.findings) == ["rank-missing"]
    assert result.findings["rank-missing"]["where"]["ranks"] == [0]


def test_ranks_that_a_launcher_ends_leave_one_document() -> None:
    """Of all that share stdout, rank 0 alone speaks."""
    need("mpirun.openmpi")
    # Rank 0 waits for the others: they are held up before they can find it.
    running = Running("gpu-test", *QUICK, "--inject", "late:1@connect", "--stall", "60", wrap=(*MPIRUN, "-np", "4"))
    running.wait_for("start: all ranks")
    running.process.terminate()
    result = running.finish()
    assert result.report["exit_code"] == 130
