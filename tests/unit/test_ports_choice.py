"""Which interface NCCL and Gloo take: variables and interfaces -> the choice; culprits of closed ways."""

from __future__ import annotations

import pytest

from distdiag.commands.ports.choice import doubts, gloo, nccl, suggested
from distdiag.commands.ports.cover import explain, merged
from distdiag.commands.ports.model import read_ports, read_target
from distdiag.errors import UsageError
from distdiag.node.network import Names
from distdiag.node.nics import Nic

KINDS = {"lo": "loopback", "ib": "infiniband", "docker": "bridge", "virbr": "bridge", "br-": "bridge"}
KINDS |= {"veth": "veth", "tailscale": "tunnel", "wg": "tunnel"}


def nics(text: str) -> tuple[Nic, ...]:
    """Read "eth0 tailscale0 ib0! eth1*": ! has no carrier, * is the default route."""
    found = []
    for number, word in enumerate(["lo", *text.split()]):
        name = word.rstrip("!*")
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), "ethernet")
        address = "127.0.0.1/8" if name == "lo" else f"10.0.{number}.1/24"
        found.append(
            Nic(
                name=name,
                kind=kind,
                addresses=(address,),
                up=True,
                running="!" not in word,
                mtu=1500,
                speed_bits_per_s=None,
                default_route="*" in word,
            )
        )
    return tuple(found)


def names(*addresses: str) -> Names:
    return Names("node1", addresses, "" if addresses else "Name or service not known", "node1")


@pytest.mark.parametrize(
    ("here", "wanted", "taken"),
    [
        ("eth0", "", "eth0"),
        ("eth0 ib0", "", "ib0"),
        ("eth0 ib0!", "", "eth0"),
        ("eth0 tailscale0", "", "eth0 tailscale0"),
        ("docker0 eth0 virbr0", "", "eth0"),
        ("docker0", "", "docker0"),
        ("br-1f2e eth0 veth12", "", "br-1f2e eth0 veth12"),
        ("virbr0", "", "lo"),
        ("", "", "lo"),
        ("eth1 eth10", "eth1", "eth1 eth10"),
        ("eth1 eth10", "=eth1", "eth1"),
        ("eth0 eth1", "eth0, eth1", "eth0"),
        ("eth0 eth1", "eth0,eth1", "eth0 eth1"),
        ("eth0", '"eth0"', ""),
        ("eth0 local0", "^lo", "eth0"),
        ("eth0 docker0", "^docker", "lo eth0"),
        ("eth0 eth1", "^=eth1", "lo eth0"),
        ("eth0", "e", "eth0"),
        ("eth0", "ens5", ""),
        ("eth0", "eth0:1", "eth0"),
        ("eth0", ",,", "lo eth0"),
    ],
)
def test_nccls_choice(here: str, wanted: str, taken: str) -> None:
    chosen = nccl(nics(here), {"NCCL_SOCKET_IFNAME": wanted} if wanted else {})
    assert [one.name for one in chosen.taken] == taken.split()
    assert bool(chosen.error) is not bool(taken)


def test_the_address_of_the_communicator_decides_before_all_others() -> None:
    chosen = nccl(nics("eth0 eth1"), {"NCCL_COMM_ID": "10.0.2.99:4444"})
    assert [one.name for one in chosen.taken] == ["eth1"]


def test_an_address_family_can_be_asked_for() -> None:
    assert nccl(nics("eth0"), {"NCCL_SOCKET_FAMILY": "AF_INET6"}).error
    assert nccl(nics("eth0"), {"NCCL_SOCKET_FAMILY": "AF_INET"}).taken


