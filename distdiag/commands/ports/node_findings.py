"""What is wrong with nodes: what NCCL and Gloo take there, names, MASTER_ADDR, RDMA ports, firewall. Pure."""

from __future__ import annotations

import ipaddress
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.drift import differences
from distdiag.cluster.hosts import fold
from distdiag.cluster.rendezvous_test import RANKS
from distdiag.commands.ports.port_findings import finding
from distdiag.commands.ports.types import COMMAND, address_of
from distdiag.diagnosis.connectivity import EVIDENCE_LINES, Case, evidence_line, opening
from distdiag.diagnosis.nic_selection import (
    export_line,
    exports,
    gloo_selection,
    nccl_selection,
    objection,
    suggested,
)
from distdiag.facts.network import is_loopback
from distdiag.report import Finding, Fix, Level, Where, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distdiag.commands.ports.collect import NodePorts
    from distdiag.commands.ports.types import PortsFacts


def node_findings(facts: PortsFacts) -> list[Finding]:
    """Judge all nodes; equal findings of several become one."""
    found: dict[tuple[str, Level, str], tuple[Finding, list[str]]] = {}
    several = len(facts.nodes) > 1
    for name, node in facts.nodes.items():
        for own in _about(node, several=several):
            found.setdefault((own.id, own.level, own.title), (own, []))[1].append(facts.hosts[name])
    together = [_for_hosts(own, hosts, several=several) for own, hosts in found.values()]
    among = [*_dead_interfaces(facts), *_names(facts), *_masters_differ(facts), *_differences(facts)] if several else []
    return together + among


def _for_hosts(own: Finding, hosts: list[str], *, several: bool) -> Finding:
    title = f"{fold(hosts)}: {own.title}" if several else own.title
    return replace(own, title=title, where=Where(hosts=tuple(hosts)))


def _about(node: NodePorts, *, several: bool) -> Iterable[Finding]:
    checks: tuple[Callable[[NodePorts, bool], Finding | None], ...] = (
        _nccl,
        _gloo,
        _own_name,
        _master_addr,
        _master_port,
        _rdma,
        _firewall,
        _container,
    )
    return [found for check in checks if (found := check(node, several)) is not None]


def _nccl(node: NodePorts, several: bool) -> Finding | None:
    chosen = nccl_selection(node.network.interfaces, node.variables)
    doubt = objection(chosen)
    if not doubt or (
        not several and not chosen.error and "NCCL_SOCKET_IFNAME" not in node.variables and "beside" not in doubt
    ):
        return None
    wanted = node.variables.get("NCCL_SOCKET_IFNAME", "")
    hint = _misread(wanted)
    return finding(
        "nccl-ifname",
        Level.FAIL if chosen.error or (several and "loopback" in doubt) else Level.WARN,
        f"NCCL would take {chosen.names or 'no interface'}: {doubt}",
        detail=" ".join(filter(None, (f"Its rule: {chosen.rule}." if chosen.rule else "", hint))),
        evidence=tuple(f"{nic.name} {nic.address} ({nic.kind})" for nic in chosen.nics),
        fix=_name_it(node) if "NCCL_SOCKET_FAMILY" not in node.variables else _forget_family(),
    )


def _forget_family() -> Fix:
    return Fix(text="no interface has an address of that family", commands=("unset NCCL_SOCKET_FAMILY",))


def _misread(wanted: str) -> str:
    """Say how NCCL reads what was probably meant otherwise."""
    if '"' in wanted or "'" in wanted:
        return "The quotes belong to the name."
    if " " in wanted:
        return "Blanks are not trimmed: they belong to the name."
    return ""


def _name_it(node: NodePorts) -> Fix | None:
    variables = exports(suggested(node.network.interfaces))
    return Fix(text="name the interface", commands=(export_line(variables),)) if variables else None


def _gloo(node: NodePorts, several: bool) -> Finding | None:
    chosen = gloo_selection(node.network.interfaces, node.network.names, node.variables)
    doubt = objection(chosen)
    if not doubt or (not several and not chosen.error):
        return None
    wanted = node.variables.get("GLOO_SOCKET_IFNAME", "")
    hint = "It takes exact names, with commas and nothing else." if wanted and chosen.error else ""
    return finding(
        "gloo-ifname",
        Level.FAIL if chosen.error or several else Level.WARN,
        f"Gloo would take {chosen.names or 'no interface'}: {doubt}",
        detail=" ".join(filter(None, (f"Its rule: {chosen.rule}." if chosen.rule else "", hint))),
        fix=_name_it(node),
    )


def _own_name(node: NodePorts, several: bool) -> Finding | None:
    names = node.network.names
    if names.host_addresses:
        return None
    return finding(
        "name-unresolved",
        Level.WARN,
        f"its own name, {names.host_name}, does not resolve: {names.host_error}",
        fix=Fix(
            text="add it to /etc/hosts",
            commands=(f"echo '{address_of(node) or '10.0.0.1'} {names.host_name}' | sudo tee -a /etc/hosts",),
        ),
    )


