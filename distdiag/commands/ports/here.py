"""What is said of each node by itself: what NCCL and Gloo take, its names, RDMA ports, firewall. Pure."""

from __future__ import annotations

import ipaddress
import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.ports.choice import address_of, doubts, gloo, nccl, suggested
from distdiag.commands.ports.findings import finding, opening
from distdiag.node.network import is_loopback
from distdiag.report import Finding, Fix, Level, Where, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distdiag.commands.ports.check import Seen
    from distdiag.commands.ports.collect import Ports


def about_nodes(seen: Seen) -> list[Finding]:
    """Judge all nodes; equal findings of several become one."""
    found: dict[tuple[str, Level, str], tuple[Finding, list[str]]] = {}
    several = len(seen.nodes) > 1
    for name, node in seen.nodes.items():
        for one in _about(node, several=several):
            found.setdefault((one.id, one.level, one.title), (one, []))[1].append(seen.hosts[name])
    together = [_for_hosts(one, hosts, several=several) for one, hosts in found.values()]
    return together + (_differences(seen) if several else [])


def _for_hosts(one: Finding, hosts: list[str], *, several: bool) -> Finding:
    from dataclasses import replace

    title = f"{fold(hosts)}: {one.title}" if several else one.title
    return replace(one, title=title, where=Where(hosts=tuple(hosts)))


