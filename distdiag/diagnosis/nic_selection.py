"""The network interface NCCL and Gloo would use on a node, and the one probably intended. Pure.

NCCL: src/misc/socket.cc and src/misc/utils.cc (2.19 to 2.30): ncclFindInterfaces, parseStringList, matchIfList. Gloo:
torch's ProcessGroupGloo.cpp, createDefaultDevice, and gloo/transport/tcp/device.cc.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from distdiag.facts.network.interfaces import network_of
from distdiag.facts.network.nics import INTERNAL
from distdiag.record import record
from distdiag.report import Fix, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.facts.network.interfaces import Names, Network
    from distdiag.facts.network.nics import Nic

_MAX_IFS = 16
"""MAX_IFS of NCCL's socket.h: limits the interfaces used and the names in a list."""
_OTHERS = 4
_CANDIDATES = 4


@record(kw_only=True)
class SelectedNic:
    """A selected interface and its address."""

    name: str
    address: str
    kind: str


@record(kw_only=True)
class Selection:
    """The interfaces a library uses; empty if it would fail. `rule`: the reason; `error`: the library's message."""

    nics: tuple[SelectedNic, ...]
    rule: str
    error: str = ""

    @property
    def names(self) -> str:
        """The interface names, comma-separated."""
        return ", ".join(nic.name for nic in self.nics)


@record
class RendezvousOverrides:
    """The user's rendezvous options; empty: selected automatically."""

    address: str = ""
    interface: str = ""


@record
class _IfList:
    """A parsed NCCL_SOCKET_IFNAME: ^ excludes, = makes names exact, otherwise they are prefixes."""

    names: tuple[str, ...]
    is_inverted: bool
    is_exact: bool

    @classmethod
    def parse(cls, value: str) -> _IfList:
        """Parse a list without trimming, as NCCL does. A port after a colon is ignored: interfaces have none."""
        inverted = value.startswith("^")
        exact = value[inverted:].startswith("=")
        words = [word.partition(":")[0] for word in value[inverted + exact :].split(",")]
        return cls(tuple(word for word in words if word)[:_MAX_IFS], inverted, exact)

    def takes(self, interface: str) -> bool:
        """Return whether an interface matches. A list without names matches every interface."""
        fits = not self.names or any(
            interface == name if self.is_exact else interface.startswith(name) for name in self.names
        )
        return fits != self.is_inverted


def is_set(value: str) -> bool:
    """Return whether NCCL honours this NCCL_SOCKET_IFNAME: it ignores single characters."""
    return len(value) > 1


def takes(value: str, interface: str) -> bool:
    """Return whether NCCL takes an interface by this value of NCCL_SOCKET_IFNAME."""
    return not is_set(value) or _IfList.parse(value).takes(interface)


def nccl_selection(nics: Sequence[Nic], variables: Mapping[str, str]) -> Selection:
    """Follow ncclFindInterfaces. `variables` include those of nccl.conf."""
    usable = _with_address(nics, variables.get("NCCL_SOCKET_FAMILY", ""))
    wanted = variables.get("NCCL_SOCKET_IFNAME", "")
    if is_set(wanted):
        taken = _matching(usable, wanted)
        error = "" if taken else f"Bootstrap : no socket interface found (NCCL_SOCKET_IFNAME={wanted})"
        return Selection(nics=taken, rule=f"NCCL_SOCKET_IFNAME={wanted}", error=error)
    rules = {
        "names starting with ib": "ib",
        "the subnet of NCCL_COMM_ID": "",
        "all but docker, lo and virbr": "^docker,lo,virbr",
        "docker, as no other interface is left": "docker",
        "loopback, as no other interface is left": "lo",
        "virbr, as no other interface is left": "virbr",
    }
    for rule, value in rules.items():
        taken = _matching(usable, value) if value else _in_subnet(nics, usable, variables.get("NCCL_COMM_ID", ""))
        if taken:
            return Selection(nics=taken, rule=rule)
    return Selection(nics=(), rule="", error="Bootstrap : no socket interface found")


def _with_address(nics: Sequence[Nic], family: str) -> list[SelectedNic]:
    """List running interfaces with their first address, except IPv6 loopback."""
    found = []
    for nic in nics:
        addresses = [address for address in nic.plain_addresses if _is_of(address, family) and address != "::1"]
        if nic.running and addresses:
            found.append(SelectedNic(name=nic.name, address=addresses[0], kind=nic.kind))
    return found


def _is_of(address: str, family: str) -> bool:
    return {"AF_INET": ":" not in address, "AF_INET6": ":" in address}.get(family, True)


def _matching(usable: Sequence[SelectedNic], value: str) -> tuple[SelectedNic, ...]:
    wanted = _IfList.parse(value)
    return tuple(nic for nic in usable if wanted.takes(nic.name))[:_MAX_IFS]


def _in_subnet(nics: Sequence[Nic], usable: Sequence[SelectedNic], comm_id: str) -> tuple[SelectedNic, ...]:
    """Find the interface whose subnet contains the communicator's address."""
    host = comm_id.rpartition(":")[0].strip("[]")
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return ()
    networks = {entry.partition("/")[0]: network_of(entry) for nic in nics for entry in nic.addresses}
    own = [(nic, networks[nic.address]) for nic in usable]
    return tuple(nic for nic, network in own if network is not None and wanted in network)[:1]


