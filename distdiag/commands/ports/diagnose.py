"""The report of ports, from the facts of all nodes and the probes. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, fold_ranks, fold_within
from distdiag.commands.ports.node_findings import node_findings
from distdiag.commands.ports.port_findings import held_by, known_as, port_findings
from distdiag.commands.ports.types import COMMAND, Choice, PortsData, ProbeRow, address_of
from distdiag.diagnosis.connectivity import Case, path_findings
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.nic_selection import exports, gloo_selection, nccl_selection, suggested
from distdiag.diagnosis.verdicts import worst_first
from distdiag.ids import Id
from distdiag.report import Finding, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.ports.types import PortsFacts, Request

_SHOWN = 4


def diagnose(request: Request, facts: PortsFacts) -> Report[PortsData]:
    """Judge the facts of all nodes."""
    case = Case(command=COMMAND, test=facts.path_test(), head=next(iter(facts.nodes), ""))
    findings = [*port_findings(facts), *path_findings(case), *node_findings(facts)]
    findings += _same_machine(facts)
    findings += host_findings(facts.refusals, facts.rows)
    return Report(
        command=COMMAND,
        data=_data(facts),
        findings=tuple(findings),
        summary=_summary(request, facts, findings),
        interrupted=facts.interrupted,
    )


def _same_machine(facts: PortsFacts) -> list[Finding]:
    if not facts.doubles:
        return []
    title = f"{fold(facts.doubles)}: same machine as another host of the list; tested once"
    if len(facts.nodes) == 1:
        title = (
            f"{fold([*facts.hosts.values(), *facts.doubles])}: one machine under several names, so no path was tested"
        )
    return [
        Finding(id=Id.HOSTS_SAME_MACHINE, level=Level.WARN, title=title, where=Where(hosts=facts.doubles)),
    ]


def _data(facts: PortsFacts) -> PortsData:
    nodes = {facts.hosts[name]: node for name, node in facts.nodes.items()}
    return PortsData(
        hosts=facts.rows,
        nodes=nodes,
        choice={
            host: Choice(
                nccl=nccl_selection(node.network.interfaces, node.variables).nics,
                gloo=gloo_selection(node.network.interfaces, node.network.names, node.variables).nics,
            )
            for host, node in nodes.items()
        },
        probes=_probes(facts),
        pairs=tuple(
            replace(path, source=facts.hosts[path.source], target=facts.hosts[path.target]) for path in facts.paths
        ),
        exports=_exports(facts),
    )


def _probes(facts: PortsFacts) -> tuple[ProbeRow, ...]:
    return tuple(
        ProbeRow(**vars(result), source=facts.hosts[node], by=known_as(result))
        for node, results in facts.scanned.items()
        for result in sorted(results, key=lambda result: (result.host, result.port))
    )


def _exports(facts: PortsFacts) -> dict[str, dict[str, str]]:
    """Return the variables per host, or once if equal on all hosts."""
    each = {facts.hosts[name]: exports(suggested(node.network.interfaces)) for name, node in facts.nodes.items()}
    if len(facts.nodes) > 1:
        first = next(iter(facts.nodes.values()))
        each = {host: {**variables, "MASTER_ADDR": address_of(first)} for host, variables in each.items()}
    values = list(each.values())
    return {"": values[0]} if values and all(value == values[0] for value in values) else each


def _summary(request: Request, facts: PortsFacts, findings: list[Finding]) -> str:
    for finding in worst_first(findings):
        if finding.level is not Level.INFO:
            return finding.title
    if facts.paths:
        hosts = dict.fromkeys(facts.hosts[node] for path in facts.paths for node in (path.source, path.target))
        return f"all {len(hosts)} nodes ({fold_within(hosts, 160)}) reach each other on every tested port"
    if facts.scanned:
        count = sum(map(len, facts.scanned.values()))
        return f"{count} port{'' if count == 1 else 's'} tested, none blocked"
    if facts.nodes and request.ports:
        return f"{'; '.join(_listeners_on(facts, request.ports))}; no other node was tested: pass a HOST, or --hosts"
    return "no network problem seen on this node; no other node was tested: pass a HOST, or --hosts"


def _listeners_on(facts: PortsFacts, ports: Sequence[int]) -> list[str]:
    """Format the listeners on the requested ports of this node."""
    (node, *_) = facts.nodes.values()
    asked = set(ports)
    owners = {own.port: own for own in node.listeners if own.port in asked}
    free = [port for port in ports if port not in owners]
    words = [f"port {port} is in use here: {held_by(own)}" for port, own in list(owners.items())[:_SHOWN]]
    more = [f"and {len(owners) - _SHOWN} more"] if len(owners) > _SHOWN else []
    nothing = f"nothing listens here on port{'s' * (len(free) > 1)} {fold_ranks(free)}"
    return [*words, *more, *([nothing] if free else [])]
