"""Facts of the nodes' cores -> Report. Pure."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.unreached_hosts import host_findings, summary_of
from distdiag.commands.core_bt import able
from distdiag.commands.core_bt.model import COMMAND
from distdiag.commands.core_bt.result import Core, CoreBt, Thread, Unread
from distdiag.commands.core_bt.words import alike, frame_in_words, guilty, where, who
from distdiag.facts.core.merge import is_eval
from distdiag.facts.machine import redacted
from distdiag.facts.programs import signal_name
from distdiag.knowledge import crashes
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.host_results import HostResult
    from distdiag.commands.core_bt.collect import CoreFacts, LiveFacts, NodeCores
    from distdiag.commands.core_bt.model import Request
    from distdiag.facts.core.merge import Merged
    from distdiag.gathered import Gathered
    from distdiag.knowledge.crashes import Crash

_SAME_FRAMES = 3
_SAID_LINES = 6
_STOPPED = ("T", "t")
_ENDS_BY_EXCEPTION = re.compile(r"terminate|__cxa_|_Unwind_|__gxx_|rethrow_exception")


def diagnose(request: Request, gathered: Gathered[NodeCores]) -> Report[CoreBt]:
    """Say what crashed, where, and why; or what keeps this machine from leaving a core."""
    nodes, rows = gathered.facts, gathered.rows
    cores: list[tuple[Core, Crash | None]] = []
    unread: list[Unread] = []
    found: list[Finding] = []
    for node in nodes:
        cores += [_core(one, node.host) for one in node.cores if one.notes is not None]
        unread += [Unread(path=one.path, host=node.host, why=one.error) for one in node.cores if one.error]
        unread += [Unread(path=path, host=node.host, why=why) for path, why in node.missed]
        if node.live is not None:
            cores.append((_live(node.live, node.host), None))
            found += _of_live(request, node.live, node.host)
    found += able.able({node.host: node.setup for node in nodes if node.setup is not None})
    cores.sort(key=lambda one: (one[0].time or 0.0, one[0].pid))
    found += _crashes(request, cores)
    found += _about_files(request, [core for core, _ in cores], unread)
    found += host_findings(gathered.refusals, rows)
    found += [_lost(host, why) for host, why in gathered.missing.items()]
    data = CoreBt(
        cores=tuple(core for core, _ in cores),
        unread=tuple(unread),
        looked_in=tuple(dict.fromkeys(place for node in nodes for place in node.searched)),
    )
    if not (cores or unread or request.setup or request.pid is not None) and nodes:
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
    told = facts.notes
    assert told is not None
    threads = [_thread(one) for one in facts.threads]
    crashed = next((thread for thread, one in zip(threads, facts.threads, strict=True) if one.crashed), None)
    functions = [frame.function for frame in crashed.frames] if crashed is not None else []
    mapped = next((one.path for one in told.files if told.address and one.start <= told.address < one.end), "")
    said = _said(facts, functions)
    evidence = "\n".join(filter(None, (said, mapped)))
    known = crashes.recognise(functions, evidence, told.signal, told.code, told.address, inside=facts.inside)
    core = Core(
        path=facts.path,
        host=host,
        exe=facts.exe,
        cmdline=redacted(told.arguments or told.program),
        pid=told.pid,
        rank=facts.rank,
        time=facts.modified_s,
        signal=told.signal,
        signal_name=signal_name(told.signal),
        signal_code=told.code,
        address=told.address,
        said=redacted(said),
        mapped=mapped,
        meaning=crashes.meaning(told.signal, told.code, told.address, told.sender_pid, told.pid),
        signature=known.id if known is not None else None,
        role=known.role if known is not None else None,
        crash_thread=crashed if crashed is not None and crashed.frames else None,
        threads=tuple(thread for thread in threads if thread is not crashed),
        truncated=told.truncated,
        size_bytes=told.size_bytes,
        whole_bytes=told.whole_bytes,
        changed=facts.changed,
        tools=facts.tools,
    )
    return core, known


def _said(facts: CoreFacts, functions: Sequence[str]) -> str:
    """Give the last words of the process; an exception that was thrown earlier, and caught, is none of them."""
    ended = not functions or any(_ENDS_BY_EXCEPTION.search(function) for function in functions)
    return facts.message or (facts.exception if ended else "")


def _live(facts: LiveFacts, host: str) -> Core:
    threads = [_thread(one) for one in facts.threads]
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
        said="",
        mapped="",
        meaning=f"a live process, in state {facts.state_before or '?'} before the look and {facts.state_after or '?'} "
        "after it",
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


def _thread(one: Merged) -> Thread:
    thread = one.thread
    return Thread(tid=thread.tid, name=thread.name, gil=thread.gil, frames=thread.frames)


def _crashes(request: Request, cores: Sequence[tuple[Core, Crash | None]]) -> list[Finding]:
    """One finding for each crash, the same in several processes being one; those that are consequences last."""
    groups: dict[tuple[object, ...], list[tuple[Core, Crash | None]]] = {}
    for core, known in cores:
        if core.signal:
            frames = tuple(frame_in_words(frame) for frame in guilty(core)[:_SAME_FRAMES])
            same = (core.signal, core.signature, where(core), frames, alike(core.said))
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
        title=f"{who(first)}{others} died by {first.signal_name}{' ' + place if place else ''}",
        detail=_sentence(known.says if known is not None else first.meaning)
        + ("" if first.crash_thread is not None else " Its stack could not be read."),
        where=Where(
            hosts=tuple(dict.fromkeys(core.host for core, _ in group)),
            ranks=tuple(core.rank for core, _ in group if core.rank is not None),
            pids=tuple(core.pid for core, _ in group),
        ),
        evidence=(
            *(f"it said: {line.strip()}" for line in first.said.splitlines()[:_SAID_LINES]),
            *([f"{first.signal_name}: {first.meaning}"] if known is not None else []),
            *(core.path for core, _ in group[:8]),
            # Of an unknown crash that is what the fix is about.
            *(first.tools if first.crash_thread is None and known is not None else ()),
            *(("its Python frames are missing", *first.tools) if _lacks_python(first) else ()),
            *([f"known from {known.source}"] if known is not None and known.source else []),
        ),
        fix=_fix(request, first, known),
    )


def _lacks_python(core: Core) -> bool:
    """Tell whether the thread that crashed ran Python, and nobody says what."""
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
        text="look at the innermost frames; keep this report for an issue, without secrets",
        commands=(request.again(core.path, "--all-threads", "--text", "report.txt"),),
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
                title=f"{len(cut)} core(s) are cut off, {cut[0].path} has {part:.0%} of its bytes: the signal and the "
                "thread are right, stacks may be missing",
                fix=Fix(
                    text="a full disk or a limit cut it; see what this machine allows",
                    commands=(request.again("--setup"),),
                ),
            )
        )
    changed = sorted({path for core in cores for path in core.changed})
    if changed:
        found.append(
            Finding(
                id=f"{COMMAND}.binary-changed",
                level=Level.WARN,
                title=f"{len(changed)} file(s) were changed since the crash: frames in them may be wrong",
                evidence=tuple(changed[:8]),
                fix=Fix(text="name the program as it was then, if there is a copy: --exe PATH"),
            )
        )
    for why in dict.fromkeys(one.why for one in unread):
        paths = [one.path for one in unread if one.why == why]
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
                title=f"process {live.pid} on {host} is stopped now, and was not before",
                fix=Fix(text="let it go on", commands=(f"kill -CONT {live.pid}",)),
            )
        )
    return found


def _lost(host: str, why: str) -> Finding:
    return Finding(id=f"{COMMAND}.no-answer", level=Level.UNKNOWN, title=f"{host}: {why}", where=Where(hosts=(host,)))


def _none(request: Request, data: CoreBt) -> Finding:
    return Finding(
        id=f"{COMMAND}.none",
        level=Level.UNKNOWN,
        title="no core was found",
        detail=f"Looked in {', '.join(data.looked_in) or 'nothing'}.",
        fix=Fix(
            text="name the file or its folder; or see whether this machine leaves cores at all",
            commands=(request.again("--setup"),),
        ),
    )


def _summary(
    request: Request, data: CoreBt, found: Sequence[Finding], rows: Sequence[HostResult], more: tuple[int, bool]
) -> str:
    left_out, interrupted = more
    if interrupted:
        return f"interrupted; {len(data.cores)} cores were read" + (f"; hosts: {summary_of(rows)}" if rows else "")
    wrong = [one.title for one in found if one.level in (Level.FAIL, Level.UNKNOWN)]
    rest = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    older = f"; {left_out} older core(s) were not looked at" if left_out else ""
    if wrong:
        return redacted(wrong[0]) + rest + older
    if request.setup:
        warned = [one.title for one in found if one.level is Level.WARN]
        return "; ".join(warned) or "a process that crashes here leaves a core"
    if request.pid is not None:
        return f"process {request.pid} is alive, and was left as it was found"
    return f"no core that can be read{older}"
