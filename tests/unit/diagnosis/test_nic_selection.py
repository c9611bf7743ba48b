"""Which interface NCCL and Gloo take: variables and interfaces -> the selection."""

from __future__ import annotations

import pytest
from loops import each

from distdiag.diagnosis.nic_selection import (
    RendezvousOverrides,
    gloo_selection,
    nccl_selection,
    objection,
    rendezvous_addresses,
    suggested,
)
from distdiag.facts.network.interfaces import Names, Network, network_of
from distdiag.facts.network.nics import Nic

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


# Each row follows from ncclFindInterfaces (src/misc/socket.cc), parseStringList and matchIfList (src/misc/utils.cc).
NCCL_RULES = [
    # Nothing is named: ib*, else all but docker, lo and virbr, else docker, else lo, else virbr.
    ("eth0", "", "eth0"),
    ("eth0 ib0", "", "ib0"),
    ("eth0 ib0!", "", "eth0"),
    ("eth0 tailscale0", "", "eth0 tailscale0"),
    ("docker0 eth0 virbr0", "", "eth0"),
    ("docker0", "", "docker0"),
    ("br-1f2e eth0 veth12", "", "br-1f2e eth0 veth12"),
    ("virbr0", "", "lo"),
    ("", "", "lo"),
    # A value of one character is as none: `if (env && strlen(env) > 1)`.
    ("eth0", "e", "eth0"),
    ("eth0 ib0", "=", "ib0"),
    ("eth0 ib0", "^", "ib0"),
    ("eth0 ib0", ",", "ib0"),
    # Prefixes, or exact names behind "=".
    ("eth1 eth10", "eth1", "eth1 eth10"),
    ("eth1 eth10", "=eth1", "eth1"),
    ("eth0 eth1 ens5", "=eth1,ens5", "eth1 ens5"),
    ("eth0", "=eth", ""),
    ("eth0", "ens5", ""),
    # A list, in the order of the interfaces; nothing is trimmed, and empty names are left out.
    ("eth0 eth1", "eth1,eth0", "eth0 eth1"),
    ("eth0 eth1", "eth0, eth1", "eth0"),
    ("eth0", '"eth0"', ""),
    ("eth0 eth1", ",eth1,", "eth1"),
    # A list without any name fits every interface, and with "^" none.
    ("eth0", ",,", "lo eth0"),
    ("eth0", "=,", "lo eth0"),
    ("eth0", "^=", ""),
    ("eth0", "^,", ""),
    # "^" is for the whole list, and only at its start.
    ("eth0 local0", "^lo", "eth0"),
    ("eth0 docker0", "^docker", "lo eth0"),
    ("eth0 eth1", "^=eth1", "lo eth0"),
    ("eth0 eth1 eth10", "^=eth1,lo", "eth0 eth10"),
    ("eth0 eth1", "=^eth1", ""),
    ("eth0 eth1", "eth0,^eth1", "eth0"),
    # What follows a colon is a port: parseStringList splits it off, and no interface has one.
    ("eth0 eth1", "eth0:1", "eth0"),
    ("eth0 eth01", "=eth0:1", "eth0"),
    ("eth0 eth1", "^eth0:1", "lo eth1"),
    ("eth0 eth1", "eth0:1,eth1:2", "eth0 eth1"),
    ("eth0 eth1", ":1,eth1", "eth1"),
    # MAX_IFS is 16, of interfaces and of names.
    (" ".join(f"eth{n}" for n in range(20)), "eth", " ".join(f"eth{n}" for n in range(16))),
    ("eth0", ",".join([*(f"x{n}" for n in range(15)), "eth0"]), "eth0"),
    ("eth0", ",".join([*(f"x{n}" for n in range(16)), "eth0"]), ""),
]


@each("here, wanted, taken", NCCL_RULES)
def test_nccls_choice(here: str, wanted: str, taken: str) -> None:
    chosen = nccl_selection(nics(here), {"NCCL_SOCKET_IFNAME": wanted} if wanted else {})
    assert [nic.name for nic in chosen.nics] == taken.split()
    assert bool(chosen.error) is not bool(taken)


