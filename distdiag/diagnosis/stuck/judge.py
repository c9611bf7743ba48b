"""Findings on stuck jobs from the facts of all nodes, shared by hang, pyspy-all and `trace blocked`. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.diagnosis import remedies
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.outliers import Outcome, split
from distdiag.diagnosis.process_index import not_found, ranks_not_found
from distdiag.diagnosis.stack_wording import briefly, unread_in_words, who
from distdiag.diagnosis.stuck.evidence import gather_evidence
from distdiag.diagnosis.stuck.findings import findings_of
from distdiag.diagnosis.stuck.join import join, source_rows
from distdiag.diagnosis.stuck.starts import start_claims, without_place
from distdiag.diagnosis.stuck.types import Source, StuckKind
from distdiag.diagnosis.verdicts import WORST_FIRST, finding
from distdiag.diagnosis.wording import counted, format_hosts, listed, no_rank_seen
from distdiag.fold import by_key
from distdiag.ids import Id
from distdiag.jobs.collect import Processes
from distdiag.jobs.roles import (
    find_jobs,
    is_called,
    is_closed,
    job_options,
    launcher_name,
    of_interest,
    of_pids,
    without_ranks,
)
from distdiag.jobs.types import NodePicture
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.diagnosis.outliers import JobVerdict
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.join import Joined
    from distdiag.diagnosis.stuck.types import Asked, Claim
    from distdiag.jobs.types import Job
    from distdiag.saved_facts import Gathered

_ITS_OWN = (StuckKind.STOPPED, StuckKind.DEBUGGER)
"""Verdicts that hold even if other ranks wait in init_process_group."""
_SHOWN = 4
_PLACES = 3
_REMEDIES = {
    "not-python": "pass the pid of its Python child: --pid",
    "timeout": "increase the limit: pyspy-all --sample-timeout 30; or run py-spy dump --nonblocking on it",
    "failed": "try again: a process that is starting or exiting cannot be read",
}


def all_nodes(gathered: Gathered[NodePicture]) -> list[NodePicture]:
    """Return the facts of all nodes, with placeholders for nodes that sent none."""
    known = {node.host for node in gathered.facts}
    rest = [(host, why) for host, why in gathered.missing.items() if host not in known]
    return [*gathered.facts, *(NodePicture(host=host, processes=Processes(host), missing=why) for host, why in rest)]


def judge(asked: Asked, nodes: Sequence[NodePicture]) -> list[Joined]:
    """Find the requested jobs and judge each; worst first."""
    stacks = [node.stacks for node in nodes]
    jobs = find_jobs(stacks, whole=not (asked.user or (asked.pids and asked.command != "hang")))
    jobs = [job for job in jobs if not asked.job or is_called(job, asked.job)]
    if asked.pids:
        named = [each for node in nodes for each in node.processes.processes if each.pid in asked.pids]
        jobs = of_pids(jobs, asked.pids, named)
    else:
        jobs = of_interest(jobs)
    if any(read.starts for node in nodes for read in node.starts):
        # Beside waiting launchers, a shell or sleep with a rank in its environment is a wrapper, not a rank.
        jobs = [job for job in jobs if any(member.process and member.process.python for member in job.members)]
    return judge_jobs(asked, nodes, jobs)


def judge_jobs(asked: Asked, nodes: Sequence[NodePicture], jobs: Sequence[Job]) -> list[Joined]:
    """Judge jobs; worst first."""
    alone = len(jobs) == 1 and not asked.pids
    judged = [_or_start(join(gather_evidence(asked, nodes, job, alone=alone)), nodes) for job in jobs]
    return sorted(judged, key=lambda joined: WORST_FIRST.index(joined.level))


def _or_start(joined: Joined, nodes: Sequence[NodePicture]) -> Joined:
    """Replace the verdict on ranks in init_process_group if their rendezvous address shows the reason."""
    evidence = joined.evidence
    states = evidence.stacks.states
    starts = start_claims(evidence.asked, nodes, of_ranks=True, states=states) if states else []
    placeless = without_place(evidence.asked, states)
    starts = starts or ([placeless] if placeless is not None else [])
    if not starts or joined.kind in _ITS_OWN:
        return joined
    first = starts[0]
    return replace(
        joined,
        kind=StuckKind.RENDEZVOUS,
        level=Level.FAIL if first.is_sure else Level.WARN,
        claims={**joined.claims, Source.START: first},
        claim=first,
        accused=first.ranks,
        against=(),
        candidates=(),
        starts=tuple(starts),
    )


def launcher_claims(asked: Asked, judged: Sequence[Joined], nodes: Sequence[NodePicture]) -> list[Claim]:
    """Return why launchers have not started any rank; beside a running job, only sure claims."""
    claims = [claim for claim in start_claims(asked, nodes, of_ranks=False) if claim.is_sure or not judged]
    # A launcher without ranks is identified by its rendezvous address only.
    words = [re.split(r"[\s,;()]+", " ".join([claim.says, *claim.evidence])) for claim in claims]
    return [claim for claim, own in zip(claims, words, strict=True) if not asked.job or asked.job in own]


def start_finding(claim: Claim) -> Finding:
    """Return the finding for a job that does not start."""
    return Finding(
        id=Id(f"hang.{claim.kind}"),
        level=Level.FAIL if claim.is_sure else Level.WARN,
        title=claim.says,
        detail=claim.detail,
        where=Where(hosts=claim.hosts, ranks=tuple(sorted(claim.ranks)), pids=claim.pids),
        evidence=claim.evidence,
        fix=claim.fix,
    )


def job_findings(
    asked: Asked, judged: Sequence[Joined], nodes: Sequence[NodePicture], gathered: Gathered[NodePicture]
) -> list[Finding]:
    """Return the findings on all jobs, and on ranks and hosts that could not be read."""
    found: list[Finding] = []
    for joined in judged:
        name = joined.evidence.job.name
        prefix = f"{f'job {name}' if name else 'ranks without MASTER_ADDR'}: " if len(judged) > 1 else ""
        own = map(start_finding, joined.starts) if joined.starts else _of_job(asked, joined, nodes)
        found += [replace(each, title=prefix + each.title) for each in own]
    found += map(start_finding, launcher_claims(asked, judged, nodes))
    if not judged and not found and (nodes or not gathered.refusals):
        found.append(no_job(asked, nodes))
    elif asked.pids:
        found += not_found(nodes, asked.pids)
    found += [
        finding("hang.incomplete", where=Where(hosts=(node.host,)), host=node.host, why=node.missing)
        for node in nodes
        if node.missing
    ]
    return [*found, *_left_stopped(nodes), *host_findings(gathered.refusals, gathered.rows)]


def _of_job(asked: Asked, joined: Joined, nodes: Sequence[NodePicture]) -> list[Finding]:
    verdict = joined.evidence.stacks
    is_decided = joined.level in (Level.FAIL, Level.WARN)
    by_stacks = not is_decided or joined.claim is None or joined.claim.source is Source.STACKS
    is_wanted = by_stacks or asked.command == "pyspy-all"  # pyspy-all also reports missing stacks
    unread = _unreadable(verdict, asked, nodes) if is_wanted else []
    if is_closed(verdict.job):
        unread = [replace(each, title=unread_in_words(verdict.job)) for each in unread[:1]]
    unseen = ranks_not_found(verdict.job, verdict.job.unseen)
    is_clear = verdict.outcome is Outcome.UNREADABLE and joined.kind is StuckKind.UNKNOWN and not joined.against
    if is_clear and unread:
        unread[0] = replace(unread[0], detail=_from_proc(joined))
    found = [] if is_clear and (unread or unseen) else findings_of(joined, source_rows(joined))
    return [*found, *unread, *unseen, *_deduced(verdict)]


def _from_proc(joined: Joined) -> str:
    """Format the /proc waits of ranks with unknown stacks; empty if permission was denied."""
    waits = joined.claims.get(Source.WAITS)
    is_denied = all(state.thread.status == "denied" for state in joined.evidence.stacks.unreadable)
    return f"From /proc: {waits.says}." if waits is not None and not is_denied else ""


def _left_stopped(nodes: Sequence[NodePicture]) -> Iterator[Finding]:
    """Report processes found stopped after sampling, which should never happen."""
    for node in nodes:
        for watched in node.watched:
            if any(sample.left_stopped for sample in watched.samples):
                where = Where(hosts=(node.host,), pids=(watched.pid,))
                yield finding("hang.left-stopped", where=where, host=node.host, pid=watched.pid)


def no_job(asked: Asked, nodes: Sequence[NodePicture]) -> Finding:
    """Report that no rank was found, with the search criteria and the jobs present."""
    hosts = format_hosts(node.host for node in nodes)
    launchers = without_ranks([node.stacks for node in nodes])
    command = f"{asked.program} {asked.command}"
    if asked.pids:
        return _no_process(asked, nodes, hosts)
    if launchers and not asked.job:
        host, launcher = launchers[0]
        return finding(
            "hang.no-rank",
            where=Where(hosts=tuple(dict.fromkeys(host for host, _ in launchers)), pids=(launcher.pid,)),
            launcher=launcher_name(launcher),
            pid=launcher.pid,
            host=host,
            again=asked.again("ports"),
        )
    others = find_jobs([node.stacks for node in nodes], whole=False) if asked.job else []
    if options := job_options(of_interest(others)):
        commands = tuple(asked.again(asked.command, option) for option in options[:_SHOWN])
        repair = Fix(text="name one of these, or the hosts of the job", commands=commands)
        return finding("hang.other-jobs", repair=repair, job=asked.job, hosts=hosts, options=listed(options))
    seen = no_rank_seen(node.processes for node in nodes)
    closed = [user for node in nodes for user in node.processes.closed]
    if closed and not asked.user:
        words = {"processes": counted(len(closed), "Python process", "Python processes"), "hosts": hosts}
        users = listed(sorted(set(closed)))
        return finding("hang.closed", words, repair=remedies.as_other_user(command), users=users, detail=seen)
    of = f"job {asked.job}" if asked.job else f"user {asked.user}" if asked.user else ""
    return finding("hang.no-job", of=of, hosts=hosts, detail=seen, program=command)


def _no_process(asked: Asked, nodes: Sequence[NodePicture], hosts: str) -> Finding:
    """Report pids that belong to no job; with several hosts, each pid is meant for one of them."""
    is_hidden = any(node.processes.asked_unseen for node in nodes)
    is_gone = all(set(asked.pids) <= set(node.processes.asked_missing) for node in nodes)
    row = "process-hidden" if is_hidden else "process-gone" if is_gone else "process-of-no-job"
    return finding(f"hang.{row}", pids=", ".join(map(str, asked.pids)), hosts=hosts)


def _unreadable(verdict: JobVerdict, asked: Asked, nodes: Sequence[NodePicture]) -> list[Finding]:
    by_reason = by_key(((state.thread.status, state.thread.reason), state) for state in verdict.unreadable)
    return [_cannot_read(members, asked, _node_of(members[0], nodes)) for members in by_reason.values()]


def _node_of(state: RankState, nodes: Sequence[NodePicture]) -> NodePicture | None:
    return next((node for node in nodes if node.host == state.member.host), None)


def _cannot_read(members: list[RankState], asked: Asked, node: NodePicture | None) -> Finding:
    status, reason = members[0].thread.status, members[0].thread.reason
    remedy = Fix(text=_REMEDIES[status]) if status in _REMEDIES else None
    return finding(
        "hang.unreadable",
        where=where_of(members),
        evidence=kernel_words(members) or _not_sampled(node),
        repair=_rights(members, asked, node) if status == "denied" else remedy,
        who=who(members),
        reason=reason,
    )


def _not_sampled(node: NodePicture | None) -> tuple[str, ...]:
    ends = node.ended if node is not None else ()
    return tuple(f"stacks: {end.why}" for end in ends if end.source == Source.STACKS and end.why)


def _rights(members: Sequence[RankState], asked: Asked, node: NodePicture | None) -> Fix:
    theirs = {state.member.process.user for state in members if state.member.process is not None}
    return remedies.right_to_read(
        f"{asked.program} {asked.command}", node.processes if node is not None else None, theirs
    )


def _deduced(verdict: JobVerdict) -> list[Finding]:
    deduced = [member for member in verdict.job.members if member.deduced and member.rank is not None]
    return [
        finding(
            "hang.rank-deduced",
            where=Where(hosts=(member.host,), ranks=(member.rank or 0,), pids=(member.pid or 0,)),
            pid=member.pid,
            host=member.host,
            rank=member.rank,
        )
        for member in deduced
    ]


def where_of(members: Iterable[RankState]) -> Where:
    """Return the hosts, ranks and pids of ranks."""
    members = list(members)
    return Where(
        hosts=tuple(dict.fromkeys(state.member.host for state in members if state.member.host)),
        ranks=tuple(sorted({state.member.rank for state in members if state.member.rank is not None})),
        pids=tuple(state.member.pid for state in members if state.member.pid is not None),
    )


def kernel_words(members: Sequence[RankState]) -> tuple[str, ...]:
    """Format the kernel state of the first rank at each place."""
    lines = []
    for group in split(members)[:_PLACES]:
        still = group[0].standstill
        if still is not None:
            facts = [f"state {still.state}", still.syscall, still.wait_channel, still.path]
            lines.append(f"{briefly(group)}: " + ", ".join(fact for fact in facts if fact))
    return tuple(lines)
