"""gpu-test --isolate: rank, link, groups, all slow, and undecidable cases, each with a real fault."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Network, need_network
from json_schema import check
from support_warm import WarmRunning, distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support import Result

# tests/benchmarks/allreduce_bench.py makes these faults among six ranks, and test_isolate_classify judges many more.
FOUR = ("--nproc", "4", "--size", "1MiB")
PAIRS = (*FOUR, "--no-compute")


def begin(*arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()) -> WarmRunning:
    return WarmRunning("gpu-test", "--isolate", "--json", "--device", "cpu", *arguments, env=env, wrap=wrap)


def isolate(*arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()) -> Result:
    return begin(*arguments, env=env, wrap=wrap).finish()


def classified(result: Result) -> dict[str, Any]:
    found = result.report["data"]["classification"]
    assert isinstance(found, dict), result.out
    return found


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_network()
    with Network(2) as network:
        yield network


def isolate_on_busy_cores(*arguments: str) -> Result:
    """Run a busy program on each core once the ranks have torch."""
    run = begin(*arguments)
    run.wait_for("start: all ranks")
    programs = [
        subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
        for core in os.sched_getaffinity(0)
    ]
    try:
        return run.finish()
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_healthy_pairs_on_a_busy_machine_and_the_same_below_an_expectation(tmp_path: Path) -> None:
    # Four ranks share few cores with the rest of the machine: each sample of a pair may see a slow pair.
    result = isolate_on_busy_cores(*FOUR, "--save", str(tmp_path))
    assert (result.code, classified(result)["kind"]) == (0, "healthy"), result.out
    pairs = result.report["data"]["pairs"]
    assert len(pairs) == 6
    assert all(one["wrong"] == 0 and one["busbw_bytes_per_s"] > 0 and len(one["samples"]) > 0 for one in pairs)
    again = distdiag("gpu-test", "--isolate", "--json", "--from", str(tmp_path), "--expect", "900")
    assert (again.code, classified(again)["kind"], "uniformly-slow" in again.findings) == (1, "uniformly-slow", True)


def test_a_rank_that_computes_at_70_percent_is_named_and_left_out_of_all_pairs(tmp_path: Path) -> None:
    result = isolate("--nproc", "3", "--size", "1MiB", "--inject", "slow-compute:1", "--save", str(tmp_path))
    assert (result.code, result.findings["slow-compute"]["where"]["ranks"]) == (0, [1]), result.out
    (kept,) = tmp_path.iterdir()
    assert set(re.findall(r'"rounds": ?(\d)', kept.read_text())) == {"3"}
    assert result.report["data"]["left_out"] == [1]
    assert [(one["a"], one["b"]) for one in result.report["data"]["pairs"]] == [(0, 2)]


def test_of_two_ranks_the_one_that_computes_well_is_not_kept_waiting() -> None:
    result = isolate("--nproc", "2", "--size", "1MiB", "--inject", "wrong-compute:1")
    assert result.report["data"]["outcome"] == "finished"
    assert [id for id, found in result.findings.items() if found["level"] == "fail"] == ["wrong-compute"], result.out
    wrong = result.findings["wrong-compute"]
    assert wrong["where"]["ranks"] == result.report["data"]["left_out"] == [1]
    assert "1 element of a 384x384 float32 product changed in repetition 2" in wrong["title"]


def test_a_slow_link_on_a_busy_machine() -> None:
    result = isolate_on_busy_cores(*PAIRS, "--inject", "slow:1-3")
    assert (result.code, list(result.findings)) == (1, ["bad-link"])
    assert classified(result)["links"] == [[1, 3]]


def test_a_link_that_drops_everything_is_found_without_computing() -> None:
    result = isolate(*PAIRS, "--inject", "block:1-3")
    check(result.out, 1)
    assert set(result.findings) - {"rank-paused"} == {"bad-link"}  # a busy machine pauses ranks, too
    assert (result.report["data"]["left_out"], len(result.report["data"]["pairs"])) == ([], 6)
    assert classified(result)["links"] == [[1, 3]]
    failed = [one for one in result.report["data"]["pairs"] if one["status"] == "failed"]
    assert [(one["a"], one["b"]) for one in failed] == [(1, 3)]
    # Whichever end gives up first closes the connection of the other.
    assert re.search("imed out|onnection closed by peer", failed[0]["error"])


@pytest.mark.timed
def test_two_groups_that_do_not_reach_each_other() -> None:
    result = isolate(*PAIRS, "--inject", "split:0-1")
    assert (result.code, list(result.findings)) == (1, ["split"])
    assert classified(result)["groups"] == [[0, 1], [2, 3]]
    assert classified(result)["ranks"] == []


def test_of_two_ranks_that_are_slow_none_is_blamed() -> None:
    result = isolate("--nproc", "2", "--size", "1MiB", "--no-compute", "--inject", "slow:all", "--expect", "0.1")
    # On a busy machine the pair may fail, and ranks pause.
    assert (result.code in (1, 3), set(result.findings) - {"rank-paused"}) == (True, {"undecidable"})
    assert result.findings["undecidable"]["fix"]["text"]


def test_a_rank_that_dies_meanwhile_is_named() -> None:
    run = begin("--nproc", "3", "--size", "128MiB", "--no-compute")
    run.wait_for("pairs: all ranks")
    os.kill(run.pid_of_rank(2), signal.SIGKILL)
    result = run.finish()
    assert (result.code, list(result.findings)) == (1, ["rank-died"])
    assert result.findings["rank-died"]["where"]["ranks"] == [2]
    assert result.report["data"]["classification"] is None


def test_on_several_nodes_ranks_meet_inside_and_across(network: Network) -> None:
    wrap, env = tuple(network.client.command()), network.client_env()
    where = ("--hosts", network.hosts, "--via", network.via, "--nproc", "2", "--size", "256KiB", "--no-compute")
    result = isolate(*where, "--inject", "block:2", env=env, wrap=wrap)
    assert (result.code, classified(result)["ranks"]) == (1, [2])
    assert set(result.findings) - {"rank-paused"} == {"bad-rank"}
    pairs = {(one["a"], one["b"]): one["level"] for one in result.report["data"]["pairs"]}
    assert pairs == {
        (0, 1): "node", (2, 3): "node", (0, 2): "net", (1, 3): "net",
    }  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("--inject", "kill:1"),
        ("--inject", "slow:"),
        ("--inject", "block:1-2-3"),
        ("--inject", "slow:9"),
        ("--size", "1KiB"),
        ("--memory", "0.5"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = isolate("--nproc", "2", *arguments)
    assert result.code == 2
    assert result.report["error"]["message"]


def test_a_rank_that_is_stopped_for_40_of_every_60_ms_is_named() -> None:
    """Its best times are as good as the others'."""
    running = begin(*PAIRS, "--stall", "60")
    stopper = (
        "import os, signal, sys, time\n"
        "while True:\n"
        "    os.kill(int(sys.argv[1]), signal.SIGSTOP); time.sleep(0.04)\n"
        "    os.kill(int(sys.argv[1]), signal.SIGCONT); time.sleep(0.02)\n"
    )
    pid = str(running.pid_of_rank(1))
    # It ends by itself when the rank is gone.
    with subprocess.Popen([sys.executable, "-c", stopper, pid], stderr=subprocess.DEVNULL) as program:
        try:
            result = running.finish()
        finally:
            program.kill()
    assert result.code == 1
    assert result.findings["rank-paused"]["where"]["ranks"] == [1]
