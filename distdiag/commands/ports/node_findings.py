"""Findings about nodes: interfaces of NCCL and Gloo, names, MASTER_ADDR, RDMA ports, firewall. Pure."""

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
    gloo_fix,
    gloo_selection,
    nccl_selection,
    objection,
    suggested,
)
from distdiag.facts.network import is_loopback
from distdiag.ids import Id, Shared
from distdiag.report import Finding, Fix, Level, Where, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distdiag.commands.ports.collect import NodePorts
    from distdiag.commands.ports.types import PortsFacts


def node_findings(facts: PortsFacts) -> list[Finding]:
    """Judge all nodes; equal findings of several are merged."""
    found: dict[tuple[str, Level, str], tuple[Finding, list[str]]] = {}
    several = len(facts.nodes) > 1
    for name, node in facts.nodes.items():
        for own in _about(node, several=several):
            if own.id is Id.PORTS_GLOO_IFNAME and own.level is Level.INFO and facts.scanned:
                continue  # the request was about a host's ports, not this node
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
        not several and not chosen.error and "NCCL_SOCKET_IFNAME" not in node.variables and " as well as " not in doubt
    ):
        return None
    hint = _misread(node.variables.get("NCCL_SOCKET_IFNAME", ""))
    return finding(
        Id.PORTS_NCCL_IFNAME,
        Level.FAIL if chosen.error or (several and "loopback" in doubt) else Level.WARN,
        f"NCCL would use {chosen.names or 'no interface'}: {doubt}",
        detail=" ".join(filter(None, (f"Selected by: {chosen.rule}." if chosen.rule else "", hint))),
        evidence=tuple(f"{nic.name} {nic.address} ({nic.kind})" for nic in chosen.nics),
        fix=_name_it(node) if "NCCL_SOCKET_FAMILY" not in node.variables else _forget_family(),
    )


def _forget_family() -> Fix:
    return Fix(
        text="unset the address family, or set the family that the interfaces have",
        commands=("unset NCCL_SOCKET_FAMILY",),
    )


def _misread(value: str) -> str:
    """Explain how NCCL reads a value that probably means something else; empty if it is fine."""
    if '"' in value or "'" in value:
        return "NCCL reads the quotes as part of the name."
    if " " in value:
        return "NCCL does not trim spaces: they are part of the name."
    return ""


def _name_it(node: NodePorts) -> Fix | None:
    variables = exports(suggested(node.network.interfaces))
    return Fix(text="set the interface explicitly", commands=(export_line(variables),)) if variables else None


def _gloo(node: NodePorts, several: bool) -> Finding | None:
    chosen = gloo_selection(node.network.interfaces, node.network.names, node.variables)
    doubt = objection(chosen)
    lines = exports(suggested(node.network.interfaces))
    if not doubt or (not several and not chosen.error and not ("loopback" in doubt and lines)):
        return None
    if not several and not chosen.error:
        return finding(
            Id.PORTS_GLOO_IFNAME,
            Level.INFO,
            f"Gloo would use {chosen.names}, which reaches no other node: {chosen.rule}",
            detail="A job on this node alone is fine with that; a multi-node job cannot connect.",
            fix=gloo_fix(chosen, lines),
        )
    is_named = bool(node.variables.get("GLOO_SOCKET_IFNAME"))
    hint = "Gloo takes exact interface names, separated by commas only." if is_named and chosen.error else ""
    return finding(
        Id.PORTS_GLOO_IFNAME,
        Level.FAIL if chosen.error or several else Level.WARN,
        f"Gloo would use {chosen.names or 'no interface'}: {doubt}",
        detail=" ".join(filter(None, (f"Selected by: {chosen.rule}." if chosen.rule else "", hint))),
        fix=gloo_fix(chosen, lines) if lines else None,
    )


def _own_name(node: NodePorts, several: bool) -> Finding | None:
    names = node.network.names
    if names.host_addresses:
        return None
    return finding(
        Shared.NAME_UNRESOLVED,
        Level.WARN,
        f"own host name {names.host_name} does not resolve: {names.host_error}",
        fix=Fix(
            text="add it to /etc/hosts",
            commands=(f"echo '{address_of(node) or '10.0.0.1'} {names.host_name}' | sudo tee -a /etc/hosts",),
        ),
    )


