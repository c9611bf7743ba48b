"""`distdiag trace fds`: open descriptors and the owners of the other ends; `collect` runs on the nodes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.hosts import fold_ranks
from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.trace.ranks import Wanted, choose, wanted
from distdiag.diagnosis import remedies
from distdiag.errors import UsageError
from distdiag.options import FromOpt, JobOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.trace.fds.collect import Opened, Reply
    from distdiag.commands.trace.nodes import Answers, NodeAnswer
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.diagnosis.process_index import Key, ProcessIndex
    from distdiag.facts.descriptors import Descriptor
    from distdiag.jobs.types import NodeStacks
    from distdiag.runner import Asks, Subcommand

COMMAND = "trace fds"
_SPARE_S, _EACH_S = 15.0, 2.0
"""Seconds for a node, and for each process on it: every file system of it may time out."""
_FULL = 0.8
_MUCH_BYTES = 2**30
_MANY_CLOSED = 10
_NAMED = 5
_GIB = 2**30
_ORDER = (Level.FAIL, Level.UNKNOWN, Level.WARN, Level.INFO)
_NUMBERED = ("pipe", "socket", "anon")
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_FDS = 24
"""Characters of a list of numbers."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of one run."""

    program: str
    cluster: Cluster
    wanted: Wanted


@dataclass(frozen=True, kw_only=True)
class DescriptorRow:
    """One descriptor. `target`: a path, the two ends of a socket, "pipe:[n]"; `who`: the processes at its other end.

    `state` of a socket; `peer_rank`: set if a single rank has the other end; `size_bytes` of a file; `gpu`: the minor
    number of an NVIDIA device. `silent`: its file system did not answer.
    """

    fd: int
    mode: str
    kind: str
    target: str
    who: str
    peer_rank: int | None
    state: str
    size_bytes: int | None
    deleted: bool
    gpu: int | None
    silent: bool


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


