"""Why a job does not start: what its launchers, or its ranks in init_process_group, wait for. Pure.

torchrun says nothing until it gives up, 1 to 10 minutes later, and then names a timeout. Each node's own view of the
meeting place is compared with the others': a name, a port, a firewall, a missing node.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distdiag.agent import port_scan
from distdiag.diagnosis.stuck.types import StuckKind
from distdiag.diagnosis.wait_reasons import lasting
from distdiag.diagnosis.wording import format_hosts, listed
from distdiag.facts.network import is_loopback
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.diagnosis.stuck.types import Asked
    from distdiag.jobs.starts import Meeting, Start
    from distdiag.jobs.types import NodePicture

_ID = f"hang.{StuckKind.RENDEZVOUS}"
_LATE_S = 300.0
"""A node or rank that others have waited for this long is not just slow to start."""
_BEGINS_S = 30.0
"""A launcher may import torch for so long before it listens or connects."""
_REFUSED = (port_scan.FILTERED, port_scan.REJECTED, port_scan.NO_ROUTE, port_scan.DENIED)
_STATES = {
    port_scan.FILTERED: "gets no answer from",
    port_scan.REJECTED: "is rejected on its path to",
    port_scan.NO_ROUTE: "has no route to",
    port_scan.DENIED: "may not connect to",
}
_SEEN = {
    port_scan.CLOSED: "nothing listens there",
    port_scan.FILTERED: "no answer",
    port_scan.NO_ROUTE: "no route",
}
_SHOWN = 8


@dataclass(frozen=True)
class _Row:
    """A waiting process and its host."""

    host: str
    start: Start
    own: frozenset[str]
    """All addresses of the host."""
    family: frozenset[int]
    """The process, those above it and below."""

    @property
    def place(self) -> str:
        """Its meeting place."""
        launch = self.start.launch
        host = f"[{launch.host}]" if ":" in launch.host else launch.host
        return f"{host}:{launch.port}"

    @property
    def meeting(self) -> Meeting | None:
        """What its node sees there."""
        return self.start.meeting

    @property
    def name(self) -> str:
        """Name it: "rank 3 on node2", "node2"."""
        return f"rank {self.start.rank} on {self.host}" if self.start.launch.program == "environment" else self.host

    def is_server(self) -> bool:
        """Return whether its own store listens at the meeting place: its own, or that of the torchrun above it."""
        met = self.meeting
        return met is not None and met.is_here and met.server in self.family


def start_findings(asked: Asked, nodes: Sequence[NodePicture], *, of_ranks: bool) -> list[Finding]:
    """Return what keeps jobs from starting, the surest first; empty if their processes show no reason.

    `of_ranks`: judge ranks in init_process_group, else launchers that have not started any rank.
    """
    groups: dict[tuple[str, str, int | None], list[_Row]] = {}
    for node in nodes:
        for read in node.starts:
            own = frozenset(text.partition("/")[0] for texts in read.addresses.values() for text in texts)
            for start in read.starts:
                if (start.launch.program == "environment") is of_ranks:
                    key = (start.launch.program, start.launch.script, start.world_size)
                    groups.setdefault(key, []).append(_Row(node.host, start, own, _family(node, start.pid)))
    jobs = [job for rows in groups.values() for job in _jobs(rows)]
    return [finding for rows in jobs for finding in _Group(asked, nodes, rows).findings()]


def _family(node: NodePicture, pid: int) -> frozenset[int]:
    processes = node.processes.processes
    above = {above for process in processes if process.pid == pid for above in process.above}
    return frozenset({pid, *above, *(process.pid for process in processes if pid in process.above)})


def _jobs(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Separate jobs of one script whose stores are at different places.

    Where each node has its own store, and together they are as many as one of them waits for, they are one job.
    """
    by_place: dict[tuple[object, ...], list[_Row]] = {}
    for row in rows:
        by_place.setdefault(_resolved(row), []).append(row)
    served = [place for place, own in by_place.items() if any(row.is_server() for row in own)]
    each_its_own = len(by_place) == len({row.host for row in rows}) == rows[0].start.launch.nodes[0]
    return list(by_place.values()) if len(served) > 1 and not each_its_own else [list(rows)]