def test_the_address_of_the_communicator_decides_before_all_others() -> None:
    chosen = nccl_selection(nics("eth0 eth1"), {"NCCL_COMM_ID": "10.0.2.99:4444"})
    assert [nic.name for nic in chosen.nics] == ["eth1"]


def test_an_address_family_can_be_asked_for() -> None:
    assert nccl_selection(nics("eth0"), {"NCCL_SOCKET_FAMILY": "AF_INET6"}).error
    assert nccl_selection(nics("eth0"), {"NCCL_SOCKET_FAMILY": "AF_INET"}).nics


@each(
    "wanted, taken, error",
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
    chosen = gloo_selection(nics("eth0 eth1"), names("10.0.1.1"), {"GLOO_SOCKET_IFNAME": wanted})
    assert ([nic.name for nic in chosen.nics], chosen.error) == (taken.split(), error)


@each(
    "addresses, taken",
    [
        (("10.0.2.1",), "eth1 10.0.2.1"),
        (("127.0.1.1",), "lo 127.0.1.1"),
        (("192.0.2.9", "10.0.1.1"), "eth0 10.0.1.1"),
        ((), "lo 127.0.0.1"),
        (("192.0.2.9",), "lo 127.0.0.1"),
    ],
)
def test_gloos_choice_by_host_name(addresses: tuple[str, ...], taken: str) -> None:
    (nic,) = gloo_selection(nics("eth0 eth1"), names(*addresses), {}).nics
    assert f"{nic.name} {nic.address}" == taken


@pytest.mark.parametrize(
    ("here", "words"),
    [("eth0", ""), ("eth0 tailscale0", "tailscale0 (tunnel) as well as eth0"), ("", "only loopback"), ("veth1", "")],
)
def test_a_choice_that_is_hardly_meant(here: str, words: str) -> None:
    doubt = objection(nccl_selection(nics(here), {}))
    assert words in doubt
    assert bool(doubt) is bool(words)


@pytest.mark.parametrize(
    ("here", "name"), [("docker0 eth0 eth1*", "eth1"), ("eth0* ib0", "ib0"), ("eth0* ib0!", "eth0"), ("veth0", "veth0")]
)
def test_the_interface_that_is_suggested(here: str, name: str) -> None:
    nic = suggested(nics(here))
    assert nic is not None
    assert nic.name == name


def met_at(here: str, overrides: RendezvousOverrides, *, nccl: str = "", gloo: str = "", known: str = "") -> list[str]:
    network = Network(nics(here), names(), None, gloo, nccl, ())
    by_address = {nic.plain_addresses[0]: nic.name for nic in network.interfaces}
    return [by_address.get(found, found) for found in rendezvous_addresses(network, known, overrides)]


@each("here, wanted, taken", [row for row in NCCL_RULES if len(row[1]) > 1 and row[2]])
def test_rank_0_is_met_at_the_interfaces_that_nccl_takes(here: str, wanted: str, taken: str) -> None:
    expected = [name for name in taken.split() if name != "lo"][:4]
    assert met_at(here, RendezvousOverrides(), nccl=wanted) == expected
    assert met_at(here, RendezvousOverrides(interface=wanted)) == expected


def test_rank_0_is_met_where_the_user_says_or_at_the_likeliest_address() -> None:
    nothing = RendezvousOverrides()
    assert met_at("eth0", RendezvousOverrides(address="head")) == ["head"]
    assert met_at("docker0 eth0 eth1*", nothing) == ["eth1", "eth0", "docker0"]
    assert met_at("docker0 eth0 eth1*", nothing, known="10.0.2.1") == ["eth0", "eth1", "docker0"]
    assert met_at("eth1 eth10", nothing, gloo="eth10", nccl="eth1") == ["eth10"]  # Gloo knows no prefixes
    assert met_at("eth0 eth1", nothing, nccl="ens5") == ["eth0", "eth1"]
    assert met_at("eth0 eth1", nothing, nccl="=") == ["eth0", "eth1"]
    assert met_at("", nothing) == ["lo"]


def test_what_is_no_address_is_in_no_network() -> None:
    """A damaged answer of a node can hold one, and costs its network only."""
    assert network_of("..") is None
    assert str(network_of("10.0.3.7/24")) == "10.0.3.0/24"
