"""doctor on real machines: a fact of one node is changed, and both are named; nothing is said where all are equal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest
from cluster import Network, need_network
from cluster_slurm import Slurm, need_slurm
from doctor_changes import CHANGES, OTHER_PYTHON, can_limit_memory, complaints
from support import PROGRAM, Running, need
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support import Result

GROUPS = (
    {
        "node2": "proxy memlock nofile shm-size mtu disk-full",
        "node3": "switch nproc core cgroup-memory torch nic-down",
        "node4": "clock stack ports inodes",
    },
    {
        "node2": "debug address-space shm-full nccl own-name",
        "node3": "variable nic-unplugged python somaxconn no-exec",
        "node4": "few-ports half-copied read-only cpus hung-mount",
    },
)
"""Changes made at the same time: three of four nodes have every fact as it was. A node's variables come first."""
assert sorted(" ".join(words for group in GROUPS for words in group.values()).split()) == sorted(CHANGES)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    need("gcc", "prlimit", "taskset")
    with Network(4) as made:
        yield made


def run(network: Network, *more: str, hosts: str = "") -> Result:
    where = ("--hosts", hosts or network.hosts, "--via", network.via)
    return distdiag("doctor", *where, *more, wrap=tuple(network.client.command()))


@pytest.mark.parametrize("group", GROUPS, ids=["first", "second"])
def test_the_node_and_the_fact_that_was_changed_are_named(group: dict[str, str], network: Network) -> None:
    left_out = [] if can_limit_memory() else ["cgroup-memory"]
    has_another = os.path.realpath(sys.executable) != OTHER_PYTHON and sys.version_info[:2] == (3, 11)
    left_out += [] if has_another else ["python"]  # of another version, it would have no torch either
    changes = [(host, name) for host, names in group.items() for name in names.split() if name not in left_out]
    with contextlib.ExitStack() as undo:
        for host, name in changes:
            undo.enter_context(CHANGES[name].make(network, network[host]))
        done = run(network, "--json")
    report = json.loads(done.out)
    unnamed = [(host, name) for host, name in changes if not CHANGES[name].named(report, host)]
    assert not unnamed, [(finding["id"], finding["title"]) for finding in report["findings"]]


def test_of_equal_nodes_nothing_is_said(network: Network) -> None:
    for _ in range(3):  # on a busy machine one of the four may be slower for a moment; a wrong complaint comes again
        report = json.loads(run(network, "--json", hosts="node[2-4]").out)
        if not complaints(report):
            break
    assert (complaints(report), report["verdict"], report["data"]["fit"]) == ([], "ok", "fit")
    assert all(abs(row["clock_offset_s"]) <= row["clock_uncertainty_s"] + 0.05 for row in report["data"]["nodes"])


def test_paths_between_nodes_that_are_closed_are_named_and_judged_again_in_one_line_too(
    network: Network, tmp_path: Path
) -> None:
    try:
        network["node2"].drop_ephemeral(29500)
        network["node4"].mtu_black_hole()
        done = run(network, "--json", "--save", str(tmp_path))
    finally:
        network["node2"].heal()
        network["node4"].heal()
    report = json.loads(done.out)
    named = {finding["id"]: (finding["where"]["hosts"], finding["level"]) for finding in report["findings"]}
    assert named["doctor.rank-ports-filtered"] == (["node2"], "fail"), report["findings"]
    assert named["doctor.mtu-black-hole"] == (["node4"], "fail"), report["findings"]
    assert (done.code, report["data"]["exclude"]) == (1, "node[2,4]")
    again = distdiag("doctor", "--json", "--from", str(tmp_path))
    assert json.loads(again.out)["findings"] == report["findings"]
    brief = distdiag("doctor", "--brief", "--from", str(tmp_path))
    assert (brief.code, brief.out.count("\n")) == (1, 1)
    assert brief.out.startswith("distdiag doctor: FAIL: not fit: ")
    assert brief.out.endswith("--exclude=node[2,4]\n")


def test_a_slow_link_is_named_without_its_neighbours_and_a_node_that_is_not_there_is_left_out(network: Network) -> None:
    need("tc")
    network["node3"].limit_rate("30mbit")
    try:
        done = run(network, "--json", hosts="node[2-4,9]")
    finally:
        network["node3"].heal()
    report = json.loads(done.out)
    (finding,) = (finding for finding in report["findings"] if finding["id"] == "doctor.link-slow")
    assert (finding["level"], finding["where"]["hosts"]) == ("warn", ["node3"])
    assert "MB/s on other paths" in finding["title"]
    assert (done.code, report["verdict"], report["data"]["exclude"]) == (3, "unknown", "node9")
    assert {row["fit"] for row in report["data"]["nodes"]} <= {"fit", "fit with warnings"}  # of a busy machine


def test_limits_are_those_inside_the_step() -> None:
    need_slurm()
    need("prlimit")
    with Slurm(2) as slurm:
        job = slurm.allocate(2)
        words = ("prlimit", "--nofile=700:700", PROGRAM, "doctor", "--json", "--slurm-job", str(job))
        report = json.loads(slurm.run(*words, check=False, timeout=90).stdout)
    (finding,) = (finding for finding in report["findings"] if finding["id"] == "doctor.nofile")
    assert finding["where"]["hosts"] == ["mn1", "mn2"]
    assert "700 files" in finding["title"]
    assert "inside the launcher's step" in finding["detail"]


def test_this_machine_alone_and_a_folder_that_it_lacks() -> None:
    done = distdiag("doctor", "--path", "/nonexistent", "--only", "disk-error")
    assert done.code == 0
    assert "/nonexistent: No such file or directory" in done.out
    assert "WARN: 1 node fit, with 1 warning" in done.out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--only", "nothing"), "one of: acs, "),
        (("--brief", "--json"), "--json has the line"),
        (("--path", "here"), "--path /scratch"),
    ],
)
def test_wrong_usage_says_what_to_type(words: tuple[str, ...], hint: str) -> None:
    done = distdiag("doctor", *words)
    assert done.code == 2
    assert hint in done.err


def test_an_interrupt_ends_it_with_what_is_known(network: Network) -> None:
    with CHANGES["hung-mount"].make(network, network["node3"]):
        where = ("--hosts", "node[2-3]", "--via", network.via)
        words = network.client.command()
        running = Running("doctor", "--json", *where, wrap=tuple(words))
        running.wait_for("reading limits")
        running.process.send_signal(signal.SIGINT)
        done = running.finish()
    assert done.code == 130
    assert done.report["exit_code"] == 130