@pytest.mark.parametrize(
    ("wanted", "taken", "error"),
    [
        ("eth0", "eth0", ""),
        ("eth0,eth1", "eth0 eth1", ""),
        ("^lo", "", "Unable to find address for: ^lo"),
        ("eth", "", "Unable to find address for: eth"),
        ("eth0 ", "", "Unable to find address for: eth0 "),
        ("lo, eth0", "", "Unable to find address for:  eth0"),
    ],
)
def test_gloos_choice_by_variable(wanted: str, taken: str, error: str) -> None:
    chosen = gloo(nics("eth0 eth1"), names("10.0.1.1"), {"GLOO_SOCKET_IFNAME": wanted})
    assert ([one.name for one in chosen.taken], chosen.error) == (taken.split(), error)


@pytest.mark.parametrize(
    ("addresses", "taken"),
    [
        (("10.0.2.1",), "eth1 10.0.2.1"),
        (("127.0.1.1",), "lo 127.0.1.1"),
        (("192.0.2.9", "10.0.1.1"), "eth0 10.0.1.1"),
        ((), "lo 127.0.0.1"),
        (("192.0.2.9",), "lo 127.0.0.1"),
    ],
)
def test_gloos_choice_by_host_name(addresses: tuple[str, ...], taken: str) -> None:
    (one,) = gloo(nics("eth0 eth1"), names(*addresses), {}).taken
    assert f"{one.name} {one.address}" == taken


@pytest.mark.parametrize(
    ("here", "words"),
    [("eth0", ""), ("eth0 tailscale0", "tailscale0 (tunnel) beside eth0"), ("", "only loopback"), ("veth1", "")],
)
def test_a_choice_that_is_hardly_meant(here: str, words: str) -> None:
    doubt = doubts(nccl(nics(here), {}))
    assert words in doubt
    assert bool(doubt) is bool(words)


@pytest.mark.parametrize(
    ("here", "name"), [("docker0 eth0 eth1*", "eth1"), ("eth0* ib0", "ib0"), ("eth0* ib0!", "eth0"), ("veth0", "veth0")]
)
def test_the_interface_that_is_suggested(here: str, name: str) -> None:
    nic = suggested(nics(here))
    assert nic is not None
    assert nic.name == name


ALL = [(a, b) for a in "abcd" for b in "abcd" if a != b]


def told(closed: list[tuple[str, str]], tried: list[tuple[str, str]] = ALL) -> list[str]:
    found = merged(explain(tried, closed))
    return [f"{one.kind} {''.join(one.nodes)} {''.join(one.others)}".strip() for one in found]


def test_a_node_that_lets_nothing_in_is_one_culprit() -> None:
    assert told([(a, "c") for a in "abd"]) == ["in c"]


def test_a_node_that_lets_nothing_out() -> None:
    assert told([("c", b) for b in "abd"]) == ["out c"]


def test_a_node_that_is_cut_off_is_both() -> None:
    assert told([edge for edge in ALL if "c" in edge]) == ["in c", "out c"]


def test_two_nodes_with_the_same_trouble_are_named_together() -> None:
    assert told([edge for edge in ALL if edge[1] in "cd"]) == ["in cd"]


def test_single_ways_are_named_as_such() -> None:
    assert told([("a", "b")]) == ["pair a b"]
    assert told([("a", "c"), ("b", "c"), ("a", "d"), ("b", "d")]) == ["pair ab cd"]


def test_with_two_nodes_neither_is_blamed() -> None:
    assert told([("a", "b")], [("a", "b"), ("b", "a")]) == ["pair a b"]


def test_nobody_reaches_anybody() -> None:
    assert told(ALL) == ["all abcd"]


def test_ports_and_hosts_are_read() -> None:
    assert read_ports("6000, 29500-29502,6000") == (6000, 29500, 29501, 29502)
    assert read_target("node1", ()) == [("node1", 29500)]
    assert read_target("node1:80-81", (7,)) == [("node1", 80), ("node1", 81)]
    assert read_target("[fd00::1]:80", ()) == [("fd00::1", 80)]
    assert read_target("fd00::1", (7,)) == [("fd00::1", 7)]
    assert read_target("::1", (7,)) == [("::1", 7)]
    for wrong in ("", "a b", "node:x", "[::1", "node:0"):
        with pytest.raises(UsageError):
            read_target(wrong, ())
