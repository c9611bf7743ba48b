"""Facts of all nodes -> the report of trace blocked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.trace import ranks
from distdiag.commands.trace.blocked.types import COMMAND, Last, Request, ThreadRow, Threads, TraceBlocked
from distdiag.diagnosis import remedies
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.process_index import ProcessIndex, not_found
from distdiag.diagnosis.stuck.judge import all_nodes, job_findings, judge_jobs
from distdiag.diagnosis.stuck.types import OF_PROCESSES, Asked
from distdiag.diagnosis.stuck.waits import root_wait
from distdiag.diagnosis.wait_graph import WaitGraph
from distdiag.diagnosis.wait_reasons import Kind, wait_of
from distdiag.ids import Id
from distdiag.jobs.roles import of_interest
from distdiag.jobs.sample_waits import SAMPLED_S
from distdiag.jobs.types import summarize
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.ranks import Chosen
    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.wait_reasons import Wait
    from distdiag.facts.process.blocked_threads import Blocked, Thread
    from distdiag.jobs.types import Job, NodePicture
    from distdiag.saved_facts import Gathered


def diagnose(request: Request, gathered: Gathered[NodePicture]) -> Report[TraceBlocked]:
    """Judge the jobs of the selected processes, and list the wait of each selected thread."""
    nodes = all_nodes(gathered)
    stacks = [node.stacks for node in nodes]
    chosen = ranks.choose(stacks, request.wanted)
    sampled = {(node.host, process.pid): process for node in nodes for process in node.blocked}
    index = ProcessIndex(stacks, {node.host: (node.networks, node.peer_processes) for node in nodes})
    graph = WaitGraph({key: _waits_of(process, key, index) for key, process in sampled.items()}, index)
    keys = tuple((choice.host, choice.process.pid) for choice in chosen if choice.process is not None)
    jobs = list({id(choice.job): choice.job for choice in chosen if choice.job is not None}.values())
    found = list(_findings(request, gathered, nodes, jobs, chosen, graph))
    shown, all_threads = [*keys, *_awaited_helpers(keys, graph)], request.threads is Threads.ALL
    data = TraceBlocked(
        interval_s=SAMPLED_S,
        jobs=tuple(summarize(job) for job in jobs),
        threads=tuple(row for key in shown for row in _rows(key, sampled, graph, all_threads=all_threads)),
        helpers=sum(len(each.member.helpers) for each in chosen if each.member is not None and not each.is_helper)
        - (len(shown) - len(keys)),
    )
    summary = found[0].title if found else "no process was read"
    return Report(command=COMMAND, data=data, findings=tuple(found), summary=summary, interrupted=gathered.interrupted)


def _findings(
    request: Request,
    gathered: Gathered[NodePicture],
    nodes: Sequence[NodePicture],
    jobs: Sequence[Job],
    chosen: Sequence[Chosen],
    graph: WaitGraph,
) -> Iterator[Finding]:
    """Yield the verdicts on whole jobs, and the activity of selected processes outside any job."""
    wanted = request.wanted
    asked = Asked(
        program=request.program,
        cluster=request.cluster,
        command=COMMAND,
        job=wanted.job,
        user=wanted.user,
        sources=OF_PROCESSES,
    )
    if not chosen and not gathered.refusals and not gathered.interrupted:
        yield _no_process(request, nodes)
    if not chosen:
        yield from host_findings(gathered.refusals, gathered.rows)
        return
    yield from not_found(nodes, wanted.pids)
    alone = [choice for choice in chosen if choice.job is None and choice.process is not None]
    for choice in alone:
        yield _about_process(asked, choice, graph)
    if jobs or not alone:
        judged = judge_jobs(asked, nodes, jobs if wanted.pids else of_interest(list(jobs)))
        yield from job_findings(asked, judged, nodes, gathered)


def _about_process(asked: Asked, choice: Chosen, graph: WaitGraph) -> Finding:
    """Report a process outside any job, without others to compare with."""
    assert choice.process is not None
    key = (choice.host, choice.process.pid)
    wait = root_wait(graph, key)
    where = Where(hosts=(choice.host,), pids=(choice.process.pid,))
    name = graph.index.name(key, whole=True)
    if wait.kind is Kind.UNREADABLE:
        title = f"{name} cannot be read: permission denied"
        fix = remedies.as_other_user(asked.again("trace", "blocked", "--pid", str(choice.process.pid)))
        return Finding(id=Id.HANG_UNREADABLE, level=Level.UNKNOWN, title=title, where=where, fix=fix)
    is_stopped = wait.kind is Kind.STOPPED
    return Finding(
        id=Id.HANG_STOPPED if is_stopped else Id.HANG_PROCESS,
        level=Level.FAIL if is_stopped else Level.UNKNOWN,
        title=f"{name} {wait.does}",
        where=where,
        fix=remedies.resume([key]) if is_stopped else None,
    )


def _no_process(request: Request, nodes: Sequence[NodePicture]) -> Finding:
    why = ranks.none_found([node.stacks for node in nodes], request.wanted, f"{request.program} trace blocked")
    return Finding(
        id=Id.HANG_NO_JOB,
        level=Level.UNKNOWN,
        title=str(why),
        where=Where(hosts=tuple(node.host for node in nodes)),
        fix=Fix(text=why.hint) if why.hint else None,
    )


def _waits_of(process: Blocked, key: Key, index: ProcessIndex) -> tuple[Wait, ...]:
    ordered = sorted(process.threads, key=lambda thread: (thread.tid != process.pid, thread.tid))
    return tuple(wait_of(thread, process, key[0], index) for thread in ordered)


def _awaited_helpers(keys: Sequence[Key], graph: WaitGraph) -> list[Key]:
    """List the helpers with waiters among the selected processes."""
    found: dict[Key, None] = {}
    for key in keys:
        for wait in graph.by_process.get(key, ()):
            for peer in wait.peers:
                place = graph.index.places.get(peer)
                if place is not None and not place.is_rank and peer not in keys and peer in graph.by_process:
                    found[peer] = None
    return list(found)


def _rows(key: Key, sampled: dict[Key, Blocked], graph: WaitGraph, *, all_threads: bool) -> Iterator[ThreadRow]:
    process, place = sampled.get(key), graph.index.places.get(key)
    for wait in graph.by_process.get(key, ())[: None if all_threads else 1]:
        thread = wait.thread
        assert thread is not None
        yield ThreadRow(
            host=key[0],
            rank=place.rank if place is not None else None,
            job=place.job.name if place is not None else "",
            role=graph.index.role(key),
            pid=key[1],
            tid=thread.tid,
            comm=thread.comm,
            state=thread.state,
            moved=process is not None and thread.tid in process.moved,
            kind=wait.kind,
            on=wait.on,
            last=_last(thread, wait, graph.index),
        )


def _last(thread: Thread, wait: Wait, index: ProcessIndex) -> Last:
    ranks = {index.rank(peer) for peer in wait.peers}
    targets = [target.descriptor.target for target in thread.targets if target.descriptor is not None]
    return Last(
        call=thread.syscall,
        args=thread.arguments,
        fd_target=thread.path or (targets[0] if targets else ""),
        peer_rank=ranks.pop() if len(ranks) == 1 else None,
        blocked_s=None if wait.kind is Kind.RUNS or wait.since_s is None else round(wait.since_s, 3),
    )
