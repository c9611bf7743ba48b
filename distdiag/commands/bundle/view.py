"""The report of bundle as text: job, verdicts, contents, next steps."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.diagnosis.wording import counted, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.bundle.types import Bundle, Request
    from distdiag.report import Report

_HOSTS = 8
_FOLDERS = {
    "verdicts": "verdicts",
    "facts": "facts",
    "nodes": "limits, settings, command lines",
    "logs": "ends of logs",
}


def bundle_view(report: Report[Bundle], request: Request) -> Iterator[RenderableType]:
    """Show the job, the verdicts, the contents, and how to use the file."""
    from rich.table import Column

    from distdiag.commands.bundle.compose import verdict_in_words
    from distdiag.commands.bundle.find_job import in_words
    from distdiag.output import Whole, Wrapped, plain_table

    bundle = report.data
    if bundle.job is not None:
        yield Wrapped(bundle.job.title, margin=0, hang=2)
        for each in bundle.job.processes[:_HOSTS]:
            yield Wrapped(f"{each.host}: {in_words(each)}", margin=2, hang=4)
        if len(bundle.job.processes) > _HOSTS:
            yield f"  and {counted(len(bundle.job.processes) - _HOSTS, 'more host')}: MANIFEST.txt lists them"
    else:
        yield Wrapped("no rank was found: only what the nodes themselves say is in it", margin=0, hang=2)
    yield ""
    for verdict in bundle.verdicts:
        yield Wrapped(verdict_in_words(verdict), margin=0, hang=2)
    yield ""
    table = plain_table(
        Column("in the bundle", no_wrap=True), Column("files", justify="right"), Column("size", justify="right")
    )
    for folder, about in _FOLDERS.items():
        sizes = [member.bytes for member in bundle.members if member.name.startswith(f"{folder}/")]
        if sizes:
            table.add_row(about, str(len(sizes)), format_size(sum(sizes)))
    yield table
    yield ""
    yield Wrapped(
        f"Redacted: {counted(bundle.stand_ins, 'name')} and {counted(bundle.secrets, 'secret')}. Keep "
        f"{bundle.map_file}: it maps placeholders to names, and is not in the bundle.",
        margin=0,
    )
    for rule, number in bundle.replaced.items():
        yield f"    {rule}: {number}"
    file = shlex.quote(bundle.file)
    yield "Read it before you send it (--show prints it; MANIFEST.txt lists the files):"
    yield Whole(f"    tar -xf {file} && less distdiag-bundle/MANIFEST.txt")
    yield "To read it on another machine:"
    for verdict in bundle.verdicts[:1]:
        yield Whole(f"    distdiag {verdict.command} --from {shlex.quote(bundle.file.rpartition('/')[2])}")
    yield ""
