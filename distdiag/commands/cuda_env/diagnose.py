"""Facts of all nodes -> the report. Pure: equal findings of several nodes become one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.about.toolkits import who_uses
from distdiag.commands.cuda_env.archs import as_list
from distdiag.commands.cuda_env.sections import apply_fixes, is_ready, sections_of
from distdiag.commands.cuda_env.types import (
    COMMAND,
    CudaEnv,
    Goal,
    NodeEnv,
    Ready,
    Section,
    SectionRow,
    Silenced,
    Step,
)
from distdiag.diagnosis.finding_ids import matches
from distdiag.diagnosis.hosts.drift import differences
from distdiag.diagnosis.hosts.unreached_hosts import host_findings, summary_of
from distdiag.diagnosis.verdicts import finding
from distdiag.ids import RowId
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.commands.cuda_env.types import Problem, Request
    from distdiag.diagnosis.hosts.drift import Difference
    from distdiag.saved_facts import Gathered


@dataclass
class _Group:
    section: Section
    hosts: list[str] = field(default_factory=list)


def diagnose(request: Request, gathered: Gathered[CudaFacts], log: Sequence[Finding] = ()) -> Report[CudaEnv]:
    """Judge all nodes; `log`: findings of the log given to --explain."""
    nodes = gathered.facts
    gpus = sorted({arch for facts in nodes for arch in fixes.gpu_archs(facts)})
    everywhere = gpus if len(nodes) > 1 else ()
    whole = {facts.host: sections_of(facts, request.goal, everywhere) for facts in nodes}
    judged = {host: _chosen(request, sections) for host, sections in whole.items()}
    groups = _groups(judged)
    findings: list[Finding] = list(log)
    rows = tuple(_row(group, findings, several=len(nodes) > 1) for group in groups)
    found = differences({facts.host: _compared(facts) for facts in nodes})
    if found and not _left_out(request, "nodes-differ"):
        findings.append(_differ(found))
    findings += host_findings(gathered.refusals, gathered.rows)
    findings += [
        finding("cuda-env.no-answer", {"host": host, "why": why}, where=Where(hosts=(host,)))
        for host, why in gathered.missing.items()
    ]
    ready = _ready(request, judged, incomplete=bool(gathered.refusals or gathered.missing))
    # For the first node only, as others need their own.
    exports, left = (
        apply_fixes(nodes[0], request.goal, lambda problem: not _left_out(request, problem.id)) if nodes else ({}, ())
    )
    data = CudaEnv(
        goal=request.goal,
        ready=ready,
        arch_list=as_list(gpus),
        nodes=tuple(_node_env(facts, _ready_of(request, judged[facts.host])) for facts in nodes),
        sections=rows,
        silenced=_silenced(request, whole),
        exports=exports,
        steps=tuple(
            Step(id=f"{COMMAND}.{problem.id}", title=problem.title, fix=problem.text, commands=problem.commands)
            for problem in left
            if problem.level in (Level.FAIL, Level.UNKNOWN)
        ),
    )
    summary = _summary(findings, ready, request, gathered)
    return Report(
        command=COMMAND, data=data, findings=tuple(findings), summary=summary, interrupted=gathered.interrupted
    )


def _left_out(request: Request, id_: str) -> bool:
    if request.only and not any(matches(id_, prefix) for prefix in request.only):
        return True
    return any(matches(id_, prefix) for prefix, _ in request.ignore)


def _chosen(request: Request, sections: Sequence[Section]) -> list[Section]:
    """Keep the requested findings; with --only, drop sections without any."""
    kept = [
        replace(section, problems=tuple(problem for problem in section.problems if not _left_out(request, problem.id)))
        for section in sections
    ]
    return [section for section in kept if section.problems or not request.only]


def _silenced(request: Request, whole: Mapping[str, Sequence[Section]]) -> tuple[Silenced, ...]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for host, sections in whole.items():
        for section in sections:
            for problem in section.problems:
                reason = next((why for id_, why in request.ignore if matches(problem.id, id_)), None)
                if reason is not None:
                    found.setdefault((problem.id, problem.title, reason), []).append(host)
    return tuple(
        Silenced(id=f"{COMMAND}.{id_}", title=title, reason=reason, hosts=tuple(hosts))
        for (id_, title, reason), hosts in found.items()
    )


def _groups(judged: Mapping[str, Sequence[Section]]) -> list[_Group]:
    """Group equal sections, in their order, each section's largest group first."""
    names = list(dict.fromkeys(section.name for sections in judged.values() for section in sections))
    groups: dict[tuple[object, ...], _Group] = {}
    for host, sections in judged.items():
        for section in sections:
            # Evidence and paths may differ; verdict and fix may not.
            key = (
                section.name,
                section.line,
                section.skipped,
                *((problem.id, problem.title, problem.to_paste) for problem in section.problems),
            )
            groups.setdefault(key, _Group(section)).hosts.append(host)
    return sorted(groups.values(), key=lambda group: (names.index(group.section.name), -len(group.hosts)))


