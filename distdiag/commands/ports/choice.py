"""Which interface NCCL and Gloo would choose here, with the variables that are set, and whether that is sane. Pure.

NCCL: src/misc/socket.cc, ncclFindInterfaces and findInterfaces (2.19 to 2.28). Gloo: torch's ProcessGroupGloo.cpp,
createDefaultDevice, and gloo/transport/tcp/device.cc.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.commands.ports.collect import Ports
    from distdiag.node.network import Names
    from distdiag.node.nics import Nic

_MOST = 16
_OTHERS = 4
_INTERNAL = ("bridge", "veth", "tunnel", "virtual")
"""Kinds that mostly lead nowhere beyond the machine, or by a detour."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One interface that is taken, and the address of it."""

    name: str
    address: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a library takes: nothing if it would fail. `rule` says by which rule, `error` what it would say."""

    taken: tuple[Taken, ...]
    rule: str
    error: str = ""


def nccl(nics: Sequence[Nic], variables: Mapping[str, str]) -> Choice:
    """Follow ncclFindInterfaces. `variables` include those of nccl.conf."""
    family = variables.get("NCCL_SOCKET_FAMILY", "")
    usable = _with_address(nics, family)
    wanted = variables.get("NCCL_SOCKET_IFNAME", "")
    if len(wanted) > 1:
        taken = _find(usable, wanted)
        error = "" if taken else f"Bootstrap : no socket interface found (NCCL_SOCKET_IFNAME={wanted})"
        return Choice(taken=taken, rule=f"NCCL_SOCKET_IFNAME={wanted}", error=error)
    ways: list[tuple[str, Callable[[], tuple[Taken, ...]]]] = [
        ("names that begin with ib", lambda: _find(usable, "ib")),
        ("the subnet of NCCL_COMM_ID", lambda: _in_subnet(nics, usable, variables.get("NCCL_COMM_ID", ""))),
        ("all but docker, lo and virbr", lambda: _find(usable, "^docker,lo,virbr")),
        ("docker, for want of others", lambda: _find(usable, "docker")),
        ("loopback, for want of others", lambda: _find(usable, "lo")),
        ("virbr, for want of others", lambda: _find(usable, "virbr")),
    ]
    for rule, way in ways:
        taken = way()
        if taken:
            return Choice(taken=taken, rule=rule)
    return Choice(taken=(), rule="", error="Bootstrap : no socket interface found")


def _with_address(nics: Sequence[Nic], family: str) -> list[Taken]:
    """List running interfaces with their first address; IPv6's loopback does not count."""
    found = []
    for one in nics:
        plain = [entry.partition("/")[0] for entry in one.addresses]
        plain = [address for address in plain if _is_of(address, family) and address != "::1"]
        if one.running and plain:
            found.append(Taken(name=one.name, address=plain[0], kind=one.kind))
    return found


def _is_of(address: str, family: str) -> bool:
    return {"AF_INET": ":" not in address, "AF_INET6": ":" in address}.get(family, True)


def _find(usable: Sequence[Taken], wanted: str) -> tuple[Taken, ...]:
    """Read a list as NCCL does: ^ leaves out, = is exact, else names that begin so; nothing is trimmed."""
    inverted = wanted.startswith("^")
    exact = wanted[inverted:].startswith("=")
    words = [word.partition(":")[0] for word in wanted[inverted + exact :].split(",") if word]

    def hit(name: str) -> bool:
        # An empty list fits every name (matchIfList).
        return not words or any(name == word if exact else name.startswith(word) for word in words)

    return tuple(one for one in usable if hit(one.name) != inverted)[:_MOST]


def _in_subnet(nics: Sequence[Nic], usable: Sequence[Taken], comm_id: str) -> tuple[Taken, ...]:
    """Find the interface in whose network the communicator's address lies."""
    host = comm_id.rpartition(":")[0].strip("[]")
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return ()
    networks = {
        entry.partition("/")[0]: ipaddress.ip_interface(entry).network for one in nics for entry in one.addresses
    }
    return tuple(one for one in usable if wanted in networks[one.address])[:1]


