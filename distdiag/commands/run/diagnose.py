"""Verdict on a recorded run: which rank failed first, why, and the places of the others. Pure."""

from __future__ import annotations

import calendar
import math
import os
import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.run.types import COMMAND, TIME_LIMIT, NodeRun, Picture, RankRun, RankStack, Run, status_text
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.job_logs import diagnose as logs_diagnose
from distdiag.diagnosis.job_logs.types import Request as LogsRequest
from distdiag.diagnosis.job_logs.types import number_in
from distdiag.diagnosis.stack_wording import place
from distdiag.diagnosis.verdicts import finding, worst_first
from distdiag.diagnosis.wording import counted, format_duration, format_ranks
from distdiag.facts.logs.demux import Stream
from distdiag.facts.logs.scan import Event
from distdiag.fold import by_key
from distdiag.report import Finding, Level, Report, Where
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.run.types import Request
    from distdiag.facts.logs.collect import NodeLogs
    from distdiag.report import Finding

_OF_FIRST = ("logs.first-failure", "logs.same-failure", f"{COMMAND}.died-first")
_SHOWN = 8


def diagnose(request: Request, gathered: Gathered[NodeRun]) -> Report[Run]:
    """Report how the job ended, from deaths, kept output and snapshots by hang."""
    nodes = gathered.facts
    found = list(_judge(request, nodes))
    found += _sanitized(nodes)
    found += host_findings(gathered.refusals, gathered.rows)
    found = worst_first(found)
    ranks = tuple(_of_one_clock(rank, nodes) for node in nodes for rank in node.ranks)
    statuses = [node.status for node in nodes]
    status = next((status for status in statuses if status), 0) if statuses else None
    world = len({rank.rank for rank in ranks})
    took_s = max((node.took_s for node in nodes), default=0.0)
    summary = found[0].title if found else f"the job exited with status 0: {counted(world, 'rank')}"
    return Report(
        command=COMMAND,
        data=Run(
            argv=nodes[0].argv if nodes else (),
            status=status,
            took_s=took_s,
            generations=max((rank.generation + 1 for rank in ranks), default=1),
            world=world,
            ranks=ranks,
            pictures=tuple(picture for node in nodes for picture in node.pictures),
            stacks=tuple(node.stacks for node in nodes if node.stacks is not None),
            first=next((each.where.ranks for each in found if each.id in _OF_FIRST), ()),
            folder=request.folder,
            hosts=tuple(node.host for node in nodes),
        ),
        findings=tuple(found),
        summary=summary,
        interrupted=gathered.interrupted,
    )


def _judge(request: Request, nodes: Sequence[NodeRun]) -> Iterator[Finding]:
    deaths = sorted(_deaths(nodes), key=lambda rank: _unix(rank, nodes))
    stall = next((p for node in nodes for p in node.pictures if p.reason == "stall" and p.verdict == "fail"), None)
    is_bad = any(node.status for node in nodes)
    first_death = _unix(deaths[0], nodes) if deaths else math.inf

    def began(node: NodeRun, at_s: float) -> float:
        return node.began_at + at_s

    if stall is not None and began(next(node for node in nodes if stall in node.pictures), stall.at_s) < first_death:
        yield _stalled(stall, killed=any(node.killed for node in nodes))
        return
    stopped = next(((name, at, node) for node in nodes for name, at in node.signals), None)
    if stopped is not None and is_bad and began(stopped[2], stopped[1]) < first_death:
        yield _terminated(stopped[0], stopped[1], nodes)
        return
    if not is_bad and not deaths:
        return
    report = logs_diagnose.diagnose(
        LogsRequest(program=request.program, cluster=request.cluster),
        Gathered(facts=[_with_exits(node, deaths) for node in nodes]),
    )
    first = report.findings[0] if report.findings else None
    if first is not None and first.level is Level.FAIL:
        yield replace(first, evidence=(*first.evidence, *_about_the_end(first.where.ranks, deaths, nodes)))
        yield from report.findings[1:]
    elif deaths:
        yield _died_first(deaths, nodes, first, request.folder)
    else:
        yield _unexplained(request.folder, nodes)
    if not is_bad:
        yield _restarted(deaths)


def _deaths(nodes: Sequence[NodeRun]) -> list[RankRun]:
    """Return the ranks that failed, except those killed by a launcher or user."""
    return [
        rank
        for node in nodes
        for rank in node.ranks
        if rank.ended_s is not None and rank.status not in (0, None, -15, -2, -1)
    ]


def _of_one_clock(rank: RankRun, nodes: Sequence[NodeRun]) -> RankRun:
    """Convert the times of a rank to the clock of the first node to start."""
    node = next(node for node in nodes if rank in node.ranks)
    later_s = node.began_at - min(node.began_at for node in nodes)
    ended_s = None if rank.ended_s is None else round(rank.ended_s + later_s, 3)
    return replace(rank, started_s=round(rank.started_s + later_s, 3), ended_s=ended_s)


