"""NCCL's RAS service, asked and judged: ranks that lag are named, never those ahead; a job that moves is not hung."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hang_facts import judge as judge_hang
from hang_facts import node, waiting
from support import wait_until

from distdiag.diagnosis.ras import RasState, judge, parse
from distdiag.diagnosis.stuck.types import Source, Stand
from distdiag.facts.recorder.nccl_ras import RasFacts, Reading, addresses, read

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).parents[2] / "programs" / "answers_as_nccl_ras.py"


@contextmanager
def service(scenario: str, folder: Path, port: int = 0) -> Iterator[str]:
    place = folder / "port"
    place.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, str(PROGRAM), str(place), scenario, str(port)])
    try:
        wait_until(lambda: place.exists() and place.read_text().endswith("\n"), 30, lambda: "the service did not start")
        yield f"127.0.0.1:{place.read_text().strip()}"
    finally:
        process.kill()
        process.wait()


def asked(scenario: str, folder: Path, timeout_s: float = 60.0) -> RasFacts:
    with service(scenario, folder) as address:
        return read(address, timeout_s=timeout_s, apart_s=0.05)


# By scenario: the state, and the ranks that lag, are dead or missing.
TRUTH: dict[str, tuple[RasState, set[int]]] = {
    "healthy": (RasState.HEALTHY, set()),
    "lagging": (RasState.LAGGING, set(range(6))),
    "lagging_2.24": (RasState.LAGGING, set(range(6))),
    "ahead": (RasState.UNKNOWN, set(range(6, 32))),
    "one_ahead": (RasState.UNKNOWN, set(range(32)) - {7}),
    "one_behind": (RasState.LAGGING, {21}),
    "moving": (RasState.MOVING, set()),
    "dead": (RasState.DEAD, {29}),
    "missing": (RasState.MISSING, {21}),
    "left": (RasState.ABORTED, set()),
    "json_healthy": (RasState.HEALTHY, set()),
    "json_moving": (RasState.MOVING, set()),
    "json_lagging": (RasState.LAGGING, {37, 900}),
    "json_lagging_moves": (RasState.MOVING, set()),
    "json_ahead": (RasState.UNKNOWN, set(range(1024)) - {5}),
    "json_dead": (RasState.DEAD, {5}),
    "json_silent": (RasState.MISSING, {5, 6}),
    "garbage": (RasState.UNKNOWN, set()),
    "huge": (RasState.UNKNOWN, set()),
    "cut": (RasState.UNKNOWN, set()),
}


@pytest.mark.parametrize("scenario", TRUTH)
def test_exactly_the_ranks_that_lag_or_are_lost_are_named(scenario: str, tmp_path: Path) -> None:
    verdict = judge(asked(scenario, tmp_path))
    named = {rank for lag in verdict.lags for rank in lag.lagging}
    named |= {member.rank for member in (*verdict.dead, *verdict.missing)}
    assert (verdict.state, named) == TRUTH[scenario], verdict


def test_the_host_and_pid_of_a_lagging_rank_lead_to_its_stack(tmp_path: Path) -> None:
    (lag,) = judge(asked("json_lagging", tmp_path)).lags
    assert [(member.host, member.pid, member.gpu) for member in lag.members] == [
        ("10.0.0.5", 4037, "5"),
        ("10.0.0.113", 4900, "4"),
    ]
    assert (lag.operation, lag.behind, lag.ahead, lag.n_lagging, lag.n_ahead) == ("AllReduce", 6648, 6649, 2, 1022)


@pytest.mark.parametrize("scenario", ["job_healthy", "job_ahead", "job_dead"])
def test_hang_blames_no_rank_that_nobody_waits_for_or_whose_process_is_there(scenario: str, tmp_path: Path) -> None:
    report = judge_hang(node(waiting(), waiting(), waiting(), ras=(asked(scenario, tmp_path),)))
    stands = {row.source: row.stand for row in report.data.sources}
    assert (report.data.ranks, stands[Source.RAS]) == ((), Stand.CANNOT_TELL), report.data.sources


@pytest.mark.parametrize("scenario", ["no_handshake", "no_status", "endless_line", "other_service", "trickle"])
def test_a_service_that_is_silent_or_lies_costs_the_deadline_and_proves_nothing(scenario: str, tmp_path: Path) -> None:
    began = time.monotonic()
    facts = asked(scenario, tmp_path, timeout_s=2.0)
    took = time.monotonic() - began
    assert judge(facts).state in (RasState.UNKNOWN, RasState.NOT_AVAILABLE), facts
    assert facts.error or facts.readings[0].error
    assert took < 20  # 2 s, and the start of the service on a busy machine


def test_no_service_is_not_available_and_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    verdict = judge(read(f"127.0.0.1:{port}", timeout_s=5))
    assert (verdict.state, verdict.why) == (RasState.NOT_AVAILABLE, "connection refused")
    assert judge(read("nonsense")).state is RasState.NOT_AVAILABLE
    assert judge(read("[::1")).state is RasState.NOT_AVAILABLE


@pytest.mark.parametrize("answer", [b"", b"\x15\x03\x03\x00\x02\x02\x0a"])
def test_a_service_that_closes_at_once_may_want_tls(answer: bytes) -> None:
    """OpenSSL closes a connection that begins with text, after an alert or without one."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close() -> None:
            with server.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=close)
        thread.start()
        facts = read(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=20)
        thread.join()
    assert "before it answered" in facts.error
    assert "ncclSetEncryption" in facts.error


