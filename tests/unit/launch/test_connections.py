"""Ranks accused by broken connections, and mere witnesses; from facts, and one real unanswered socket."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from loops import each

from distdiag.agent.tcp_probe import _VERDICTS, ProbeResult, Target, TcpProbe
from distdiag.cluster.records import Payload, RankEnded, RankEvent, RankInspected, StuckSocket
from distdiag.cluster.rendezvous_test import NetworkPath, PathTest, RendezvousTest
from distdiag.commands.gpu_test.diagnose import diagnose
from distdiag.commands.gpu_test.types import Request
from distdiag.diagnosis.connectivity import Case, path_findings
from distdiag.diagnosis.finding_ids import declared
from distdiag.facts.network import sockets
from distdiag.facts.network.interfaces import Names, Network
from distdiag.facts.network.nics import Nic
from distdiag.knowledge import logs
from distdiag.launch.environment_checks import networks_that_differ
from distdiag.launch.plan import make_plan
from distdiag.launch.rank_runs import Outcome, RankTimeline
from distdiag.launch.record import Inventory, NodeSlot, RunRecord
from distdiag.launch.types import Device, Gpus, NodeFacts
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.gpu_test.types import GpuTest
    from distdiag.report import Finding, Report

HOSTS = ("node1", "node2", "node3")
GLOO = (
    "[/__w/pytorch/gloo/transport/tcp/pair.cc:537] Read error [{}]:16535: Connection reset by peer. "
    "This is typically caused by a remote worker hanging or crashing."
)
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:1691, remote process exited or there was a network error, NCCL version 2.27.3 "
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely. "
    "Last error: socketProgress: Connection closed by remote peer {}"
)


def network(number: int) -> Network:
    eth0 = Nic("eth0", "ethernet", (f"10.77.0.{number}/16",), True, True, 1500, None, True)
    return Network((eth0,), Names(f"node{number}", (), "", ""), None, "", "", ("nft",))


def meeting(*paths: NetworkPath) -> RendezvousTest:
    return RendezvousTest(
        head="node1",
        hosts={host: host for host in HOSTS},
        address="10.77.0.1",
        port=29500,
        networks={host: network(number) for number, host in enumerate(HOSTS, 1)},
        paths=list(paths),
    )


def trace(
    rank: int, *, said: str = "", stuck: Sequence[str] = (), tail: str = "", state: str = "ESTABLISHED"
) -> RankTimeline:
    waits = RankEvent(rank=0, stage="reduce", at=3, note="all_reduce of 64 bytes", waiting=True, elapsed_s=1.0)
    gave_up = cast("Payload", {"trouble": {"kind": "exception", "message": said}, "fatal": True})
    events = [
        waits,
        *(
            [RankEvent(rank=0, stage="reduce", at=4, note="", waiting=False, elapsed_s=1.0, payload=gave_up)]
            * bool(said)
        ),
    ]
    ill = tuple(StuckSocket(remote=remote, state=state, retransmits=7, unanswered_bytes=96) for remote in stuck)
    look = RankInspected(rank=0, state="S", wait_channel="", frames=(), stack_error="no", tail="", stuck=ill)
    ended = RankEnded(rank=0, status=-6, elapsed_s=1.0, tail=tail, oom_kills=0) if tail else None
    return RankTimeline(
        rank=rank, local_rank=0, host=HOSTS[rank], pid=9, events=events, inspection=None if said or tail else look,
        ending=ended,
    )  # fmt: skip


def judged(outcome: Outcome, *traces: RankTimeline) -> tuple[Finding, Report[GpuTest]]:
    facts = NodeFacts("node", "6.1", "python3", Gpus(False, 0), None, 2**33, 2**33, 2**33)
    places = [NodeSlot(node=host, host=host, slots=1, facts=facts) for host in HOSTS]
    plan = make_plan(Request(nproc=1, device=Device.CPU), places)
    course = RunRecord(outcome, list(traces), {}, 30.0, meeting())
    report = diagnose(Request(device=Device.CPU), Inventory(places=tuple(places)), plan, course)  # type: ignore[arg-type]
    (found,) = report.findings
    return found, report


@pytest.mark.parametrize(
    "traces",
    [
        (trace(0, said=GLOO.format("10.77.0.3")), trace(1, said=GLOO.format("::ffff:10.77.0.3")), trace(2)),
        (trace(0, said=NCCL.format("node3<46588>")), trace(1, tail=GLOO.format("10.77.0.3")), trace(2)),
    ],
)
def test_cut_connections_accuse_the_node_that_all_of_them_lead_to(traces: tuple[RankTimeline, ...]) -> None:
    found, report = judged(Outcome.FAULT, *traces)
    assert (found.id, found.where.hosts) == ("gpu-test.connections-cut", ("node3",))
    assert found.witnesses.hosts == ("node1", "node2")
    statuses = [rank.status for rank in report.data.ranks[:2]]
    assert statuses == ["waiting", "waiting"]


@pytest.mark.parametrize("second", [trace(1), trace(1, said=GLOO.format("10.77.0.3"))])
def test_a_node_that_may_have_been_lost_because_it_lost_another_is_not_accused_alone(second: RankTimeline) -> None:
    traces = trace(0, said=GLOO.format("10.77.0.3")), second, trace(2, said=GLOO.format("10.77.0.2"))
    found, _ = judged(Outcome.FAULT, *traces)
    assert (found.id, found.where.hosts) == ("gpu-test.connections-cut", ("node3", "node2"))
    assert found.witnesses.hosts == ()
    assert "between node[2-3]" in found.title


def test_whom_a_rank_lost_that_had_given_up_before_is_not_accused() -> None:
    traces = trace(0, said=GLOO.format("10.77.0.3")), trace(1, said=GLOO.format("10.77.0.1")), trace(2)
    for number, one in enumerate(traces[:2]):
        one.over_at = float(number)
    found, _ = judged(Outcome.FAULT, *traces)
    assert found.where.hosts == ("node1", "node3")  # the two ends of the one connection that broke by itself


def test_between_two_nodes_both_ends_are_named() -> None:
    found, _ = judged(Outcome.FAULT, trace(0, said=GLOO.format("10.77.0.2")), trace(1), trace(2))
    assert (found.where.hosts, found.witnesses.hosts) == (("node1", "node2"), ())


def test_an_error_that_names_nobody_and_a_rank_that_died_are_judged_as_before() -> None:
    found, _ = judged(Outcome.FAULT, trace(0, said="Connection reset by peer"), trace(1), trace(2))
    assert found.id == "gpu-test.rank-failed"
    found, _ = judged(Outcome.FAULT, trace(0, said=GLOO.format("10.77.0.3")), trace(1), trace(2, tail="Segmentation"))
    assert (found.id, found.where.ranks) == ("gpu-test.rank-died", (2,))


def test_what_the_kernels_send_again_accuses_the_node_that_does_not_answer() -> None:
    found, _ = judged(Outcome.STALLED, trace(0, stuck=["10.77.0.3:41"]), trace(1, stuck=["10.77.0.3:42"]), trace(2))
    assert (found.id, found.where.hosts, found.where.ranks) == ("gpu-test.all-waiting", ("node3",), (2,))
    assert found.witnesses.ranks == (0, 1)
    assert "connected to 10.77.0.3:41, 96 bytes without an answer" in found.evidence[0]


def probe(verdict: str, route: str = "") -> ProbeResult:
    return ProbeResult(
        "", "10.77.0.1", 29500, verdict, "invalid argument", ("10.77.0.1",), "", "eth0", "", None, 1, 0, route=route
    )


@pytest.mark.parametrize("verdict", ["no-route", "no-port"])
def test_what_a_nodes_own_kernel_refuses_is_its_own_and_no_firewall(verdict: str) -> None:
    closed = NetworkPath(source="node3", target="node1", purpose="port", probe=probe(verdict))
    unanswered = NetworkPath(source="node1", target="node3", purpose="port", probe=probe("filtered"))
    paths = [closed, unanswered] if verdict == "no-route" else [closed]
    (found,) = path_findings(
        Case(command="gpu-test", test=meeting(*paths), head="node1", rendezvous_port=29500, again=str)
    )
    assert (found.id, found.where.hosts) == (f"gpu-test.port-{verdict}", ("node3",))
    assert found.witnesses.hosts == ("node1",)
    assert found.fix is not None
    assert not any("nft" in command or "allow TCP" in found.fix.text for command in found.fix.commands)


@each("verdict", _VERDICTS)
def test_each_answer_of_all_paths_gives_declared_ids(verdict: str) -> None:
    hosts = ("n0", "n1", "n2")
    ends = [(source, target) for source in hosts for target in hosts if source != target]
    paths = [
        NetworkPath(source=source, target=target, purpose=purpose, probe=probe(verdict))
        for source, target in ends
        for purpose in ("port", "ranks")
    ]
    test = PathTest(hosts={host: host for host in hosts}, networks={}, addresses={}, paths=paths)
    found = path_findings(Case(command="ports", test=test, head="n0"))
    assert {str(finding.id) for finding in found} <= declared().keys()
    assert found or verdict == "ok"


def test_a_node_that_is_too_busy_to_answer_is_no_firewall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # its kernel accepts, but no process reads
        port = listener.getsockname()[1]
        asked = TcpProbe(Target("port", "127.0.0.1", port), "key", time.monotonic() + 0.2).run()
        late = TcpProbe(Target("port", "127.0.0.1", port), "key", time.monotonic() - 1).run()
    assert (asked.verdict, late.verdict) == ("busy", "busy"), "no packet was lost; none was sent"
    of_node1 = replace(asked, resolved=("10.77.0.1",))
    sources = ("node2", "node3")
    paths = [NetworkPath(source=source, target="node1", purpose="port", probe=of_node1) for source in sources]
    (found,) = path_findings(Case(command="gpu-test", test=meeting(*paths)))
    assert (found.id, found.level, found.where.hosts) == ("gpu-test.no-answer", Level.UNKNOWN, ("node1",))
    assert found.witnesses.hosts == ("node2", "node3")


def test_a_real_connection_that_nobody_answers_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as other, socket.socket() as own:
        other.connect(full.getsockname())  # the backlog is full now: the kernel drops what comes, and says nothing
        own.setblocking(False)
        assert own.connect_ex(full.getsockname()) == errno.EINPROGRESS
        (found,) = sockets.stuck(os.getpid())
        assert found["state"] == "SYN_SENT"
        assert found["remote"] == f"127.0.0.1:{full.getsockname()[1]}"


@each(
    "line",
    [  # as NCCL 2.8, 2.19, 2.21, 2.25 and 2.29 write it
        "NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
        "NET/IB : Got completion from peer 10.2.0.5<42281> with error 12, opcode 0, len 0, vendor err 129 (Recv)",
        "NET/IB : Got completion from peer 10.2.0.5<42281> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
        "NET/IB: Got completion from peer 10.2.0.5<4> with status=12 opcode=0 len=0 vendor err 129 (Recv) hca mlx5_0",
        "NET/IB: Got completion from peer 10.2.0.5<4> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=0 vendor_err=129",
    ],
)
def test_error_12_of_infiniband_is_known_in_all_its_spellings(line: str) -> None:
    known = logs.recognise(f"ncclRemoteError: A call failed. Last error: {line}")
    assert known is not None
    assert known.role == "cause"
    assert "error 12" in known.means


def test_a_flushed_request_is_never_the_cause() -> None:
    known = logs.recognise("NET/IB : Got completion with error 5, opcode 0, len 0, vendor err 249")
    assert known is not None
    assert known.role == "consequence"


def test_nodes_in_two_networks_are_told_apart() -> None:
    seen = meeting()
    seen.interfaces = dict.fromkeys(HOSTS, "eth0")
    assert networks_that_differ(Request(), seen) == []
    other = Nic("eth0", "ethernet", ("10.99.0.3/16",), True, True, 1500, None, True)
    seen.networks["node3"] = replace(seen.networks["node3"], interfaces=(other,))
    (found,) = networks_that_differ(Request(), seen)
    assert (found.id, found.where.hosts) == ("gpu-test.networks-differ", ("node3",))
    assert "10.99.0.0/16 on node3" in found.title