def _unix(rank: RankRun, nodes: Sequence[NodeRun]) -> float:
    node = next(node for node in nodes if rank in node.ranks)
    return node.began_at + (rank.ended_s or 0.0)


def _with_exits(node: NodeRun, deaths: Sequence[RankRun]) -> NodeLogs:
    """Add the kernel's exit statuses of ranks to the logs, in place of the launchers' reports on them.

    `deaths`: of all nodes, in order.
    """
    firsts = {rank.generation: rank for rank in reversed(deaths)}
    ended = [rank for rank in node.ranks if rank.ended_s is not None and rank.status is not None]
    known = {rank.rank for rank in ended}
    ended.sort(key=lambda rank: rank.ended_s or 0.0)
    logs = node.logs
    stream = len(logs.streams)
    newest = max((rank.generation for rank in node.ranks), default=0)
    events: list[Event] = [
        replace(event, generation=min(event.generation, newest))  # a launcher's last lines count one more
        for event in logs.events
        if not (event.id == "exit" and (not event.groups.get("rank") or int(event.groups["rank"]) in known))
    ]
    start_of_year = calendar.timegm((time.gmtime(node.began_at).tm_year, 1, 1, 0, 0, 0))
    for rank in ended:
        is_first = rank is firsts.get(rank.generation)
        groups = {
            "rank": str(rank.rank),
            "code": str(rank.status),
            "pid": str(rank.pid),
            "host": rank.host,
            "launcher": "distdiag run",
            **({"first": "yes"} if is_first else {}),
        }
        at = node.began_at + (rank.ended_s or 0.0) - start_of_year
        text = f"rank {rank.rank}: {status_text(rank.status)}"
        events.append(Event("exit", stream, 0, text, at, rank.generation, None, groups))
        if rank.oom:
            text = "memory.events of its cgroup: oom_kill rose while it ran"
            events.append(Event("oom-kill", stream, 0, text, at, rank.generation, None, {"pid": str(rank.pid)}))
    streams = (*logs.streams, Stream(file=len(logs.files), label="distdiag run"))
    return replace(logs, streams=streams, events=tuple(events))


def _about_the_end(first: Sequence[int], deaths: Sequence[RankRun], nodes: Sequence[NodeRun]) -> Iterator[str]:
    """Yield the recorded end: last line of output, order of exits, and places of the others."""
    failed = next((rank for rank in deaths if rank.rank in first), None)
    if failed is not None and failed.last_line and len(first) == 1:
        yield f"last line of its output: {failed.last_line}"
    if len(deaths) > 1:
        shown = [_ended(_of_one_clock(rank, nodes)) for rank in deaths[:_SHOWN]]
        more = f", and {len(deaths) - _SHOWN} more" if len(deaths) > _SHOWN else ""
        yield f"ranks ended in this order: {', '.join(shown)}{more}"
    yield from _where_others_were(nodes)
    for node in nodes:
        named = _launcher_names(node.logs)
        if named is not None and first and named not in first:
            yield f"the launcher names rank {named}, which it saw first; rank {first[0]} failed before"
    yield from _pictured(nodes)


def _ended(rank: RankRun) -> str:
    memory = ", out of memory" if rank.oom else ""
    return f"rank {rank.rank} ({status_text(rank.status)}{memory}) at {rank.ended_s or 0.0:.2f} s"


def _where_others_were(nodes: Sequence[NodeRun]) -> Iterator[str]:
    """Yield the places of ranks still alive after the first exit on their node."""
    for node in nodes:
        if node.stacks is None:
            continue
        on = f" on {node.host}" if len(nodes) > 1 else ""
        places = by_key((_place(stack), stack.rank) for stack in node.stacks.ranks)
        words = "; ".join(f"{format_ranks(ranks)} {place}" for place, ranks in places.items())
        yield f"where the others were{on}: {words or 'not recorded, they had ended'}"


def _place(stack: RankStack) -> str:
    if stack.error:
        return f"not known ({stack.error})"
    return f"at {place(stack.frames)}" if stack.frames else "exiting (no Python frames left)"


def _launcher_names(logs: NodeLogs) -> int | None:
    """Return the rank that a launcher reports as the first failure."""
    first = next((event for event in logs.events if event.id == "exit" and event.groups.get("first")), None)
    return None if first is None else number_in(first.groups.get("rank"))