class _Group:
    """The processes of one job that wait to start."""

    def __init__(self, asked: Asked, nodes: Sequence[NodePicture], rows: Sequence[_Row]) -> None:
        self._asked, self._nodes, self._rows = asked, nodes, rows
        self._first = rows[0].start
        self._several = (
            max(row.start.launch.nodes[0] for row in rows) > 1 or self._first.launch.program == "environment"
        )
        self._served = [row for row in rows if _is_served(row, rows)]

    def findings(self) -> list[Finding]:
        """Return the findings of the first rule that has any."""
        rules = (
            self._unresolved,
            self._itself,
            self._stranger,
            self._other_place,
            self._other_options,
            self._unreachable,
            self._wrong_interface,
            self._nobody_listens,
            self._waits_for_more,
        )
        return next((found for rule in rules if (found := list(rule()))), [])

    def _made(
        self, rows: Iterable[_Row], level: Level, title: str, detail: str, fix: Fix | None, *, accuses: bool = True
    ) -> Finding:
        rows = list(rows)
        hosts = tuple(dict.fromkeys(row.host for row in rows)) if accuses else ()
        ranks = tuple(sorted(row.start.rank for row in rows if row.start.rank is not None)) if accuses else ()
        return Finding(
            id=_ID,
            level=level,
            title=title,
            detail=" ".join(filter(None, (detail, self._ends()))),
            where=Where(hosts=hosts, ranks=ranks, pids=tuple(row.start.pid for row in rows)),
            evidence=tuple(_evidence(row) for row in self._rows)[:_SHOWN],
            fix=fix,
        )

    def _ends(self) -> str:
        """Describe for how long it has waited, and when it gives up."""
        waited_s = max(row.start.waited_s for row in self._rows)
        left = [limit_s - row.start.waited_s for row in self._rows if (limit_s := _limit_s(row)) is not None]
        ends = f"; it gives up in {lasting(min(left))}" if left and min(left) > 0 else ""
        return f"The job has waited for {lasting(waited_s)}{ends}."

    def _right_place(self) -> str:
        """Return the meeting place that a process of this job serves; empty if none does."""
        if not self._served:
            return ""
        first = self._served[0]
        port = first.start.launch.port
        if first.meeting is None or not _is_loopback(first.meeting):
            return first.place
        return f"{min(first.own - _LOOPBACK, default=first.host)}:{port}"

    def _start_with(self, rows: Sequence[_Row]) -> Fix | None:
        place = self._right_place()
        if not place:
            return None
        options = _options_for(rows[0].start, place)
        return Fix(text=f"start it on {format_hosts(row.host for row in rows)} with {options}")

    def _unresolved(self) -> Iterable[Finding]:
        bad = [row for row in self._rows if row.meeting is not None and row.meeting.error]
        by_name: dict[str, list[_Row]] = {}
        for row in bad:
            by_name.setdefault(row.start.launch.host, []).append(row)
        for name, rows in by_name.items():
            hosts = format_hosts(row.host for row in rows)
            reason = rows[0].meeting.error if rows[0].meeting is not None else ""
            fix = self._start_with(rows) or Fix(
                text=f"use a name that {hosts} resolves, or the address", commands=(f"getent hosts {name}",)
            )
            title = f"{hosts} cannot resolve {name}, where the job meets: {reason}"
            yield self._made(rows, Level.FAIL, title, "", fix)

    def _itself(self) -> Iterable[Finding]:
        """A node that meets at its own loopback, while the store is elsewhere."""
        if not self._several or not self._first.launch.host:
            return
        rows = [row for row in self._rows if row.meeting is not None and _is_loopback(row.meeting)]
        # The store of the first node listens at all of its addresses, so that it alone may call itself localhost.
        others = [row for row in rows if 0 not in (row.start.launch.node_rank, row.start.rank)]
        alone = len({row.host for row in self._rows}) == 1
        wrong = [row for row in others if row.start.launch.node_rank] if alone else others
        if wrong:
            place = wrong[0].place
            title = f"{format_hosts(row.host for row in wrong)} meets at {place}, itself: {_is_own(wrong[0])}"
            text = "start all nodes with the address of one of them"
            yield self._made(wrong, Level.FAIL, title, "", self._start_with(wrong) or Fix(text=text))

    def _stranger(self) -> Iterable[Finding]:
        """Another program has the port."""
        for row in self._rows:
            met = row.meeting
            if met is None or not met.is_here or met.server is None:
                continue
            if any(met.server in other.family for other in self._rows if other.host == row.host):
                continue
            title = f"port {met.port} on {row.host} is in use by another program: {met.command} (pid {met.server})"
            text = f"end that process, or give this job another port: {_options_for(row.start, f'{met.host}:PORT')}"
            yield self._made([row], Level.FAIL, title, "", Fix(text=text, commands=(f"ps -fp {met.server}",)))
            return

    def _other_place(self) -> Iterable[Finding]:
        """Processes of one job that meet at different places."""
        places = Counter(row.place for row in self._rows)
        if len({_resolved(row) for row in self._rows}) < 2:
            return
        right = {row.place for row in self._served}
        wrong = [row for row in self._rows if row.place not in right]
        if right and wrong and len({_resolved(row) for row in self._served}) == 1:
            there = format_hosts(row.host for row in self._rows if row.place in right)
            names = listed([row.name for row in wrong])
            wait = "waits" if len(wrong) == 1 else "wait"
            title = f"{names} {wait} at {wrong[0].place}, {there} at {self._right_place()}"
            yield self._made(wrong, Level.FAIL, title, "", self._start_with(wrong))
            return
        parts = [f"{format_hosts(row.host for row in self._rows if row.place == place)} at {place}" for place in places]
        text = "start all of them with the same rendezvous"
        yield self._made(
            self._rows, Level.FAIL, f"the job meets in different places: {listed(parts)}", "", Fix(text=text)
        )

    def _other_options(self) -> Iterable[Finding]:
        """Launchers whose options do not fit together."""
        launches = [(row, row.start.launch) for row in self._rows]
        if self._first.launch.program == "environment":
            return
        for what, of in (("--nnodes", "nodes"), ("--rdzv-backend", "backend"), ("--rdzv-id", "run_id")):
            values = {row.host: _text(getattr(launch, of)) for row, launch in launches}
            if len(set(values.values())) > 1:
                parts = [
                    f"{value or 'none'} on {format_hosts(host for host, own in values.items() if own == value)}"
                    for value in dict.fromkeys(values.values())
                ]
                title = f"the nodes were started with different {what}: {listed(parts)}"
                yield self._made(self._rows, Level.FAIL, title, "", Fix(text=f"start all with the same {what}"))
                return
        ranks = Counter(launch.node_rank for _, launch in launches if launch.node_rank is not None)
        for rank, count in ranks.items():
            if count > 1:
                rows = [row for row, launch in launches if launch.node_rank == rank]
                title = f"{format_hosts(row.host for row in rows)} were both started with --node-rank {rank}"
                text = f"give each node its own: 0 to {self._first.launch.nodes[0] - 1}"
                yield self._made(rows, Level.FAIL, title, "", Fix(text=text))

    def _unreachable(self) -> Iterable[Finding]:
        rows = [row for row in self._rows if row.meeting is not None and row.meeting.state in _REFUSED]
        if rows:
            first = rows[0]
            state = first.meeting.state if first.meeting is not None else ""
            title = f"{listed(list(dict.fromkeys(row.name for row in rows)))} {_STATES[state]} {first.place}"
            fix = Fix(
                text="open the port between these nodes, or name an address that they reach",
                commands=(self._asked.again("ports", first.place),),
            )
            yield self._made(rows, Level.FAIL, f"{title}, where the job meets", _WHY.get(state, ""), fix)

    def _wrong_interface(self) -> Iterable[Finding]:
        """A rank that knocks at an address of another rank's node that it cannot reach."""
        for row in self._rows:
            for end in row.start.knocks:
                address = end.rpartition(":")[0].strip("[]")
                if row.meeting is not None and address in row.meeting.addresses:
                    continue
                other = next((node for node in self._nodes if address in _by_interface(node)), None)
                at = f"{other.host}, interface {_by_interface(other)[address]}" if other is not None else "another rank"
                wanted = ", ".join(f"{name}={value}" for name, value in row.start.interfaces.items())
                title = f"{row.name} gets no answer from {end} ({at})"
                text = "choose the interface that all nodes reach: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
                fix = Fix(text=text, commands=(self._asked.again("ports"),))
                detail = f"It was started with {wanted}." if wanted else ""
                yield self._made([row], Level.FAIL, title, detail, fix)
                return

    def _nobody_listens(self) -> Iterable[Finding]:
        rows = [row for row in self._rows if row.meeting is not None and row.meeting.state == port_scan.CLOSED]
        rows = [row for row in rows if row.start.waited_s > _BEGINS_S] or ([] if self._served else rows)
        if not rows:
            return
        first = rows[0]
        addresses = set(first.meeting.addresses) if first.meeting is not None else set()
        name = first.start.launch.host.partition(".")[0]
        head = next(
            (
                node
                for node in self._nodes
                if addresses & set(_by_interface(node)) or node.host.partition(".")[0] == name
            ),
            None,
        )
        names = listed(list(dict.fromkeys(row.name for row in rows)))
        waits = f"{names} {'wait' if len(rows) > 1 else 'waits'} for {first.place}"
        level = Level.FAIL if first.start.waited_s > _LATE_S else Level.WARN
        if head is None:
            title = f"{waits}, where nothing listens"
            first_one = "Rank 0" if first.start.launch.program == "environment" else "The first node's launcher"
            detail = f"{first_one} is not there yet, has ended, or listens at another port."
            fix = Fix(
                text="next: ask both nodes", commands=(f"{self._asked.program} hang --hosts {self._with(first)}",)
            )
            yield self._made(rows, level, title, detail, fix)
            return
        there = [row for row in self._rows if row.host == head.host]
        if there and (first.start.launch.backend == "c10d" or first.start.rank is not None):
            title = f"{waits}: the process of this job on {head.host} does not listen there yet"
            yield self._made(rows, Level.UNKNOWN, title, "", self._is_host(there[0]), accuses=False)
            return
        who = "rank 0" if first.start.launch.program == "environment" else "node rank 0"
        title = f"{waits}, but nothing listens on {head.host}: {who} was never started there, or exited"
        fix = Fix(text=f"start it on {head.host}; if it failed, its log names the reason", commands=())
        found = self._made(rows, level, title, "", fix)
        where = Where(hosts=(head.host,), ranks=(0,) if who == "rank 0" else (), pids=found.where.pids)
        yield replace(found, where=where)

    def _is_host(self, row: _Row) -> Fix | None:
        if row.start.launch.backend != "c10d" or row.start.launch.is_host is not None or row.start.waited_s < _BEGINS_S:
            return None
        return Fix(text=f"if it stays so, tell torchrun on {row.host} that it hosts the store: --rdzv-conf is_host=1")

    def _with(self, row: _Row) -> str:
        return ",".join(dict.fromkeys([row.start.launch.host, row.host]))

    def _waits_for_more(self) -> Iterable[Finding]:
        """All that is there has met; nodes are missing."""
        least = self._first.launch.nodes[0]
        if self._first.launch.program == "environment" or least < 2:
            return
        hosts = {row.host for row in self._rows}
        clients = {client for row in self._rows if row.is_server() and row.meeting for client in row.meeting.clients}
        own = {address for row in self._rows for address in row.own}
        joined = len(hosts) + len([client for client in clients - own if not is_loopback(client)])
        waited_s = max(row.start.waited_s for row in self._rows)
        absent = [node.host for node in self._nodes if node.host not in hosts and not node.missing]
        if joined >= least and not absent:
            return
        level = Level.FAIL if absent and waited_s > _LATE_S else Level.WARN
        some = f"{joined} of {least} nodes {'has' if joined == 1 else 'have'} come to {self._rows[0].place}"
        if not any(row.is_server() for row in self._rows):
            some = f"{format_hosts(hosts)} has come to {self._rows[0].place}, and waits for more of its {least} nodes"
        if absent and joined < least:
            title = f"{some}: {self._first.launch.program} does not run on {format_hosts(absent)}"
            fix = Fix(text=f"start it on {format_hosts(absent)}, or ask for fewer nodes: --nnodes {joined}")
            found = self._made([], level, title, "", fix)
            yield replace(found, where=Where(hosts=tuple(absent)))
            return
        fix = Fix(
            text="next: ask all of its nodes; on a missing node, test the path to the first",
            commands=(
                f"{self._asked.program} hang --hosts LIST",
                f"{self._asked.program} ports {self._right_place() or self._rows[0].place}",
            ),
        )
        yield self._made(self._rows, level, some, "", fix, accuses=False)