@on_hosts
def fds(
    pid: Annotated[
        list[int] | None, typer.Argument(min=1, metavar="[PID]...", help="Processes to read.", show_default=False)
    ] = None,
    more_pids: Annotated[
        list[int] | None, typer.Option("--pid", "-p", min=1, metavar="PID", help="Same as PID; repeatable.")
    ] = None,
    rank: Annotated[
        list[str] | None, typer.Option(metavar="RANKS", help="Only these ranks: 3, or 0-3,7; repeatable.")
    ] = None,
    job: JobOpt = "",
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show what the file descriptors of processes or ranks point to, and which process has the other end.

    Connections lead to ranks, pipes to processes; deleted files are shown with the disk space that they still use.

    Exit status: 0 read, also with warnings, 2 wrong usage, 3 permission denied, or no process found, 130 interrupted.

    \b
    Examples:
      distdiag trace fds 4711
      distdiag trace fds --rank 3 --hosts gpu[01-08]
    """
    from distdiag import runner

    def request() -> Request:
        pids = [*(pid or ()), *(more_pids or ())]
        if not (pids or rank or job or from_):
            raise UsageError("no process selected", hint="distdiag trace fds PID, or --rank 0-3, or --job ID")
        return Request(program=called_as(), cluster=cluster, wanted=wanted(pids, rank, job, ""))

    runner.run(subcommand(), request, runner.Options(as_json, strict, save, from_, cluster.explain))


def _plan(nodes: Sequence[NodeStacks], request: Request) -> Asks:
    """Read the selected processes; of the rest of the job, only sockets, as possible other ends."""
    from distdiag.commands.trace.fds.collect import Ask
    from distdiag.runner import Asks

    chosen: dict[str, list[int]] = {}
    for choice in choose(nodes, request.wanted):
        if choice.process is not None:
            chosen.setdefault(choice.host, []).append(choice.process.pid)
    asks = {}
    for node in nodes if chosen else ():
        pids = chosen.get(node.host, [])
        others = [process.pid for process in node.processes.processes if process.pid not in pids]
        if pids or others:
            asks[node.host] = Ask(pids, others)
    return Asks(by_host=asks, timeout_s=_SPARE_S + _EACH_S * max(map(len, chosen.values()), default=0))


def subcommand() -> Subcommand[Request, NodeAnswer[Reply], TraceFds]:
    """Return the subcommand for the runner."""
    from distdiag.commands.trace.fds.collect import Reply
    from distdiag.commands.trace.nodes import about_processes, chosen_of

    def judge(request: Request, answers: Answers[Reply]) -> Report[TraceFds]:
        return diagnose(request, answers, chosen_of(answers, request.wanted, f"{request.program} trace fds"))

    return about_processes(COMMAND, Request, Reply, _plan, judge, trace_fds_view)


def diagnose(request: Request, answers: Answers[Reply], chosen: Sequence[Chosen]) -> Report[TraceFds]:
    """Report the open descriptors of every selected process, with warnings on leaks and limits."""
    from distdiag.cluster.unreached_hosts import host_findings
    from distdiag.commands.trace.nodes import incomplete, index_of

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
    worst = min(found, key=lambda finding: _ORDER.index(finding.level), default=None)
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
    closed = sum(descriptor.state == "CLOSE_WAIT" for row in rows for descriptor in row.descriptors)
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
    return DescriptorRow(
        fd=descriptor.fd,
        mode=descriptor.mode,
        kind=descriptor.kind,
        target=_target(descriptor),
        who=who,
        peer_rank=ranks.pop() if len(ranks) == 1 else None,
        state=descriptor.socket.state if descriptor.socket is not None else "",
        size_bytes=descriptor.size_bytes,
        deleted=descriptor.deleted,
        gpu=descriptor.gpu,
        silent=descriptor.silent,
    )


def _target(descriptor: Descriptor) -> str:
    """Format a socket as "tcp 10.0.0.1:40000 -> 10.0.0.2:29500"."""
    if descriptor.socket is None or not descriptor.socket.protocol:
        return descriptor.target
    socket = descriptor.socket
    to = f" -> {socket.remote}" if socket.remote and socket.protocol != "unix" else ""
    return f"{socket.protocol} {socket.local or socket.remote}{to}".strip()


def _of_process(row: ProcessRow, request: Request, answers: Answers[Reply], index: ProcessIndex) -> Iterator[Finding]:
    from distdiag.ids import Id

    name = index.name((row.host, row.pid), whole=True)
    where = Where(hosts=(row.host,), ranks=(row.rank,) if row.rank is not None else (), pids=(row.pid,))
    if row.unread:
        yield _unreadable(row, name, where, request, answers)
    if row.limit and len(row.descriptors) > _FULL * row.limit:
        yield _near_limit(row, name, where)
    gone = sorted(
        (descriptor for descriptor in row.descriptors if descriptor.kind == "deleted file"),
        key=lambda descriptor: -(descriptor.size_bytes or 0),
    )
    gone = list({(descriptor.target, descriptor.size_bytes): descriptor for descriptor in gone[::-1]}.values())[
        ::-1
    ]  # one file, opened twice
    held = sum(descriptor.size_bytes or 0 for descriptor in gone)
    if held > _MUCH_BYTES:
        yield Finding(
            id=Id.TRACE_DELETED_FILES,
            level=Level.WARN,
            title=f"{name} holds {held / _GIB:.1f} GiB of disk in {len(gone)} deleted file{'s' * (len(gone) > 1)}: "
            "`du` does not count it, and it is freed only when they are closed",
            where=where,
            evidence=tuple(
                f"fd {descriptor.fd}: {descriptor.target}, {(descriptor.size_bytes or 0) / _GIB:.1f} GiB"
                for descriptor in gone[:_NAMED]
            ),
            fix=Fix(text="end the process; or, if the file is a log, truncate it", commands=(_cut(row, gone[0]),)),
        )
    yield from _of_sockets(row, name, where)
    silent = [descriptor for descriptor in row.descriptors if descriptor.silent]
    if silent:
        yield Finding(
            id=Id.TRACE_STORAGE,
            level=Level.WARN,
            title=f"{name} has {len(silent)} descriptors on a file system that does not answer",
            where=where,
            evidence=tuple(f"fd {descriptor.fd}: {descriptor.target}" for descriptor in silent[:_NAMED]),
        )


def _of_sockets(row: ProcessRow, name: str, where: Where) -> Iterator[Finding]:
    from distdiag.ids import Id

    closed = [descriptor for descriptor in row.descriptors if descriptor.state == "CLOSE_WAIT"]
    if len(closed) >= _MANY_CLOSED:
        yield Finding(
            id=Id.TRACE_CLOSE_WAIT,
            level=Level.WARN,
            title=f"{name} has {len(closed)} connections in CLOSE_WAIT: the peer has closed them, this process has not",
            detail="The process ignores the end of these connections or never closes them; each uses a descriptor.",
            where=where,
            evidence=tuple(f"fd {descriptor.fd}: {descriptor.target}" for descriptor in closed[:_NAMED]),
        )


def _near_limit(row: ProcessRow, name: str, where: Where) -> Finding:
    from distdiag.ids import Id

    assert row.limit is not None
    kind, count = next(iter(row.counts.items()))
    return Finding(
        id=Id.TRACE_FD_LIMIT,
        level=Level.WARN,
        title=f"{name} uses {len(row.descriptors)} of {row.limit} descriptors (ulimit -n); {count} are of kind {kind}",
        detail="At the limit, every open and every connect fails: EMFILE, 'Too many open files'.",
        where=where,
        fix=Fix(
            text=f"on {row.host}, raise its limit while it runs; for the next start: ulimit -n {4 * row.limit}",
            commands=(f"prlimit --pid {row.pid} --nofile={4 * row.limit}",),
        ),
    )


def _cut(row: ProcessRow, file: DescriptorRow) -> str:
    return f"truncate -s 0 /proc/{row.pid}/fd/{file.fd}"


def _unreadable(row: ProcessRow, name: str, where: Where, request: Request, answers: Answers[Reply]) -> Finding:
    from distdiag.ids import Id

    if row.unread != "denied":
        return Finding(id=Id.TRACE_EXITED, level=Level.UNKNOWN, title=f"{name} has exited", where=where)
    user = next((node.processes.user for node in answers.nodes if node.host == row.host), 0)
    command = f"{request.program} trace fds {row.pid}"
    fix = remedies.ptrace_in_container() if user == 0 else remedies.as_other_user(command)
    title = f"descriptors of {name} cannot be read: permission denied"
    return Finding(id=Id.TRACE_UNREADABLE, level=Level.UNKNOWN, title=title, where=where, fix=fix)


def trace_fds_view(data: TraceFds) -> Iterator[RenderableType]:
    """Render a table for each process: the number of each kind, then each descriptor, equal rows folded."""
    from distdiag.output import Wrapped

    several = len({row.job for row in data.processes}) > 1
    for number, row in enumerate(data.processes):
        if number:
            yield ""
        of = f"job {row.job}, " if several and row.job else ""
        yield Wrapped(f"{of}{_title(row)}", margin=0)
        if not row.descriptors:
            continue
        yield Wrapped(", ".join(_counted(count, kind) for kind, count in row.counts.items()), margin=2)
        yield _table(row)


def _counted(count: int, kind: str) -> str:
    plural = "s" if count > 1 and kind not in ("anon", "shm") else ""
    return f"{count} {kind}{plural}"


def _title(row: ProcessRow) -> str:
    who = f"{'helper of ' if row.role == 'helper' else ''}rank {row.rank}, " if row.rank is not None else ""
    limit = f" of {row.limit}" if row.limit else ""
    count = f"{len(row.descriptors)}{limit} descriptors" if not row.unread else "not read"
    return f"{who}pid {row.pid} on {row.host} ({row.command}): {count}"


def _table(row: ProcessRow) -> RenderableType:
    from rich.table import Column

    from distdiag.output import plain_table

    table = plain_table(
        Column("fd", justify="right", overflow="fold"),
        Column("mode", no_wrap=True),
        Column("kind", no_wrap=True),
        Column("target", overflow="fold"),
        Column("other end", overflow="fold"),
    )
    for group in _folded(row.descriptors):
        first = group[0]
        times = f"{len(group)} x " if len(group) > 1 else ""
        table.add_row(_fds(group), first.mode or "-", first.kind, times + _shown_target(group), first.who or "-")
    return table


def _folded(rows: Sequence[DescriptorRow]) -> list[list[DescriptorRow]]:
    """Group equal descriptors: all own pipes, all eventfds, all connections to the same process."""
    groups: dict[tuple[object, ...], list[DescriptorRow]] = {}
    for row in rows:
        # Addresses add nothing once the other end is known, or for many connections closed by the peer.
        is_closed = row.state == "CLOSE_WAIT"
        target = row.target.partition(" ")[0] if row.kind == "socket" and (row.who or is_closed) else _plain(row)
        # Both ends of a connection of a process with itself are shown.
        ends = row.fd if row.kind == "socket" and row.who == "itself" else None
        groups.setdefault((row.kind, row.mode, target, row.who, row.state, row.deleted, ends), []).append(row)
    return list(groups.values())


def _plain(row: DescriptorRow) -> str:
    if row.kind == "shm":  # each tensor that workers share has one
        return re.sub(r"\d[\d_]*", "*", row.target)
    return re.sub(r":\[\d+\]$", "", row.target) if row.kind in _NUMBERED else row.target


def _shown_target(group: Sequence[DescriptorRow]) -> str:
    row, count = group[0], len(group)
    target = _plain(row) if count > 1 or row.kind == "pipe" else row.target
    facts = [row.state] if row.state else []
    sizes = {descriptor.target: descriptor.size_bytes for descriptor in group if descriptor.size_bytes is not None}
    facts += [_size(sum(sizes.values())) + (" in total" if len(sizes) > 1 else "")] if sizes else []
    facts += ["deleted"] if row.deleted else []
    facts += ["its file system does not answer"] if row.silent else []
    more = ", ..." if count > 1 and row.kind == "socket" and (row.who or row.state == "CLOSE_WAIT") else ""
    return f"{target}{more}" + (f" ({', '.join(facts)})" if facts else "")


def _fds(group: Sequence[DescriptorRow]) -> str:
    text = fold_ranks(row.fd for row in group)
    return text if len(text) <= _FDS else text[: text.rfind(",", 0, _FDS - 4)] + ",..."


def _size(size: int) -> str:
    unit = next(((factor, name) for factor, name in _UNITS if size >= factor), None)
    return f"{size / unit[0]:.1f} {unit[1]}" if unit else f"{size} B"
