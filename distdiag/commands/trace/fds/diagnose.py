"""Facts of all nodes -> the report of trace fds. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from distdiag.cluster.reached import host_findings
from distdiag.commands.trace.fds.model import COMMAND
from distdiag.commands.trace.fds.result import DescriptorRow, ProcessRow, TraceFds
from distdiag.commands.trace.who import People
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.fds.collect import Opened, Told
    from distdiag.commands.trace.fds.model import Request
    from distdiag.commands.trace.nodes import Answers
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.who import Key
    from distdiag.node.descriptors import Descriptor

_FULL = 0.8
_MUCH_BYTES = 2**30
_MANY_CLOSED = 10
_NAMED = 5
_GIB = 2**30
_ORDER = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO)


def diagnose(request: Request, answers: Answers[Told], chosen: Sequence[Chosen]) -> Report[TraceFds]:
    """Tell what every chosen process has open, and what of it may become a trouble."""
    ends = {
        host: ([one for part in told for one in part.networks], [one for part in told for one in part.people])
        for host, told in answers.told.items()
    }
    people = People(answers.nodes, ends)
    opened = {(host, one.pid): one for host, told in answers.told.items() for part in told for one in part.processes}
    keys = [(one.host, one.process.pid) for one in chosen if one.process is not None]
    rows = [_row(opened[key], key, people) for key in keys if key in opened]
    found = [finding for row in rows for finding in _of_process(row, request, answers, people)]
    for host, why in answers.missing.items():
        title = f"what {host} told is not complete: {why}"
        found.append(Finding(id="trace.incomplete", level=Level.UNKNOWN, title=title, where=Where(hosts=(host,))))
    found += host_findings(answers.refusals, answers.rows)
    worst = min(found, key=lambda one: _ORDER.index(one.level), default=None)
    return Report(
        command=COMMAND,
        data=TraceFds(processes=tuple(rows)),
        findings=tuple(found),
        summary=worst.title if worst is not None else _summary(rows),
        interrupted=answers.interrupted,
    )


def _summary(rows: Sequence[ProcessRow]) -> str:
    total = sum(len(row.descriptors) for row in rows)
    whose = f"{len(rows)} processes have" if len(rows) > 1 else f"pid {rows[0].pid} has" if rows else "nobody has"
    return f"{whose} {total} descriptors open; none of them stands out"


def _row(one: Opened, key: Key, people: People) -> ProcessRow:
    host, pid = key
    place, process, person = people.places.get(key), people.processes.get(key), people.persons.get(key)
    counts = Counter(descriptor.kind for descriptor in one.descriptors)
    return ProcessRow(
        host=host,
        rank=place.rank if place is not None else None,
        role=people.role(key),
        pid=pid,
        command=process.command if process is not None and process.command else person.command if person else "",
        limit=one.limit,
        counts=dict(counts.most_common()),
        unread=one.unread,
        descriptors=tuple(_descriptor(descriptor, key, people) for descriptor in one.descriptors),
    )


def _descriptor(one: Descriptor, key: Key, people: People) -> DescriptorRow:
    others = people.others(*key, one)
    ranks = {people.rank(other) for other in others}
    who = people.names(others, seen_from=key[0]) or ("itself" if people.is_own(*key, one) else "")
    if people.is_store(key, one):
        who = f"{who}: the job's store" if who else "the job's store"
    return DescriptorRow(
        fd=one.fd,
        mode=one.mode,
        kind=one.kind,
        target=_target(one),
        who=who,
        peer_rank=ranks.pop() if len(ranks) == 1 else None,
        state=one.socket.state if one.socket is not None else "",
        size_bytes=one.size_bytes,
        deleted=one.deleted,
        gpu=one.gpu,
        silent=one.silent,
    )


def _target(one: Descriptor) -> str:
    """Write what it points to; a socket by its addresses, "tcp 10.0.0.1:40000 -> 10.0.0.2:29500"."""
    if one.socket is None or not one.socket.protocol:
        return one.target
    socket = one.socket
    to = f" -> {socket.remote}" if socket.remote and socket.protocol != "unix" else ""
    return f"{socket.protocol} {socket.local or socket.remote}{to}".strip()


def _of_process(row: ProcessRow, request: Request, answers: Answers[Told], people: People) -> Iterator[Finding]:
    name = people.name((row.host, row.pid), whole=True)
    where = Where(hosts=(row.host,), ranks=(row.rank,) if row.rank is not None else (), pids=(row.pid,))
    if row.unread:
        yield _unreadable(row, name, where, request, answers)
    if row.limit and len(row.descriptors) > _FULL * row.limit:
        yield _near_limit(row, name, where)
    gone = sorted(
        (one for one in row.descriptors if one.kind == "deleted file"), key=lambda one: -(one.size_bytes or 0)
    )
    gone = list({(one.target, one.size_bytes): one for one in gone[::-1]}.values())[::-1]  # one file, opened twice
    held = sum(one.size_bytes or 0 for one in gone)
    if held > _MUCH_BYTES:
        yield Finding(
            id="trace.deleted-files",
            level=Level.WARN,
            title=f"{name} holds {held / _GIB:.1f} GiB of disk in {len(gone)} deleted file{'s' * (len(gone) > 1)}: "
            "`du` does not see it, and it is free only when they are closed",
            where=where,
            evidence=tuple(
                f"fd {one.fd}: {one.target}, {(one.size_bytes or 0) / _GIB:.1f} GiB" for one in gone[:_NAMED]
            ),
            fix=Fix(text="end the process; or cut the file short where it is a log", commands=(_cut(row, gone[0]),)),
        )
    yield from _of_sockets(row, name, where)
    silent = [one for one in row.descriptors if one.silent]
    if silent:
        yield Finding(
            id="trace.storage",
            level=Level.WARN,
            title=f"{name} has {len(silent)} descriptors on a file system that does not answer",
            where=where,
            evidence=tuple(f"fd {one.fd}: {one.target}" for one in silent[:_NAMED]),
        )


def _of_sockets(row: ProcessRow, name: str, where: Where) -> Iterator[Finding]:
    closed = [one for one in row.descriptors if one.state == "CLOSE_WAIT"]
    if len(closed) >= _MANY_CLOSED:
        yield Finding(
            id="trace.close-wait",
            level=Level.WARN,
            title=f"{name} has {len(closed)} connections that the other side has closed and it has not (CLOSE_WAIT)",
            detail="It does not notice their end, or forgets to close them; each keeps a descriptor.",
            where=where,
            evidence=tuple(f"fd {one.fd}: {one.target}" for one in closed[:_NAMED]),
        )


def _near_limit(row: ProcessRow, name: str, where: Where) -> Finding:
    assert row.limit is not None
    kind, count = next(iter(row.counts.items()))
    return Finding(
        id="trace.fd-limit",
        level=Level.WARN,
        title=f"{name} has {len(row.descriptors)} of {row.limit} descriptors that it may have; {count} are of the kind "
        f"{kind}",
        detail="At the limit every open and every connection fails: EMFILE, 'Too many open files'.",
        where=where,
        fix=Fix(
            text=f"on {row.host}, give the running process more; for the next start: ulimit -n {4 * row.limit}",
            commands=(f"prlimit --pid {row.pid} --nofile={4 * row.limit}",),
        ),
    )


def _cut(row: ProcessRow, one: DescriptorRow) -> str:
    return f"truncate -s 0 /proc/{row.pid}/fd/{one.fd}"


def _unreadable(row: ProcessRow, name: str, where: Where, request: Request, answers: Answers[Told]) -> Finding:
    if row.unread != "denied":
        return Finding(id="trace.gone", level=Level.UNKNOWN, title=f"{name} has ended", where=where)
    user = next((node.processes.user for node in answers.nodes if node.host == row.host), 0)
    sudo = f'sudo env "PATH=$PATH" {request.program} trace fds {row.pid}'
    fix = Fix(text="run it as that user, or as root", commands=(sudo,))
    if user == 0:
        fix = Fix(text="give the container the right to read its processes: docker run --cap-add SYS_PTRACE")
    title = f"what {name} has open may not be read"
    return Finding(id="trace.unreadable", level=Level.UNKNOWN, title=title, where=where, fix=fix)