_WHY = {
    port_scan.FILTERED: "A firewall drops it, or the address is not reachable from here.",
    port_scan.REJECTED: "A firewall or router on the way rejects it.",
}


def _is_served(row: _Row, rows: Sequence[_Row]) -> bool:
    """Return whether a process of the same job listens at its meeting place."""
    if row.is_server():
        return True
    servers = [other for other in rows if other.is_server() and other.start.launch.port == row.start.launch.port]
    met = row.meeting
    return met is not None and any(set(met.addresses) & other.own for other in servers)


def _limit_s(row: _Row) -> float | None:
    """Return how long a launcher waits in all: for the store, or for the other nodes."""
    met, launch = row.meeting, row.start.launch
    return launch.gives_up_s if met is not None and met.state == port_scan.OPEN else launch.connects_s


def _resolved(row: _Row) -> tuple[object, ...]:
    """Return what two processes must have in common to meet: an address of the same machine, and the port."""
    met = row.meeting
    if met is None or not met.addresses:
        return row.place, 0
    # Loopback, or a name with several addresses, is the machine itself.
    key = min(row.own - _LOOPBACK, default=row.host) if met.is_here else None
    return (key, met.port) if key else (met.addresses[0], met.port)


_LOOPBACK = frozenset(("127.0.0.1", "::1"))