def gloo(nics: Sequence[Nic], names: Names, variables: Mapping[str, str]) -> Choice:
    """Follow createDefaultDevice: exact names from GLOO_SOCKET_IFNAME, else what our own host name resolves to."""
    wanted = variables.get("GLOO_SOCKET_IFNAME", "")
    by_name = {one.name: one for one in nics}
    if wanted:
        taken = []
        for word in wanted.split(","):
            nic = by_name.get(word)
            if nic is None or not nic.addresses:
                return Choice(
                    taken=(), rule=f"GLOO_SOCKET_IFNAME={wanted}", error=f"Unable to find address for: {word}"
                )
            taken.append(Taken(name=word, address=nic.addresses[0].partition("/")[0], kind=nic.kind))
        return Choice(taken=tuple(taken), rule=f"GLOO_SOCKET_IFNAME={wanted}")
    for address in names.host_addresses:
        own = _owner(nics, address)
        if own is not None:
            return Choice(taken=(own,), rule=f"the host name {names.host_name} resolves to {address}")
    loopback = next((one for one in nics if one.kind == "loopback"), None)
    why = f"the host name {names.host_name} does not lead to an address of this machine; loopback stands in"
    if loopback is None:
        return Choice(taken=(), rule=why, error="no loopback interface")
    return Choice(taken=(Taken(name=loopback.name, address="127.0.0.1", kind="loopback"),), rule=why)


def _owner(nics: Sequence[Nic], address: str) -> Taken | None:
    """Find the interface that an address can be bound at; all of 127.0.0.0/8 can be, at loopback."""
    for one in nics:
        if any(entry.partition("/")[0] == address for entry in one.addresses):
            return Taken(name=one.name, address=address, kind=one.kind)
    if address.startswith("127.") and (own := next((one for one in nics if one.kind == "loopback"), None)):
        return Taken(name=own.name, address=address, kind="loopback")
    return None


def doubts(choice: Choice) -> str:
    """Say what is wrong with a choice for a job on several nodes; empty if it looks right."""
    if choice.error:
        return choice.error
    kinds = {one.kind for one in choice.taken}
    if kinds == {"loopback"}:
        return "only loopback: no other node can be reached"
    inner = [one for one in choice.taken if one.kind in _INTERNAL]
    if inner and len(inner) < len(choice.taken):
        names = ", ".join(f"{one.name} ({one.kind})" for one in inner)
        return f"{names} beside {', '.join(one.name for one in choice.taken if one not in inner)}"
    return ""


def suggested(nics: Sequence[Nic]) -> Nic | None:
    """Choose the interface that is most likely meant: real and running; InfiniBand, or that of the default route."""
    real = [one for one in nics if one.running and one.addresses and one.kind not in (*_INTERNAL, "loopback")]
    others = [one for one in nics if one.running and one.addresses and one.kind != "loopback"]
    order = real or others
    return min(order, key=lambda one: (one.kind != "infiniband", not one.default_route, nics.index(one)), default=None)


def address_of(ports: Ports) -> str:
    """Give the address under which other nodes should reach a node: the one that NCCL takes, or that is meant."""
    chosen = nccl(ports.nics, ports.variables)
    if chosen.taken and not doubts(chosen):
        return chosen.taken[0].address
    nic = suggested(ports.nics)
    return nic.addresses[0].partition("/")[0] if nic is not None else ""


def other_addresses(ports: Ports) -> list[tuple[str, str]]:
    """List further addresses to try: those that NCCL takes as well ("also"), or one that it should take ("other")."""
    first = address_of(ports)
    found = [("also", one.address) for one in nccl(ports.nics, ports.variables).taken if one.address != first]
    nic = suggested(ports.nics)
    meant = nic.addresses[0].partition("/")[0] if nic is not None else ""
    if meant and meant != first and ("also", meant) not in found:
        found.append(("other", meant))
    return found[:_OTHERS]
