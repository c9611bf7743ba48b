"""Conclusions about hosts and the paths between them, from facts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.agent.tcp_probe import ProbeResult
from distdiag.cluster.host_results import HostError, HostResult, HostState
from distdiag.cluster.rendezvous_test import LookUp, NetworkPath, RendezvousTest
from distdiag.diagnosis.connectivity import Case, path_findings, slow_links
from distdiag.diagnosis.hosts.drift import differences
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.facts.network.interfaces import Names, Network
from distdiag.facts.network.nics import Nic
from distdiag.facts.process.rank_identity import contradiction, nested_tasks
from distdiag.report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Callable


def network(name: str, *, own: str = "10.0.0.9", tools: tuple[str, ...] = ("ufw",)) -> Network:
    eth0 = Nic("eth0", "ethernet", ("10.0.0.9/24",), True, True, 9000, None, True)
    return Network((eth0,), Names(name, (own,), "", name), (32768, 60999), "", "", tools)


def probe(verdict: str, *, port: int = 29500, resolved: str = "10.0.0.1", sent_again: int = 0) -> ProbeResult:
    return ProbeResult(
        key="",
        address="10.0.0.1",
        port=port,
        verdict=verdict,
        error="",
        resolved=(resolved,),
        local_address="10.0.0.9",
        interface="eth0",
        said="",
        latency_s=0.001,
        attempts=1,
        retransmits=sent_again,
        bulk_bytes=2**16,
    )


def meeting(*paths: NetworkPath, own: str = "10.0.0.9") -> RendezvousTest:
    nodes = ("n1", "n2", "n3")
    return RendezvousTest(
        head="n1",
        hosts={name: name for name in nodes},
        address="10.0.0.1",
        port=29500,
        networks={name: network(name, own=own) for name in nodes},
        paths=list(paths),
        interfaces=dict.fromkeys(nodes, "eth0"),
    )


def judged(subject: RendezvousTest, command: str = "gpu-test") -> list[Finding]:
    case = Case(
        command=command,
        test=subject,
        head=subject.head,
        rendezvous_port=subject.port,
        again=lambda extra: f"distdiag {command} {extra}",
    )
    return path_findings(case)


def to_head(source: str, verdict: str, purpose: str = "port") -> NetworkPath:
    return NetworkPath(source=source, target="n1", purpose=purpose, probe=probe(verdict))


def test_all_paths_open_is_no_news() -> None:
    assert judged(meeting(to_head("n2", "ok"), to_head("n2", "ok", "ranks"))) == []


CLOSED = {
    "filtered": ("port-filtered", "rank-ports-filtered", "path-filtered"),
    "refused": ("port-refused", "rank-ports-refused", "path-refused"),
    "rejected": ("port-rejected", "rank-ports-rejected", "path-rejected"),
    "silent": ("port-silent", "rank-ports-silent", "path-silent"),
    "broken": ("port-broken", "rank-ports-broken", "path-broken"),
    "cut-off": ("port-cut-off", "rank-ports-cut-off", "path-cut-off"),
    "no-route": ("port-no-route", "rank-ports-no-route", "path-no-route"),
    "no-port": ("port-no-port", "rank-ports-no-port", "path-no-port"),
}


@pytest.mark.parametrize("verdict", CLOSED)
@pytest.mark.parametrize("command", ["gpu-test", "allreduce-bench", "ports"])
def test_each_closed_path_has_an_id_by_its_ports(command: str, verdict: str) -> None:
    both = ("port", "ranks")
    for closed, id_ in zip((("port",), ("ranks",), both), CLOSED[verdict], strict=True):
        paths = [to_head("n2", verdict if purpose in closed else "ok", purpose) for purpose in both]
        paths += [to_head("n3", "ok", purpose) for purpose in both]
        (found,) = path_findings(Case(command=command, test=meeting(*paths), head="n1"))
        assert (found.id, found.level) == (f"{command}.{id_}", Level.FAIL)
        assert "{" not in found.title + found.detail
        assert "?" not in found.title + found.detail


def test_paths_of_doctor_and_other_answers_have_their_ids() -> None:
    def only(command: str, port: str, ranks: str) -> tuple[str, Level]:
        (found,) = judged(meeting(to_head("n2", port), to_head("n2", ranks, "ranks")), command)
        return found.id, found.level

    for verdict, (_, of_ranks, _) in CLOSED.items():
        assert only("doctor", "ok", verdict) == (f"doctor.{of_ranks}", "fail")
    others = {("ok", "lossy"): ("link-slow", "fail"), ("busy", "ok"): ("no-answer", "unknown")}
    for command in ("gpu-test", "allreduce-bench", "ports", "doctor"):
        for (port, ranks), (id_, level) in others.items():
            assert only(command, port, ranks) == (f"{command}.{id_}", level)


def test_one_node_that_is_cut_off_is_told_from_a_port_that_is_closed_to_all() -> None:
    (alone,) = judged(meeting(to_head("n2", "filtered"), to_head("n2", "filtered", "ranks"), to_head("n3", "ok")))
    assert "n3 can reach it" in alone.detail
    (closed,) = judged(meeting(to_head("n2", "filtered"), to_head("n2", "ok", "ranks"), to_head("n3", "filtered")))
    assert closed.title.startswith("n1 drops inbound packets on port 29500 (rendezvous)")
    assert "only this port is blocked" in closed.detail
    assert closed.fix is not None
    assert closed.fix.commands[0] == "sudo ufw allow proto tcp from 10.0.0.0/24 to any port 29500"


@pytest.mark.parametrize(("tool", "command"), [("ufw", "ufw status numbered"), ("iptables", "iptables -S INPUT")])
@pytest.mark.parametrize("unknown", ["..", "192.168.0.1/24"])
def test_no_port_is_opened_to_the_world_where_the_network_of_the_nodes_is_not_known(
    tool: str, command: str, unknown: str
) -> None:
    subject = meeting(*(to_head(source, "filtered") for source in ("n2", "n3")), to_head("n2", "ok", "ranks"))
    here = network("n", tools=(tool,))
    there = replace(here, interfaces=(replace(here.interfaces[0], addresses=(unknown,)),))
    subject.networks.update(n1=there, n2=there if unknown == ".." else here, n3=there)
    (closed,) = judged(subject)
    assert closed.fix is not None
    assert closed.fix.commands[0] == f"sudo {command}"


def test_a_few_packets_sent_again_are_no_fault_and_many_are() -> None:
    busy = NetworkPath(source="n2", target="n1", purpose="ranks", probe=probe("ok", sent_again=2))
    lossy = NetworkPath(source="n2", target="n1", purpose="ranks", probe=probe("ok", sent_again=9))
    hopeless = NetworkPath(source="n2", target="n1", purpose="ranks", probe=probe("lossy", sent_again=30))
    assert judged(meeting(busy)) == []
    assert [found.level for found in judged(meeting(lossy))] == [Level.WARN]
    assert [found.level for found in judged(meeting(hopeless))] == [Level.FAIL]


def test_loss_on_one_path_accuses_neither_end_and_on_all_paths_of_a_node_that_node() -> None:
    names = ("n1", "n2", "n3")
    pairs = [(a, b) for a in names for b in names if a != b]

    def paths(is_bad: Callable[[str, str], bool]) -> list[NetworkPath]:
        verdicts = {True: probe("lossy", sent_again=30), False: probe("ok")}
        return [NetworkPath(source=a, target=b, purpose="ranks", probe=verdicts[is_bad(a, b)]) for a, b in pairs]

    (one,) = judged(meeting(*paths(lambda a, b: {a, b} == {"n1", "n2"})))
    assert (one.level, one.where.hosts, set(one.witnesses.hosts)) == (Level.FAIL, (), {"n1", "n2"})
    assert one.title == "packet loss between n[1-2]"
    (all_of_it,) = judged(meeting(*paths(lambda a, b: "n2" in (a, b))))
    assert (all_of_it.level, all_of_it.where.hosts) == (Level.FAIL, ("n2",))


def test_a_slow_path_is_named_beside_the_others_and_below_the_rate_that_processes_explain() -> None:
    names = ("n1", "n2", "n3")
    pairs = [(a, b) for a in names for b in names if a != b]

    def named(seconds: Callable[[str, str], float], *, sent_again: int = 0) -> list[tuple[str, ...]]:
        bulk = replace(probe("ok", sent_again=sent_again), bulk_bytes=2**18)
        paths = [
            NetworkPath(source=a, target=b, purpose="ranks", probe=replace(bulk, bulk_s=seconds(a, b)))
            for a, b in pairs
        ]
        return [found.where.hosts for found in slow_links(Case(command="doctor", test=meeting(*paths), head="n1"))]

    assert named(lambda a, b: 0.02 if "n2" in (a, b) else 0.002) == [("n2",)]
    assert named(lambda a, b: 0.02 if {a, b} == {"n1", "n2"} else 0.002) == [()]
    assert named(lambda a, b: 0.05 if "n2" in (a, b) else 0.02) == []  # a busy machine
    assert named(lambda a, b: 0.008 if "n2" in (a, b) else 0.0002) == []  # above 25 MB/s
    assert named(lambda a, b: 0.02 if "n2" in (a, b) else 0.002, sent_again=30) == []  # loss is the cause


def test_large_packets_that_vanish_on_one_try_and_come_through_on_another_are_loss() -> None:
    def level_and_ids(back: ProbeResult, elsewhere: int = 0) -> list[tuple[str, tuple[str, ...]]]:
        paths = [
            NetworkPath(source="n2", target="n1", purpose="ranks", probe=probe("swallowed-up", sent_again=5)),
            NetworkPath(source="n1", target="n2", purpose="ranks", probe=back),
            NetworkPath(source="n2", target="n3", purpose="ranks", probe=probe("ok", sent_again=elsewhere)),
        ]
        return [(found.id, found.where.hosts) for found in judged(meeting(*paths))]

    blocked = probe("swallowed-down", sent_again=5)
    assert level_and_ids(blocked)[0][0] == "gpu-test.mtu-black-hole"
    assert level_and_ids(replace(probe("ok"), bulk_s=0.4)) == [("gpu-test.link-lossy", ())]
    assert level_and_ids(blocked, elsewhere=9)[0][0] == "gpu-test.link-lossy"


@pytest.mark.parametrize(("lost", "ids"), [(9, [("link-lossy", ("n2",))]), (0, [("rank-ports-silent", ("n2", "n1"))])])
def test_a_connection_that_stops_beside_loss_is_loss(lost: int, ids: list[tuple[str, tuple[str, ...]]]) -> None:
    paths = [
        NetworkPath(source="n2", target="n1", purpose="ranks", probe=probe("silent")),
        NetworkPath(source="n1", target="n2", purpose="ranks", probe=probe("ok")),
        NetworkPath(source="n2", target="n3", purpose="ranks", probe=probe("ok", sent_again=lost)),
        NetworkPath(source="n3", target="n1", purpose="ranks", probe=probe("ok")),
    ]
    found = [(each.id.partition(".")[2], each.where.hosts) for each in judged(meeting(*paths))]
    assert [(id_, set(hosts)) for id_, hosts in found] == [(id_, set(hosts)) for id_, hosts in ids]


def test_loss_elsewhere_does_not_make_loss_of_a_node_that_swallows_large_packets() -> None:
    hole = [
        NetworkPath(source=source, target="n3", purpose="ranks", probe=probe("swallowed-up", sent_again=3))
        for source in ("n1", "n2")
    ]
    busy = NetworkPath(source="n1", target="n2", purpose="ranks", probe=probe("ok", sent_again=9))
    found = judged(meeting(*hole, busy))
    assert ("gpu-test.mtu-black-hole", ("n3",)) in [(each.id, each.where.hosts) for each in found]


def test_a_name_that_leads_home_is_not_called_a_refusal() -> None:
    home = NetworkPath(source="n2", target="n1", purpose="port", probe=probe("refused", resolved="127.0.1.1"))
    assert [found.id for found in judged(meeting(home))] == ["gpu-test.address-loopback"]


@pytest.mark.parametrize("command", ["gpu-test", "allreduce-bench", "ports", "doctor"])
def test_names_that_torchrun_trips_over_are_warnings(command: str) -> None:
    (own,) = judged(meeting(to_head("n2", "ok"), own="127.0.1.1"), command)
    assert (own.id, own.level) == (f"{command}.name-loopback", Level.WARN)
    assert own.title.startswith("n[1-3]: own host name")
    unknown = meeting(to_head("n2", "ok"))
    unknown.lookups = [LookUp(node="n2", name="n1", addresses=(), error="no")]
    (elsewhere,) = judged(unknown, command)
    assert (elsewhere.id, elsewhere.where.hosts) == (f"{command}.name-unresolved", ("n2",))


def test_the_minority_is_the_news() -> None:
    facts: dict[str, dict[str, object]] = {f"n{i}": {"torch": "2.3.0", "GPUs": 8} for i in range(1, 9)}
    facts["n8"]["torch"] = "2.2.1"
    (difference,) = differences(facts)
    assert str(difference) == "torch: 2.2.1 on n8; 2.3.0 on n[1-7]"
    assert difference.odd_hosts == ("n8",)
    assert differences({"a": {"x": None}, "b": {}}) == ()


def test_the_same_trouble_of_many_hosts_is_one_finding() -> None:
    def refusal(host: str) -> HostError:
        return HostError(state=HostState.FILTERED, stage="connect", message=f"no answer from {host} port 22 within 5 s")

    names = [f"n{i}" for i in range(1, 101)]
    rows = [HostResult(host=name, state=HostState.FILTERED, stage="connect", message="", seconds=5.0) for name in names]
    (found,) = host_findings({name: refusal(name) for name in names}, rows)
    assert found.id == "hosts.filtered"
    assert found.title.startswith("100 hosts, n[1-100]: each does not respond")
    assert (found.level, len(found.where.hosts)) == (Level.UNKNOWN, 100)


@each(
    "environ, expected",
    [
        (
            {"RANK": "0", "WORLD_SIZE": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
            (3, 4, 0, 1),
        ),
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, None),
        ({"RANK": "0", "WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, (0, 4, 0, 8)),
        ({"RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, None),
        ({"RANK": "5", "WORLD_SIZE": "8"}, None),
    ],
)
def test_rank_variables_that_contradict_the_launcher(
    environ: dict[str, str], expected: tuple[int, int, int, int] | None
) -> None:
    found = contradiction(environ)
    reported = found and (found[0].rank, found[0].world_size, found[1].rank, found[1].world_size)
    assert reported == expected


@each(
    "ancestors, tasks, nested",
    [
        (["mpirun", "slurmstepd", "systemd"], "2", 2),
        (["mpirun", "bash", "slurmstepd"], "2", 2),
        (["mpirun", "slurmstepd"], "1", 0),
        (["orted", "slurmstepd"], "4", 0),  # mpirun in a batch script starts its daemons by srun
        (["slurmstepd"], "4", 0),
        (["mpirun", "bash", "sshd"], "4", 0),
    ],
)
def test_an_mpirun_in_every_task_of_srun(ancestors: list[str], tasks: str, nested: int) -> None:
    assert nested_tasks({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": tasks}, ancestors) == nested


def test_this_machine_alone_has_no_row_and_its_failure_is_a_finding_all_the_same() -> None:
    lost = HostError(state=HostState.LOST, stage="run", message="the agent ended with status 1")
    (found,) = host_findings({"this node": lost}, ())
    assert (found.id, found.level) == ("hosts.lost", Level.UNKNOWN)
