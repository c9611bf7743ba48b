"""What could not be read, and who was not seen: findings that are no verdict on anybody. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.commands.pyspy_all.model import COMMAND
from distdiag.commands.pyspy_all.verdict import split
from distdiag.commands.pyspy_all.words import briefly, who
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.pyspy_all.model import Request, Standing
    from distdiag.commands.pyspy_all.verdict import JobVerdict
    from distdiag.jobs.nodes import NodeStacks

_PLACES = 3
_REMEDIES = {
    "not-python": "give the pid of the Python below it: --pid",
    "timeout": "look at it by hand, or give it longer: --timeout 30",
    "failed": "try again; a process that is just starting or ending cannot be read",
}


def unreadable(verdict: JobVerdict, request: Request, nodes: Sequence[NodeStacks]) -> list[Finding]:
    """Name the processes that could not be read, why, and what gives the right to."""
    by_reason: dict[tuple[str, str], list[Standing]] = {}
    for one in verdict.unreadable:
        by_reason.setdefault((one.status, one.reason), []).append(one)
    return [_cannot_read(members, request, _node_of(members[0], nodes)) for members in by_reason.values()]


def _node_of(one: Standing, nodes: Sequence[NodeStacks]) -> NodeStacks | None:
    return next((node for node in nodes if node.host == one.member.host), None)


def _cannot_read(members: list[Standing], request: Request, node: NodeStacks | None) -> Finding:
    status, reason = members[0].status, members[0].reason
    text, commands = _rights(members[0], request, node) if status == "denied" else (_REMEDIES.get(status, ""), ())
    return Finding(
        id=f"{COMMAND}.unreadable",
        level=Level.UNKNOWN,
        title=f"{who(members)} could not be read: {reason}",
        where=where(members),
        evidence=kernel_words(members),
        fix=Fix(text=text, commands=commands) if text else None,
    )


def _rights(one: Standing, request: Request, node: NodeStacks | None) -> tuple[str, tuple[str, ...]]:
    """Say how to get the right to read a process; in order of effort, and only what helps there."""
    scope = node.processes.ptrace_scope if node is not None else None
    as_root = node is not None and node.processes.user == 0
    theirs = one.member.process.user if one.member.process is not None else -1
    sudo = f'sudo env "PATH=$PATH" {request.program} pyspy-all'
    if node is not None and not as_root and theirs != node.processes.user:
        return "run it as that user, or as root", (sudo,)
    if scope in (1, 2) and not as_root:
        text = "run it as root; or let users read their own processes until the next boot"
        return text, (sudo, "echo 0 | sudo tee /proc/sys/kernel/yama/ptrace_scope")
    if scope == 3:
        return "this kernel lets nobody read another process until it is booted again (ptrace_scope 3)", ()
    text = (
        "give the container the right to read its processes: docker run --cap-add SYS_PTRACE; in Kubernetes "
        "securityContext.capabilities.add: [SYS_PTRACE]; or run distdiag on the host"
    )
    return text, ()


def unseen(verdict: JobVerdict) -> list[Finding]:
    """Name the ranks that were on none of the hosts looked at."""
    job = verdict.job
    if not job.unseen:
        return []
    hosts = fold(dict.fromkeys(member.host for member in job.members))
    return [
        Finding(
            id=f"{COMMAND}.exited",
            level=Level.UNKNOWN,
            title=f"{name_ranks(job.unseen)} of {job.world_size} {'was' if len(job.unseen) == 1 else 'were'} not seen "
            f"on {hosts}: gone, or on other hosts",
            where=Where(ranks=job.unseen),
            fix=Fix(text="look at all hosts of the job: --hosts LIST, or --slurm-job ID"),
        )
    ]


def deduced(verdict: JobVerdict) -> list[Finding]:
    """Say of whom only the other ranks tell which rank it is."""
    return [
        Finding(
            id=f"{COMMAND}.rank-deduced",
            level=Level.INFO,
            title=f"pid {one.process.pid} on {one.host} is taken for rank {one.rank}",
            detail="Its environment names no rank. It started the other ranks of its host, has a connection at their "
            "MASTER_PORT, and they leave this rank over: so does Lightning's first rank of a node.",
            where=Where(hosts=(one.host,), ranks=(one.rank,), pids=(one.process.pid,)),
        )
        for one in verdict.job.members
        if one.deduced and one.rank is not None and one.process is not None
    ]


def where(members: Iterable[Standing]) -> Where:
    """Say whom a finding is about."""
    members = list(members)
    return Where(
        hosts=tuple(dict.fromkeys(one.member.host for one in members if one.member.host)),
        ranks=tuple(sorted({one.rank for one in members if one.rank is not None})),
        pids=tuple(one.pid for one in members if one.pid is not None),
    )


def kernel_words(members: Sequence[Standing]) -> tuple[str, ...]:
    """Give what the kernel says of the first of each place; their stacks are in the groups."""
    lines = []
    for group in split(members)[:_PLACES]:
        watched = group[0].member.watched
        still = watched.looks[-1].standstill if watched is not None and watched.looks else ()
        if still:
            facts = [f"state {still[0].state}", still[0].syscall, still[0].wait_channel, still[0].path]
            lines.append(f"{briefly(group)}: " + ", ".join(fact for fact in facts if fact))
    return tuple(lines)