def _is_loopback(met: Meeting) -> bool:
    return bool(met.addresses) and all(map(is_loopback, met.addresses))


def _is_own(row: _Row) -> str:
    met = row.meeting
    name = row.start.launch.host
    return f"{name} is {met.addresses[0]} there" if met is not None and met.addresses[0] != name else "it is loopback"


def _by_interface(node: NodePicture) -> dict[str, str]:
    return {
        text.partition("/")[0]: name
        for read in node.starts
        for name, texts in read.addresses.items()
        for text in texts
        if not is_loopback(text.partition("/")[0])
    }


def _options_for(start: Start, place: str) -> str:
    """Return the options that send a launcher, or the variables that send a rank, to a meeting place."""
    host, _, port = place.rpartition(":")
    launch = start.launch
    if launch.program == "environment":
        return f"MASTER_ADDR={host} MASTER_PORT={port}"
    if launch.program == "accelerate":
        return f"--main_process_ip {host} --main_process_port {port}"
    return f"--rdzv-endpoint={place}" if launch.backend != "static" else f"--master-addr={host} --master-port={port}"


def _evidence(row: _Row) -> str:
    """Format one process: "node2: torchrun (pid 17), node rank 1, at node1:29500 (10.0.0.1): refused"."""
    launch, met = row.start.launch, row.meeting
    parts = [f"pid {row.start.pid}"]
    parts += [f"node rank {launch.node_rank}"] if launch.node_rank is not None else []
    parts += [f"of {_text(launch.nodes)} nodes"] if launch.program != "environment" else []
    place = f"at {row.place}" if launch.host else "names no rendezvous"
    if met is not None:
        place += f" ({', '.join(met.addresses[:2]) or met.error})"
        place += (
            ", where it listens" if row.is_server() else f": {_SEEN.get(met.state, met.state)}" if met.state else ""
        )
    name = f"rank {row.start.rank}" if launch.program == "environment" else launch.program
    return f"{row.host}: {name} ({', '.join(parts)}) {place}"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return str(value[0]) if value[0] == value[1] else f"{value[0]}:{value[1]}"
    return str(value)
