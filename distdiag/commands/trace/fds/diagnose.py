"""Open descriptors of all nodes -> Report: leaks and limits, and the owners of the other ends. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations
from distdiag.commands.trace.nodes import incomplete, index_of
from distdiag.commands.trace.ranks import Wanted  # noqa: TC001 - msgspec reads the annotations
from distdiag.diagnosis import remedies
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.verdicts import finding, worst_first
from distdiag.diagnosis.wording import counted
from distdiag.facts.process.descriptors import Descriptor
from distdiag.record import record
from distdiag.report import Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.fds.collect import Opened, Reply
    from distdiag.commands.trace.nodes import Answers
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.report import Finding

COMMAND = "trace fds"
_FULL = 0.8
_MUCH_BYTES = 2**30
_MANY_CLOSED = 10
_NAMED = 5
_GIB = 2**30


@record(kw_only=True)
class Request:
    """The options of one run."""

    program: str
    cluster: Cluster
    wanted: Wanted


@record
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


@record(kw_only=True)
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


@record(kw_only=True)
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
    found = [each for row in rows for each in _of_process(row, request, answers, index)]
    found += [*incomplete(answers, request.wanted, chosen), *host_findings(answers.refusals, answers.rows)]
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

    def warning(verdict: str, rows: Sequence[DescriptorRow] = (), **words: object) -> Finding:
        sizes = [f", {each.size_bytes / _GIB:.1f} GiB" if each.deleted and each.size_bytes else "" for each in rows]
        shown = tuple(
            f"fd {each.fd}: {each.target}{size}" for each, size in list(zip(rows, sizes, strict=True))[:_NAMED]
        )
        return finding(verdict, {"name": name, "pid": row.pid, **words}, where=where, evidence=shown)

    if row.unread == "denied":
        user = next((node.processes.user for node in answers.nodes if node.host == row.host), 0)
        as_other = remedies.as_other_user(f"{request.program} trace fds {row.pid}")
        repair = remedies.ptrace_in_container() if user == 0 else as_other
        yield finding("trace-unreadable", where=where, repair=repair, name=name)
    elif row.unread:
        yield finding("trace-process-exited", where=where, name=name)
    if row.limit and len(row.descriptors) > _FULL * row.limit:
        kind, count = next(iter(row.counts.items()))
        used, more = len(row.descriptors), 4 * row.limit
        yield warning("trace-fd-limit", used=used, limit=row.limit, kind=kind, count=count, more=more, host=row.host)
    # A file opened twice holds its space once.
    gone = {(each.target, each.size_bytes): each for each in row.descriptors[::-1] if each.kind == "deleted file"}
    largest = sorted(gone.values(), key=lambda descriptor: (-(descriptor.size_bytes or 0), descriptor.fd))
    held = sum(descriptor.size_bytes or 0 for descriptor in largest)
    if held > _MUCH_BYTES:
        files = counted(len(largest), "deleted file")
        yield warning("trace-deleted-files", largest, held=f"{held / _GIB:.1f}", files=files, fd=largest[0].fd)
    closed = [descriptor for descriptor in row.descriptors if descriptor.is_closed]
    if len(closed) >= _MANY_CLOSED:
        yield warning("trace-close-wait", closed, number=len(closed))
    silent = [descriptor for descriptor in row.descriptors if descriptor.silent]
    if silent:
        yield warning("trace-storage", silent, number=counted(len(silent), "descriptor"))
