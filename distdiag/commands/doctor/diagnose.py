"""Facts of all nodes -> the report: symptoms folded over nodes, outlier nodes, and fitness. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, fold_within
from distdiag.commands.doctor import paths
from distdiag.commands.doctor.gpu_symptoms import gpu_symptoms
from distdiag.commands.doctor.node_differences import difference_findings
from distdiag.commands.doctor.node_symptoms import node_symptoms, versions_of
from distdiag.commands.doctor.settings_symptoms import overloaded, rebooted, settings_symptoms
from distdiag.commands.doctor.symptoms import finding_about, symptom
from distdiag.commands.doctor.types import COMMAND, Doctor, NodeRow, Silenced
from distdiag.diagnosis import pcie_paths
from distdiag.diagnosis.finding_ids import matches
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.pcie_paths import PcieNode
from distdiag.diagnosis.verdicts import worst_first
from distdiag.diagnosis.wording import counted, format_duration, format_size
from distdiag.fold import by_key
from distdiag.report import Finding, Level, Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.doctor.types import NodeDoctor, Request, Symptom
    from distdiag.saved_facts import Gathered

FIT, WARNED, UNFIT, UNKNOWN = "fit", "fit with warnings", "not fit", "unknown"
_LATE_CLOCK_S, _WRONG_CLOCK_S = 1.0, 15.0
"""torchrun declares a node dead if its clock is off by 15 s (keep-alives of the c10d rendezvous, 3 x 5 s)."""
_MANY_FLAPS, _FLAPS_RATIO = 10, 5
_ROOM = 60
_EVIDENCE_LINES = 8


def diagnose(request: Request, gathered: Gathered[NodeDoctor]) -> Report[Doctor]:
    """Judge all nodes."""
    nodes = gathered.facts
    several = len(nodes) > 1
    own = _folded(nodes, several=several)
    odd, rows = difference_findings(nodes, _said(own)) if several else ([], [])
    all_findings = [
        *host_findings(gathered.refusals, gathered.rows),
        *_incomplete(gathered),
        *own,
        *paths.judge({node.host: node.paths for node in nodes if node.paths is not None}),
        *_clocks(nodes),
        *_flaps(nodes),
        *rebooted(nodes),
        *overloaded(nodes),
        *pcie_paths.findings(COMMAND, [_pcie(node) for node in nodes]),
        *odd,
    ]
    wanted = (finding for finding in all_findings if not _left_out(request, finding.id))
    findings = worst_first(_to_paste(request, finding) for finding in wanted)
    judged = [_node_row(node, findings) for node in nodes]
    unreached = tuple(dict.fromkeys([*gathered.refusals, *(row.host for row in judged if row.fit == UNKNOWN)]))
    exclude = _exclude(judged, unreached)
    fit = _fit(findings, judged, unreached)
    return Report(
        command=COMMAND,
        data=Doctor(
            fit=fit,
            exclude=exclude,
            nodes=tuple(judged),
            differences=tuple(row for row in rows if not _left_out(request, row.id)),
            silenced=_silenced(request, all_findings),
            unchecked=_unchecked(request, nodes),
        ),
        findings=tuple(findings),
        summary=_summary(fit, exclude, findings, judged, unreached) + _for_what(fit, nodes),
        interrupted=gathered.interrupted,
    )


def _to_paste(request: Request, finding: Finding) -> Finding:
    """Insert the host options of this run into the commands of a fix."""
    typed = _hosts_typed(request)
    if finding.fix is None or not typed:
        return finding
    commands = tuple(command.replace(" --hosts LIST", typed) for command in finding.fix.commands)
    return replace(finding, fix=replace(finding.fix, commands=commands))


def _hosts_typed(request: Request) -> str:
    # The value of a variable may be a secret.
    return "".join(f" {name} {shlex.quote(value)}" for name, value in request.cluster.typed() if name != "--env")


def _unchecked(request: Request, nodes: Sequence[NodeDoctor]) -> tuple[str, ...]:
    """List the omitted checks and the commands to run."""
    typed = _hosts_typed(request)
    work = "Gloo" if _without_gpu(nodes) else "GPUs and NCCL"
    load = f"{work} under load: distdiag gpu-test{typed}"
    is_open = len(nodes) > 1 and not any(node.paths for node in nodes)
    return (f"connections between the nodes: distdiag ports{typed}", load) if is_open else (load,)


def _without_gpu(nodes: Sequence[NodeDoctor]) -> bool:
    return bool(nodes) and all(
        node.gpus is not None and not (node.gpus.health.gpus or node.gpus.driver.devices or node.gpus.driver.hardware)
        for node in nodes
    )


def _for_what(fit: str, nodes: Sequence[NodeDoctor]) -> str:
    """Return a restriction of the verdict, if any."""
    if fit not in (FIT, WARNED) or not _without_gpu(nodes):
        return ""
    return "; no NVIDIA GPU here: checked for CPU and Gloo only"


def _said(findings: Iterable[Finding]) -> dict[str, tuple[str, ...]]:
    return {finding.id: finding.where.hosts for finding in findings if finding.level is not Level.INFO}


def _left_out(request: Request, id_: str) -> bool:
    plain = id_.removeprefix(f"{COMMAND}.")
    if request.only and not id_.startswith("hosts.") and not any(matches(plain, prefix) for prefix in request.only):
        return True
    return any(matches(plain, prefix) for prefix, _ in request.ignore)


def _silenced(request: Request, findings: Iterable[Finding]) -> tuple[Silenced, ...]:
    found = []
    for finding in findings:
        plain = finding.id.removeprefix(f"{COMMAND}.")
        reason = next((why for id_, why in request.ignore if matches(plain, id_)), None)
        if reason is not None:
            found.append(Silenced(id=finding.id, title=finding.title, reason=reason))
    return tuple(found)


def _incomplete(gathered: Gathered[NodeDoctor]) -> list[Finding]:
    """Report missing parts: unknown never passes as OK."""
    known = {node.host for node in gathered.facts}
    why_by_host = [(why, host) for host, why in gathered.missing.items() if host not in known]
    for node in gathered.facts:
        parts = [f"{part} not read in time" for part in node.late]
        parts += [f"{part} not read: {why}" for part, why in node.failed.items()]
        why_by_host += [(why, node.host) for why in (*parts, *filter(None, [node.missing]))]
    return [
        finding_about(symptom("incomplete", hosts=fold_within(hosts, _ROOM), why=words), hosts)
        for words, hosts in by_key(why_by_host).items()
    ]


def _folded(nodes: Sequence[NodeDoctor], *, several: bool) -> list[Finding]:
    """Merge symptoms of several nodes by id and subject, ignoring their numbers."""
    found = [
        (node.host, each)
        for node, first_rank in zip(nodes, _first_ranks(nodes), strict=True)
        for each in (*node_symptoms(node, several=several), *settings_symptoms(node), *gpu_symptoms(node, first_rank))
    ]
    groups = by_key(((each.id, each.level, each.subject), (host, each)) for host, each in found)
    return [_finding(group, len(nodes)) for group in groups.values()]


def _first_ranks(nodes: Sequence[NodeDoctor]) -> list[int | None]:
    """Return the rank of each node's first GPU, assuming one rank per GPU; None if the numbers of GPUs differ."""
    counts = [len(node.gpus.health.gpus) if node.gpus is not None else 0 for node in nodes]
    if len(set(counts)) != 1:
        return [None] * len(nodes)
    return [sum(counts[:number]) for number in range(len(counts))]


