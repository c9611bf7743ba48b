"""Views of doctor: facts, findings and verdict for a terminal, and the content of the page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Column

from distdiag.cluster.hosts import fold, fold_within
from distdiag.commands.doctor.diagnose import FIT, UNFIT, UNKNOWN, WARNED
from distdiag.fold import by_key
from distdiag.output import Whole, Wrapped, plain_table
from distdiag.program_name import as_called
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

    from distdiag.commands.doctor.types import Doctor
    from distdiag.report import Finding, Report

_ROOM = 24
_STYLES = {Level.FAIL: "bold red", Level.UNKNOWN: "bold yellow", Level.WARN: "bold yellow"}
_FITS = {FIT: "bold green", WARNED: "bold yellow", UNFIT: "bold red", UNKNOWN: "bold yellow"}


def doctor_view(report: Report[Doctor], *, verbose: bool) -> Iterator[RenderableType]:
    """Yield the facts folded over nodes, remarks, then findings, the worst last, and the verdict as the last line."""
    yield from _facts(report.data)
    notes = [finding for finding in report.findings if finding.level is Level.INFO]
    for finding in notes:
        yield from _finding(finding, whole=verbose)
    if any(finding.detail or finding.evidence or finding.fix for finding in notes) and not verbose:
        yield ""
        yield "-v: details and fixes of these"
    for finding in reversed([finding for finding in report.findings if finding.level is not Level.INFO]):
        yield from _finding(finding)
    if report.data.silenced:
        yield ""
        for silenced in report.data.silenced:
            reason = f" ({silenced.reason})" if silenced.reason else ""
            yield Wrapped(f"ignored{reason}: {silenced.title}  [{silenced.id}]", margin=0, hang=6)
    yield ""
    for other in report.data.unchecked:
        yield Wrapped(f"not tested: {as_called(other)}", margin=0, hang=6)
    yield ""
    yield Wrapped(f"{report.verdict.upper()}: {report.summary}", margin=0, hang=2, style=_FITS[report.data.fit])


def _facts(data: Doctor) -> Iterator[RenderableType]:
    """Draw a row per fact, or per value if the nodes differ, the most common first."""
    several = len(data.nodes) > 1
    columns = [Column("", no_wrap=True), Column("", overflow="fold"), Column("nodes", overflow="fold")]
    table = plain_table(*columns[: 2 + several])
    table.show_header = several
    for label in dict.fromkeys(label for row in data.nodes for label in row.facts):
        groups = by_key((row.facts.get(label, "?"), row.host) for row in data.nodes)
        for value, hosts in sorted(groups.items(), key=lambda group: -len(group[1])):
            nodes = ("all" if len(groups) == 1 else fold_within(hosts, _ROOM),) if several else ()
            table.add_row(label, value, *nodes)
    if data.nodes:
        yield table


def _finding(finding: Finding, *, whole: bool = True) -> Iterator[RenderableType]:
    yield ""
    yield Whole(f"{finding.level.upper()}  {finding.id}", style=_STYLES.get(finding.level, ""))
    yield Wrapped(finding.title, margin=2)
    if not whole:
        return
    yield Wrapped(finding.detail, margin=2)
    for line in finding.evidence:
        yield Whole(f"    {line}")
    if finding.fix is not None:
        yield Wrapped(finding.fix.labelled, margin=2)
        for command in finding.fix.commands:
            yield Whole(f"    {as_called(command)}")


def page_content(data: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the document's JSON to the content of the page: nodes with equal facts and findings are one row."""
    alike: dict[str, list[str]] = {}
    for node in data["nodes"]:
        alike.setdefault(json.dumps([node["fit"], node["findings"], node["facts"]]), []).append(node["host"])
    nodes = [
        dict(zip(("fit", "findings", "facts"), json.loads(row), strict=True), host=fold(hosts))
        for row, hosts in alike.items()
    ]
    differences = [
        {**each, "values": {value: fold(hosts) for value, hosts in each["values"].items()}}
        for each in data["differences"]
    ]
    return {"data": {**data, "nodes": nodes, "differences": differences}}
