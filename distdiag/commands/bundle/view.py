"""How a bundle is shown: what was written, what it says, and what to do with it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.diagnosis.wording import counted, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.bundle.types import Bundle, Request
    from distdiag.report import Report

_FOLDERS = {
    "verdicts": "verdicts",
    "facts": "facts",
    "nodes": "limits, settings, command lines",
    "logs": "ends of logs",
}


def bundle_view(report: Report[Bundle], request: Request) -> Iterator[RenderableType]:
    """Show what is in it, the verdicts, and where the map is."""
    from rich.table import Column

    from distdiag.output import Whole, plain_table

    bundle = report.data
    table = plain_table(
        Column("in the bundle", no_wrap=True), Column("files", justify="right"), Column("size", justify="right")
    )
    for folder, about in _FOLDERS.items():
        sizes = [member.bytes for member in bundle.members if member.name.startswith(f"{folder}/")]
        if sizes:
            table.add_row(about, str(len(sizes)), format_size(sum(sizes)))
    yield table
    yield ""
    for verdict in bundle.verdicts:
        yield Whole(f"{verdict.command}: {verdict.verdict.upper()}: {verdict.summary}")
    yield ""
    yield Whole(
        f"Redacted: {counted(bundle.stand_ins, 'name')} and {counted(bundle.secrets, 'secret')}. "
        f"Review it before you send it: tar -xOf {shlex.quote(bundle.file)} distdiag-bundle/MANIFEST.txt"
    )
    yield Whole(f"Keep {bundle.map_file}: it maps placeholders to names, and is not in the bundle.")
    for verdict in bundle.verdicts[:1]:
        yield Whole(f"Elsewhere: distdiag {verdict.command} --from {shlex.quote(bundle.file.rpartition('/')[2])}")