def test_where_the_service_listens_comes_from_the_environment_of_the_ranks() -> None:
    assert addresses([{}, {}]) == ["localhost:28028"]
    assert addresses([{"NCCL_RAS_ADDR": "10.0.0.1:5000"}, {}]) == ["10.0.0.1:5000", "localhost:28028"]
    assert addresses([{"NCCL_RAS_ENABLE": "0"}]) == []


def test_one_reading_is_not_enough_to_name_a_rank(tmp_path: Path) -> None:
    facts = asked("json_lagging", tmp_path)
    alone = RasFacts(facts.address, facts.protocol, facts.readings[:1])
    assert judge(alone).state is RasState.UNKNOWN
    broken = RasFacts(facts.address, facts.protocol, (facts.readings[0], Reading("", "json", 1.0, "no answer in time")))
    assert judge(broken).state is RasState.UNKNOWN


def two(document: str) -> RasFacts:
    return RasFacts("x:1", 2, (Reading(document, "json"), Reading(document, "json", 1.0)))


def communicator(name: str, counts: dict[int, dict[str, int]]) -> str:
    ranks = [
        {
            **{"rank": place, "host": "h", "pid": process, "cuda_dev": process, "nvml_dev": process},
            **{"status": {}, "collective_counts": each},
        }
        for place, (process, each) in enumerate(counts.items())
    ]
    return json.dumps({"hash": name, "size": len(counts), "ranks": ranks, "missing_ranks": []})


def job(*communicators: str) -> RasFacts:
    return two(f'{{"nccl_version": "2.29.3", "communicators": [{",".join(communicators)}], "ras": {{}}}}')


def test_a_rank_that_waits_in_another_communicator_is_not_blamed() -> None:
    """Process 3 has not reached its pair's AllReduce; process 2 waits there, so it is behind in the world group."""
    world = communicator("world", {pid: {"AllReduce": 10 - (pid in (2, 3))} for pid in range(1, 9)})
    pair = communicator("pair", {2: {"AllGather": 5}, 3: {"AllGather": 4}})
    verdict = judge(job(world, pair))
    assert verdict.state is RasState.LAGGING
    assert {member.pid for lag in verdict.lags for member in lag.members} == {3}


def test_ranks_that_wait_for_each_other_in_two_communicators_are_no_stragglers() -> None:
    first = communicator("a", {1: {"AllReduce": 5}, 2: {"AllReduce": 4}})
    second = communicator("b", {1: {"AllReduce": 7}, 2: {"AllReduce": 8}})
    assert judge(job(first, second)).state is RasState.UNKNOWN


def test_ranks_that_call_different_collectives_are_not_behind() -> None:
    calls = {pid: {"AllReduce": 10, "AllGather": 3} for pid in range(1, 8)}
    calls[8] = {"AllReduce": 9, "AllGather": 4}
    verdict = judge(job(communicator("world", calls)))
    assert verdict.state is RasState.UNKNOWN
    assert "behind in one operation and ahead in another" in verdict.why


def test_damaged_answers_are_unknown_or_parsed_and_never_raise(tmp_path: Path) -> None:
    dice = random.Random(28)
    for scenario in ("json_dead", "lagging", "dead", "missing", "left"):
        original = asked(scenario, tmp_path).readings[0]
        text = original.text if len(original.text) < 20_000 else original.text[:9000] + original.text[-9000:]
        for _ in range(100):
            at, length = dice.randrange(len(text)), dice.choice((1, 1, 5, 50))
            piece = dice.choice(("", "-1", "9" * 400, '"', "{", "null", "\x00", "\n", "[[[["))
            damaged = Reading(text[:at] + piece + text[at + length :], original.form)
            with suppress(ValueError):
                parse(damaged)
            judge(RasFacts("x:1", 2, (damaged, damaged)))