def _row(group: _Group, findings: list[Finding], *, several: bool) -> SectionRow:
    section = group.section
    first = len(findings)
    hosts = tuple(group.hosts) if several else ()
    findings += [_finding(problem, tuple(group.hosts)) for problem in section.problems]
    level = section.level
    return SectionRow(
        name=section.name,
        hosts=hosts,
        level=str(level) if level is not None else "skipped" if section.skipped else "ok",
        line=section.line,
        skipped=section.skipped,
        findings=tuple(range(first, len(findings))),
        details=section.details,
    )


def _finding(problem: Problem, hosts: tuple[str, ...]) -> Finding:
    breaks = f"affects: {problem.breaks}" if problem.breaks else ""
    return Finding(
        id=RowId(f"{COMMAND}.{problem.id}"),
        level=problem.level,
        title=problem.title,
        detail="\n".join(filter(None, (problem.cause, breaks))),
        where=Where(hosts=hosts),
        evidence=tuple(filter(None, problem.evidence)),
        fix=Fix(text=problem.text, commands=problem.to_paste) if problem.text else None,
    )


def _differ(found: Sequence[Difference]) -> Finding:
    hosts = tuple(dict.fromkeys(host for difference in found for host in difference.odd_hosts))
    words = {"hosts": fold(hosts), "s": "s" if len(hosts) == 1 else ""}
    return finding("cuda-env.nodes-differ", words, where=Where(hosts=hosts), evidence=tuple(map(str, found)))


def _compared(facts: CudaFacts) -> dict[str, object]:
    torch, used = facts.torch, fixes.used_toolkit(facts)
    compiler = facts.compilers.cxx
    nccl = next((version for name, version in facts.packages.items() if name.startswith("nvidia-nccl")), None)
    return {
        "driver": fixes.driver_version(facts) or None,
        "Python": facts.python.version or None,
        "torch": torch.version if torch is not None else None,
        "torch's CUDA": torch.cuda or "none" if torch is not None else None,
        "NCCL": nccl,
        "toolkit": used.version or None if used is not None else None,
        "compiler": f"{compiler.family} {compiler.version}" if compiler is not None else None,
    }


def _ready_of(request: Request, sections: Sequence[Section]) -> Ready:
    if request.only:
        return Ready(run=None, build=None)  # the omitted findings may include failures
    problems = [problem for section in sections for problem in section.problems]
    return Ready(run=is_ready(problems, Goal.RUN, request.goal), build=is_ready(problems, Goal.BUILD, request.goal))


def _ready(request: Request, judged: Mapping[str, Sequence[Section]], *, incomplete: bool) -> Ready:
    """Combine the nodes: any False gives False, else any None gives None."""
    each = [_ready_of(request, sections) for sections in judged.values()]

    def of_all(values: list[bool | None]) -> bool | None:
        if False in values:
            return False
        return None if None in values or incomplete or not values else True

    return Ready(run=of_all([node.run for node in each]), build=of_all([node.build for node in each]))


def _summary(findings: Sequence[Finding], ready: Ready, request: Request, gathered: Gathered[CudaFacts]) -> str:
    order = [Level.FAIL, Level.UNKNOWN, Level.WARN]
    worst = min(findings, key=lambda finding: order.index(finding.level) if finding.level in order else 9, default=None)
    head = worst.title if worst is not None and worst.level is not Level.INFO else "no problems found"
    more = f" ({summary_of(gathered.rows)})" if gathered.refusals else ""
    return f"{head}{more}. {readiness(ready, request)}" if not request.only else head + more


def readiness(ready: Ready, request: Request) -> str:
    """Format the last line: Build: NOT READY · Run: ready."""
    words = {True: "ready", False: "NOT READY", None: "unknown"}
    parts = [
        f"{name}: {words[value]}"
        for name, part, value in (("Build", Goal.BUILD, ready.build), ("Run", Goal.RUN, ready.run))
        if part in request.goal.parts
    ]
    return " · ".join(parts)


def _node_env(facts: CudaFacts, ready: Ready) -> NodeEnv:
    return NodeEnv(
        facts=facts,
        driver=fixes.driver_version(facts),
        driver_cuda=fixes.driver_cuda(facts),
        users=who_uses(facts),
        ready=ready,
    )
