"""gpu-test under SLURM, Open MPI, MPICH and torchrun: started by them, beside them, and in spite of a broken node."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Network, need_network
from cluster_slurm import Slurm, need_slurm
from cluster_ssh import SSHD, serve_ssh
from cuda_machines import is_for_cpu
from support import PROGRAM, Running, need, wait_until
from support_warm import distdiag, enough_of_torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from support import Result

KILLED = ("--inject", "kill:1@connect")
"""Shows who is where to a run that gets no further than this: no rank needs more than `enough_of_torch`."""
QUICK = ("--json", "--size", "1MiB", "--no-compute", "--stall", "60")
"""On a busy machine three imports of torch may take half a minute."""
MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    need_slurm()
    with Slurm(3) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def no_torch_yet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return enough_of_torch(tmp_path_factory.mktemp("enough"))


@dataclass(frozen=True)
class Allocation:
    """A batch job whose script runs gpu-test, and whose CPUs are all held by a step, as training would."""

    id: int
    report: Path
    code: Path
    errors: Path


@pytest.fixture(scope="module")
def allocation(slurm: Slurm, no_torch_yet: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Allocation:
    folder = tmp_path_factory.mktemp("allocation")
    found = Allocation(0, folder / "report.json", folder / "code", folder / "errors")
    script = folder / "job.sh"
    script.write_text(
        f"#!/bin/bash\nexport PYTHONPATH={shlex.quote(no_torch_yet['PYTHONPATH'])}\n"
        f"{PROGRAM} gpu-test {' '.join((*QUICK, *KILLED))} --nproc 1 >{found.report} 2>{found.errors}\n"
        f"echo $? >{found.code}.part; mv {found.code}.part {found.code}; sleep 1000\n"
    )
    job = slurm.submit(script, "--nodes=3", "--ntasks-per-node=2", "--exclusive")
    slurm.start_step(job, "sleep", "1000", options=("--ntasks=6", "--nodes=3", "--overlap"))
    return replace(found, id=job)


@pytest.fixture(scope="module")
def job(allocation: Allocation) -> int:
    return allocation.id


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    need("ssh", SSHD)
    with Network(2) as network:
        serve_ssh(network)
        yield network


def hosts_of_ranks(report: dict[str, Any]) -> list[str]:
    return [rank["host"] for rank in report["data"]["ranks"]]


def beside(slurm: Slurm, command: str, *arguments: str) -> Result:
    return distdiag(command, "--json", *arguments, env=slurm.env(), wrap=tuple(slurm.client.command()))


def as_ranks(
    slurm: Slurm, job: int, shape: str, *arguments: str, within: tuple[str, ...], env: Mapping[str, str] | None = None
) -> Result:
    srun = (*slurm.client.command(), "srun", "--overlap", f"--jobid={job}", *shape.split(), *within)
    return Running("gpu-test", *QUICK, *arguments, env={**slurm.env(), **(env or {})}, wrap=srun).finish()


def by_mpirun(network: Network, mpirun: list[str], *arguments: str, env: Mapping[str, str]) -> Result:
    wrap = (*network.client.command(), *mpirun)
    return Running("gpu-test", *QUICK, *arguments, env={**network.client_env(), **env}, wrap=wrap).finish()


def test_from_outside_a_dropped_port_is_found_while_a_step_holds_all_cpus(slurm: Slurm, job: int) -> None:
    first, _, third = slurm.nodes
    where = ("--slurm-job", str(job))
    first.drop(29500)
    try:
        tested = beside(slurm, "gpu-test", *where, "--nproc", "1", "--master-port", "29500")
    finally:
        first.heal()
    assert tested.code == 1
    assert "mn1 drops inbound packets on port 29500" in tested.findings["port-filtered"]["title"]
    third.drop(29500)
    try:
        result = beside(slurm, "ports", *where)
    finally:
        third.heal()
    finding = result.findings["port-filtered"]
    assert (result.code, finding["title"].split()[0]) == (1, third.name), result.out + result.err


def test_from_outside_each_node_has_its_own_environment(slurm: Slurm, job: int) -> None:
    found = beside(slurm, "cuda-env", "--goal", "build", "--slurm-job", str(job))
    hosts = [node["facts"]["host"] for node in found.report["data"]["nodes"]]
    assert hosts == [node.name for node in slurm.nodes]
    assert ("torch.build" in found.findings) == is_for_cpu(found)
    if is_for_cpu(found):
        assert slurm.nodes[0].name in found.findings["torch.build"]["where"]["hosts"]


def test_inside_an_allocation_its_nodes_are_found(allocation: Allocation) -> None:
    """A real batch script with two tasks per node: each node gets one agent, and the script is not a rank."""
    wait_until(allocation.code.exists, 60, allocation.errors.read_text)
    assert allocation.code.read_text().strip() == "1", allocation.errors.read_text()
    report = json.loads(allocation.report.read_text())
    assert hosts_of_ranks(report) == ["mn1", "mn2", "mn3"]
    (died,) = [one for one in report["findings"] if one["level"] == "fail"]
    assert (died["id"], died["where"]["hosts"]) == ("gpu-test.rank-died", ["mn2"])


def test_ranks_started_by_srun_which_knows_better_than_variables_of_another_job(
    slurm: Slurm, job: int, no_torch_yet: dict[str, str]
) -> None:
    foreign = ("env", "RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=10.99.0.1")
    result = as_ranks(slurm, job, "-N 2 -n 3 --ntasks-per-node=2", *KILLED, within=foreign, env=no_torch_yet)
    assert sorted(result.findings) == ["rank-died", "rank-variables"], result.out + result.err
    assert result.findings["rank-variables"]["level"] == "warn"
    assert "srun set rank 0 of 3" in result.findings["rank-variables"]["title"]
    assert hosts_of_ranks(result.report) == ["mn1", "mn1", "mn2"]
    assert [rank["local_rank"] for rank in result.report["data"]["ranks"]] == [0, 1, 0]


def test_mpirun_in_every_task_of_srun_is_told(slurm: Slurm, job: int) -> None:
    need("mpirun.openmpi")
    # Open MPI would start its daemon by srun inside a job; as a plain program it does what users see.
    inner = (*MPIRUN, "--mca", "plm", "isolated", "--mca", "ras", "^slurm", "-np", "2")
    result = as_ranks(slurm, job, "-N 2 -n 2 --mpi=none", within=inner)
    assert result.code != 0
    assert result.out.count('"gpu-test.nested-launchers"') == 2, result.out + result.err


def test_a_frozen_slurmd_and_then_a_dead_one_cost_their_own_node_only() -> None:
    need_slurm()
    with Slurm(2) as own:
        job = ("--slurm-job", str(own.allocate(2)), "--nproc", "1")
        own.freeze_slurmd("mn2")
        try:
            frozen = beside(own, "ports", *job[:2])
        finally:
            own.thaw_slurmd("mn2")
        own.kill_slurmd("mn2")
        dead = beside(own, "gpu-test", *QUICK[1:], *job)
    assert (hosts_of_ranks(dead.report), dead.statuses) == (["mn1"], ["ok"]), dead.out
    for result in (frozen, dead):
        assert result.code == 3
        (row,) = [row for row in result.report["data"]["hosts"] if row["state"] != "ok"]
        assert row["host"] == "mn2"
        assert row["state"] in ("timeout", "failed")
    assert (row["state"], "slurmd there does not respond" in row["message"]) == ("failed", True)


def test_a_slurm_job_that_is_not_there(slurm: Slurm) -> None:
    result = beside(slurm, "gpu-test", "--slurm-job", "987654")
    assert result.code == 3
    assert "no running SLURM job 987654" in result.report["error"]["message"]


def test_one_process_of_mpich_per_node_starts_its_own_ranks_and_names_the_stopped_one(
    network: Network, no_torch_yet: dict[str, str]
) -> None:
    """All wait for it in silence, rank 0 too, whose node is not taken for a lost one."""
    need("mpirun.mpich")
    address = ("-genv", "MASTER_ADDR", network.nodes[0].address)
    mpirun = ["mpirun.mpich", "-hosts", "node1,node2", "-ppn", "1", *address, "-n", "2"]
    stopped = ("--stall", "12", "--inject", "stop:3@connect")
    result = by_mpirun(network, mpirun, "--nproc", "2", *stopped, env=no_torch_yet)
    assert result.code == 1
    assert hosts_of_ranks(result.report) == ["node1", "node1", "node2", "node2"]
    assert list(result.findings) == ["rank-missing"]
    missing = result.findings["rank-missing"]
    assert (missing["where"]["hosts"], missing["where"]["ranks"]) == (["node2"], [3])
    assert missing["fix"]["commands"]


def test_ranks_of_open_mpi_of_which_one_is_killed_and_both_have_variables_of_another_job(
    network: Network, no_torch_yet: dict[str, str]
) -> None:
    need(MPIRUN[0])
    only = ("--host", "node1:1,node2:1", "--mca", "oob_tcp_if_include", "eth0")
    mpirun = [*MPIRUN, *only, "-x", "PYTHONPATH", "-np", "2"]
    stale = (
        "case $OMPI_COMM_WORLD_RANK in 0) export MASTER_ADDR=nosuch17;; 1) export WORLD_SIZE=7 NCCL_ALGO=Ring;; esac; "
        'exec "$@"'
    )
    result = by_mpirun(network, [*mpirun, "bash", "-c", stale, "bash"], *KILLED, env=no_torch_yet)
    assert result.code == 1, result.out + result.err
    assert hosts_of_ranks(result.report) == ["node1", "node2"]
    assert sorted(result.findings) == ["nodes-differ", "rank-died", "rank-variables"]
    assert result.findings["rank-died"]["where"]["hosts"] == ["node2"]
    reported = result.findings["rank-variables"]
    assert "WORLD_SIZE=7 in rank 1" in reported["title"]
    assert "MASTER_ADDR=nosuch17 in rank 0" in reported["title"]
    assert reported["where"]["ranks"] == [0, 1]
    assert "NCCL_ALGO: " in result.findings["nodes-differ"]["title"]


def test_ranks_of_two_torchrun_agents_with_a_fault(network: Network, tmp_path: Path) -> None:
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={network.nodes[0].address}:29400", "--rdzv-id=1")
    rank = ("sh", "-c", f'exec "$@" >{tmp_path}/out-$RANK 2>{tmp_path}/err-$RANK', "sh", PROGRAM)
    agents = [
        node.start(
            *(TORCHRUN, "--nnodes=2", "--nproc-per-node=1", *rendezvous, f"--local-addr={node.address}"),
            *("--no-python", *rank, "gpu-test", *QUICK, "--inject", "corrupt:1"),
            env={"OMP_NUM_THREADS": "1"},
        )
        for node in network.nodes
    ]
    assert [agent.wait(90) for agent in agents] == [1, 1], (tmp_path / "err-0").read_text()
    assert (tmp_path / "out-1").read_text() == ""
    (found,) = [one for one in json.loads((tmp_path / "out-0").read_text())["findings"] if one["level"] != "info"]
    assert (found["id"], found["where"]["ranks"]) == ("gpu-test.wrong-result", [1])


def test_ranks_that_never_come_are_named() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 9999)}
    result = distdiag("gpu-test", "--json", "--stall", "2", env=alone)
    assert result.code == 1
    assert result.findings["rank-missing"]["where"]["ranks"] == [1, 2]


def test_a_master_addr_that_leads_elsewhere_is_at_fault_and_not_those_whom_it_misled() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "10.99.0.1"}
    result = distdiag("gpu-test", "--json", "--stall", "2", env=alone)
    assert result.code == 1
    (finding,) = result.findings.values()
    assert "MASTER_ADDR=10.99.0.1 is not" in finding["title"]
    assert finding["where"]["ranks"] == []


def test_a_rank_without_its_rank_0_says_so_and_ends() -> None:
    alone = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 9999)}
    result = distdiag("gpu-test", "--stall", "2", env=alone)
    assert result.code == 3
    assert "did not find rank 0 at 127.0.0.1" in result.err


def test_ranks_that_a_launcher_ends_leave_one_document(tmp_path: Path) -> None:
    """Of all that share stdout, rank 0 alone speaks. An import of torch that takes long holds them up."""
    need("mpirun.openmpi")
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(1000)\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    running = Running("gpu-test", *QUICK, env=path, wrap=(*MPIRUN, "-np", "2"))
    running.wait_for("start: all ranks")
    running.process.terminate()
    result = running.finish()
    assert result.report["exit_code"] == 130