def gloo_selection(nics: Sequence[Nic], names: Names, variables: Mapping[str, str]) -> Selection:
    """Follow createDefaultDevice: exact names from GLOO_SOCKET_IFNAME, else the address of the host name."""
    wanted = variables.get("GLOO_SOCKET_IFNAME", "")
    if wanted:
        return _by_exact_names(nics, wanted)
    for address in names.host_addresses:
        own = _owner(nics, address)
        if own is not None:
            return Selection(nics=(own,), rule=f"the host name {names.host_name} resolves to {address}")
    loopback = next((nic for nic in nics if nic.loopback), None)
    why = f"the host name {names.host_name} does not resolve to an address of this machine: fallback to loopback"
    if loopback is None:
        return Selection(nics=(), rule=why, error="no loopback interface")
    return Selection(nics=(SelectedNic(name=loopback.name, address="127.0.0.1", kind="loopback"),), rule=why)


def _by_exact_names(nics: Sequence[Nic], wanted: str) -> Selection:
    by_name = {nic.name: nic for nic in nics}
    rule = f"GLOO_SOCKET_IFNAME={wanted}"
    taken = []
    for word in wanted.split(","):
        nic = by_name.get(word)
        if nic is None or not nic.addresses:
            return Selection(nics=(), rule=rule, error=f"Unable to find address for: {word}")
        taken.append(SelectedNic(name=word, address=nic.plain_addresses[0], kind=nic.kind))
    return Selection(nics=tuple(taken), rule=rule)


def _owner(nics: Sequence[Nic], address: str) -> SelectedNic | None:
    """Find the interface that can bind an address; loopback owns all of 127.0.0.0/8."""
    own = next((nic for nic in nics if address in nic.plain_addresses), None)
    if own is None and address.startswith("127."):
        own = next((nic for nic in nics if nic.loopback), None)
    return SelectedNic(name=own.name, address=address, kind=own.kind) if own is not None else None


def objection(selection: Selection) -> str:
    """Return why a selection is wrong for a multi-node job; empty if it looks right."""
    if selection.error:
        return selection.error
    if {nic.kind for nic in selection.nics} == {"loopback"}:
        return "only loopback: it reaches no other node"
    internal = [nic for nic in selection.nics if nic.kind in INTERNAL]
    if internal and len(internal) < len(selection.nics):
        names = ", ".join(f"{nic.name} ({nic.kind})" for nic in internal)
        return f"{names} as well as {', '.join(nic.name for nic in selection.nics if nic not in internal)}"
    return ""


def suggested(nics: Sequence[Nic]) -> Nic | None:
    """Return the interface most likely intended: physical and running; InfiniBand, else the default route's."""
    usable = [nic for nic in nics if nic.running and nic.addresses and not nic.loopback]
    real = [nic for nic in usable if not nic.virtual]
    order = real or usable
    return min(order, key=lambda nic: (nic.kind != "infiniband", not nic.default_route, nics.index(nic)), default=None)


def address_of(nics: Sequence[Nic], variables: Mapping[str, str]) -> str:
    """Return the address at which other nodes should reach this one: NCCL's choice, else the suggested interface's."""
    chosen = nccl_selection(nics, variables)
    if chosen.nics and not objection(chosen):
        return chosen.nics[0].address
    nic = suggested(nics)
    return nic.plain_addresses[0] if nic is not None else ""


def other_addresses(nics: Sequence[Nic], variables: Mapping[str, str]) -> list[tuple[str, str]]:
    """List further addresses to probe: others NCCL uses ("also"), or one it should use ("other")."""
    first = address_of(nics, variables)
    found = [("also", nic.address) for nic in nccl_selection(nics, variables).nics if nic.address != first]
    nic = suggested(nics)
    meant = nic.plain_addresses[0] if nic is not None else ""
    if meant and meant != first and ("also", meant) not in found:
        found.append(("other", meant))
    return found[:_OTHERS]


def rendezvous_addresses(network: Network, known: str, overrides: RendezvousOverrides) -> list[str]:
    """List the addresses of rank 0's node, most likely first. `known`: the address by which the launcher reaches it.

    Restricted to the interfaces that the user or the node's variables name, unless none of these exists.
    """
    if overrides.address:
        return [overrides.address]
    usable = [nic for nic in network.interfaces if nic.up and nic.addresses and not nic.loopback]
    if overrides.interface or not network.wanted_gloo:
        value = overrides.interface or network.wanted_nccl
        named = [nic for nic in usable if is_set(value) and _IfList.parse(value).takes(nic.name)]
    else:
        named = [nic for nic in usable if nic.name in network.wanted_gloo.split(",")]
    order = named or sorted(usable, key=lambda nic: (nic.virtual, not nic.default_route))
    addresses = [address for nic in order for address in nic.plain_addresses]
    addresses.sort(key=lambda address: ":" in address)  # stable: IPv4 first
    known_addresses = {known, *network.names.host_addresses}
    addresses.sort(key=lambda address: address not in known_addresses)
    return addresses[:_CANDIDATES] or ["127.0.0.1"]


def exports(nic: Nic | None) -> dict[str, str]:
    """Return the variables that set one interface for both libraries; empty without one."""
    # "=" makes the name exact; eth1 alone would also match eth10.
    return {"NCCL_SOCKET_IFNAME": f"={nic.name}", "GLOO_SOCKET_IFNAME": nic.name} if nic is not None else {}


def export_line(variables: Mapping[str, str]) -> str:
    """Format an export command to paste."""
    return "export " + " ".join(f"{name}={quoted(value)}" for name, value in variables.items())


def gloo_fix(selection: Selection, variables: Mapping[str, str]) -> Fix:
    """Return how to make Gloo use the intended interface; `variables`: from exports(), not empty."""
    by_name = selection.rule.startswith("the host name ")
    return Fix(
        text="set the interface explicitly"
        + (", or give the host name its real address in /etc/hosts on this node" if by_name else ""),
        commands=(export_line(variables),),
    )
