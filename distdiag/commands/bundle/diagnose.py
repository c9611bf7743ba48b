"""The report of bundle: its contents and gaps. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.commands.bundle.types import COMMAND, Bundle
from distdiag.diagnosis.wording import counted, format_size
from distdiag.ids import Id
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.commands.bundle.types import Request


def diagnose(request: Request, bundle: Bundle, missing: Mapping[str, str], errors: Sequence[str]) -> Report[Bundle]:
    """Report the written bundle. `missing`: reasons by incomplete host; `errors`: commands without facts."""
    findings = tuple(_findings(request, bundle, missing, errors))
    hosts = counted(len(set(bundle.hosts) - set(bundle.missing)), "host")
    summary = f"{bundle.file}: {format_size(bundle.bytes)}, facts of {hosts}"
    return Report(command=COMMAND, data=bundle, findings=findings, summary=summary)


def _findings(request: Request, bundle: Bundle, missing: Mapping[str, str], errors: Sequence[str]) -> Iterator[Finding]:
    reasons: dict[str, list[str]] = {}
    for host, why in missing.items():
        reasons.setdefault(why.replace(host, "it"), []).append(host)
    for why, hosts in reasons.items():
        yield Finding(
            id=Id.BUNDLE_INCOMPLETE,
            level=Level.WARN,
            title=f"the bundle does not have all facts of {fold(hosts)}",
            detail=why,
            where=Where(hosts=tuple(hosts)),
            fix=Fix(text="send it anyway: the bundle lists what is missing; or increase --timeout"),
        )
    for error in errors:
        yield Finding(id=Id.BUNDLE_NO_FACTS, level=Level.WARN, title=error)
    if not set(bundle.hosts) - set(bundle.missing):
        yield Finding(
            id=Id.BUNDLE_EMPTY,
            level=Level.UNKNOWN,
            title="no host returned facts: the bundle only says why",
            fix=Fix(
                text="check how the hosts are reached", commands=(f"{request.program} bundle --explain-transport",)
            ),
        )
    for sentence in bundle.cut:
        yield Finding(
            id=Id.BUNDLE_CUT,
            level=Level.WARN,
            title=sentence,
            fix=Fix(text="increase --max-size if the ticket accepts larger files"),
        )
    for verdict in bundle.verdicts:
        if not verdict.same:
            yield Finding(
                id=Id.BUNDLE_VERDICT_DIFFERS,
                level=Level.WARN,
                title=f"{verdict.command} judges the redacted facts differently",
                fix=Fix(
                    text="run the command here, and add its output to the ticket",
                    commands=(f"{request.program} {verdict.command}",),
                ),
            )