def _master_addr(node: NodePorts, several: bool) -> Finding | None:
    """Judge MASTER_ADDR where one node is looked at; of several each resolves it for itself."""
    name = node.variables.get("MASTER_ADDR")
    if name is None or several or node.master:
        return None
    return finding(
        "master-addr",
        Level.FAIL,
        f"MASTER_ADDR={name!r} cannot be resolved here",
        detail="It is a name or an address, without a port." if ":" in name or name != name.strip() else "",
        fix=Fix(text="name the address of rank 0's node", commands=(f"getent hosts {shlex.quote(name)}",)),
    )


def _master_port(node: NodePorts, several: bool) -> Finding | None:
    text = node.variables.get("MASTER_PORT")
    if text is None:
        return None
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        return finding(
            "master-port",
            Level.FAIL,
            f"MASTER_PORT={text!r} is no port",
            fix=Fix(text="take a number, 1 to 65535", commands=(f"export MASTER_PORT={node.lowest_free or 29500}",)),
        )
    if node.network.ephemeral_ports is None:
        return None
    low, high = node.network.ephemeral_ports
    if not low <= int(text) <= high:
        return None
    return finding(
        "port-range",
        Level.WARN,
        f"MASTER_PORT={text} lies among the ephemeral ports ({low}-{high})",
        detail="Any outgoing connection may have it when rank 0 wants to listen.",
        fix=Fix(text="take one below", commands=(f"export MASTER_PORT={node.lowest_free or 29500}",)),
    )


def _rdma(node: NodePorts, several: bool) -> Finding | None:
    ports = [port for port in node.ib_ports if port.link in ("InfiniBand", "Ethernet")]
    down = [port for port in ports if port.state != "ACTIVE"]
    if not down or len(down) == len(ports):
        return None
    names = ", ".join(f"{port.device}:{port.port}" for port in down)
    waits = [port for port in down if port.physical == "LinkUp"]
    return finding(
        "rdma-down",
        Level.WARN,
        f"{len(down)} of {len(ports)} RDMA ports are not active: {names}",
        detail="A cable that is up and not active waits for its subnet manager." if waits else "",
        evidence=tuple(f"{port.device}:{port.port} {port.state}, {port.physical}, {port.link}" for port in down),
        fix=Fix(
            text="see cable, switch port and subnet manager; or leave them out",
            commands=("ibstat", f"export NCCL_IB_HCA={quoted('^' + ','.join(port.device for port in down))}"),
        ),
    )


def _firewall(node: NodePorts, several: bool) -> Finding | None:
    if not node.firewalls:
        return None
    low, high = node.network.ephemeral_ports or (32768, 60999)
    return finding(
        "firewall",
        Level.INFO,
        f"a firewall is active: {', '.join(node.firewalls)}; ranks need the rendezvous port and {low}-{high}",
        fix=Fix(text="if they are closed", commands=opening(node.network, ["29500", f"{low}-{high}"], _network(node))),
    )


def _network(node: NodePorts) -> str:
    nic = suggested(node.network.interfaces)
    return str(ipaddress.ip_interface(nic.addresses[0]).network) if nic is not None else "0.0.0.0/0"


def _container(node: NodePorts, several: bool) -> Finding | None:
    """Point at a container with a network of its own: nobody outside reaches its ephemeral ports."""
    nic = suggested(node.network.interfaces)
    if not several or not node.container or nic is None or not nic.addresses[0].startswith("172.17."):
        return None
    return finding(
        "container-network",
        Level.WARN,
        f"this container is behind a bridge ({nic.addresses[0]})",
        detail="Other machines do not reach its ephemeral ports.",
        fix=Fix(text="start it in the network of its host: docker run --network host"),
    )


def _dead_interfaces(facts: PortsFacts) -> list[Finding]:
    """Find interfaces that NCCL would use as well and that lead nowhere: it takes all of them, and hangs."""
    bad = [path for path in facts.paths if path.purpose == "also" and not path.is_open]
    if not bad:
        return []
    case = Case(command=COMMAND, test=facts.path_test())
    names = sorted({name for path in bad if (name := _interface_at(facts.nodes.get(path.target), path.probe.address))})
    good = sorted({path.probe.interface for path in facts.paths if path.purpose == RANKS and path.is_open} - {""})
    hosts = case.named(path.target for path in bad)
    return [
        finding(
            "nccl-dead-interface",
            Level.FAIL,
            f"NCCL would use {', '.join(names)} on {fold(hosts)} as well, and nobody is reached over it",
            detail="It spreads its connections over all that it takes, and hangs in those that lead nowhere.",
            where=Where(hosts=hosts),
            evidence=tuple(evidence_line(case, path) for path in bad[:EVIDENCE_LINES]),
            fix=Fix(
                text=f"let it take {good[0]} only" if good else "name the interface that works",
                commands=tuple(export_line({"NCCL_SOCKET_IFNAME": f"={name}"}) for name in good[:1]),
            ),
        )
    ]


