"""Findings about nodes: interfaces of NCCL and Gloo, names, MASTER_ADDR, firewall. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.cluster.rendezvous_test import RANKS
from distdiag.commands.ports.types import COMMAND, address_of
from distdiag.diagnosis.connectivity import EVIDENCE_LINES, Case, evidence_line, opening
from distdiag.diagnosis.hosts.drift import differences
from distdiag.diagnosis.nic_selection import (
    export_line,
    exports,
    gloo_fix,
    gloo_selection,
    nccl_selection,
    objection,
    suggested,
)
from distdiag.diagnosis.verdicts import finding
from distdiag.facts.network.interfaces import is_loopback, network_of
from distdiag.fold import by_key
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.commands.ports.collect import NodePorts
    from distdiag.commands.ports.types import PortsFacts


def node_findings(facts: PortsFacts) -> list[Finding]:
    """Judge all nodes; equal findings of several are merged."""
    found: dict[tuple[str, Level, str], tuple[Finding, list[str]]] = {}
    several = len(facts.nodes) > 1
    for name, node in facts.nodes.items():
        for own in _about(node, several=several):
            if own.id == "ports.gloo-ifname" and own.level is Level.INFO and facts.scanned:
                continue  # the request was about a host's ports, not this node
            found.setdefault((own.id, own.level, own.title), (own, []))[1].append(facts.hosts[name])
    together = [_for_hosts(own, hosts, several=several) for own, hosts in found.values()]
    among = [*_dead_interfaces(facts), *_names(facts), *_masters_differ(facts), *_differences(facts)] if several else []
    return together + among


def _for_hosts(own: Finding, hosts: list[str], *, several: bool) -> Finding:
    title = f"{fold(hosts)}: {own.title}" if several else own.title
    return replace(own, title=title, where=Where(hosts=tuple(hosts)))


def _about(node: NodePorts, *, several: bool) -> Iterable[Finding]:
    checks = (_nccl, _gloo, _own_name, _master_addr, _master_port, _firewall, _container)
    return [found for check in checks if (found := check(node, several)) is not None]


def _nccl(node: NodePorts, several: bool) -> Finding | None:
    chosen = nccl_selection(node.network.interfaces, node.variables)
    doubt = objection(chosen)
    if not doubt or (
        not several and not chosen.error and "NCCL_SOCKET_IFNAME" not in node.variables and " as well as " not in doubt
    ):
        return None
    words = {"names": chosen.names or "no interface", "doubt": doubt, "rule": chosen.rule}
    words |= {"hint": _misread(node.variables.get("NCCL_SOCKET_IFNAME", "")), **_name_it(node)}
    if "NCCL_SOCKET_FAMILY" in node.variables:
        words["fix"] = "unset the address family, or set the family that the interfaces have"
        words["line"] = "unset NCCL_SOCKET_FAMILY"
    return finding(
        "ports.nccl-ifname",
        words,
        level=Level.FAIL if chosen.error or (several and "loopback" in doubt) else Level.WARN,
        evidence=tuple(f"{nic.name} {nic.address} ({nic.kind})" for nic in chosen.nics),
    )


def _misread(value: str) -> str:
    """Explain how NCCL reads a value that probably means something else; empty if it is fine."""
    if '"' in value or "'" in value:
        return "NCCL reads the quotes as part of the name."
    if " " in value:
        return "NCCL does not trim spaces: they are part of the name."
    return ""


def _name_it(node: NodePorts) -> dict[str, str]:
    variables = exports(suggested(node.network.interfaces))
    return {"fix": "set the interface explicitly", "line": export_line(variables)} if variables else {}


def _gloo(node: NodePorts, several: bool) -> Finding | None:
    chosen = gloo_selection(node.network.interfaces, node.network.names, node.variables)
    doubt = objection(chosen)
    lines = exports(suggested(node.network.interfaces))
    if not doubt or (not several and not chosen.error and not ("loopback" in doubt and lines)):
        return None
    if not several and not chosen.error:
        found = finding("ports.gloo-alone", {"names": chosen.names, "rule": chosen.rule})
        return replace(found, fix=gloo_fix(chosen, lines))
    is_named = bool(node.variables.get("GLOO_SOCKET_IFNAME"))
    hint = "Gloo takes exact interface names, separated by commas only." if is_named and chosen.error else ""
    words = {"names": chosen.names or "no interface", "doubt": doubt, "rule": chosen.rule, "hint": hint}
    found = finding("ports.gloo-ifname", words, level=Level.FAIL if chosen.error or several else Level.WARN)
    return replace(found, fix=gloo_fix(chosen, lines) if lines else None)


def _own_name(node: NodePorts, several: bool) -> Finding | None:
    names = node.network.names
    if names.host_addresses:
        return None
    words = {"named": names.host_name, "error": names.host_error, "address": address_of(node) or "10.0.0.1"}
    return finding("ports.name-unresolved", words)


def _master_addr(node: NodePorts, several: bool) -> Finding | None:
    """Judge MASTER_ADDR on a single node; with several, each one's look-up is judged."""
    name = node.variables.get("MASTER_ADDR")
    if name is None or several or node.master:
        return None
    odd = ":" in name or name != name.strip()
    detail = "MASTER_ADDR takes a name or an address only: no port, no spaces." if odd else ""
    words = {"value": repr(name), "detail": detail, "named": shlex.quote(name)}
    return finding("ports.master-addr-unresolved", words)


