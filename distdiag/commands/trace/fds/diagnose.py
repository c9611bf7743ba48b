"""Open descriptors of all nodes -> Report: leaks and limits, and the owners of the other ends. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations
from distdiag.commands.trace.nodes import incomplete, index_of
from distdiag.commands.trace.ranks import Wanted  # noqa: TC001 - msgspec reads the annotations
from distdiag.diagnosis import remedies
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.verdicts import worst_first
from distdiag.diagnosis.wording import counted
from distdiag.facts.process.descriptors import Descriptor
from distdiag.ids import Id
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.fds.collect import Opened, Reply
    from distdiag.commands.trace.nodes import Answers
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.diagnosis.process_index import Key, ProcessIndex

COMMAND = "trace fds"
_FULL = 0.8
_MUCH_BYTES = 2**30
_MANY_CLOSED = 10
_NAMED = 5
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of one run."""

    program: str
    cluster: Cluster
    wanted: Wanted


@dataclass(frozen=True)
class DescriptorRow(Descriptor):
    """One descriptor. `target`: of a socket, both ends; `who`: the processes at its other end.

    `peer_rank`: set if a single rank has the other end.
    """

    who: str = ""
    peer_rank: int | None = None

    @property
    def is_closed(self) -> bool:
        """Whether it is a connection that the peer has closed and this process has not."""
        return self.socket is not None and self.socket.state == "CLOSE_WAIT"


@dataclass(frozen=True, kw_only=True)
class ProcessRow:
    """One process and its descriptors. `limit`: RLIMIT_NOFILE; `counts` by kind, the largest first.

    `unread`: the reason for a missing list: "denied", "gone".
    """

    host: str
    rank: int | None
    job: str
    role: str
    pid: int
    command: str
    limit: int | None
    counts: dict[str, int]
    unread: str
    descriptors: tuple[DescriptorRow, ...]


@dataclass(frozen=True, kw_only=True)
class TraceFds:
    """The result."""

    processes: tuple[ProcessRow, ...]


def diagnose(request: Request, answers: Answers[Reply], chosen: Sequence[Chosen]) -> Report[TraceFds]:
    """Report the open descriptors of every selected process, with warnings on leaks and limits."""
    replies = [(host, reply) for host, some in answers.replies.items() for reply in some]
    index = index_of(answers)
    opened = {(host, process.pid): process for host, reply in replies for process in reply.processes}
    jobs = {
        (choice.host, choice.process.pid): choice.job.name if choice.job is not None else ""
        for choice in chosen
        if choice.process is not None
    }
    rows = [_row(opened[key], key, index, job) for key, job in jobs.items() if key in opened]
    found = [finding for row in rows for finding in _of_process(row, request, answers, index)]
    found += [*incomplete(answers), *host_findings(answers.refusals, answers.rows)]
    worst = next(iter(worst_first(found)), None)
    return Report(
        command=COMMAND,
        data=TraceFds(processes=tuple(rows)),
        findings=tuple(found),
        summary=worst.title if worst is not None else _summary(rows),
        interrupted=answers.interrupted,
    )


def _summary(rows: Sequence[ProcessRow]) -> str:
    total = sum(len(row.descriptors) for row in rows)
    whose = f"{len(rows)} processes have" if len(rows) > 1 else f"pid {rows[0].pid} has" if rows else "no process has"
    closed = sum(descriptor.is_closed for row in rows for descriptor in row.descriptors)
    more = f", {closed} of them connections that the peer has closed (CLOSE_WAIT)" if closed else ""
    return f"{whose} {total} descriptors open{more}; no problem found in them"


def _row(opened: Opened, key: Key, index: ProcessIndex, job: str) -> ProcessRow:
    host, pid = key
    place, process, person = index.places.get(key), index.processes.get(key), index.peer_processes.get(key)
    counts = Counter(descriptor.kind for descriptor in opened.descriptors)
    return ProcessRow(
        host=host,
        rank=place.rank if place is not None else None,
        job=job,
        role=index.role(key),
        pid=pid,
        command=process.command if process is not None and process.command else person.command if person else "",
        limit=opened.limit,
        counts=dict(counts.most_common()),
        unread=opened.unread,
        descriptors=tuple(_descriptor(descriptor, key, index) for descriptor in opened.descriptors),
    )


def _descriptor(descriptor: Descriptor, key: Key, index: ProcessIndex) -> DescriptorRow:
    others = index.others(*key, descriptor)
    ranks = {index.rank(other) for other in others}
    who = index.names(others, seen_from=key[0]) or ("itself" if index.is_own(*key, descriptor) else "")
    if index.is_store(key, descriptor):
        who = f"{who}: the job's store" if who else "the job's store"
    peer_rank = ranks.pop() if len(ranks) == 1 else None
    return DescriptorRow(**{**vars(descriptor), "target": _target(descriptor)}, who=who, peer_rank=peer_rank)


