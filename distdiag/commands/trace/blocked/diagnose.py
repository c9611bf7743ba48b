"""Facts of all nodes -> the report of trace blocked. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.reached import host_findings
from distdiag.commands.trace.blocked import findings
from distdiag.commands.trace.blocked.chains import Waits, trees
from distdiag.commands.trace.blocked.findings import Case, root_wait
from distdiag.commands.trace.blocked.model import COMMAND, Threads
from distdiag.commands.trace.blocked.result import LOOK_S, Chain, JobRow, Kind, Last, ThreadRow, TraceBlocked, Waiter
from distdiag.commands.trace.blocked.waits import wait_of
from distdiag.commands.trace.ranks import nobody
from distdiag.commands.trace.who import People
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.blocked.chains import Tree
    from distdiag.commands.trace.blocked.collect import Blocked, Told
    from distdiag.commands.trace.blocked.model import Request
    from distdiag.commands.trace.blocked.result import Wait
    from distdiag.commands.trace.nodes import Answers
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.who import Key
    from distdiag.jobs.model import Job
    from distdiag.node.blocked import Thread

_ORDER = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO)


def diagnose(request: Request, answers: Answers[Told], chosen: Sequence[Chosen]) -> Report[TraceBlocked]:
    """Tell what every chosen thread waits for, and find the processes that others wait for."""
    people = People(answers.nodes, {host: _ends_of(told) for host, told in answers.told.items()})
    looked = {(host, one.pid): one for host, told in answers.told.items() for part in told for one in part.processes}
    waits = Waits({key: _waits_of(one, key, people) for key, one in looked.items()}, people)
    keys = tuple((one.host, one.process.pid) for one in chosen if one.process is not None)
    found_trees = [tree for tree in trees(waits) if _is_about(tree, keys)]
    cases = [Case(request, job, own, waits) for job, own in _cases(chosen)]
    user = answers.nodes[0].processes.user if answers.nodes else 0
    found = [one for case in cases for one in _of_case(case, found_trees, user, several=len(cases) > 1)]
    if not chosen and not answers.refusals and not answers.interrupted:
        found.append(_nobody(request, answers))
    found += _missing(answers)
    found += host_findings(answers.refusals, answers.rows)
    shown = [*keys, *_awaited_helpers(keys, waits)]
    data = TraceBlocked(
        look_s=LOOK_S,
        jobs=tuple(_job_row(job) for job, _ in _cases(chosen) if job is not None),
        threads=tuple(row for key in shown for row in _rows(key, looked, waits, all_of_them=_shows_all(request))),
        chains=tuple(_chain(tree, cases[0], people) for tree in found_trees) if cases else (),
        helpers=sum(len(one.member.helpers) for one in chosen if one.member is not None and not one.is_helper)
        - (len(shown) - len(keys)),
    )
    return Report(
        command=COMMAND, data=data, findings=tuple(found), summary=_summary(found), interrupted=answers.interrupted
    )


def _nobody(request: Request, answers: Answers[Told]) -> Finding:
    why = nobody(answers.nodes, request.wanted, f"{request.program} trace blocked")
    return Finding(
        id="trace.no-job",
        level=Level.UNKNOWN,
        title=str(why),
        where=Where(hosts=tuple(node.host for node in answers.nodes)),
        fix=Fix(text=why.hint) if why.hint else None,
    )


def _summary(found: Sequence[Finding]) -> str:
    worst = min(found, key=lambda one: _ORDER.index(one.level), default=None)
    if worst is None:
        return "nobody was looked at"
    return worst.title.partition(": ")[0] if worst.level is Level.INFO else worst.title


def _ends_of(told: Sequence[Told]) -> tuple[list, list]:  # type: ignore[type-arg]
    return [one for part in told for one in part.networks], [one for part in told for one in part.people]


def _waits_of(one: Blocked, key: Key, people: People) -> tuple[Wait, ...]:
    """Tell what its threads wait for, the main thread first."""
    ordered = sorted(one.threads, key=lambda thread: (thread.tid != one.pid, thread.tid))
    return tuple(wait_of(thread, one, key[0], people) for thread in ordered)


def _cases(chosen: Sequence[Chosen]) -> Iterator[tuple[Job | None, tuple[Key, ...]]]:
    """Put the chosen ones together by job; of a chosen rank all others count that it may wait for."""
    by_job: dict[int, tuple[Job | None, dict[Key, None]]] = {}
    for one in chosen:
        _, keys = by_job.setdefault(id(one.job), (one.job, {}))
        members = one.job.members if one.job is not None and not one.is_helper else [one]
        keys.update(((other.host, other.process.pid), None) for other in members if other.process is not None)
    for job, own in by_job.values():
        yield job, tuple(own)


def _is_about(tree: Tree, keys: Sequence[Key]) -> bool:
    """Tell whether a chosen one waits in it, or is waited for."""
    return not {tree.root, *(edge.waiter for edge in tree.edges)}.isdisjoint(keys)


def _of_case(case: Case, found_trees: Sequence[Tree], user: int, *, several: bool) -> Iterator[Finding]:
    own = [tree for tree in found_trees if _is_about(tree, case.keys)]
    found = [*findings.of_trees(case, own), *findings.of_themselves(case, own), *findings.of_gone(case)]
    unread = findings.unreadable(case, user)
    if not found:
        found += findings.by_exclusion(case)
    if not found:
        found += findings.undecided(case)
    if all(one.level is not Level.INFO for one in found):
        found += findings.unseen(case)
    for one in [*found, *unread]:
        named = several and case.job is not None and case.job.name
        yield replace(one, title=f"job {case.job.name}: {one.title}") if named and case.job is not None else one


def _missing(answers: Answers[Told]) -> Iterator[Finding]:
    for host, why in answers.missing.items():
        title = f"what {host} told is not complete: {why}"
        yield Finding(id="trace.incomplete", level=Level.UNKNOWN, title=title, where=Where(hosts=(host,)))


def _shows_all(request: Request) -> bool:
    return request.threads is Threads.ALL


def _awaited_helpers(keys: Sequence[Key], waits: Waits) -> list[Key]:
    """List the helpers that a thread of a chosen process waits for."""
    found: dict[Key, None] = {}
    for key in keys:
        for wait in waits.by_process.get(key, ()):
            for peer in wait.peers:
                place = waits.people.places.get(peer)
                if place is not None and not place.is_rank and peer not in keys and peer in waits.by_process:
                    found[peer] = None
    return list(found)


def _rows(key: Key, looked: dict[Key, Blocked], waits: Waits, *, all_of_them: bool) -> Iterator[ThreadRow]:
    one = looked.get(key)
    if one is None:
        return
    place = waits.people.places.get(key)
    for wait in waits.by_process[key][: None if all_of_them else 1]:
        thread = wait.thread
        assert thread is not None
        yield ThreadRow(
            host=key[0],
            rank=place.rank if place is not None else None,
            job=place.job.name if place is not None else "",
            role=waits.people.role(key),
            pid=key[1],
            tid=thread.tid,
            comm=thread.comm,
            state=thread.state,
            moved=thread.tid in one.moved,
            kind=wait.kind,
            on=wait.on,
            last=_last(thread, wait, waits.people),
        )


def _last(thread: Thread, wait: Wait, people: People) -> Last:
    ranks = {people.rank(peer) for peer in wait.peers}
    targets = [one.descriptor.target for one in thread.targets if one.descriptor is not None]
    return Last(
        call=thread.syscall,
        args=thread.arguments,
        fd_target=thread.path or (targets[0] if targets else ""),
        peer_rank=ranks.pop() if len(ranks) == 1 else None,
        blocked_s=None if wait.kind is Kind.RUNS else _rounded(wait.since_s),
    )


def _chain(tree: Tree, case: Case, people: People) -> Chain:
    wait = root_wait(case, tree.root)
    place = people.places.get(tree.root)
    return Chain(
        job=place.job.name if place is not None else "",
        host=tree.root[0],
        rank=people.rank(tree.root),
        pid=tree.root[1],
        cause="cycle" if tree.is_cycle else wait.kind,
        does=wait.does,
        blocked_s=_rounded(wait.since_s),
        waiting=tuple(
            Waiter(
                host=edge.waiter[0],
                rank=people.rank(edge.waiter),
                pid=edge.waiter[1],
                call=edge.wait.call,
                on=edge.wait.on,
                blocked_s=_rounded(edge.wait.since_s),
                for_rank=people.rank(edge.to),
                for_pid=edge.to[1],
            )
            for edge in tree.edges
        ),
    )


def _job_row(job: Job) -> JobRow:
    seen = [member for member in job.members if member.process is not None]
    hosts = tuple(dict.fromkeys(member.host for member in seen))
    return JobRow(job=job.name, launcher=job.launcher, world_size=job.world_size, ranks=len(seen), hosts=hosts)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