def _interface_at(node: NodePorts | None, address: str) -> str:
    nics = node.network.interfaces if node is not None else ()
    return next((nic.name for nic in nics if address in nic.plain_addresses), "")


def _names(facts: PortsFacts) -> list[Finding]:
    """Judge MASTER_ADDR, and the first node's own name, as each node resolves them."""
    wrong: dict[tuple[str, str], list[str]] = {}
    own = {
        address for node in facts.nodes.values() for nic in node.network.interfaces for address in nic.plain_addresses
    }
    of_first = next(iter(facts.nodes.values())).network.names.fqdn
    for lookup in facts.lookups:
        is_master = _value_of_master_addr(facts, lookup.node) == lookup.name
        if not is_master and (lookup.name != of_first or not lookup.addresses):
            continue  # another node's MASTER_ADDR, or a name that resolves nowhere: diagnosis/connectivity judges that
        if not lookup.addresses:
            leads_to = ""
        elif all(is_loopback(address) for address in lookup.addresses):
            leads_to = ", ".join(lookup.addresses)
        elif not own & set(lookup.addresses):
            leads_to = f"{', '.join(lookup.addresses)}, which is none of these nodes,"
        else:
            continue
        wrong.setdefault((lookup.name, leads_to), []).append(facts.hosts[lookup.node])
    return [_name(facts, name, leads_to, hosts) for (name, leads_to), hosts in wrong.items()]


def _value_of_master_addr(facts: PortsFacts, node: str) -> str:
    return facts.nodes[node].variables.get("MASTER_ADDR", "") if node in facts.nodes else ""


def _name(facts: PortsFacts, name: str, leads_to: str, hosts: list[str]) -> Finding:
    first = next(iter(facts.nodes))
    master = any(_value_of_master_addr(facts, node) == name for node in facts.nodes)
    what = "MASTER_ADDR" if master else f"the name of {facts.hosts[first]}"
    why = "Torchrun hands this name around, and the others time out."
    if leads_to:
        why = "Each node must be led to the node of rank 0; loopback leads to itself. Torchrun hands this name around."
    return finding(
        "master-addr",
        Level.FAIL if master else Level.WARN,
        f"{what}, {name!r}, resolves to {leads_to} on {fold(hosts)}"
        if leads_to
        else f"{fold(hosts)} cannot resolve {name!r}, {what}",
        detail=why,
        where=Where(hosts=tuple(hosts)),
        fix=Fix(
            text="name the address instead, on all nodes",
            commands=(f"export MASTER_ADDR={address_of(facts.nodes[first])}",),
        ),
    )


def _masters_differ(facts: PortsFacts) -> list[Finding]:
    """Say where MASTER_ADDR is set to something else than elsewhere, or set on some nodes only."""
    values: dict[str, list[str]] = {}
    for node in facts.nodes:
        values.setdefault(_value_of_master_addr(facts, node), []).append(facts.hosts[node])
    if len(values) < 2:
        return []
    fewest = min(values.items(), key=lambda entry: (len(entry[1]), not entry[0]))[1]
    each = "; ".join(f"{value or 'not set'} on {fold(hosts)}" for value, hosts in values.items())
    return [
        finding(
            "master-addr-differs",
            Level.WARN,
            f"MASTER_ADDR differs: {each}",
            detail="Ranks that are led to different places wait for each other for ever. A launcher may set it anew.",
            where=Where(hosts=tuple(fewest)),
            fix=Fix(
                text="set the same on all nodes, or on none and let the launcher do it",
                commands=(f"export MASTER_ADDR={address_of(next(iter(facts.nodes.values())))}", "unset MASTER_ADDR"),
            ),
        )
    ]


def _differences(facts: PortsFacts) -> list[Finding]:
    """Name what must be alike and is not: the MTU, and the interface that is taken."""
    found = differences({facts.hosts[name]: _compared(node) for name, node in facts.nodes.items()})
    if not found:
        return []
    odd = tuple(dict.fromkeys(host for difference in found for host in difference.odd_hosts))
    return [
        finding(
            "nodes-differ",
            Level.WARN,
            f"{fold(odd)} {'is' if len(odd) == 1 else 'are'} set up otherwise than the rest",
            detail="One value of NCCL_SOCKET_IFNAME does not fit all then, or large packets get lost.",
            where=Where(hosts=odd),
            evidence=tuple(map(str, found)),
            fix=Fix(text="make them alike, or set the variables on each node; NCCL_SOCKET_IFNAME takes several names"),
        )
    ]


def _compared(node: NodePorts) -> dict[str, object]:
    nic = suggested(node.network.interfaces)
    return {"interface": nic.name if nic is not None else None, "MTU": nic.mtu if nic is not None else None}