def _finding(group: Sequence[tuple[str, Symptom]], nodes: int) -> Finding:
    one, hosts = group[0][1], [host for host, _ in group]
    titles = by_key((each.title, host) for host, each in group)
    if one.id == "rdma-down" and 1 < nodes <= len(hosts) and len(titles) == 1:
        one = replace(one, level=Level.INFO)  # ports without a cable, as intended
    title = f"{fold_within(hosts, _ROOM)}: {one.title}" if nodes > 1 else one.title
    others = [f"{fold(hosts)}: {words}" for words, hosts in titles.items()] if len(titles) > 1 else []
    if len(others) > _EVIDENCE_LINES:
        others = [*others[:_EVIDENCE_LINES], f"... and {len(others) - _EVIDENCE_LINES} more"]
    return finding_about(replace(one, title=title, evidence=(*one.evidence, *others)), hosts)


def _clocks(nodes: Sequence[NodeDoctor]) -> list[Finding]:
    """Name nodes whose clock deviates from the median of all clocks, including this machine's."""
    clocks = {node.host: node.clock for node in nodes if node.clock is not None}
    middle = median([0.0, *(clock.offset_s for clock in clocks.values())]) if len(clocks) > 1 else 0.0
    found = []
    for host, clock in clocks.items():
        off = clock.offset_s - middle
        sure = abs(off) - clock.uncertainty_s
        if sure <= _LATE_CLOCK_S:
            continue
        far = sure > _WRONG_CLOCK_S
        measured = f"{clock.offset_s:+.3f} s +- {clock.uncertainty_s:.3f} s (half the round trip)"
        named = symptom(
            "clock",
            level=Level.FAIL if far else Level.WARN,
            host=host,
            off=f"{format_duration(abs(off))} {'ahead' if off > 0 else 'behind'}",
            detail="torchrun's rendezvous treats a node whose clock is off by 15 s as dead, and SLURM refuses its "
            "credentials."
            if far
            else "Logs, traces and dumps of the nodes cannot be put in order.",
            evidence=(f"measured as {measured} from this machine; median of all nodes: {middle:+.3f} s",),
        )
        found.append(finding_about(named, [host]))
    return found


