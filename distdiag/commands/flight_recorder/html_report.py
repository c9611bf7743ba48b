"""flight-recorder as a static HTML page without network or script: the last calls of all ranks over time."""

from __future__ import annotations

import base64
import hashlib
import html
import os
from typing import TYPE_CHECKING

from distdiag.commands.flight_recorder.view import name, site
from distdiag.errors import UsageError
from distdiag.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.diagnosis.flight_recorder.types import CallRow, FlightRecorder, RankRow
    from distdiag.report import Finding, Report

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --fail: #c62828; --wait: #b26a00; --done: #2e7d32; }
body { margin: 1rem; font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem .5rem; vertical-align: top; }
tr + tr { border-top: 1px solid var(--line); } .finding { border-left: 4px solid var(--line); padding-left: .7rem; }
.calls { white-space: nowrap; font: 12px ui-monospace, monospace; } .wide { overflow-x: auto; }
.call { display: inline-block; padding: 0 .3rem; margin-right: 2px; border: 1px solid var(--done); border-radius: 3px; }
.open { border: 2px dashed var(--wait); } .failed, .accused { border: 2px solid var(--fail); }
tr.accused th { border-left: 4px double var(--fail); color: var(--fail); }
span, td, th, p, li { unicode-bidi: isolate; } .quiet { opacity: .7; }
"""


def check_place(path: str) -> None:
    """Check in advance that a file can be written. Raises UsageError."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder) or os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise UsageError(f"--html {path}: cannot write this file", hint="choose a writable path")


def write_page(report: Report[FlightRecorder], path: str) -> None:
    """Write the report as one page for a browser. Raises DistdiagError."""
    write_whole(path, make_page(report).encode("ascii", "xmlcharrefreplace"))


def make_page(report: Report[FlightRecorder]) -> str:
    """Format a report as HTML. Text from dumps is escaped, and the page's policy forbids scripts."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    rows = "".join(_rank(row) for row in report.data.ranks)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>distdiag flight-recorder</title><style>{_STYLE}</style></head><body>"
        f"<h1>distdiag flight-recorder: {report.verdict.upper()}</h1><p>{_text(report.summary)}</p>"
        + "".join(_finding(finding) for finding in report.findings)
        + '<h2>Last calls of each rank, newest on the right</h2><div class="wide"><table>'
        "<thead><tr><th>rank</th><th>host</th><th>state</th><th>calls</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></body></html>\n"
    )


def _text(text: str) -> str:
    shown = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    return html.escape(shown.encode("utf-8", "replace").decode())


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<li>{_text(line)}</li>" for line in finding.evidence)
    head = f"<h3>{finding.level.upper()} {_text(finding.id)}</h3><p>{_text(finding.title)}</p>"
    return f'<div class="finding">{head}<p class="quiet">{_text(finding.detail)}</p><ul>{evidence}</ul></div>'


def _rank(row: RankRow) -> str:
    mark = ' class="accused"' if row.accused else ""
    state = f"{row.status}{', STUCK' if row.accused else ''}"
    calls = "".join(_calls(row))
    return (
        f"<tr{mark}><th>{row.rank}</th><td>{_text(row.host) or '-'}</td><td>{_text(state)}</td>"
        f'<td class="calls">{calls or "-"}</td></tr>'
    )


def _calls(row: RankRow) -> Iterator[str]:
    start = row.recent[0].created_ns if row.recent else 0
    for call in row.recent:
        kind = {"ended": "call", "failed": "call failed"}.get(call.state, "call open")
        yield f'<span class="{kind}" title="{_title(call, start)}">{_text(_short(call))}</span>'


def _title(call: CallRow, start: int) -> str:
    return _text(f"{name(call)}, {call.state}, +{(call.created_ns - start) / 1e6:.1f} ms, {site(call)}")


def _short(call: CallRow) -> str:
    number = f" #{call.number}" if call.number is not None else f" {call.source}->{call.target}"
    return f"{call.group} {call.operation}{number}" + ("" if call.state == "ended" else f" ({call.state})")