def _master_addr(node: NodePorts, several: bool) -> Finding | None:
    """Judge MASTER_ADDR on a single node; with several, each one's look-up is judged."""
    name = node.variables.get("MASTER_ADDR")
    if name is None or several or node.master:
        return None
    return finding(
        Id.PORTS_MASTER_ADDR,
        Level.FAIL,
        f"cannot resolve MASTER_ADDR={name!r}",
        detail="MASTER_ADDR takes a name or an address only: no port, no spaces."
        if ":" in name or name != name.strip()
        else "",
        fix=Fix(text="set it to the address of rank 0's node", commands=(f"getent hosts {shlex.quote(name)}",)),
    )


def _master_port(node: NodePorts, several: bool) -> Finding | None:
    text = node.variables.get("MASTER_PORT")
    if text is None:
        return None
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        return finding(
            Id.PORTS_MASTER_PORT,
            Level.FAIL,
            f"MASTER_PORT={text!r} is not a valid port",
            fix=Fix(text="use a number from 1 to 65535", commands=(f"export MASTER_PORT={node.lowest_free or 29500}",)),
        )
    if node.network.ephemeral_ports is None:
        return None
    low, high = node.network.ephemeral_ports
    if not low <= int(text) <= high:
        return None
    return finding(
        Id.PORTS_PORT_RANGE,
        Level.WARN,
        f"MASTER_PORT={text} is in the ephemeral port range ({low}-{high})",
        detail="Any outgoing connection may hold it when rank 0 starts to listen.",
        fix=Fix(text="use a port below that range", commands=(f"export MASTER_PORT={node.lowest_free or 29500}",)),
    )


def _rdma(node: NodePorts, several: bool) -> Finding | None:
    ports = [port for port in node.ib_ports if port.link in ("InfiniBand", "Ethernet")]
    down = [port for port in ports if port.state != "ACTIVE"]
    if not down or len(down) == len(ports):
        return None
    names = ", ".join(f"{port.device}:{port.port}" for port in down)
    waits = [port for port in down if port.physical == "LinkUp"]
    return finding(
        Id.PORTS_RDMA_DOWN,
        Level.WARN,
        f"{len(down)} of {len(ports)} RDMA ports not active: {names}",
        detail="A port whose link is up but not active is waiting for the subnet manager." if waits else "",
        evidence=tuple(f"{port.device}:{port.port} {port.state}, {port.physical}, {port.link}" for port in down),
        fix=Fix(
            text="check the cable, switch port and subnet manager; or exclude these ports",
            commands=("ibstat", f"export NCCL_IB_HCA={quoted('^' + ','.join(port.device for port in down))}"),
        ),
    )


def _firewall(node: NodePorts, several: bool) -> Finding | None:
    if not node.firewalls:
        return None
    low, high = node.network.ephemeral_ports or (32768, 60999)
    return finding(
        Id.PORTS_FIREWALL,
        Level.INFO,
        f"firewall active ({', '.join(node.firewalls)}): ranks need the rendezvous port and {low}-{high}",
        fix=Fix(
            text="if these ports are closed, open them",
            commands=opening(node.network, ["29500", f"{low}-{high}"], _network(node)),
        ),
    )


def _network(node: NodePorts) -> str:
    nic = suggested(node.network.interfaces)
    return str(ipaddress.ip_interface(nic.addresses[0]).network) if nic is not None else "0.0.0.0/0"


def _container(node: NodePorts, several: bool) -> Finding | None:
    """Report a container behind a bridge: other machines cannot reach its ephemeral ports."""
    nic = suggested(node.network.interfaces)
    if not several or not node.container or nic is None or not nic.addresses[0].startswith("172.17."):
        return None
    return finding(
        Id.PORTS_CONTAINER_NETWORK,
        Level.WARN,
        f"this container is behind a Docker bridge ({nic.addresses[0]})",
        detail="Other machines cannot reach its ephemeral ports.",
        fix=Fix(text="start it on the host's network: docker run --network host"),
    )


def _dead_interfaces(facts: PortsFacts) -> list[Finding]:
    """Find unreachable interfaces that NCCL would use too: it uses all of them, and hangs."""
    bad = [path for path in facts.paths if path.purpose == "also" and not path.is_open]
    if not bad:
        return []
    case = Case(command=COMMAND, test=facts.path_test())
    names = sorted({name for path in bad if (name := _interface_at(facts.nodes.get(path.target), path.probe.address))})
    good = sorted({path.probe.interface for path in facts.paths if path.purpose == RANKS and path.is_open} - {""})
    hosts = case.named(path.target for path in bad)
    return [
        finding(
            Id.PORTS_NCCL_DEAD_INTERFACE,
            Level.FAIL,
            f"NCCL would also use {', '.join(names)} on {fold(hosts)}, and paths to it are closed",
            detail="NCCL stripes connections across every selected interface and hangs on an unreachable interface.",
            where=Where(hosts=hosts),
            evidence=tuple(evidence_line(case, path) for path in bad[:EVIDENCE_LINES]),
            fix=Fix(
                text=f"restrict NCCL to {good[0]}" if good else "set the interface that works",
                commands=tuple(export_line({"NCCL_SOCKET_IFNAME": f"={name}"}) for name in good[:1]),
            ),
        )
    ]


