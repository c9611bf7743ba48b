"""The report of bundle: its contents and gaps. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.bundle.types import COMMAND, Bundle
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted, format_size
from distdiag.fold import by_key
from distdiag.report import Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.commands.bundle.types import Request
    from distdiag.report import Finding


def diagnose(request: Request, bundle: Bundle, missing: Mapping[str, str], errors: Sequence[str]) -> Report[Bundle]:
    """Report the written bundle. `missing`: reasons by incomplete host; `errors`: commands without facts."""
    findings = tuple(_findings(request, bundle, missing, errors))
    hosts = counted(len(set(bundle.hosts) - set(bundle.missing)), "host")
    summary = f"{bundle.file}: {format_size(bundle.bytes)}, facts of {hosts}"
    return Report(command=COMMAND, data=bundle, findings=findings, summary=summary)


def _findings(request: Request, bundle: Bundle, missing: Mapping[str, str], errors: Sequence[str]) -> Iterator[Finding]:
    for why, hosts in by_key((why.replace(host, "it"), host) for host, why in missing.items()).items():
        yield finding(f"{COMMAND}.incomplete", where=Where(hosts=tuple(hosts)), hosts=fold(hosts), detail=why)
    for error in errors:
        yield finding(f"{COMMAND}.no-facts", error=error)
    if not set(bundle.hosts) - set(bundle.missing):
        yield finding(f"{COMMAND}.empty", program=request.program)
    for sentence in bundle.cut:
        yield finding(f"{COMMAND}.cut", cut=sentence)
    for verdict in bundle.verdicts:
        if not verdict.same:
            yield finding(f"{COMMAND}.verdict-differs", program=request.program, command=verdict.command)
