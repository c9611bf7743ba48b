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


@pytest.mark.parametrize("word", ["=eth0", "^docker,lo", "eth0", "a b", "it's"])
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_what_is_printed_is_one_word_in_every_shell(shell: str, word: str) -> None:
    need(shell)
    script = f"export X={quoted(word)}; printf '%s\\n' \"$X\" {quoted(word)}"
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [word, word]
