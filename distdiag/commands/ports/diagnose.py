"""Facts of all nodes and all that was tried -> the report. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.cluster.reached import host_findings
from distdiag.commands.ports.choice import address_of, gloo, nccl
from distdiag.commands.ports.findings import about_closed
from distdiag.commands.ports.here import about_nodes, exports_of
from distdiag.commands.ports.model import COMMAND
from distdiag.commands.ports.quality import about_names, about_quality
from distdiag.commands.ports.result import (
    ChoiceRow,
    IbPortRow,
    InterfaceRow,
    ListenerRow,
    PairRow,
    PortsData,
    ProbeRow,
    Taken,
)
from distdiag.commands.ports.tried import about_tried, known_as
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from distdiag.commands.ports.check import Seen
    from distdiag.commands.ports.model import Request


def diagnose(request: Request, seen: Seen) -> Report[PortsData]:
    """Judge what was seen."""
    findings = [*about_tried(seen), *about_closed(seen), *about_quality(seen), *about_names(seen), *about_nodes(seen)]
    findings += _unserved(seen)
    if seen.doubles:
        findings.append(
            Finding(
                id="hosts.same-machine",
                level=Level.WARN,
                title=f"{fold(seen.doubles)}: a machine that another of the hosts is already; it was tried once",
                where=Where(hosts=seen.doubles),
            )
        )
    findings += host_findings(seen.refusals, seen.rows)
    findings += [
        Finding(
            id=f"{COMMAND}.no-answer", level=Level.UNKNOWN, title=f"{seen.hosts.get(node, node)} did not answer in time"
        )
        for node in seen.silent
    ]
    return Report(
        command=COMMAND,
        data=_data(seen),
        findings=tuple(findings),
        summary=_summary(seen, findings),
        interrupted=seen.interrupted,
    )


def _unserved(seen: Seen) -> list[Finding]:
    """Say which servers could not be checked: that is no proof of anything."""
    words = {
        "stranger": "something answers at {name}, and it is no `distdiag ports serve`",
        "busy": "what answers at {name} hung up at once: a `serve` that has too many guests does so",
        "midway": "the `distdiag ports serve` at {name} went away midway",
    }
    return [
        Finding(
            id=f"{COMMAND}.not-checked",
            level=Level.UNKNOWN,
            title=words[why].format(name=name),
            fix=Fix(
                text="start it there, and check again",
                commands=(f"distdiag ports serve --port {name.rpartition(':')[2]}",),
            ),
        )
        for name, why in seen.unserved.items()
    ]


def _data(seen: Seen) -> PortsData:
    nodes = [(seen.hosts[name], node) for name, node in seen.nodes.items()]
    first = nodes[0][1] if nodes else None
    return PortsData(
        hosts=seen.rows,
        interfaces=tuple(
            InterfaceRow(
                host=host,
                name=nic.name,
                kind=nic.kind,
                addresses=nic.addresses,
                up=nic.up,
                running=nic.running,
                mtu=nic.mtu,
                speed_bits_per_s=nic.speed_bits_per_s,
                default_route=nic.default_route,
            )
            for host, node in nodes
            for nic in node.nics
        ),
        ib_ports=tuple(
            IbPortRow(host, one.device, one.port, one.state, one.link, one.rate_bits_per_s, one.netdevs)
            for host, node in nodes
            for one in node.ib_ports
        ),
        choice=ChoiceRow(
            nccl=tuple(
                Taken(host, one.name, one.address, one.kind)
                for host, node in nodes
                for one in nccl(node.nics, node.variables).taken
            ),
            gloo=tuple(
                Taken(host, one.name, one.address, one.kind)
                for host, node in nodes
                for one in gloo(node.nics, node.names, node.variables).taken
            ),
        ),
        listeners=tuple(
            ListenerRow(host, one.address, one.port, one.pid, one.command)
            for host, node in nodes
            for one in node.listeners
        ),
        probes=_probes(seen),
        pairs=_pairs(seen),
        ephemeral_ports=first.ephemeral_ports if first is not None else None,
        free_port=first.lowest_free or None if first is not None else None,
        exports=_exports(seen),
    )


def _probes(seen: Seen) -> tuple[ProbeRow, ...]:
    return tuple(
        ProbeRow(
            from_=seen.hosts[node],
            to=one.host,
            address=one.address,
            port=one.port,
            state=one.state,
            by=known_as(one),
            said=one.said,
            local_address=one.local_address,
            interface=one.interface,
            rtt_s=one.rtt_s,
            error=one.error,
        )
        for node, tried in seen.tried.items()
        for one in sorted(tried, key=lambda one: (one.host, one.port))
    )


def _pairs(seen: Seen) -> tuple[PairRow, ...]:
    rows = []
    for way in seen.ways:
        probe = way.probe
        rate = probe.bulk_bytes / probe.bulk_s if probe.bulk_s and probe.bulk_bytes else None
        rows.append(
            PairRow(
                from_=seen.hosts[way.source],
                to=seen.hosts[way.target],
                address=probe.address,
                port=probe.port,
                purpose=way.purpose,
                state=probe.verdict,
                interface=probe.interface,
                rtt_s=probe.latency_s,
                throughput_bytes_per_s=rate,
                error=probe.error,
            )
        )
    return tuple(rows)


def _exports(seen: Seen) -> dict[str, dict[str, str]]:
    """Give the variables per host; if all have the same, once for all."""
    each = {seen.hosts[name]: exports_of(node) for name, node in seen.nodes.items()}
    if len(seen.nodes) > 1:
        first = next(iter(seen.nodes.values()))
        each = {host: {**variables, "MASTER_ADDR": address_of(first)} for host, variables in each.items()}
    values = list(each.values())
    return {"": values[0]} if values and all(one == values[0] for one in values) else each


def _summary(seen: Seen, findings: list[Finding]) -> str:
    for level in (Level.FAIL, Level.UNKNOWN, Level.WARN):
        for one in findings:
            if one.level is level:
                return one.title
    if seen.ways:
        hosts = dict.fromkeys(seen.hosts[node] for way in seen.ways for node in (way.source, way.target))
        return f"all {len(hosts)} nodes ({fold(hosts)}) reach each other at all tried ports"
    if seen.served:
        return "nobody came"
    if seen.tried:
        count = sum(map(len, seen.tried.values()))
        return f"{count} port{'' if count == 1 else 's'} tried, nothing stands in the way"
    return "nothing is wrong with this node's network"