def _about(node: Ports, *, several: bool) -> Iterable[Finding]:
    checks: tuple[Callable[[Ports, bool], Finding | None], ...] = (
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


def exports_of(node: Ports) -> dict[str, str]:
    """Give the variables that name the interface that is meant, if one is."""
    nic = suggested(node.nics)
    if nic is None:
        return {}
    # "=" asks NCCL for this very name; eth1 alone would take eth10 too.
    return {"NCCL_SOCKET_IFNAME": f"={nic.name}", "GLOO_SOCKET_IFNAME": nic.name}


def export_line(variables: dict[str, str]) -> str:
    """Write variables to paste."""
    return "export " + " ".join(f"{name}={quoted(value)}" for name, value in variables.items())


def _nccl(node: Ports, several: bool) -> Finding | None:
    chosen = nccl(node.nics, node.variables)
    doubt = doubts(chosen)
    if not doubt or (
        not several and not chosen.error and "NCCL_SOCKET_IFNAME" not in node.variables and "beside" not in doubt
    ):
        return None
    wanted = node.variables.get("NCCL_SOCKET_IFNAME", "")
    hint = _misread(wanted)
    return finding(
        "nccl-ifname",
        Level.FAIL if chosen.error or (several and "loopback" in doubt) else Level.WARN,
        f"NCCL would take {', '.join(one.name for one in chosen.taken) or 'no interface'}: {doubt}",
        detail=" ".join(filter(None, (f"Its rule: {chosen.rule}." if chosen.rule else "", hint))),
        evidence=tuple(f"{one.name} {one.address} ({one.kind})" for one in chosen.taken),
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


def _name_it(node: Ports) -> Fix | None:
    variables = exports_of(node)
    return Fix(text="name the interface", commands=(export_line(variables),)) if variables else None


def _gloo(node: Ports, several: bool) -> Finding | None:
    chosen = gloo(node.nics, node.names, node.variables)
    doubt = doubts(chosen)
    if not doubt or (not several and not chosen.error):
        return None
    wanted = node.variables.get("GLOO_SOCKET_IFNAME", "")
    hint = "It takes exact names, with commas and nothing else." if wanted and chosen.error else ""
    return finding(
        "gloo-ifname",
        Level.FAIL if chosen.error or several else Level.WARN,
        f"Gloo would take {', '.join(one.name for one in chosen.taken) or 'no interface'}: {doubt}",
        detail=" ".join(filter(None, (f"Its rule: {chosen.rule}." if chosen.rule else "", hint))),
        fix=_name_it(node),
    )


def _own_name(node: Ports, several: bool) -> Finding | None:
    names = node.names
    if not names.host_addresses:
        return finding(
            "name-unresolved",
            Level.WARN,
            f"its own name, {names.host_name}, does not resolve: {names.host_error}",
            fix=Fix(
                text="add it to /etc/hosts",
                commands=(f"echo '{address_of(node) or '10.0.0.1'} {names.host_name}' | sudo tee -a /etc/hosts",),
            ),
        )
    if several and all(is_loopback(address) for address in names.host_addresses):
        return finding(
            "name-loopback",
            Level.WARN,
            f"its own name, {names.host_name}, resolves to {', '.join(names.host_addresses)}",
            detail="Torchrun's c10d rendezvous does not see then that it is the host, and Gloo binds to loopback.",
            fix=Fix(
                text="put the real address into /etc/hosts, or name the interface",
                commands=(export_line(exports_of(node)),),
            ),
        )
    return None


def _master_addr(node: Ports, several: bool) -> Finding | None:
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


def _master_port(node: Ports, several: bool) -> Finding | None:
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
    if node.ephemeral_ports is None:
        return None
    low, high = node.ephemeral_ports
    if not low <= int(text) <= high:
        return None
    return finding(
        "port-range",
        Level.WARN,
        f"MASTER_PORT={text} lies among the ephemeral ports ({low}-{high})",
        detail="Any outgoing connection may have it when rank 0 wants to listen.",
        fix=Fix(text="take one below", commands=(f"export MASTER_PORT={node.lowest_free or 29500}",)),
    )


def _rdma(node: Ports, several: bool) -> Finding | None:
    ports = [one for one in node.ib_ports if one.link in ("InfiniBand", "Ethernet")]
    down = [one for one in ports if one.state != "ACTIVE"]
    if not down or len(down) == len(ports):
        return None
    names = ", ".join(f"{one.device}:{one.port}" for one in down)
    waits = [one for one in down if one.physical == "LinkUp"]
    return finding(
        "rdma-down",
        Level.WARN,
        f"{len(down)} of {len(ports)} RDMA ports are not active: {names}",
        detail="A cable that is up and not active waits for its subnet manager." if waits else "",
        evidence=tuple(f"{one.device}:{one.port} {one.state}, {one.physical}, {one.link}" for one in down),
        fix=Fix(
            text="see cable, switch port and subnet manager; or leave them out",
            commands=("ibstat", f"export NCCL_IB_HCA={quoted('^' + ','.join(one.device for one in down))}"),
        ),
    )


def _firewall(node: Ports, several: bool) -> Finding | None:
    if not node.firewall.active:
        return None
    low, high = node.ephemeral_ports or (32768, 60999)
    return finding(
        "firewall",
        Level.INFO,
        f"a firewall is active: {', '.join(node.firewall.active)}; ranks need the rendezvous port and {low}-{high}",
        fix=Fix(text="if they are closed", commands=opening(node, ["29500", f"{low}-{high}"], _network(node))),
    )


def _network(node: Ports) -> str:
    nic = suggested(node.nics)
    return str(ipaddress.ip_interface(nic.addresses[0]).network) if nic is not None else "0.0.0.0/0"


def _container(node: Ports, several: bool) -> Finding | None:
    """Point at a container with a network of its own: nobody outside reaches its ephemeral ports."""
    nic = suggested(node.nics)
    if not several or not node.container or nic is None or not nic.addresses[0].startswith("172.17."):
        return None
    return finding(
        "container-network",
        Level.WARN,
        f"this container is behind a bridge ({nic.addresses[0]})",
        detail="Other machines do not reach its ephemeral ports.",
        fix=Fix(text="start it in the network of its host: docker run --network host"),
    )


def _differences(seen: Seen) -> list[Finding]:
    """Name what must be alike and is not: the MTU, and the interface that is taken."""
    from distdiag.cluster.minority import differences

    facts = {seen.hosts[name]: _compared(node) for name, node in seen.nodes.items()}
    found = differences(facts)
    if not found:
        return []
    odd = tuple(dict.fromkeys(host for one in found for host in one.odd_hosts))
    return [
        finding(
            "nodes-differ",
            Level.WARN,
            f"{fold(odd)} {'is' if len(odd) == 1 else 'are'} set up otherwise than the rest",
            detail="One value of NCCL_SOCKET_IFNAME does not fit all then, or large packets get lost.",
            where=Where(hosts=odd),
            evidence=tuple(str(one) for one in found),
            fix=Fix(text="make them alike, or set the variables on each node; NCCL_SOCKET_IFNAME takes several names"),
        )
    ]


def _compared(node: Ports) -> dict[str, object]:
    nic = suggested(node.nics)
    if nic is None:
        return {"interface": None, "MTU": None}
    return {"interface": nic.name, "MTU": nic.mtu}
