"""Facts of the nodes' cores -> Report. Pure."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.core_bt.core_dump_setup import setup_findings
from distdiag.commands.core_bt.types import COMMAND, Core, CoreBt, Unread
from distdiag.commands.core_bt.wording import faulting_frames, format_frame, where, who, without_numbers
from distdiag.diagnosis.hosts.unreached_hosts import host_findings, summary_of
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted
from distdiag.facts.core.stacks import is_eval
from distdiag.facts.machine import redacted
from distdiag.facts.programs import signal_name
from distdiag.ids import Id
from distdiag.knowledge import crashes
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.cluster.host_results import HostResult
    from distdiag.commands.core_bt.collect import CoreFacts, NodeCores
    from distdiag.commands.core_bt.types import Request
    from distdiag.knowledge.crashes import Crash
    from distdiag.saved_facts import Gathered

_SAME_FRAMES = 3
_MAX_MESSAGE_LINES = 6
_ENDS_BY_EXCEPTION = re.compile(r"terminate|__cxa_|_Unwind_|__gxx_|rethrow_exception")


def diagnose(request: Request, gathered: Gathered[NodeCores]) -> Report[CoreBt]:
    """Report each crash with its place and cause, or the obstacles to a core on a machine."""
    nodes, rows = gathered.facts, gathered.rows
    cores: list[tuple[Core, Crash | None]] = []
    unread: list[Unread] = []
    found: list[Finding] = []
    for node in nodes:
        cores += [_core(facts, node.host) for facts in node.cores if facts.notes is not None]
        unread += [Unread(path=facts.path, host=node.host, why=facts.error) for facts in node.cores if facts.error]
        unread += [Unread(path=path, host=node.host, why=why) for path, why in node.missed]
    found += setup_findings({node.host: node.setup for node in nodes if node.setup is not None})
    cores.sort(key=lambda row: (row[0].time or 0.0, row[0].pid))
    found += _crashes(request, cores)
    found += _about_files(request, [core for core, _ in cores], unread)
    found += host_findings(gathered.refusals, rows)
    found += [
        finding("core-no-answer", what=host, why=why, where=Where(hosts=(host,)))
        for host, why in gathered.missing.items()
    ]
    data = CoreBt(
        cores=tuple(core for core, _ in cores),
        unread=tuple(unread),
        searched=tuple(dict.fromkeys(place for node in nodes for place in node.searched)),
    )
    if not (cores or unread or request.setup) and nodes:
        searched = ", ".join(data.searched) or "nothing"
        found.append(finding("core-none", searched=searched, setup=request.again("--check-setup")))
    left_out = sum(node.left_out for node in nodes)
    return Report(
        command=COMMAND,
        data=data,
        findings=tuple(found),
        summary=_summary(request, data, found, rows, (left_out, gathered.interrupted)),
        interrupted=gathered.interrupted,
    )


def _core(facts: CoreFacts, host: str) -> tuple[Core, Crash | None]:
    notes = facts.notes
    assert notes is not None
    crashed = facts.threads[0] if facts.threads else None
    functions = [frame.function for frame in crashed.frames] if crashed is not None else []
    mapped = next((file.path for file in notes.files if notes.address and file.start <= notes.address < file.end), "")
    words = _last_words(facts, functions)
    evidence = "\n".join(filter(None, (words, mapped)))
    known = crashes.recognise(functions, evidence, notes.signal, notes.code, notes.address, inside=facts.inside)
    core = Core(
        path=facts.path,
        host=host,
        exe=facts.exe,
        cmdline=redacted(notes.arguments or notes.program),
        pid=notes.pid,
        rank=facts.rank,
        time=facts.modified_s,
        signal=notes.signal,
        signal_name=signal_name(notes.signal),
        signal_code=notes.code,
        address=notes.address,
        message=redacted(words),
        mapped=mapped,
        meaning=crashes.meaning(notes.signal, notes.code, notes.address, notes.sender_pid, notes.pid),
        signature=known.id if known is not None else None,
        role=known.role if known is not None else None,
        crash_thread=crashed if crashed is not None and crashed.frames else None,
        threads=facts.threads[1:],
        truncated=notes.truncated,
        size_bytes=notes.size_bytes,
        whole_bytes=notes.whole_bytes,
        changed=facts.changed,
        tools=facts.tools,
    )
    return core, known


def _last_words(facts: CoreFacts, functions: Sequence[str]) -> str:
    """Return the last message of the process, ignoring an exception that was caught earlier."""
    ended = not functions or any(_ENDS_BY_EXCEPTION.search(function) for function in functions)
    return facts.message or (facts.exception if ended else "")


def _crashes(request: Request, cores: Sequence[tuple[Core, Crash | None]]) -> list[Finding]:
    """Return one finding per distinct crash, for all processes with it; consequences are last."""
    groups: dict[tuple[object, ...], list[tuple[Core, Crash | None]]] = {}
    for core, known in cores:
        frames = tuple(format_frame(frame) for frame in faulting_frames(core)[:_SAME_FRAMES])
        same = (core.signal, core.signature, where(core), frames, without_numbers(core.message))
        groups.setdefault(same, []).append((core, known))
    ordered = sorted(groups.values(), key=lambda group: group[0][0].role == "consequence")
    return [_crash(request, group) for group in ordered]


def _crash(request: Request, group: Sequence[tuple[Core, Crash | None]]) -> Finding:
    first, known = group[0]
    others = f" and {len(group) - 1} more" if len(group) > 1 else ""
    place = where(first)
    consequence = known is not None and known.role == "consequence"
    return Finding(
        id=Id.CORE_BT_CONSEQUENCE if consequence else Id.CORE_BT_CRASH,
        level=Level.FAIL,
        title=f"{who(first)}{others} died with {first.signal_name}{' ' + place if place else ''}",
        detail=_sentence(known.says if known is not None else first.meaning)
        + ("" if first.crash_thread is not None else " Its stack could not be read."),
        where=Where(
            hosts=tuple(dict.fromkeys(core.host for core, _ in group)),
            ranks=tuple(core.rank for core, _ in group if core.rank is not None),
            pids=tuple(core.pid for core, _ in group),
        ),
        evidence=(
            *(f"message: {line.strip()}" for line in first.message.splitlines()[:_MAX_MESSAGE_LINES]),
            *([f"{first.signal_name}: {first.meaning}"] if known is not None else []),
            *(core.path for core, _ in group[:8]),
            # For an unknown crash the fix lists the tools.
            *(first.tools if first.crash_thread is None and known is not None else ()),
            *(("its Python frames are missing", *first.tools) if _lacks_python(first) else ()),
            *([f"source: {known.source}"] if known is not None and known.source else []),
        ),
        fix=_fix(request, first, known),
    )


def _lacks_python(core: Core) -> bool:
    """Return whether the crashed thread ran Python and its Python frames are missing."""
    frames = core.crash_thread.frames if core.crash_thread is not None else ()
    return any(is_eval(frame) for frame in frames) and not any(frame.language == "python" for frame in frames)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}" + ("" if words.endswith(".") else ".")


def _fix(request: Request, core: Core, known: Crash | None) -> Fix:
    if known is not None:
        return Fix(
            text=known.fix,
            commands=tuple(command.replace("{file}", shlex.quote(core.mapped)) for command in known.commands),
        )
    if core.crash_thread is None:
        return Fix(text="; ".join(core.tools) or "nothing could read its stacks")
    return Fix(
        text="look at the innermost frames; for an issue, write this report to a file",
        commands=(request.again(shlex.quote(core.path), "--threads", "all", "--markdown", ">", "report.md"),),
    )


def _about_files(request: Request, cores: Sequence[Core], unread: Sequence[Unread]) -> Iterator[Finding]:
    cut = [core for core in cores if core.truncated]
    if cut:
        part = f"{cut[0].size_bytes / max(1, cut[0].whole_bytes):.0%}"
        number = counted(len(cut), "core is", "cores are")
        yield finding(
            "core-truncated", number=number, path=cut[0].path, part=part, setup=request.again("--check-setup")
        )
    changed = sorted({path for core in cores for path in core.changed})
    if changed:
        number, them = counted(len(changed), "file has", "files have"), "them" if len(changed) > 1 else "it"
        yield finding("core-binary-changed", number=number, them=them, evidence=tuple(changed[:8]))
    for why in dict.fromkeys(row.why for row in unread):
        paths = [row.path for row in unread if row.why == why]
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield finding("core-unreadable", what=f"{paths[0]}{more}", why=why)


def _summary(
    request: Request, data: CoreBt, found: Sequence[Finding], rows: Sequence[HostResult], more: tuple[int, bool]
) -> str:
    left_out, interrupted = more
    if interrupted:
        hosts = f"; hosts: {summary_of(rows)}" if rows else ""
        return f"interrupted; {counted(len(data.cores), 'core')} read{hosts}"
    wrong = [each.title for each in found if each.level in (Level.FAIL, Level.UNKNOWN)]
    rest = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    older = f"; {counted(left_out, 'older core')} not read" if left_out else ""
    if wrong:
        return redacted(wrong[0]) + rest + older
    if request.setup:
        warned = [each.title for each in found if each.level is Level.WARN]
        return "; ".join(warned) or "a crash here leaves a core"
    return f"no readable core{older}"
