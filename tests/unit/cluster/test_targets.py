"""Hosts of a command: from its arguments, from the surrounding allocation, or this machine."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING

import pytest
from loops import each
from support import need

from distdiag.cluster.targets import Cluster, Launcher, chosen_env, find_targets
from distdiag.errors import DistdiagError, UsageError
from distdiag.launch.launch_commands import Recipe, lines
from distdiag.report import quoted

if TYPE_CHECKING:
    from pathlib import Path

IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[2,1],m5", "SLURM_TASKS_PER_NODE": "2(x2),1"}


def names(cluster: Cluster, **environ: str) -> tuple[list[str], Launcher | None]:
    targets = find_targets(cluster, environ)
    return [host.name for host in targets.hosts], targets.launcher


def test_nothing_typed_and_no_scheduler_is_this_machine() -> None:
    assert names(Cluster()) == (["this node"], None)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_machine_by_name_needs_no_ssh(name: str) -> None:
    assert names(Cluster(hosts=name)) == (["this node"], None)


def test_hosts_go_by_ssh_and_duplicates_once() -> None:
    targets = find_targets(Cluster(hosts="n[1-2],n1"), {})
    assert ([host.name for host in targets.hosts], targets.launcher) == (["n1", "n2"], Launcher.SSH)
    assert targets.duplicates == ("n1",)


def test_an_allocation_is_taken_in_the_schedulers_order() -> None:
    assert names(Cluster(), **IN_SLURM) == (["n2", "n1", "m5"], Launcher.SLURM)


def test_tasks_per_node_are_the_ranks_only_where_they_were_asked_for() -> None:
    asked = find_targets(Cluster(), {**IN_SLURM, "SLURM_NTASKS_PER_NODE": "2"})
    assert [host.slots for host in asked.hosts] == [2, 2, 1]
    assert [host.slots for host in find_targets(Cluster(), IN_SLURM).hosts] == [None, None, None]


def test_hosts_of_the_own_allocation_go_by_srun_and_others_by_ssh() -> None:
    assert names(Cluster(hosts="n1"), **IN_SLURM)[1] is Launcher.SLURM
    assert names(Cluster(hosts="n1,elsewhere"), **IN_SLURM)[1] is Launcher.SSH


def test_an_allocation_of_this_node_alone_needs_no_srun() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}
    assert names(Cluster(), **environ) == (["this node"], None)


def test_a_job_without_a_node_list_is_not_guessed_at() -> None:
    with pytest.raises(DistdiagError, match="SLURM_JOB_NODELIST is not"):
        find_targets(Cluster(), {"SLURM_JOB_ID": "7"})


def test_pbs_and_lsf_name_their_hosts(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("a\na\nb\n")
    pbs = find_targets(Cluster(), {"PBS_NODEFILE": str(file), "PBS_JOBID": "1"})
    assert (pbs.hosts[0].name, pbs.hosts[0].slots, len(pbs.hosts)) == ("a", 2, 2)
    assert pbs.launcher is Launcher.SSH
    lsf = find_targets(Cluster(), {"LSB_MCPU_HOSTS": "a 4 b 2"})
    assert [(host.name, host.slots) for host in lsf.hosts] == [("a", 4), ("b", 2)]


@each(
    "cluster, words",
    [
        (Cluster(hosts="a", hostfile="f"), "--hosts and --hostfile both select hosts"),
        (Cluster(hosts="a", slurm_job="1"), "--hosts and --slurm-job both select hosts"),
        (Cluster(via="x {host}"), "--via needs hosts"),
        (Cluster(launcher=Launcher.VIA, hosts="a"), "--launcher via needs --via"),
        (Cluster(launcher=Launcher.SSH, via="x {host}", hosts="a"), "are mutually exclusive"),
        (Cluster(launcher=Launcher.SLURM, hosts="a"), "--launcher slurm needs a running job"),
        (Cluster(slurm_job="12; rm"), "is not a job id"),
        (Cluster(slurm_job="1", via="x {host}"), "--slurm-job always uses srun"),
        (Cluster(hostfile="/nowhere/hosts"), "/nowhere/hosts: No such file"),
    ],
)
def test_contradictions_are_usage_errors(cluster: Cluster, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        find_targets(cluster, {})


def test_variables_for_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", 'a,b c"d$x')
    assert chosen_env(Cluster(env=("HERE", "B=1=2", "C="))) == {"HERE": 'a,b c"d$x', "B": "1=2", "C": ""}
    for wrong in ("NOT_HERE", "=x", "1A=2", "A B=1"):
        with pytest.raises(UsageError):
            chosen_env(Cluster(env=(wrong,)))


def test_what_was_typed_can_be_typed_again() -> None:
    typed = Cluster(hosts="n[1-2]", via="kubectl exec -i {host} --", env=("A=1", "B"), launcher=Launcher.VIA).typed()
    assert typed == [
        ("--hosts", "n[1-2]"),
        ("--via", "kubectl exec -i {host} --"),
        ("--launcher", "via"),
        ("--env", "A=1"),
        ("--env", "B"),
    ]


def test_the_slurm_script_asks_for_what_the_ranks_need() -> None:
    hosts = ["a", "b"]
    on_gpus = lines(Recipe.SLURM, hosts, 8, "distdiag gpu-test", gpus=True)
    assert {"#SBATCH --gpus-per-node=8", "#SBATCH --cpus-per-task=4", "#SBATCH --output=distdiag-%j.out"} <= set(
        on_gpus
    )
    assert on_gpus[-1] == "srun --kill-on-bad-exit=0 --cpus-per-task=4 distdiag gpu-test"
    on_cpu = lines(Recipe.SLURM, hosts, 2, "distdiag gpu-test", gpus=False)
    assert not any("gpus" in line for line in on_cpu)
    (reported,) = (line for line in lines(Recipe.SLURM, hosts, 2, "distdiag gpu-test", gpus=None) if "gpus" in line)
    assert reported.startswith("# ")


@pytest.mark.parametrize("recipe", [Recipe.TORCHRUN, Recipe.PDSH])
def test_torchrun_meets_at_the_port_that_was_asked_for(recipe: Recipe) -> None:
    assert "--master-port 29777 " in lines(recipe, ["a", "b"], 2, "distdiag gpu-test", gpus=False, port=29777)[0]


def test_the_line_for_mpirun_names_the_interface() -> None:
    mpi = lines(Recipe.MPI, ["a", "b"], 2, "distdiag gpu-test", gpus=False, ifname="ib0")
    assert "--mca btl_tcp_if_include ib0" in mpi[1]
    assert "-iface ib0" in mpi[3]


@pytest.mark.parametrize("word", ["=eth0", "^docker,lo", "eth0", "a b", "it's"])
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_what_is_printed_is_one_word_in_every_shell(shell: str, word: str) -> None:
    need(shell)
    script = f"export X={quoted(word)}; printf '%s\\n' \"$X\" {quoted(word)}"
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [word, word]


def test_lines_for_launchers_name_every_host_and_count_the_ranks() -> None:
    hosts = ["a", "b"]
    script = lines(Recipe.SLURM, hosts, 8, "distdiag gpu-test", gpus=True)
    assert script[0] == "#!/bin/bash"
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8"} <= set(script)
    assert "mpirun -np 16 --host a:8,b:8 distdiag gpu-test" in lines(
        Recipe.MPI, hosts, 8, "distdiag gpu-test", gpus=True
    )
    agents = lines(Recipe.TORCHRUN, hosts, 8, "distdiag gpu-test", gpus=True)
    assert [
        ("--node-rank 0" in agents[0], "on a" in agents[0]),
        ("--node-rank 1" in agents[1], "on b" in agents[1]),
    ] == [
        (True, True),
        (True, True),
    ]
    (pdsh,) = lines(Recipe.PDSH, hosts, 8, "distdiag gpu-test", gpus=True)
    assert pdsh.startswith("pdsh -S -w a,b 'torchrun ")
    assert "--node-rank %n" in pdsh
