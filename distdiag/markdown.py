"""A report as Markdown, for a ticket: verdict, findings with evidence and fix, and the whole page folded."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

from distdiag import __version__
from distdiag.program_name import as_called

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.report import Finding, Report

_CODE = re.compile(r"(`[^`]*`)")
_ACTIVE = re.compile(r"([\\<>*_\[\]|#])")


def markdown(report: Report[Any], page: str) -> str:
    """Return a report as Markdown; `page`: its text, for the end."""
    command = as_called(f"distdiag {shlex.join(word for word in sys.argv[1:] if word != '--markdown')}")
    lines = [f"## distdiag {report.command}: {report.verdict.upper()}", "", _escaped(report.summary), ""]
    for finding in report.findings:
        lines += _finding(finding, report.summary)
    lines += ["<details><summary>The whole report</summary>", "", *_fenced(page.rstrip(), "text"), "", "</details>", ""]
    lines += [*_fenced(f"$ {command}    # distdiag {__version__}", "console")]
    return "\n".join(lines) + "\n"


def _finding(finding: Finding, summary: str) -> Iterator[str]:
    title = "" if finding.title == summary else f": {_escaped(finding.title)}"
    yield from (f"**{finding.level.upper()}** `{finding.id}`{title}", "")
    if finding.detail:
        yield from (_escaped(finding.detail), "")
    if finding.evidence:
        yield from (*_fenced("\n".join(finding.evidence), "text"), "")
    if finding.fix is not None:
        yield from (_escaped(f"{finding.fix.labelled[0].upper()}{finding.fix.labelled[1:]}"), "")
        if finding.fix.commands:
            yield from (*_fenced("\n".join(map(as_called, finding.fix.commands)), "sh"), "")


def _escaped(text: str) -> str:
    """Escape Markdown in text, except for code in backticks."""
    return "".join(part if part[:1] == "`" else _ACTIVE.sub(r"\\\1", part) for part in _CODE.split(text))


def _fenced(text: str, language: str) -> tuple[str, str, str]:
    fence = max(["```", *(run + "`" for run in re.findall(r"`{3,}", text))], key=len)
    return f"{fence}{language}", text, fence
