"""The report of cuda-env as text: a line per section, expanded if it has problems; the verdict last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_within
from distdiag.commands.cuda_env.diagnose import readiness
from distdiag.diagnosis.wording import counted
from distdiag.output import Whole, Wrapped
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.cuda_env.types import CudaEnv, Request, SectionRow
    from distdiag.report import Finding, Report

_WORDS = {"skipped": "SKIP"}
"""Displayed words of levels; any other is shown as its name."""
_STYLES = {"fail": "bold red", "warn": "bold yellow", "unknown": "bold yellow", "ok": "green"}
_EVIDENCE = 4
_ROOM = 100
"""Longest list of hosts, in characters; longer ones show their number and the first host."""
_INDENT = 6


def cuda_env_view(report: Report[CudaEnv], request: Request) -> Iterator[RenderableType]:
    """Yield the sections with findings, and whether builds and runs will work."""
    data = report.data
    yield from _about(report, request)
    shown: set[int] = set()
    for row in data.sections:
        yield from _section(row, report.findings, len(data.nodes), verbose=request.verbose)
        shown.update(row.findings)
    rest = [finding for number, finding in enumerate(report.findings) if number not in shown]
    if data.log is not None and not request.verbose:
        yield from _consequences(rest)
        rest = [finding for finding in rest if finding.level is not Level.INFO or not finding.evidence]
    # The most important last, nearest to the prompt; of several causes the first in the log.
    for finding in sorted(reversed(rest), key=lambda finding: finding.level in (Level.FAIL, Level.UNKNOWN)):
        yield Whole("")
        yield Whole(f"{finding.level.upper()}  {finding.id}", style=_STYLES.get(finding.level, ""))
        yield from _finding(finding, margin=_INDENT, verbose=True)
    for silenced in data.silenced:
        reason = f": {silenced.reason}" if silenced.reason else ""
        yield Whole(f"ignored  {silenced.id}{reason}")
    yield from _last(report, request)


def _about(report: Report[CudaEnv], request: Request) -> Iterator[RenderableType]:
    goals = {"run": "running", "build": "building", "all": "running and building"}[request.goal]
    if len(report.data.nodes) > 1:
        kinds = f", GPUs {report.data.arch_list}" if report.data.arch_list else ""
        yield Wrapped(f"{len(report.data.nodes)} nodes{kinds}; for {goals}", margin=0)
    elif report.data.sections:
        facts = report.data.nodes[0].facts
        python = facts.python
        number = f"Python {python.version} ({python.executable})" if python.version else python.executable
        chosen = f": {facts.chosen}" if facts.chosen else ""
        yield Wrapped(f"{facts.host}, {number}{chosen}, for {goals}", margin=0)
    if report.data.sections:
        yield Whole("")


def _consequences(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    following = [finding for finding in findings if finding.level is Level.INFO and finding.evidence]
    if following:
        yield Whole("related lines, not causes:")
    for finding in reversed(following):
        yield Whole(f"  {finding.evidence[0]}")


def _section(row: SectionRow, findings: Sequence[Finding], nodes: int, *, verbose: bool) -> Iterator[RenderableType]:
    where = f" [{fold_within(row.hosts, _ROOM)}]" if row.hosts and len(row.hosts) < nodes else ""
    why = f" ({row.skipped})" if row.skipped else ""
    level = "ok" if row.level == "info" else row.level
    head = f"{_WORDS.get(level, level.upper()):<7} {row.name:<11} "
    yield Wrapped(
        head + row.line + why + where, margin=0, hang=len(head), style=_STYLES.get(level, "") if level != "ok" else ""
    )
    if verbose:
        for line in row.details:
            yield Whole(" " * len(head) + line)
    for number in row.findings:
        finding = findings[number]
        if finding.level is Level.INFO and not verbose:
            if level == "ok":
                yield Wrapped(finding.title, margin=len(head))
            continue
        yield Whole(f"{'':{_INDENT}}{finding.level.upper()}  {finding.id}", style=_STYLES.get(finding.level, ""))
        yield from _finding(finding, margin=_INDENT + 2, verbose=verbose)


def _finding(finding: Finding, *, margin: int, verbose: bool) -> Iterator[RenderableType]:
    yield Wrapped(finding.title, margin=margin)
    if finding.detail:
        yield Wrapped(finding.detail, margin=margin)
    shown = finding.evidence if verbose else finding.evidence[:_EVIDENCE]
    for line in shown:
        yield Whole(" " * (margin + 2) + line)
    if finding.fix is not None:
        yield Wrapped(finding.fix.labelled, margin=margin)
        for command in finding.fix.commands:
            yield Whole(" " * (margin + 2) + command)


def _last(report: Report[CudaEnv], request: Request) -> Iterator[RenderableType]:
    counts = {level: sum(finding.level is level for finding in report.findings) for level in Level}
    problems = counts[Level.FAIL]
    parts = [f"{problems} problem{'' if problems == 1 else 's'} to fix"]
    parts += [f"{counts[Level.WARN]} warning{'' if counts[Level.WARN] == 1 else 's'}"] if counts[Level.WARN] else []
    parts += [f"{counts[Level.UNKNOWN]} unknown"] if counts[Level.UNKNOWN] else []
    skipped = sum(row.level == "skipped" for row in report.data.sections)
    parts += [f"{skipped} skipped"] if skipped else []
    parts += [f"{len(report.data.silenced)} ignored"] if report.data.silenced else []
    style = _STYLES.get(report.verdict, "")
    yield Whole("")
    if report.data.log is not None:
        log = report.data.log
        causes = counted(log.causes, "cause") if log.causes else "no cause"
        found = f"{causes} found in the log ({counted(log.lines, 'line')})"
        yield Whole(f"{report.verdict.upper()}: {found}", style=style)
        return
    yield Whole(f"{report.verdict.upper()}: {', '.join(parts)}", style=style)
    if not request.only:
        yield Whole(readiness(report.data.ready, request), style=style)