def _target(descriptor: Descriptor) -> str:
    """Format a socket as "tcp 10.0.0.1:40000 -> 10.0.0.2:29500"."""
    if descriptor.socket is None or not descriptor.socket.protocol:
        return descriptor.target
    socket = descriptor.socket
    to = f" -> {socket.remote}" if socket.remote and socket.protocol != "unix" else ""
    return f"{socket.protocol} {socket.local or socket.remote}{to}".strip()


def _of_process(row: ProcessRow, request: Request, answers: Answers[Reply], index: ProcessIndex) -> Iterator[Finding]:
    name = index.name((row.host, row.pid), whole=True)
    where = Where(hosts=(row.host,), ranks=(row.rank,) if row.rank is not None else (), pids=(row.pid,))

    def warning(id_: Id, has: str, rows: Sequence[DescriptorRow], detail: str = "", fix: Fix | None = None) -> Finding:
        sizes = [f", {each.size_bytes / _GIB:.1f} GiB" if each.deleted and each.size_bytes else "" for each in rows]
        shown = tuple(
            f"fd {each.fd}: {each.target}{size}" for each, size in list(zip(rows, sizes, strict=True))[:_NAMED]
        )
        level, title = Level.WARN, f"{name} {has}"
        return Finding(id=id_, level=level, title=title, detail=detail, where=where, evidence=shown, fix=fix)

    if row.unread:
        yield _unreadable(row, name, where, request, answers)
    if row.limit and len(row.descriptors) > _FULL * row.limit:
        kind, count = next(iter(row.counts.items()))
        title = f"uses {len(row.descriptors)} of {row.limit} descriptors (ulimit -n); {count} are of kind {kind}"
        detail = "At the limit, every open and every connect fails: EMFILE, 'Too many open files'."
        text = f"on {row.host}, raise its limit while it runs; for the next start: ulimit -n {4 * row.limit}"
        fix = Fix(text=text, commands=(f"prlimit --pid {row.pid} --nofile={4 * row.limit}",))
        yield warning(Id.TRACE_FD_LIMIT, title, (), detail, fix)
    # A file opened twice holds its space once.
    gone = {(each.target, each.size_bytes): each for each in row.descriptors[::-1] if each.kind == "deleted file"}
    largest = sorted(gone.values(), key=lambda descriptor: (-(descriptor.size_bytes or 0), descriptor.fd))
    held = sum(descriptor.size_bytes or 0 for descriptor in largest)
    if held > _MUCH_BYTES:
        title = f"holds {held / _GIB:.1f} GiB of disk in {counted(len(largest), 'deleted file')}"
        detail = "`du` does not count it, and it is freed only when they are closed."
        cut = f"truncate -s 0 /proc/{row.pid}/fd/{largest[0].fd}"
        fix = Fix(text="end the process; or, if the file is a log, truncate it", commands=(cut,))
        yield warning(Id.TRACE_DELETED_FILES, title, largest, detail, fix)
    closed = [descriptor for descriptor in row.descriptors if descriptor.is_closed]
    if len(closed) >= _MANY_CLOSED:
        title = f"has {len(closed)} connections in CLOSE_WAIT: the peer has closed them, this process has not"
        detail = "The process ignores the end of these connections or never closes them; each uses a descriptor."
        yield warning(Id.TRACE_CLOSE_WAIT, title, closed, detail)
    silent = [descriptor for descriptor in row.descriptors if descriptor.silent]
    if silent:
        title = f"has {counted(len(silent), 'descriptor')} on a file system that does not answer"
        yield warning(Id.TRACE_STORAGE, title, silent)


def _unreadable(row: ProcessRow, name: str, where: Where, request: Request, answers: Answers[Reply]) -> Finding:
    if row.unread != "denied":
        return Finding(id=Id.TRACE_EXITED, level=Level.UNKNOWN, title=f"{name} has exited", where=where)
    user = next((node.processes.user for node in answers.nodes if node.host == row.host), 0)
    command = f"{request.program} trace fds {row.pid}"
    fix = remedies.ptrace_in_container() if user == 0 else remedies.as_other_user(command)
    title = f"descriptors of {name} cannot be read: permission denied"
    return Finding(id=Id.TRACE_UNREADABLE, level=Level.UNKNOWN, title=title, where=where, fix=fix)
