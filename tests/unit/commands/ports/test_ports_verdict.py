"""ports: conclusions about one node and single ports, from facts alone."""

from __future__ import annotations

from dataclasses import replace

from loops import each

from distdiag.agent.port_scan import PortResult
from distdiag.cluster.targets import Cluster
from distdiag.commands.ports.collect import NodePorts
from distdiag.commands.ports.diagnose import diagnose
from distdiag.commands.ports.types import PortsFacts, Request
from distdiag.facts.network.interfaces import Names, Network
from distdiag.facts.network.listeners import Listener
from distdiag.facts.network.nics import Nic

REQUEST = Request(program="distdiag", cluster=Cluster())
LO = Nic("lo", "loopback", ("127.0.0.1/8",), True, True, 65536, None, False)
ETH0 = Nic("eth0", "ethernet", ("10.0.0.1/24",), True, True, 1500, 10**10, True)
STORE = Listener("127.0.0.1", 29611, 7, "/opt/venv/bin/python /home/me/train.py --lr 1")


def node(name_leads_to: str, *listeners: Listener) -> NodePorts:
    names = Names("vm", (name_leads_to,), "", "vm")
    return NodePorts(
        host="vm",
        network=Network((LO, ETH0), names, (32768, 60999), "", "", ()),
        ib_ports=(),
        variables={},
        master=(),
        listeners=listeners,
        lowest_free=29500,
        firewalls=(),
        container="",
    )


def of(*nodes: NodePorts, **more: object) -> PortsFacts:
    hosts = {f"n{number}": f"n{number}" for number in range(len(nodes))}
    return PortsFacts(nodes=dict(zip(hosts, nodes, strict=True)), hosts=hosts, **more)  # type: ignore[arg-type]


def test_a_host_name_that_is_loopback_is_a_remark_of_one_node_and_a_fault_of_several() -> None:
    (remark,) = diagnose(REQUEST, of(node("127.0.0.1"))).findings
    assert (remark.id, remark.level) == ("ports.gloo-ifname", "info")
    assert remark.title == "Gloo would use lo, which reaches no other node: the host name vm resolves to 127.0.0.1"
    faults = {str(each.id): each for each in diagnose(REQUEST, of(node("127.0.0.1"), node("10.0.0.1"))).findings}
    fault = faults["ports.gloo-ifname"]
    assert (fault.level, fault.title) == ("fail", "n0: Gloo would use lo: only loopback: it reaches no other node")
    for finding in (remark, fault):
        assert finding.fix is not None
        assert "/etc/hosts" in finding.fix.text
        assert finding.fix.commands == ("export NCCL_SOCKET_IFNAME='=eth0' GLOO_SOCKET_IFNAME=eth0",)
    assert diagnose(REQUEST, of(node("10.0.0.1"))).findings == ()


def test_a_port_that_is_asked_for_without_a_host_is_looked_up_here() -> None:
    report = diagnose(Request(program="distdiag", cluster=Cluster(), ports=(29611, 29612)), of(node("10.0.0.1", STORE)))
    assert report.summary.startswith("port 29611 is in use here: pid 7 (python train.py --lr); nothing listens here on")
    assert "on port 29612; no other node was tested" in report.summary


def test_a_closed_port_of_this_machine_says_what_listens_instead() -> None:
    tried = PortResult("127.0.0.1", 29612, "127.0.0.1", "closed", error="Connection refused")
    report = diagnose(REQUEST, of(node("127.0.0.1", STORE), scanned={"n0": [tried]}, named=True))
    (closed,) = report.findings
    assert closed.evidence == ("listening here: port 29611, pid 7 (python train.py --lr)",)
    assert closed.fix is not None
    assert (
        closed.fix.commands == ()
    )  # a listener of ours at the job's own port would only hide that rank 0 is not there
    assert "start what should listen there, such as rank 0" in closed.fix.text


def test_two_names_of_one_machine_leave_nothing_to_test() -> None:
    report = diagnose(REQUEST, of(node("10.0.0.1"), doubles=("b",), local=False))
    assert report.summary == "n0,b: one machine under several names, so no path was tested"
    assert report.verdict == "warn"


WELL = node("10.0.0.1")
DOCKER = Nic("docker0", "docker", ("172.17.0.2/16",), True, True, 1500, None, True)


@each(
    "id_, level, nodes",
    [
        ("ports.nccl-ifname", "fail", [replace(WELL, variables={"NCCL_SOCKET_IFNAME": "ib9"})]),
        ("ports.gloo-ifname", "fail", [replace(WELL, variables={"GLOO_SOCKET_IFNAME": "ib9"})]),
        ("ports.master-addr", "fail", [replace(WELL, variables={"MASTER_ADDR": "no.such.host"})]),
        ("ports.master-port", "fail", [replace(WELL, variables={"MASTER_PORT": "99999"})]),
        ("ports.port-range", "warn", [replace(WELL, variables={"MASTER_PORT": "40000"})]),
        ("ports.firewall", "info", [replace(WELL, firewalls=("ufw",))]),
        ("ports.master-addr-differs", "warn", [WELL, replace(WELL, variables={"MASTER_ADDR": "10.0.0.1"})]),
        (
            "ports.container-network",
            "warn",
            [WELL, replace(WELL, container="docker", network=replace(WELL.network, interfaces=(LO, DOCKER)))],
        ),
    ],
)
def test_each_fault_of_a_node_has_an_id(id_: str, level: str, nodes: list[NodePorts]) -> None:
    found = {str(each.id): each for each in diagnose(REQUEST, of(*nodes)).findings}
    assert found[id_].level == level, found
    assert "{" not in found[id_].title + found[id_].detail
    assert "?" not in found[id_].title + found[id_].detail


@each(
    "id_, result",
    [
        ("ports.port-filtered", PortResult("b", 1, "10.0.0.2", "filtered", error="no answer")),
        ("ports.port-rejected", PortResult("b", 1, "10.0.0.2", "rejected", error="No route to host", seconds=3.0)),
        ("ports.port-no-route", PortResult("b", 1, "10.0.0.2", "no-route", error="Network is unreachable")),
        ("ports.address-unresolved", PortResult("b", 1, "", "name", error="Name or service not known")),
        ("ports.denied", PortResult("b", 1, "10.0.0.2", "denied", error="Operation not permitted")),
        ("ports.closed", PortResult("b", 1, "10.0.0.2", "closed", error="Connection refused")),
        ("ports.address-loopback", PortResult("b", 1, "127.0.1.1", "open")),
        ("ports.http", PortResult("b", 1, "10.0.0.2", "open", said="HTTP/1.1 400 Bad Request")),
    ],
)
def test_each_answer_of_a_port_has_an_id(id_: str, result: PortResult) -> None:
    (found,) = diagnose(REQUEST, of(WELL, scanned={"n0": [result]})).findings
    assert found.id == id_
    assert found.fix is not None
    assert "?" not in " ".join([found.title, found.detail, *found.fix.commands])
