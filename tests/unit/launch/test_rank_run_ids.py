"""gpu-test and allreduce-bench: records of runs in, finding ids and levels out."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distdiag.cluster.acceptor import Acceptor
from distdiag.cluster.links import SocketLink
from distdiag.cluster.records import PairMessage, Payload, RankEnded, RankEvent
from distdiag.cluster.rendezvous_test import RendezvousTest
from distdiag.commands.allreduce_bench import diagnose as bench
from distdiag.commands.allreduce_bench.formulas import NO_PEER
from distdiag.commands.allreduce_bench.types import Request as BenchRequest
from distdiag.commands.gpu_test import diagnose as gpu_test
from distdiag.commands.gpu_test.isolate import diagnose as isolate
from distdiag.commands.gpu_test.isolate.types import Request as IsolateRequest
from distdiag.commands.gpu_test.types import Request as GpuTestRequest
from distdiag.errors import DistdiagError
from distdiag.facts.network.interfaces import Names, Network
from distdiag.facts.network.nics import Nic
from distdiag.facts.process.rank_identity import Identity
from distdiag.launch import findings, under_launcher
from distdiag.launch.environment_checks import hangs, surroundings
from distdiag.launch.join import JoinTransport
from distdiag.launch.plan import make_plan
from distdiag.launch.rank_runs import Outcome, RankTimeline
from distdiag.launch.record import Inventory, NodeSlot, Plan, RunRecord
from distdiag.launch.types import Backend, Device, Fault, Gpus, NodeFacts

if TYPE_CHECKING:
    from distdiag.report import Report

GIB = 2**30
COMMANDS = {"gpu-test": GpuTestRequest(), "allreduce-bench": BenchRequest()}
GPU = {"device": "cuda:0", "device_name": "NVIDIA H100 80GB HBM3"}


def slot(host: str, gpus: int = 0, **variables: str) -> NodeSlot:
    facts = NodeFacts(
        host=host,
        kernel="6.1",
        python="/usr/bin/python3",
        gpus=Gpus(driver_present=gpus > 0, visible=gpus),
        cuda_visible_devices=None,
        memory_available_bytes=2**40,
        shm_free_bytes=2**33,
        shm_total_bytes=2**33,
    )
    return NodeSlot(node=host, host=host, slots=None, facts=replace(facts, variables=variables))


def network(host: str, address: str) -> Network:
    eth0 = Nic("eth0", "ethernet", (f"{address}/24",), True, True, 1500, None, True)
    return Network((eth0,), Names(host, (address,), "", host), (32768, 60999), "", "", ())


def meeting(*addresses: str) -> RendezvousTest:
    """Make nodes n0, n1, ... with these addresses, and no closed path between them."""
    hosts = [f"n{number}" for number in range(len(addresses))]
    return RendezvousTest(
        head="n0",
        hosts=dict(zip(hosts, hosts, strict=True)),
        address=addresses[0],
        port=29500,
        networks={host: network(host, address) for host, address in zip(hosts, addresses, strict=True)},
        interfaces=dict.fromkeys(hosts, "eth0"),
    )


def step(stage: str, **payload: Any) -> RankEvent:  # noqa: ANN401 - any JSON
    return RankEvent(rank=0, stage=stage, at=1, note="a step", waiting=False, elapsed_s=1.0, payload=Payload(**payload))  # type: ignore[typeddict-item]


def row(*seconds: float, skipped: str = "") -> RankEvent:
    if skipped:
        return step("bench", row={"number": 1, "skipped": skipped})
    times = [round(each * 1e9) for each in seconds]
    own = {"number": 1, "wrong": 0, "late_ns": 0, "inside_ns": times[0], "iterations": len(times), "times_ns": times}
    return step("bench", row=own)


DONE = step("done", finished=True)


def rank(number: int, *events: RankEvent, host: str = "n0", status: int = 0, tail: str = "") -> RankTimeline:
    ending = RankEnded(rank=0, status=status, elapsed_s=2.0, tail=tail, oom_kills=0)
    return RankTimeline(rank=number, local_rank=0, host=host, pid=100, events=list(events), ending=ending)


def plan_of(ranks: int, *slots: NodeSlot, gpus: bool = False) -> Plan:
    own = GpuTestRequest(nproc=ranks) if gpus else GpuTestRequest(nproc=ranks, device=Device.CPU, backend=Backend.GLOO)
    plan = make_plan(own, slots)
    assert isinstance(plan, Plan)
    return plan


def found(report: Report[Any]) -> set[tuple[str, str]]:
    return {(str(finding.id), str(finding.level)) for finding in report.findings}


def ran(*traces: RankTimeline, at: RendezvousTest | None = None) -> RunRecord:
    outcome = Outcome.FINISHED if all(trace.finished for trace in traces) else Outcome.FAULT
    return RunRecord(outcome, list(traces), {}, 0.0, at)


def judged(command: str, course: RunRecord, *slots: NodeSlot) -> set[tuple[str, str]]:
    gpus = any(place.facts.gpus.visible for place in slots)
    plan, scene = plan_of(len(course.traces) // len(slots), *slots, gpus=gpus), Inventory(places=slots)
    if command == "gpu-test":
        return found(gpu_test.diagnose(GpuTestRequest(), scene, plan, course))
    return found(bench.diagnose(BenchRequest(sizes=(4 * GIB,)), scene, plan, course))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_of_these_runs_has_its_id(command: str) -> None:
    def broken(**trouble: object) -> RankTimeline:
        return rank(0, step("start", trouble=trouble, fatal=True), status=1)

    lost = "Read error [10.0.0.1]:40115: Connection reset by peer"
    cut = broken(kind="exception", message="[pair.cc:547] Connection closed by peer [10.0.1.1]:40114")
    gone = broken(kind="cuda-unavailable", message="no CUDA-capable device is detected", built_for="12.8")
    corrupt = broken(kind="memory-corrupt", chunks=[3], chunk_bytes=GIB)
    memory = broken(kind="out-of-memory", message="CUDA out of memory. Tried to allocate 2.00 GiB")
    torch = broken(kind="no-torch", message="No module named 'torch'", missing=True)
    other = broken(kind="exception", message="ValueError: it cannot go on")
    fine = (rank(0, row(0.001), DONE), rank(1, row(0.001), DONE, host="n1"))
    apart = meeting("10.0.0.1", "10.0.1.1")
    cases = {
        ("connections-cut", "fail"): ran(cut, rank(1, host="n1", status=1, tail=lost), at=apart),
        ("cuda-unavailable", "fail"): ran(gone, rank(1, host="n1")),
        ("memory-corrupt", "fail"): ran(corrupt, rank(1, host="n1")),
        ("no-torch", "fail"): ran(torch, rank(1, host="n1")),
        ("out-of-memory", "fail"): ran(memory, rank(1, host="n1")),
        ("rank-failed", "fail"): ran(other, rank(1, host="n1")),
        ("networks-differ", "info"): ran(*fine, at=apart),
    }
    two = (slot("n0"), slot("n1"))
    for (id_, level), course in cases.items():
        ids = judged(command, course, *two)
        assert (f"{command}.{id_}", level) in ids, (id_, ids)
    healthy = ran(*fine, at=meeting("10.0.0.1", "10.0.0.2"))
    assert judged(command, healthy, *two) == {(f"{command}.cpu-only", "info")}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_limits_of_a_test_have_their_ids(command: str) -> None:
    request = replace(COMMANDS[command], fault=Fault(option="kill:0", kind="kill", ranks=(0,)))
    crowded = replace(slot("n0"), facts=replace(slot("n0").facts, shm_free_bytes=2**20))
    found = surroundings(request, plan_of(1, crowded), [crowded])
    assert [(each.id.removeprefix(f"{command}."), each.level) for each in found] == [
        ("injected", "info"),
        ("cpu-only", "info"),
        ("single-rank", "info"),
        ("shm-small", "warn"),
    ]


def joined_by(*ranks: int) -> JoinTransport:
    """Make the transport of rank 0, in a job that expects no rank but itself."""
    hub = Acceptor("key")
    transport = JoinTransport(hub, b"", patience_s=1.0)
    for number in ranks:
        ours, theirs = socket.socketpair()
        hub.joined({"rank": number}, SocketLink(ours))
        theirs.close()
    transport.close()
    return transport


@pytest.mark.parametrize("command", COMMANDS)
def test_each_reason_not_to_start_has_its_id(command: str) -> None:
    request = COMMANDS[command]
    differs = hangs(request, [slot("n0"), slot("n1", TORCH_DISTRIBUTED_DEBUG="DETAIL")])
    assert differs is not None
    no_rank = findings.not_started(DistdiagError("the agent on n1 ended", hint="look at n1"), request)
    nested = under_launcher._nested(Identity("Open MPI", 0, 2, 0, 2), 4, request)
    (double,) = under_launcher._doubles(joined_by(1, 1), request)
    cases = {"debug-differs": differs, "not-started": no_rank, "nested-launchers": nested, "rank-double": double}
    assert [each.id for each in cases.values()] == [f"{command}.{id_}" for id_ in cases]
    assert [each.level for each in cases.values()] == ["fail", "unknown", "fail", "fail"]


def test_each_of_these_rows_has_its_id() -> None:
    """220 GB/s on 8 H100, where 365 are usual; a quarter of the iterations 20 times slower; no times at all."""
    started = step("start", started=GPU)
    low = row(*[4 * GIB * 1.75 / 220e9] * 20)
    slow = row(*[0.001] * 15, *[0.02] * 5)
    skipped, alone, large = (
        ran(*(rank(number, row(skipped=why), DONE) for number in range(2)))
        for why in ("gloo has no reduce_scatter", NO_PEER, "it needs 8589934592 bytes")
    )
    cases = {
        ("bandwidth-low", "warn"): (ran(*(rank(number, started, low, DONE) for number in range(8))), slot("n0", 8)),
        ("unsteady", "warn"): (ran(*(rank(number, slow, DONE) for number in range(2))), slot("n0")),
        ("unsupported", "warn"): (skipped, slot("n0")),
        ("nothing-measured", "unknown"): (skipped, slot("n0")),
        ("alone", "info"): (alone, slot("n0")),
        ("too-large", "info"): (large, slot("n0")),
    }
    for (id_, level), (course, place) in cases.items():
        ids = judged("allreduce-bench", course, place)
        assert (f"allreduce-bench.{id_}", level) in ids, (id_, ids)
    without_rows = ran(*(rank(number, started, DONE) for number in range(2)))  # as in damaged facts
    assert ("allreduce-bench.nothing-measured", "unknown") in judged("allreduce-bench", without_rows, slot("n0"))


def pair(a: int, b: int, bandwidth: float) -> PairMessage:
    return {"a": a, "b": b, "level": "net", "bandwidths": [bandwidth] * 10, "failed": False, "wrong": 0, "error": ""}


@pytest.mark.parametrize(
    ("id_", "slow"),
    [
        ("gpu-test.bad-node", {(0, 4), (1, 4), (2, 4), (3, 4)}),
        ("gpu-test.several", {(0, 4), (1, 4), (2, 4), (3, 4), (0, 1)}),
    ],
)
def test_slow_pairs_have_the_id_of_their_culprit(id_: str, slow: set[tuple[int, int]]) -> None:
    """One rank on each node: a slow rank is its node."""
    edges = [(a, b) for a in range(5) for b in range(a + 1, 5)]
    told = [pair(a, b, 1e8 if (a, b) in slow else 1e9) for a, b in edges]
    slots = tuple(slot(f"n{number}") for number in range(5))
    course = ran(*(rank(number, step("pairs", pairs=told), DONE, host=f"n{number}") for number in range(5)))
    report = isolate.diagnose(IsolateRequest(), Inventory(places=slots), plan_of(1, *slots), course)
    assert (id_, "fail") in found(report)