def _pictured(nodes: Sequence[NodeRun]) -> Iterator[str]:
    for node in nodes:
        for picture in node.pictures:
            if picture.reason == "SIGTERM" and not picture.error and not picture.ranks_seen:
                yield f"{node.host}: the ranks got the signal too, and had ended before they could be looked at"
            elif picture.verdict or picture.error:
                when = {"SIGTERM": "at SIGTERM", TIME_LIMIT: "before the time limit"}.get(
                    picture.reason, picture.reason
                )
                yield f"hang at {picture.at_s:.1f} s ({when}): {picture.summary or picture.error}"


def _stalled(picture: Picture, *, killed: bool) -> Finding:
    return finding(
        f"{COMMAND}.stalled",
        where=Where(ranks=picture.ranks),
        evidence=(f"hang looked at {format_duration(picture.at_s)}, for {format_duration(picture.took_s)}",),
        summary=picture.summary,
        killed="--on-stall kill" if killed else "",
        folder=picture.folder,
    )


def _terminated(name: str, at_s: float, nodes: Sequence[NodeRun]) -> Finding:
    job = next(filter(None, (node.slurm_job for node in nodes)), "")
    # The latest counts: a job that hung earlier may have continued.
    seen = [picture for node in nodes for picture in node.pictures if picture.ranks_seen]
    last = max(seen, key=lambda picture: picture.at_s, default=None)
    hung = last if last is not None and last.verdict == "fail" else None
    by_ctrl_c = "It was interrupted, as by Ctrl-C."
    return finding(
        f"{COMMAND}.terminated",
        level=Level.UNKNOWN if hung is None else Level.FAIL,
        where=Where(ranks=hung.ranks if hung is not None else ()),
        evidence=tuple(_pictured(nodes)),
        signal=name,
        after=format_duration(at_s),
        before=f"at {format_duration(hung.at_s)} it hung: {hung.summary}" if hung else "no rank had failed",
        detail=by_ctrl_c if name == "SIGINT" else "It was a time limit, a preemption or a user.",
        why="why" if job else "",
        job=shlex.quote(job),
    )


def _died_first(deaths: Sequence[RankRun], nodes: Sequence[NodeRun], logs: Finding | None, folder: str) -> Finding:
    rank = deaths[0]
    is_whole = rank.world <= len({each.rank for node in nodes for each in node.ranks})
    title = logs.title if logs is not None else ""
    is_order = logs is not None and logs.id == "logs.order-unknown" and is_whole
    output = shlex.quote(os.path.join(folder, f"output.{rank.host}"))
    return finding(
        f"{COMMAND}.died-first{'' if is_whole else '-here'}",
        where=Where(ranks=(rank.rank,), hosts=(rank.host,), pids=(rank.pid,)),
        evidence=tuple(_about_the_end((rank.rank,), deaths, nodes)),
        who=format_ranks([rank.rank], [rank.host]),
        status=status_text(rank.status),
        why=title if is_order else "why is unknown",
        detail="" if is_order else title,
        output=f"{output}/rank{rank.rank}.g{rank.generation}.*.log",
    )


def _unexplained(folder: str, nodes: Sequence[NodeRun]) -> Finding:
    node = next(node for node in nodes if node.status)
    ranks = node.ranks
    ended = sorted((rank for rank in ranks if rank.ended_s and rank.status), key=lambda rank: rank.ended_s or 0.0)
    first = f"rank {ended[0].rank} ended first, with {status_text(ended[0].status)}" if ended else "none failed"
    return finding(
        f"{COMMAND}.launcher-failed",
        evidence=tuple(_pictured(nodes)),
        status=status_text(node.status),
        ranks=f"{counted(len(ranks), 'rank')} started, {first}" if ranks else "no rank started",
        output=f"{shlex.quote(os.path.join(folder, f'output.{node.host}'))}/job.*.log",
    )


def _sanitized(nodes: Sequence[NodeRun]) -> Iterator[Finding]:
    """Yield findings of compute-sanitizer: an error in device code, whether or not the job failed."""
    for node in nodes:
        for log in node.sanitizer:
            if log.errors or (log.errors is None and log.first):
                number = counted(log.errors, "error") if log.errors else "the rank ended before the summary"
                launched = (f"launched by {log.launched}",) if log.launched else ()
                place = next((f" {line}" for line in log.details if line.startswith("at ")), "")
                yield finding(
                    f"{COMMAND}.sanitizer",
                    where=Where(ranks=(log.rank,), hosts=(node.host,)),
                    evidence=(*(line for line in log.details if not line.startswith("at ")), *launched, number),
                    who=format_ranks([log.rank], [node.host]),
                    first=f"{log.first or 'errors'}{place}",
                    path=shlex.quote(log.path),
                )


def _restarted(deaths: Sequence[RankRun]) -> Finding:
    ranks = sorted({rank.rank for rank in deaths})
    return finding(f"{COMMAND}.recovered", where=Where(ranks=tuple(ranks)), ranks=format_ranks(ranks))