def _flaps(nodes: Sequence[NodeDoctor]) -> list[Finding]:
    """Name nodes with an RDMA link that went down far more often since boot than on the others."""
    downs: dict[str, tuple[int, str]] = {}
    for node in nodes:
        if node.network is not None and node.network.ib_ports:
            counts = [(each.value, each.link) for each in node.network.counters.links if each.name == "link_downed"]
            downs[node.host] = max(counts, default=(0, ""))
    found = []
    for host, (count, link) in downs.items():
        others = [other for name, (other, _) in downs.items() if name != host]
        usual = median(others) if others else None
        if count < _MANY_FLAPS or (usual is not None and count < _FLAPS_RATIO * max(1.0, usual)):
            continue
        beside = "" if usual is None else f"{usual:g}"
        level = Level.WARN if beside else Level.INFO
        named = symptom("link-flaps", level=level, host=host, link=link, count=count, usual=beside)
        found.append(finding_about(named, [host]))
    return found


def _pcie(node: NodeDoctor) -> PcieNode:
    network = node.network
    if network is None:
        return PcieNode(node.host, None, has_rdma=False)
    return PcieNode(node.host, network.pcie, has_rdma=any(port.state == "ACTIVE" for port in network.ib_ports))


def _node_row(node: NodeDoctor, findings: Sequence[Finding]) -> NodeRow:
    own = [finding for finding in findings if node.host in finding.where.hosts and finding.level is not Level.INFO]
    levels = {finding.level for finding in own}
    fit = UNFIT if Level.FAIL in levels else UNKNOWN if Level.UNKNOWN in levels else WARNED if levels else FIT
    return NodeRow(
        host=node.host,
        fit=fit,
        findings=tuple(dict.fromkeys(finding.id for finding in own)),
        facts=_facts_of(node),
        clock_offset_s=node.clock.offset_s if node.clock is not None else None,
        clock_uncertainty_s=node.clock.uncertainty_s if node.clock is not None else None,
    )


def _facts_of(node: NodeDoctor) -> dict[str, str]:
    """Choose the facts for a table that folds over equal nodes."""
    found = {}
    system, network, software = node.system, node.network, node.software
    if system is not None:
        limits = {limit.name: limit.soft for limit in system.limits}
        memory = f"{system.memory_bytes / 2**30:.0f} GiB" if system.memory_bytes else "memory unknown"
        found["machine"] = f"{counted(system.cpus, 'CPU')}, {memory}, Linux {system.kernel}"
        found["limits"] = ", ".join(
            f"{name} {_limit(limits.get(name), in_bytes=name != 'nofile')}" for name in ("memlock", "nofile", "stack")
        )
        shm = system.shm
        found["/dev/shm"] = format_size(shm.total_bytes) if shm is not None and not shm.error else "none"
    if network is not None:
        real = [nic for nic in network.nics if not nic.loopback and not nic.virtual and nic.addresses]
        links = [f"{nic.name} MTU {nic.mtu}{'' if nic.running else ' DOWN'}" for nic in real]
        found["network"] = ", ".join(links) or "none"
        if network.ib_ports:
            active = sum(port.state == "ACTIVE" for port in network.ib_ports)
            found["RDMA"] = f"{active} of {len(network.ib_ports)} ports active"
    if software is not None and not software.error:
        versions = versions_of(node)
        found["software"] = ", ".join(
            f"{words} {versions[name]}" for name, words in _VERSIONS.items() if name in versions
        )
    if node.gpus is not None:
        kinds = Counter(gpu.name for gpu in node.gpus.health.gpus)
        found["GPUs"] = ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none"
    return found


_VERSIONS = {"python": "Python", "torch": "torch", "nccl": "NCCL", "driver": "driver"}


def _limit(soft: int | None, *, in_bytes: bool) -> str:
    return "unlimited" if soft is None else format_size(soft) if in_bytes else str(soft)


def _fit(findings: Sequence[Finding], judged: Sequence[NodeRow], unreached: Sequence[str]) -> str:
    levels = {finding.level for finding in findings}
    if Level.FAIL in levels:
        return UNFIT
    if unreached or Level.UNKNOWN in levels or not judged:
        return UNKNOWN
    return WARNED if Level.WARN in levels else FIT


def _exclude(judged: Sequence[NodeRow], unreached: Sequence[str]) -> str:
    """Fold the nodes to exclude; "" if none would remain."""
    bad = [row.host for row in judged if row.fit == UNFIT]
    out = dict.fromkeys([*bad, *unreached])
    left = [row for row in judged if row.host not in out]
    return fold(out) if left else ""


def _summary(
    fit: str, exclude: str, findings: Sequence[Finding], judged: Sequence[NodeRow], unreached: Sequence[str]
) -> str:
    nodes = counted(len({*unreached, *(row.host for row in judged)}), "node")
    if fit in (FIT, WARNED):
        warnings = sum(finding.level is Level.WARN for finding in findings)
        return f"{nodes} fit" + (f", with {counted(warnings, 'warning')}" if warnings else "")
    bad = [finding for finding in findings if finding.level in (Level.FAIL, Level.UNKNOWN)]
    if not bad:
        return "no node returned facts"
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    start = f"; start without: --exclude={exclude}" if exclude else ""
    if fit == UNFIT:
        return f"not fit: {bad[0].title}{more}{start}"
    good = sum(row.fit in (FIT, WARNED) for row in judged)
    return f"{bad[0].title}{more}" + (f"; {counted(good, 'node')} fit" if good else "") + start
