"""Facts of the nodes' cores -> Report. Pure."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.unreached_hosts import host_findings, summary_of
from distdiag.commands.core_bt.core_dump_setup import setup_findings
from distdiag.commands.core_bt.types import COMMAND, Core, CoreBt, Thread, Unread
from distdiag.commands.core_bt.wording import faulting_frames, format_frame, where, who, without_numbers
from distdiag.facts.core.stacks import is_eval
from distdiag.facts.machine import redacted
from distdiag.facts.programs import signal_name
from distdiag.knowledge import crashes
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.host_results import HostResult
    from distdiag.commands.core_bt.collect import CoreFacts, LiveFacts, NodeCores
    from distdiag.commands.core_bt.types import Request
    from distdiag.facts.core.stacks import Merged
    from distdiag.gathered import Gathered
    from distdiag.knowledge.crashes import Crash

_SAME_FRAMES = 3
_MAX_MESSAGE_LINES = 6
_STOPPED = ("T", "t")
_ENDS_BY_EXCEPTION = re.compile(r"terminate|__cxa_|_Unwind_|__gxx_|rethrow_exception")


def diagnose(request: Request, gathered: Gathered[NodeCores]) -> Report[CoreBt]:
    """Report what crashed, where, and why; or what prevents a core on a machine."""
    nodes, rows = gathered.facts, gathered.rows
    cores: list[tuple[Core, Crash | None]] = []
    unread: list[Unread] = []
    found: list[Finding] = []
    for node in nodes:
        cores += [_core(facts, node.host) for facts in node.cores if facts.notes is not None]
        unread += [Unread(path=facts.path, host=node.host, why=facts.error) for facts in node.cores if facts.error]
        unread += [Unread(path=path, host=node.host, why=why) for path, why in node.missed]
        for live in node.live:
            cores.append((_live(live, node.host), None))
            found += _of_live(request, live, node.host)
    found += setup_findings({node.host: node.setup for node in nodes if node.setup is not None})
    cores.sort(key=lambda row: (row[0].time or 0.0, row[0].pid))
    found += _crashes(request, cores)
    found += _about_files(request, [core for core, _ in cores], unread)
    found += host_findings(gathered.refusals, rows)
    found += [_no_answer(host, why) for host, why in gathered.missing.items()]
    data = CoreBt(
        cores=tuple(core for core, _ in cores),
        unread=tuple(unread),
        searched=tuple(dict.fromkeys(place for node in nodes for place in node.searched)),
    )
    if not (cores or unread or request.setup or request.pids) and nodes:
        found.append(_none(request, data))
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
    threads = [_thread(merged) for merged in facts.threads]
    crashed = next((thread for thread, merged in zip(threads, facts.threads, strict=True) if merged.crashed), None)
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
        threads=tuple(thread for thread in threads if thread is not crashed),
        truncated=notes.truncated,
        size_bytes=notes.size_bytes,
        whole_bytes=notes.whole_bytes,
        changed=facts.changed,
        tools=facts.tools,
    )
    return core, known


def _last_words(facts: CoreFacts, functions: Sequence[str]) -> str:
    """Return the last message of the process, without an exception that was thrown and caught earlier."""
    ended = not functions or any(_ENDS_BY_EXCEPTION.search(function) for function in functions)
    return facts.message or (facts.exception if ended else "")


def _live(facts: LiveFacts, host: str) -> Core:
    threads = [_thread(merged) for merged in facts.threads]
    main = next((thread for thread in threads if thread.tid == facts.pid), None)
    return Core(
        path="",
        host=host,
        exe=facts.exe,
        cmdline=redacted(facts.cmdline),
        pid=facts.pid,
        rank=facts.rank,
        time=None,
        signal=0,
        signal_name="",
        signal_code=None,
        address=None,
        message="",
        mapped="",
        meaning=f"a live process, in state {facts.state_before} before it was read, "
        f"{facts.state_after or '?'} afterwards"
        if facts.state_before
        else "",
        signature=None,
        role=None,
        crash_thread=main,
        threads=tuple(thread for thread in threads if thread is not main),
        truncated=False,
        size_bytes=0,
        whole_bytes=0,
        changed=(),
        tools=facts.tools,
    )


def _thread(merged: Merged) -> Thread:
    thread = merged.thread
    return Thread(tid=thread.tid, name=thread.name, gil=thread.gil, frames=thread.frames)


def _crashes(request: Request, cores: Sequence[tuple[Core, Crash | None]]) -> list[Finding]:
    """Return a finding for each distinct crash, however many processes had it; consequences come last."""
    groups: dict[tuple[object, ...], list[tuple[Core, Crash | None]]] = {}
    for core, known in cores:
        if core.signal:
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
        id=f"{COMMAND}.{'consequence' if consequence else 'crash'}",
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
            # In an unknown crash the fix has them.
            *(first.tools if first.crash_thread is None and known is not None else ()),
            *(("its Python frames are missing", *first.tools) if _lacks_python(first) else ()),
            *([f"source: {known.source}"] if known is not None and known.source else []),
        ),
        fix=_fix(request, first, known),
    )


def _lacks_python(core: Core) -> bool:
    """Return whether the thread that crashed ran Python, and its Python frames are not known."""
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
        text="look at the innermost frames; for an issue, write this report to a file, with secrets redacted",
        commands=(request.again(shlex.quote(core.path), "--threads", "all", "--text", "report.txt"),),
    )


def _about_files(request: Request, cores: Sequence[Core], unread: Sequence[Unread]) -> list[Finding]:
    found = []
    cut = [core for core in cores if core.truncated]
    if cut:
        part = cut[0].size_bytes / max(1, cut[0].whole_bytes)
        found.append(
            Finding(
                id=f"{COMMAND}.truncated",
                level=Level.WARN,
                title=f"{len(cut)} core{'s are' if len(cut) > 1 else ' is'} truncated: {cut[0].path} has {part:.0%} "
                "of its bytes",
                detail="The signal and the crashed thread are right; stacks may be missing.",
                fix=Fix(
                    text="a full disk or a size limit truncated it; check the setup of this machine",
                    commands=(request.again("--check-setup"),),
                ),
            )
        )
    changed = sorted({path for core in cores for path in core.changed})
    if changed:
        found.append(
            Finding(
                id=f"{COMMAND}.binary-changed",
                level=Level.WARN,
                title=f"{len(changed)} file{'s have' if len(changed) > 1 else ' has'} changed since the crash: frames "
                f"in {'them' if len(changed) > 1 else 'it'} may be wrong",
                evidence=tuple(changed[:8]),
                fix=Fix(text="pass the program as it was at the crash, if there is a copy: --exe PATH"),
            )
        )
    for why in dict.fromkeys(row.why for row in unread):
        paths = [row.path for row in unread if row.why == why]
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        found.append(Finding(id=f"{COMMAND}.unreadable", level=Level.UNKNOWN, title=f"{paths[0]}{more}: {why}"))
    return found


def _of_live(request: Request, live: LiveFacts, host: str) -> list[Finding]:
    found = []
    if live.error:
        found.append(
            Finding(
                id=f"{COMMAND}.unreadable",
                level=Level.UNKNOWN,
                title=f"process {live.pid} on {host}: {live.error}",
                where=Where(hosts=(host,), pids=(live.pid,)),
            )
        )
    if live.state_after in _STOPPED and live.state_before not in _STOPPED:
        found.append(
            Finding(
                id=f"{COMMAND}.left-stopped",
                level=Level.FAIL,
                title=f"process {live.pid} on {host} was left stopped after it was read",
                fix=Fix(text="resume it", commands=(f"kill -CONT {live.pid}",)),
            )
        )
    return found


def _no_answer(host: str, why: str) -> Finding:
    return Finding(id=f"{COMMAND}.no-answer", level=Level.UNKNOWN, title=f"{host}: {why}", where=Where(hosts=(host,)))


def _none(request: Request, data: CoreBt) -> Finding:
    return Finding(
        id=f"{COMMAND}.none",
        level=Level.UNKNOWN,
        title="no core found",
        detail=f"Searched: {', '.join(data.searched) or 'nothing'}.",
        fix=Fix(
            text="pass the core file or its directory; or check whether this machine writes cores",
            commands=(request.again("--check-setup"),),
        ),
    )


def _summary(
    request: Request, data: CoreBt, found: Sequence[Finding], rows: Sequence[HostResult], more: tuple[int, bool]
) -> str:
    left_out, interrupted = more
    if interrupted:
        return f"interrupted; {len(data.cores)} core{'' if len(data.cores) == 1 else 's'} read" + (
            f"; hosts: {summary_of(rows)}" if rows else ""
        )
    wrong = [finding.title for finding in found if finding.level in (Level.FAIL, Level.UNKNOWN)]
    rest = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    older = f"; {left_out} older core{'s' if left_out > 1 else ''} not read" if left_out else ""
    if wrong:
        return redacted(wrong[0]) + rest + older
    if request.setup:
        warned = [finding.title for finding in found if finding.level is Level.WARN]
        return "; ".join(warned) or "a crash here leaves a core"
    if request.pids:
        is_alone = len(request.pids) == 1
        pids = ", ".join(map(str, request.pids))
        return (
            f"process {pids} is alive; its state is unchanged"
            if is_alone
            else f"processes {pids} are alive; their state is unchanged"
        )
    return f"no readable core{older}"