def _interface_at(node: NodePorts | None, address: str) -> str:
    nics = node.network.interfaces if node is not None else ()
    return next((nic.name for nic in nics if address in nic.plain_addresses), "")


def _names(facts: PortsFacts) -> list[Finding]:
    """Judge MASTER_ADDR, and the first node's host name, as resolved by each node."""
    wrong: dict[tuple[str, str], list[str]] = {}
    own = {
        address for node in facts.nodes.values() for nic in node.network.interfaces for address in nic.plain_addresses
    }
    of_first = next(iter(facts.nodes.values())).network.names.fqdn
    for lookup in facts.lookups:
        is_master = _value_of_master_addr(facts, lookup.node) == lookup.name
        if not is_master and (lookup.name != of_first or not lookup.addresses):
            continue  # another node's MASTER_ADDR, or an unresolvable name, which diagnosis/connectivity judges
        if not lookup.addresses:
            leads_to = ""
        elif all(is_loopback(address) for address in lookup.addresses):
            leads_to = ", ".join(lookup.addresses)
        elif not own & set(lookup.addresses):
            leads_to = f"{', '.join(lookup.addresses)} (none of these nodes)"
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
    why = "torchrun advertises this name to the other nodes, which then time out."
    if leads_to:
        why = (
            "This name must resolve to rank 0's node everywhere; a loopback address is the local node. torchrun "
            "advertises it to the other nodes."
        )
    return finding(
        Id.PORTS_MASTER_ADDR,
        Level.FAIL if master else Level.WARN,
        f"{what} ({name!r}) resolves to {leads_to} on {fold(hosts)}"
        if leads_to
        else f"{fold(hosts)} cannot resolve {name!r} ({what})",
        detail=why,
        where=Where(hosts=tuple(hosts)),
        fix=Fix(
            text="use the address instead of the name, on all nodes",
            commands=(f"export MASTER_ADDR={address_of(facts.nodes[first])}",),
        ),
    )


def _masters_differ(facts: PortsFacts) -> list[Finding]:
    """Report a MASTER_ADDR that differs between nodes, or is set on some nodes only."""
    values: dict[str, list[str]] = {}
    for node in facts.nodes:
        values.setdefault(_value_of_master_addr(facts, node), []).append(facts.hosts[node])
    if len(values) < 2:
        return []
    fewest = min(values.items(), key=lambda entry: (len(entry[1]), not entry[0]))[1]
    each = "; ".join(f"{value or 'not set'} on {fold(hosts)}" for value, hosts in values.items())
    return [
        finding(
            Id.PORTS_MASTER_ADDR_DIFFERS,
            Level.WARN,
            f"MASTER_ADDR differs: {each}",
            detail="Ranks that connect to different addresses wait for each other forever. A launcher may override it.",
            where=Where(hosts=tuple(fewest)),
            fix=Fix(
                text="set the same value on all nodes; or unset it everywhere and let the launcher set it",
                commands=(f"export MASTER_ADDR={address_of(next(iter(facts.nodes.values())))}", "unset MASTER_ADDR"),
            ),
        )
    ]


def _differences(facts: PortsFacts) -> list[Finding]:
    """Report differences in MTU and suggested interface."""
    found = differences({facts.hosts[name]: _compared(node) for name, node in facts.nodes.items()})
    if not found:
        return []
    hosts = tuple(dict.fromkeys(host for difference in found for host in difference.odd_hosts))
    return [
        finding(
            Id.PORTS_NODES_DIFFER,
            Level.WARN,
            f"{fold(hosts)} {'is' if len(hosts) == 1 else 'are'} configured differently from the other nodes",
            detail="One NCCL_SOCKET_IFNAME value does not work on all nodes then, or large packets are lost.",
            where=Where(hosts=hosts),
            evidence=tuple(map(str, found)),
            fix=Fix(text="configure them alike, or set the variables per node; NCCL_SOCKET_IFNAME takes a list"),
        )
    ]


def _compared(node: NodePorts) -> dict[str, object]:
    nic = suggested(node.network.interfaces)
    return {"interface": nic.name if nic is not None else None, "MTU": nic.mtu if nic is not None else None}
