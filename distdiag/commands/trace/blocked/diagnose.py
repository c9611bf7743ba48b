"""Facts of all nodes -> the report of trace blocked. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.unreached_hosts import host_findings
from distdiag.commands.trace import ranks
from distdiag.commands.trace.blocked.types import (
    COMMAND,
    Chain,
    Last,
    Request,
    ThreadRow,
    Threads,
    TraceBlocked,
    Waiter,
)
from distdiag.commands.trace.nodes import Answers, index_of
from distdiag.diagnosis import wait_findings as findings
from distdiag.diagnosis.remedies import unseen_ranks
from distdiag.diagnosis.wait_findings import Case, root_wait
from distdiag.diagnosis.wait_graph import WaitGraph, wait_trees
from distdiag.diagnosis.wait_reasons import Kind, wait_of
from distdiag.jobs.sample_waits import SAMPLED_S
from distdiag.jobs.types import summarize
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.ranks import Chosen
    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.diagnosis.wait_graph import WaitTree
    from distdiag.diagnosis.wait_reasons import Wait
    from distdiag.facts.blocked_threads import Blocked, Thread
    from distdiag.jobs.sample_waits import Reply
    from distdiag.jobs.types import Job

_ORDER = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO)


def diagnose(request: Request, answers: Answers[Reply], chosen: Sequence[Chosen]) -> Report[TraceBlocked]:
    """Judge what every selected thread waits for, and find the processes that others wait for."""
    index = index_of(answers)
    sampled = {
        (host, process.pid): process
        for host, replies in answers.replies.items()
        for reply in replies
        for process in reply.processes
    }
    graph = WaitGraph({key: _waits_of(process, key, index) for key, process in sampled.items()}, index)
    keys = tuple((choice.host, choice.process.pid) for choice in chosen if choice.process is not None)
    found_trees = [tree for tree in wait_trees(graph) if _is_about(tree, keys)]
    cases = [Case(request, job, own, graph) for job, own in _cases(chosen)]
    user = answers.nodes[0].processes.user if answers.nodes else 0
    found = [finding for case in cases for finding in _of_case(case, found_trees, user, several=len(cases) > 1)]
    if not chosen and not answers.refusals and not answers.interrupted:
        found.append(_no_process(request, answers))
    found += _missing(answers)
    found += host_findings(answers.refusals, answers.rows)
    shown = [*keys, *_awaited_helpers(keys, graph)]
    data = TraceBlocked(
        interval_s=SAMPLED_S,
        jobs=tuple(summarize(job) for job, _ in _cases(chosen) if job is not None),
        threads=tuple(row for key in shown for row in _rows(key, sampled, graph, all_threads=_shows_all(request))),
        chains=tuple(_chain(tree, cases[0], index) for tree in found_trees) if cases else (),
        helpers=sum(
            len(choice.member.helpers) for choice in chosen if choice.member is not None and not choice.is_helper
        )
        - (len(shown) - len(keys)),
    )
    return Report(
        command=COMMAND, data=data, findings=tuple(found), summary=_summary(found), interrupted=answers.interrupted
    )


def _no_process(request: Request, answers: Answers[Reply]) -> Finding:
    why = ranks.none_found(answers.nodes, request.wanted, f"{request.program} trace blocked")
    return Finding(
        id="trace.no-job",
        level=Level.UNKNOWN,
        title=str(why),
        where=Where(hosts=tuple(node.host for node in answers.nodes)),
        fix=Fix(text=why.hint) if why.hint else None,
    )


def _summary(found: Sequence[Finding]) -> str:
    worst = min(found, key=lambda finding: _ORDER.index(finding.level), default=None)
    if worst is None:
        return "no process was read"
    jobs = sum(finding.id == "trace.not-hung" for finding in found)
    if worst.id == "trace.not-hung":
        return f"no hang seen in {SAMPLED_S:g} s" + (f", in {jobs} jobs" if jobs > 1 else "")
    return worst.title


def _waits_of(process: Blocked, key: Key, index: ProcessIndex) -> tuple[Wait, ...]:
    """Return what its threads wait for, the main thread first."""
    ordered = sorted(process.threads, key=lambda thread: (thread.tid != process.pid, thread.tid))
    return tuple(wait_of(thread, process, key[0], index) for thread in ordered)


def _cases(chosen: Sequence[Chosen]) -> Iterator[tuple[Job | None, tuple[Key, ...]]]:
    """Group the selected processes by job, with all other ranks of the job, which they may wait for."""
    by_job: dict[int, tuple[Job | None, dict[Key, None]]] = {}
    for choice in chosen:
        _, keys = by_job.setdefault(id(choice.job), (choice.job, {}))
        members = choice.job.members if choice.job is not None and not choice.is_helper else [choice]
        keys.update(((other.host, other.process.pid), None) for other in members if other.process is not None)
    for job, own in by_job.values():
        yield job, tuple(own)


def _is_about(tree: WaitTree, keys: Sequence[Key]) -> bool:
    """Return whether a selected process waits in it, or is waited for."""
    return not {tree.root, *(edge.waiter for edge in tree.edges)}.isdisjoint(keys)


def _of_case(case: Case, found_trees: Sequence[WaitTree], user: int, *, several: bool) -> Iterator[Finding]:
    own = [tree for tree in found_trees if _is_about(tree, case.keys)]
    found = [*findings.of_trees(case, own), *findings.of_themselves(case, own), *findings.of_gone(case)]
    unread = findings.unreadable(case, user)
    if not found:
        found += findings.by_exclusion(case)
    if not found:
        found += findings.undecided(case)
    if all(finding.level is not Level.INFO for finding in found):
        found += unseen_ranks(case.job, "trace.unseen") if case.job is not None else []
    for finding in [*found, *unread]:
        named = several and case.job is not None and case.job.name
        yield (
            replace(finding, title=f"job {case.job.name}: {finding.title}")
            if named and case.job is not None
            else finding
        )


def _missing(answers: Answers[Reply]) -> Iterator[Finding]:
    for host, why in answers.missing.items():
        title = f"incomplete facts from {host}: {why}"
        yield Finding(id="trace.incomplete", level=Level.UNKNOWN, title=title, where=Where(hosts=(host,)))


def _shows_all(request: Request) -> bool:
    return request.threads is Threads.ALL


def _awaited_helpers(keys: Sequence[Key], graph: WaitGraph) -> list[Key]:
    """List the helpers that a thread of a selected process waits for."""
    found: dict[Key, None] = {}
    for key in keys:
        for wait in graph.by_process.get(key, ()):
            for peer in wait.peers:
                place = graph.index.places.get(peer)
                if place is not None and not place.is_rank and peer not in keys and peer in graph.by_process:
                    found[peer] = None
    return list(found)


def _rows(key: Key, sampled: dict[Key, Blocked], graph: WaitGraph, *, all_threads: bool) -> Iterator[ThreadRow]:
    process = sampled.get(key)
    if process is None:
        return
    place = graph.index.places.get(key)
    for wait in graph.by_process[key][: None if all_threads else 1]:
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
            moved=thread.tid in process.moved,
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
        blocked_s=None if wait.kind is Kind.RUNS else _rounded(wait.since_s),
    )


def _chain(tree: WaitTree, case: Case, index: ProcessIndex) -> Chain:
    wait = root_wait(case, tree.root)
    place = index.places.get(tree.root)
    return Chain(
        job=place.job.name if place is not None else "",
        host=tree.root[0],
        rank=index.rank(tree.root),
        pid=tree.root[1],
        cause="cycle" if tree.is_cycle else wait.kind,
        does=wait.does,
        blocked_s=_rounded(wait.since_s),
        waiting=tuple(
            Waiter(
                host=edge.waiter[0],
                rank=index.rank(edge.waiter),
                pid=edge.waiter[1],
                call=edge.wait.call,
                on=edge.wait.on,
                blocked_s=_rounded(edge.wait.since_s),
                for_rank=index.rank(edge.to),
                for_pid=edge.to[1],
            )
            for edge in tree.edges
        ),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
