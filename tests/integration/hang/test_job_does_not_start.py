"""hang on jobs that do not start: the node and the setting at fault are named, and no innocent one."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import pytest
import start_srun
from cluster import Network, need_network
from cluster_slurm import Slurm, need_slurm
from start_faults import FAULTS, StartFault, ask, c10d, plain, score, start, wait_idle
from support import wait_until

if TYPE_CHECKING:
    from pathlib import Path

_PATIENCE_S = 120.0
"""torchrun imports torch before it waits, which a busy machine slows down."""
NAMED = (
    *("port-c10d", "name-static", "localhost-static", "rank-0-missing", "port-taken", "rank-twice"),
    "ipv6-first-static",
)

SPAWNS = """
import torch.distributed as dist
import torch.multiprocessing as mp

def work(i):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=i, world_size=4)

if __name__ == "__main__":
    mp.start_processes(work, nprocs=2, start_method="fork")  # as mp.spawn, without its imports
"""
ENV = {"OMP_NUM_THREADS": "1"}


def ask_until_right(fault: StartFault, *, alone: bool = False, idle: int = 0) -> None:
    """Ask until all processes of the job wait; on its nodes, and on `idle` ones, which are innocent."""
    need_network()
    with Network(1 + max(number for number, _ in fault.runs) + idle) as network:
        node = start(fault, network)
        until = time.monotonic() + _PATIENCE_S
        while score(fault, report := ask(network, node if alone else None), alone=alone) != "right":
            assert time.monotonic() < until, report["findings"]


@pytest.mark.parametrize("name", NAMED)
def test_the_reason_is_named(name: str) -> None:
    ask_until_right(FAULTS[name], idle=name.startswith("port"))


def test_the_line_of_srun_is_printed_with_the_address_of_rank_0() -> None:
    need_slurm()
    exports = "MASTER_ADDR=mn01 MASTER_PORT=29500 WORLD_SIZE=2"
    fault = dataclasses.replace(start_srun.SRUN_FAULTS["srun-name"], exports=exports, tasks=2)
    with Slurm(3) as slurm:
        output = start_srun.start(fault, slurm)

        def both_look() -> bool:
            return {line[:2] for line in output.read_text().splitlines() if "mn01" in line} >= {"0:", "1:"}

        wait_until(lambda: output.exists() and both_look(), 120, lambda: "they do not look for mn01")
        report = start_srun.ask(slurm, "all")
        assert "mn[1-2] cannot resolve mn01" in report["summary"], report["findings"]
    (line,) = report["findings"][0]["fix"]["commands"]
    assert line.startswith("MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 srun --label --nodes=2")


@pytest.mark.parametrize("name", ["port-plain", "firewall-drops", "world-size"])
def test_one_node_names_its_side(name: str) -> None:
    ask_until_right(FAULTS[name], alone=True)


def test_a_rank_of_this_node_that_has_not_started_is_a_warning_at_first_and_then_joins_as_usual(tmp_path: Path) -> None:
    """Two ranks of three, started by hand: the third may be about to start, and nothing shows that it exited."""
    need_network()
    first, second, third = (tuple(plain(rank, "127.0.0.1", world=3, local=rank)) for rank in range(3))
    two = StartFault(((0, first), (0, second)), (), "rank 2 of 3 has not connected to 127.0.0.1:29500")
    with Network(1) as network, (tmp_path / "log").open("w") as log:
        ranks = [network.nodes[0].start(*each, env=ENV, output=log) for each in (first, second)]
        wait_idle(ranks)
        until = time.monotonic() + _PATIENCE_S
        while score(two, report := ask(network, network.nodes[0]), alone=True) != "right":
            assert report["verdict"] != "fail", report["findings"]
            assert time.monotonic() < until, report["findings"]
        ranks.append(network.nodes[0].start(*third, env=ENV, output=log))
        assert [rank.wait(_PATIENCE_S) for rank in ranks] == [0, 0, 0], (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().count("OK") == 3
    assert (report["verdict"], [found["id"] for found in report["findings"]]) == ("warn", ["hang.rendezvous"])
    assert [row["doing"] for row in report["data"]["processes"]][2] == "no process"


def test_a_first_node_that_is_slow_to_start_is_not_accused() -> None:
    """Its torchrun runs, but still imports: it does not listen yet."""
    need_network()
    waits = StartFault(((1, tuple(c10d("node1:29400"))),), (), "")
    with Network(2) as network:
        (network.folder / "sitecustomize.py").write_text("import time\ntime.sleep(600)\n")
        network.nodes[0].start(*c10d("node1:29400"), env={"PYTHONPATH": str(network.folder)})
        start(waits, network)
        until = time.monotonic() + _PATIENCE_S
        while True:
            report = ask(network, None)
            accused = {
                host for each in report["findings"] for host in each["where"]["hosts"] if each["level"] != "info"
            }
            assert "node1" not in accused, report["findings"]
            assert report["verdict"] != "fail"
            if "node1 does not listen there yet" in report["findings"][0]["title"]:
                break
            assert time.monotonic() < until, report["findings"]


def test_a_missing_node_is_named_and_torchrun_starts_as_usual_once_it_has_come(tmp_path: Path) -> None:
    """A store of torch drops a connection that sends nothing, and answers one that asks for its keys."""
    need_network()
    (tmp_path / "prints.py").write_text("print('OK', flush=True)")  # what its ranks do with a store is tested above
    command = (*c10d("node1:29400", 3)[:-1], str(tmp_path / "prints.py"))
    with Network(3) as network, (tmp_path / "log").open("w") as log:
        launchers = [network.nodes[number].start(*command, env=ENV, output=log) for number in (0, 1)]
        wait_idle(launchers)
        until = time.monotonic() + _PATIENCE_S
        while score(FAULTS["node-missing"], report := ask(network, None), alone=False) != "right":
            assert time.monotonic() < until, report["findings"]
        for _ in range(2):
            assert "2 of 3 nodes have joined at node1:29400: node[1-2]" in ask(network, network.nodes[1])["summary"]
        launchers.append(network.nodes[2].start(*command, env=ENV, output=log))
        assert [each.wait(_PATIENCE_S) for each in launchers] == [0, 0, 0], (tmp_path / "log").read_text()
        assert (tmp_path / "log").read_text().count("OK") == 3


def test_a_rank_that_still_imports_is_not_accused_and_those_that_wait_are_not_hung() -> None:
    need_network()
    with Network(2) as network:
        (network.folder / "sitecustomize.py").write_text("import time\ntime.sleep(600)\n")
        network.nodes[0].start(*plain(0, "node1"), env={"PYTHONPATH": str(network.folder)})
        wait_idle([network.nodes[1].start(*plain(1, "node1"), env=ENV)])
        until = time.monotonic() + _PATIENCE_S
        while "rank 0 has not reached init_process_group yet" not in (report := ask(network, None))["summary"]:
            assert report["verdict"] != "fail", report["findings"]
            assert time.monotonic() < until, report["findings"]
        assert not any(finding["where"]["hosts"] or finding["where"]["ranks"] for finding in report["findings"])
        assert report["data"]["class_name"] == "rendezvous"


def test_ranks_at_an_address_of_their_script_are_neither_behind_nor_fine(tmp_path: Path) -> None:
    """As below mp.spawn: no MASTER_ADDR, a loop that polls, and arguments that look like counters."""
    need_network()
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    with Network(1) as network:
        wait_idle([network.nodes[0].start(sys.executable, str(script), env=ENV)])
        until = time.monotonic() + _PATIENCE_S
        while "wait in init_process_group for more ranks" not in (report := ask(network, network.nodes[0]))["summary"]:
            assert report["verdict"] != "fail", report["findings"]
            assert time.monotonic() < until, report["findings"]
        assert report["verdict"] == "warn"