def _master_port(node: NodePorts, several: bool) -> Finding | None:
    text = node.variables.get("MASTER_PORT")
    if text is None:
        return None
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        return finding("ports.master-port", {"value": repr(text), "free": node.lowest_free or 29500})
    if node.network.ephemeral_ports is None:
        return None
    low, high = node.network.ephemeral_ports
    if not low <= int(text) <= high:
        return None
    return finding("ports.port-range", {"value": text, "low": low, "high": high, "free": node.lowest_free or 29500})


def _firewall(node: NodePorts, several: bool) -> Finding | None:
    if not node.firewalls:
        return None
    low, high = node.network.ephemeral_ports or (32768, 60999)
    found = finding("ports.firewall", {"firewalls": ", ".join(node.firewalls), "low": low, "high": high})
    opened = opening(node.network, ["29500", f"{low}-{high}"], _network(node))
    return replace(found, fix=Fix(text="if these ports are closed, open them", commands=opened))


def _network(node: NodePorts) -> str:
    nic = suggested(node.network.interfaces)
    network = network_of(nic.addresses[0]) if nic is not None else None
    return str(network) if network is not None else ""


def _container(node: NodePorts, several: bool) -> Finding | None:
    """Report a container behind a bridge: other machines cannot reach its ephemeral ports."""
    nic = suggested(node.network.interfaces)
    if not several or not node.container or nic is None or not nic.addresses[0].startswith("172.17."):
        return None
    return finding("ports.container-network", {"address": nic.addresses[0]})


def _dead_interfaces(facts: PortsFacts) -> list[Finding]:
    """Find unreachable interfaces that NCCL would use too: it uses all of them, and hangs."""
    bad = [path for path in facts.paths if path.purpose == "also" and not path.is_open]
    if not bad:
        return []
    case = Case(command=COMMAND, test=facts.path_test())
    names = sorted({name for path in bad if (name := _interface_at(facts.nodes.get(path.target), path.probe.address))})
    good = sorted({path.probe.interface for path in facts.paths if path.purpose == RANKS and path.is_open} - {""})
    hosts = case.named(path.target for path in bad)
    words = {
        "names": ", ".join(names),
        "hosts": fold(hosts),
        "fix": "set the interface that works",
        "line": "ip -br address",
    }
    if good:
        words |= {"fix": f"restrict NCCL to {good[0]}", "line": export_line({"NCCL_SOCKET_IFNAME": f"={good[0]}"})}
    evidence = tuple(evidence_line(case, path) for path in bad[:EVIDENCE_LINES])
    return [finding("ports.nccl-dead-interface", words, where=Where(hosts=hosts), evidence=evidence)]


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
    words = {"what": what, "named": repr(name), "to": leads_to, "hosts": fold(hosts)}
    return finding(
        "ports.master-addr" if leads_to else "ports.master-addr-unknown",
        {**words, "address": address_of(facts.nodes[first])},
        level=Level.FAIL if master else Level.WARN,
        where=Where(hosts=tuple(hosts)),
    )


def _masters_differ(facts: PortsFacts) -> list[Finding]:
    """Report a MASTER_ADDR that differs between nodes, or is set on some nodes only."""
    values = by_key((_value_of_master_addr(facts, node), facts.hosts[node]) for node in facts.nodes)
    if len(values) < 2:
        return []
    fewest = min(values.items(), key=lambda entry: (len(entry[1]), not entry[0]))[1]
    each = "; ".join(f"{value or 'not set'} on {fold(hosts)}" for value, hosts in values.items())
    words = {"each": each, "address": address_of(next(iter(facts.nodes.values())))}
    return [finding("ports.master-addr-differs", words, where=Where(hosts=tuple(fewest)))]


def _differences(facts: PortsFacts) -> list[Finding]:
    """Report differences in MTU and suggested interface."""
    found = differences({facts.hosts[name]: _compared(node) for name, node in facts.nodes.items()})
    if not found:
        return []
    hosts = tuple(dict.fromkeys(host for difference in found for host in difference.odd_hosts))
    words = {"hosts": fold(hosts), "are": "is" if len(hosts) == 1 else "are"}
    return [finding("ports.nodes-differ", words, where=Where(hosts=hosts), evidence=tuple(map(str, found)))]


def _compared(node: NodePorts) -> dict[str, object]:
    nic = suggested(node.network.interfaces)
    return {"interface": nic.name if nic is not None else None, "MTU": nic.mtu if nic is not None else None}
