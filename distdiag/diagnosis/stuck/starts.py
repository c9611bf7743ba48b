"""Why a job does not start, by its waiting launchers, or its ranks in init_process_group. Pure.

torchrun prints no reason until it gives up, 1 to 10 minutes later, and then only a timeout. The nodes' views of the
rendezvous are compared: a name, a port, a firewall, a missing node.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.agent import port_scan
from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.outliers import split
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.diagnosis.stack_wording import briefly, does, who
from distdiag.diagnosis.stuck.start_fixes import at_place, corrected, options_for
from distdiag.diagnosis.stuck.start_rows import (
    LOOPBACK,
    StartRow,
    by_interface,
    evidence_of,
    interfaces_in_words,
    is_served,
    limit_s,
    meets_at_loopback,
    owners,
    resolved,
    value_in_words,
    why_own,
)
from distdiag.diagnosis.stuck.types import Claim, Source, StuckKind
from distdiag.diagnosis.wait_reasons import lasting
from distdiag.diagnosis.wording import format_hosts, listed
from distdiag.facts.network import is_loopback
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.types import Asked
    from distdiag.jobs.starts import Start
    from distdiag.jobs.types import NodePicture

_LATE_S = 300.0
"""A node or rank that others have waited for this long is not just slow to start."""
_BEGINS_S = 30.0
"""A launcher may import torch for this long before it listens or connects."""
_REFUSED = (port_scan.FILTERED, port_scan.REJECTED, port_scan.NO_ROUTE, port_scan.DENIED)
_STATES = {
    port_scan.FILTERED: "gets no answer from",
    port_scan.REJECTED: "is rejected on its path to",
    port_scan.NO_ROUTE: "has no route to",
    port_scan.DENIED: "may not connect to",
}
_SHOWN = 8
_GROUPS = 2
_NOT_COMING = (StackClass.EXITED, StackClass.STOPPED, StackClass.DEBUGGER, StackClass.UNREADABLE)


def start_claims(
    asked: Asked, nodes: Sequence[NodePicture], *, of_ranks: bool, states: Sequence[RankState] = ()
) -> list[Claim]:
    """Return the obstacles to starting, the surest first; empty if the processes show no reason.

    `of_ranks`: judge ranks in init_process_group, else launchers without ranks. `states`: the ranks of the one job to
    judge, on any host; empty: judge all.
    """
    own_pids = {(state.member.host, state.member.pid): state.member.rank for state in states}
    owner = owners(nodes)
    groups: dict[tuple[str, str], list[StartRow]] = {}
    for node in nodes:
        for read in node.starts:
            own = frozenset(text.partition("/")[0] for texts in read.addresses.values() for text in texts)
            for start in read.starts:
                key = node.host, start.pid
                number = own_pids.get(key) if start.rank is None else start.rank  # Lightning's first rank is deduced
                row = StartRow(node.host, replace(start, rank=number), own, _family(node, start.pid))
                if row.is_rank is of_ranks and (not own_pids or key in own_pids):
                    groups.setdefault((start.launch.program, start.launch.script), []).append(row)
    jobs = [job for rows in groups.values() for job in _jobs(rows, owner)]
    found = (_Group(asked, nodes, rows, [job for job in jobs if job is not rows], states) for rows in jobs)
    return sorted((claim for group in found for claim in group.claims()), key=lambda claim: not claim.is_sure)


def in_init(state: RankState) -> bool:
    """Return whether a rank's stack is in init_process_group."""
    return any(
        frame.function == "init_process_group" and frame.file.endswith("distributed_c10d.py")
        for frame in state.thread.frames
    )


def without_place(asked: Asked, states: Sequence[RankState]) -> Claim | None:
    """Claim that all these ranks wait in init_process_group, at a place not named by their environment.

    As with mp.spawn and init_method="tcp://...": polling for rank 0 looks like progress, and arguments like steps.
    """
    processes = [state.member.process for state in states]
    told = any(process is not None and "MASTER_ADDR" in process.job for process in processes)
    if told or not states or not all(map(in_init, states)):
        return None
    wait = "waits" if len(states) == 1 else "wait"
    return Claim(
        source=Source.START,
        kind=StuckKind.RENDEZVOUS,
        is_sure=False,
        says=f"{briefly(states)} {wait} in init_process_group for more ranks, or for rank 0",
        detail="Their environment has no MASTER_ADDR: the script itself chooses where they meet.",
        fix=Fix(
            text="ask all nodes of the job; test the address that the script gives to init_process_group",
            commands=(f"{asked.program} hang --hosts LIST", f"{asked.program} ports HOST:PORT"),
        ),
        pids=tuple(state.member.pid for state in states if state.member.pid is not None),
    )


def _family(node: NodePicture, pid: int) -> frozenset[int]:
    processes = node.processes.processes
    above = {above for process in processes if process.pid == pid for above in process.above}
    return frozenset({pid, *above, *(process.pid for process in processes if pid in process.above)})


def _jobs(rows: Sequence[StartRow], owner: Mapping[str, str]) -> list[list[StartRow]]:
    """Separate jobs of one script whose stores are at different places.

    If each node has its own store, as many as the first launcher expects nodes, it is one job.
    """
    by_place: dict[tuple[str, int], list[StartRow]] = {}
    for row in rows:
        by_place.setdefault(resolved(row, owner), []).append(row)
    served = [place for place, own in by_place.items() if any(row.is_server() for row in own)]
    each_its_own = len(by_place) == len({row.host for row in rows}) == rows[0].start.launch.nodes[0]
    return list(by_place.values()) if len(served) > 1 and not each_its_own else [list(rows)]


def _lines(wanted: Iterable[tuple[str, Start, list[str]]]) -> tuple[str, ...]:
    lines = [(host, corrected(start, options)) for host, start, options in wanted]
    return tuple(f"{line}  # on {host}" for host, line in lines if line)[:_SHOWN]


class _Group:
    """The waiting processes of one job. `others`: those of other jobs; `states`: all ranks of this job."""

    def __init__(
        self,
        asked: Asked,
        nodes: Sequence[NodePicture],
        rows: Sequence[StartRow],
        others: Sequence[Sequence[StartRow]] = (),
        states: Sequence[RankState] = (),
    ) -> None:
        self._asked, self._nodes, self._rows = asked, nodes, rows
        self._others = [row for job in others for row in job]
        self._owner = owners(nodes)
        self._first = rows[0].start
        self._of_ranks = rows[0].is_rank
        self._several = max(row.start.launch.nodes[0] for row in rows) > 1 or self._of_ranks
        self._served = [row for row in rows if is_served(row, rows)]
        self._met = [row for row in rows if row.start.joined and row.meeting is not None and not row.meeting.is_here]
        self._waited_s = max(row.start.waited_s for row in rows)
        here = {(row.host, row.start.pid) for row in rows}
        self._not_here = [state for state in states if (state.member.host, state.member.pid) not in here]

    def claims(self) -> list[Claim]:
        """Return the claims of the first rule that has any."""
        rules = (
            self._unresolved,
            self._itself,
            self._stranger,
            self._other_place,
            self._other_options,
            self._other_ranks,
            self._unreachable,
            self._first_address,
            self._wrong_interface,
            self._on_the_way,
            self._nobody_listens,
            self._waits_for_more,
            self._ranks_missing,
        )
        return next((found for rule in rules if (found := list(rule()))), [])

    def _made(
        self, rows: Iterable[StartRow], level: Level, title: str, detail: str, fix: Fix | None, *, accuses: bool = True
    ) -> Claim:
        rows = list(rows)
        hosts = tuple(dict.fromkeys(row.host for row in rows)) if accuses else ()
        ranks = frozenset(row.start.rank for row in rows if row.start.rank is not None) if accuses else frozenset()
        return Claim(
            source=Source.START,
            kind=StuckKind.RENDEZVOUS,
            is_sure=level is Level.FAIL,
            says=title,
            detail=" ".join(filter(None, (detail, *self._interfaces(lacking=True), self._ends()))),
            hosts=hosts,
            ranks=ranks,
            pids=tuple(row.start.pid for row in rows),
            evidence=tuple(evidence_of(row) for row in self._rows)[:_SHOWN],
            fix=fix,
            seconds=self._waited_s,
        )

    def _interfaces(self, *, lacking: bool) -> list[str]:
        return interfaces_in_words(self._rows, self._nodes, lacking=lacking)

    def _ends(self) -> str:
        """Format the waiting time, and the time left until the timeout."""
        left = [seconds - row.start.waited_s for row in self._rows if (seconds := limit_s(row)) is not None]
        ends = f"; it gives up in {lasting(min(left))}" if left and min(left) > 0 else ""
        return f"The job has waited for {lasting(self._waited_s)}{ends}."

    def _level(self) -> Level:
        """FAIL once missing processes are too late to be expected, else WARN."""
        return Level.FAIL if self._waited_s > _LATE_S else Level.WARN

    def _right_place(self) -> str:
        """Return the rendezvous served by a process of this job, else rank 0's; empty if neither is known."""
        served = self._served or self._met
        if served and not (served[0].meeting is not None and meets_at_loopback(served[0].meeting)):
            return served[0].place
        first = next(iter(served), None) or next(
            (row for row in self._rows if row.is_rank and row.start.rank == 0), None
        )
        if first is None:
            return ""
        own = [address for address in first.own - LOOPBACK if self._owner.get(address, first.host) == first.host]
        address = min(own, key=lambda address: (":" in address, address), default=first.host)
        return f"{f'[{address}]' if ':' in address else address}:{first.start.launch.port}"

    def _start_with(self, rows: Sequence[StartRow]) -> Fix | None:
        place = self._right_place()
        return at_place(rows, place, job=self._rows) if place else None

    def _unresolved(self) -> Iterable[Claim]:
        bad = [row for row in self._rows if row.meeting is not None and row.meeting.error]
        by_name: dict[str, list[StartRow]] = {}
        for row in bad:
            by_name.setdefault(row.start.launch.host, []).append(row)
        for name, rows in by_name.items():
            hosts = format_hosts(row.host for row in rows)
            reason = rows[0].meeting.error if rows[0].meeting is not None else ""
            text = f"use a name that {hosts} resolves, or the address"
            if rows[0].start.above is not None and rows[0].start.above.program == "torchrun":
                text = f"add {name} to DNS or /etc/hosts, or start torchrun there with --local-addr=ADDRESS"
            fix = None if rows[0].start.above is not None else self._start_with(rows)
            fix = fix or Fix(text=text, commands=(f"getent hosts {name}",))
            title = f"{hosts} cannot resolve {name}, where the job meets: {reason}"
            yield self._made(rows, Level.FAIL, title, "", fix)

    def _itself(self) -> Iterable[Claim]:
        """A node connects to its own loopback, while the store is elsewhere."""
        if not self._several or not self._first.launch.host:
            return
        rows = [row for row in self._rows if row.meeting is not None and meets_at_loopback(row.meeting)]
        # The store of the first node listens at all of its addresses, so that it alone may call itself localhost.
        others = [row for row in rows if 0 not in (row.start.launch.node_rank, row.start.rank)]
        alone = len({row.host for row in self._rows}) == 1
        wrong = [row for row in others if row.start.launch.node_rank] if alone else others
        if wrong:
            place = wrong[0].place
            meet = "meets" if len({row.host for row in wrong}) == 1 else "meet"
            title = f"{format_hosts(row.host for row in wrong)} {meet} at {place}, itself: {why_own(wrong[0])}"
            text = "start all nodes with the address of one of them"
            yield self._made(wrong, Level.FAIL, title, "", self._start_with(wrong) or Fix(text=text))

    def _stranger(self) -> Iterable[Claim]:
        """Another program has the port."""
        for row in self._rows:
            met = row.meeting
            if met is None or not met.is_here or met.server is None:
                continue
            if any(met.server in other.family for other in self._rows if other.host == row.host):
                continue
            title = f"port {met.port} on {row.host} is in use by another program: {met.command} (pid {met.server})"
            options = " ".join(options_for(row.start.launch, f"{met.host}:PORT"))
            text = f"end that process, or give this job another port: {options}"
            yield self._made(
                [row], Level.FAIL, title, "", Fix(text=text, commands=(f"ps -fp {met.server}  # on {row.host}",))
            )
            return
        yield from self._another_job()

    def _another_job(self) -> Iterable[Claim]:
        """The store at the rendezvous belongs to another known job."""
        rows = [row for row in self._rows if row.meeting is not None and row.meeting.state == port_scan.OPEN]
        places = {resolved(row, self._owner): row for row in rows}
        for other in self._others:
            place = resolved(other, self._owner)
            if self._served or not other.is_server() or place not in places:
                continue
            row, pid = places[place], other.start.pid
            title = (
                f"{row.name} meets at {row.place}, the store of another job: {other.start.launch.script or 'python'}"
            )
            options = " ".join(options_for(row.start.launch, f"{row.start.launch.host}:PORT"))
            text = f"end that job if it is left over, or give this job another port: {options}"
            fix = Fix(text=text, commands=(f"ps -fp {pid}  # on {other.host}",))
            found = self._made(rows, Level.FAIL, f"{title} (pid {pid} on {other.host})", "", fix)
            yield replace(found, hosts=(other.host,), ranks=frozenset())
            return

    def _other_place(self) -> Iterable[Claim]:
        """Processes of one job use different rendezvous."""
        places = Counter(row.place for row in self._rows)
        if len({resolved(row, self._owner) for row in self._rows}) < 2:
            return
        served = self._served or self._met
        right = {row.place for row in served}
        wrong = [row for row in self._rows if row.place not in right]
        if right and wrong and len({resolved(row, self._owner) for row in served}) == 1:
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

    def _other_options(self) -> Iterable[Claim]:
        """Launchers have contradictory options."""
        launches = [(row, row.start.launch) for row in self._rows]
        if self._of_ranks:
            return
        for what, of in (("--nnodes", "nodes"), ("--rdzv-backend", "backend"), ("--rdzv-id", "run_id")):
            values = {row.host: value_in_words(getattr(launch, of)) for row, launch in launches}
            if len(set(values.values())) > 1:
                parts = [
                    f"{value or 'none'} on {format_hosts(host for host, own in values.items() if own == value)}"
                    for value in dict.fromkeys(values.values())
                ]
                title = f"the nodes were started with different {what}: {listed(parts)}"
                lines: tuple[str, ...] = ()
                if of == "run_id" and self._served:
                    right = self._served[0].start.launch.run_id
                    wrong = [row for row, launch in launches if launch.run_id != right]
                    lines = _lines((row.host, row.start, [f"--rdzv-id={right}"]) for row in wrong)
                fix = Fix(text=f"start all with the same {what}", commands=lines)
                yield self._made(self._rows, Level.FAIL, title, "", fix)
                return
        ranks = Counter(launch.node_rank for _, launch in launches if launch.node_rank is not None)
        for rank, count in ranks.items():
            if count > 1:
                rows = [row for row, launch in launches if launch.node_rank == rank]
                both = "both" if count == 2 else "all"
                title = f"{format_hosts(row.host for row in rows)} were {both} started with --node-rank {rank}"
                text = f"give each node its own: 0 to {self._first.launch.nodes[0] - 1}"
                free = sorted(set(range(self._first.launch.nodes[0])) - set(ranks))
                own = zip(rows[1:], free, strict=False)
                lines = _lines((row.host, row.start, [f"--node-rank={number}"]) for row, number in own)
                yield self._made(rows, Level.FAIL, title, "", Fix(text=text, commands=lines))

    def _other_ranks(self) -> Iterable[Claim]:
        """Ranks contradict each other in RANK or WORLD_SIZE."""
        if not self._of_ranks:
            return
        sizes = Counter(row.start.world_size for row in self._rows if row.start.world_size is not None)
        if len(sizes) > 1:
            parts = [
                f"{size} for {name_ranks(row.start.rank or 0 for row in self._rows if row.start.world_size == size)}"
                for size in sizes
            ]
            title = f"the ranks were started with different WORLD_SIZE: {listed(parts)}"
            yield self._made(self._rows, Level.FAIL, title, "", Fix(text="start all ranks with the same WORLD_SIZE"))
        for rank, count in Counter(row.start.rank for row in self._rows if row.start.rank is not None).items():
            if count > 1 and len(sizes) < 2:
                rows = [row for row in self._rows if row.start.rank == rank]
                title = f"{count} processes were started with RANK={rank}: on {format_hosts(row.host for row in rows)}"
                size = self._first.world_size or 1
                fix = Fix(text=f"give each process its own RANK: 0 to {size - 1}")
                free = sorted(set(range(size)) - {row.start.rank for row in self._rows})
                detail = f"None of these processes is {name_ranks(free)} of {size}." if free else ""
                yield self._made(rows, Level.FAIL, title, detail, fix)

    def _first_address(self) -> Iterable[Claim]:
        """The resolver's first address does not answer, and torch tries it until its timeout."""
        for row in self._rows:
            met = row.meeting
            if met is None or not met.silent:
                continue
            first, second = met.addresses[:2]
            kind = "IPv6 address " if ":" in first else "address "
            title = f"{row.name} tries the {kind}{first} of {met.host} first, which gives no answer; {second} does"
            place = f"{f'[{second}]' if ':' in second else second}:{met.port}"
            rows = [other for other in self._rows if other.meeting is not None and other.meeting.silent]
            but = f", or remove {first} from DNS or /etc/hosts for {met.host}"
            yield self._made(rows, Level.FAIL, title, "", at_place(rows, place, job=self._rows, but=but))
            return

    def _unreachable(self) -> Iterable[Claim]:
        rows = [row for row in self._rows if row.meeting is not None and row.meeting.state in _REFUSED]
        if rows:
            first = rows[0]
            state = first.meeting.state if first.meeting is not None else ""
            title = f"{listed(list(dict.fromkeys(row.name for row in rows)))} {_STATES[state]} {first.place}"
            text = "open the port between these nodes, or name an address that they reach"
            if first.start.above is not None and first.start.above.program == "torchrun":
                text = "torchrun chooses this port: open all ports between these nodes"
            fix = Fix(text=text, commands=(self._asked.again("ports", first.place),))
            found = self._made(rows, Level.FAIL, f"{title}, where the job meets", _WHY.get(state, ""), fix)
            other = self._head(first)
            is_reached = any(row.start.joined and row.host != other for row in self._rows)
            ends = [*found.hosts, *([other] if other and not is_reached else [])]
            yield replace(found, hosts=tuple(dict.fromkeys(ends)))

    def _wrong_interface(self) -> Iterable[Claim]:
        """A rank connects to an address of another rank's node that it cannot reach."""
        for row in self._rows:
            for end in row.start.knocks:
                address = end.rpartition(":")[0].strip("[]")
                if row.meeting is not None and address in row.meeting.addresses:
                    continue
                other = next((node for node in self._nodes if address in by_interface(node)), None)
                at = f"{other.host}, interface {by_interface(other)[address]}" if other is not None else "another rank"
                title = f"{row.name} gets no answer from {end} ({at})"
                ends = tuple(dict.fromkeys([row.host, *([other.host] if other is not None else [])]))
                text = "choose the interface that all nodes reach: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
                fix = Fix(text=text, commands=(self._asked.again("ports"),))
                detail = " ".join(interfaces_in_words([row], self._nodes, lacking=False))
                yield replace(self._made([row], Level.FAIL, title, detail, fix), hosts=ends)
                return

    def _on_the_way(self) -> Iterable[Claim]:
        """Ranks or launchers still import or load: no fault yet."""
        late = [state for state in self._not_here if state.thread.kind not in _NOT_COMING and state.member.pid]
        if late and self._waited_s <= _LATE_S:
            says = "; ".join(f"{who(group)}: {does(group[0])}" for group in split(late)[:_GROUPS])
            reaches = "has" if len(late) == 1 else "have"
            title = f"{briefly(late)} {reaches} not reached init_process_group yet: {says.partition(': ')[2]}"
            names = listed(list(dict.fromkeys(row.name for row in self._rows))[:_SHOWN])
            wait = "wait" if len(self._rows) > 1 else "waits"
            detail = f"{names[:1].upper()}{names[1:]} {wait} for {'it' if len(late) == 1 else 'them'}."
            fix = Fix(text="wait, then ask again", commands=(self._asked.again("hang"),))
            yield self._made(self._rows, Level.WARN, title, detail, fix, accuses=False)
        rows = [row for row in self._rows if row.start.joined is False and not row.is_server() and not row.start.knocks]
        rows = [row for row in rows if row.meeting is not None and row.meeting.state == port_scan.OPEN]
        if rows and not self._of_ranks:
            program = rows[0].start.launch.program
            title = f"{program} on {format_hosts(row.host for row in rows)} runs, but has not connected to"
            is_long = max(row.start.waited_s for row in rows) > _LATE_S
            fix = Fix(
                text="see what it does", commands=(f"py-spy dump --pid {rows[0].start.pid}  # on {rows[0].host}",)
            )
            fix = fix if is_long else Fix(text="wait, then ask again", commands=(self._asked.again("hang"),))
            detail = "" if is_long else "It still imports or loads."
            yield self._made(rows, Level.WARN, f"{title} {rows[0].place} yet", detail, fix, accuses=is_long)

    def _nobody_listens(self) -> Iterable[Claim]:
        rows = [row for row in self._rows if row.meeting is not None and row.meeting.state == port_scan.CLOSED]
        rows = [row for row in rows if row.start.waited_s > _BEGINS_S] or ([] if self._served else rows)
        if not rows or any(state.member.rank == 0 and state.member.pid for state in self._not_here):
            return
        first = rows[0]
        head = self._head(first)
        names = listed(list(dict.fromkeys(row.name for row in rows)))
        waits = f"{names} {'wait' if len(rows) > 1 else 'waits'} for {first.place}"
        level = self._level()
        if not head:
            is_own = first.meeting is not None and meets_at_loopback(first.meeting)
            title = f"{waits}, {'itself, ' if is_own else ''}where nothing listens"
            first_one = "Rank 0" if self._of_ranks else "The first node's launcher"
            detail = f"{first_one} is not there yet, has ended, or listens at another port."
            text, hosts = "next: ask both nodes", self._with(first)
            if is_own:
                detail = (
                    f"{first_one} is on another node, which {first.start.launch.host} does not lead to, or has ended."
                )
                text, hosts = "next: ask all nodes; the job needs the address of rank 0's node", "LIST"
            fix = Fix(text=text, commands=(f"{self._asked.program} hang --hosts {hosts}",))
            yield self._made(rows, level, title, detail, fix, accuses=False)
            return
        there = [row for row in self._rows if row.host == head]
        if there and (self._of_ranks or not there[0].start.launch.node_rank):
            away = [row.name for row in rows if row.host != head] or [row.name for row in rows]
            waits = f"{listed(away)} {'wait' if len(away) > 1 else 'waits'} for {first.place}"
            title = f"{waits}: the process of this job on {head} does not listen there yet"
            yield self._made(rows, Level.WARN, title, "", self._is_host(there[0]), accuses=False)
            return
        elsewhere = self._first_rank_on(head) if self._of_ranks else ""
        if elsewhere:
            title = f"{waits}, where nothing listens: rank 0 on {head} meets at {elsewhere}"
            yield self._made(rows, Level.WARN, title, "", at_place(rows, elsewhere, job=self._rows), accuses=False)
            return
        one = "rank 0" if self._of_ranks else "node rank 0"
        title = f"{waits}, but nothing listens on {head}: {one} was never started there, or exited"
        fix = Fix(text=f"start it on {head}; if it failed, its log has the reason", commands=())
        found = self._made(rows, level, title, "", fix)
        yield replace(found, hosts=(head,), ranks=frozenset([0] if self._of_ranks else []))

    def _head(self, row: StartRow) -> str:
        """Return the host that a rendezvous resolves to; empty if that host was not read."""
        addresses = set(row.meeting.addresses) if row.meeting is not None else set()
        name = row.start.launch.host.partition(".")[0]
        heads = (
            node.host
            for node in self._nodes
            if addresses & set(by_interface(node)) or node.host.partition(".")[0] == name
        )
        return next(heads, "")

    def _first_rank_on(self, host: str) -> str:
        """Return the rendezvous of the same program's rank 0 on this host; empty if none."""
        own = {(row.host, row.start.pid) for row in self._rows}
        processes = [(node.host, process) for node in self._nodes for process in node.processes.processes]
        commands = {process.command for at, process in processes if (at, process.pid) in own}
        for at, process in processes:
            is_first = process.python and process.place is not None and process.place.rank == 0
            if at == host and is_first and process.command in commands and "MASTER_ADDR" in process.job:
                return f"{process.job['MASTER_ADDR']}:{process.job.get('MASTER_PORT', '')}"
        return ""

    def _is_host(self, row: StartRow) -> Fix | None:
        if row.start.launch.backend != "c10d" or row.start.launch.is_host is not None or row.start.waited_s < _BEGINS_S:
            return None
        return Fix(text=f"if it stays so, tell torchrun on {row.host} that it hosts the store: --rdzv-conf is_host=1")

    def _with(self, row: StartRow) -> str:
        return ",".join(dict.fromkeys([row.start.launch.host, row.host]))

    def _came(self) -> frozenset[str]:
        """Return the addresses connected to this job's stores, except those of other jobs."""
        clients = {client for row in self._rows if row.is_server() and row.meeting for client in row.meeting.clients}
        others = {address for row in self._others for address in row.own}
        own = {address for row in self._rows for address in row.own}
        return frozenset(client for client in clients - (others - own) if not is_loopback(client))

    def _named_absent(self) -> list[str]:
        """Return the unconnected nodes of deepspeed's or SLURM's list; none if ambiguous."""
        expected = {name: own for node in self._nodes for read in node.starts for name, own in read.expected.items()}
        own = {address for row in self._rows for address in row.own}
        known = {address for addresses in expected.values() for address in addresses}
        if not all(expected.values()) or not self._came() <= known | own:
            return []
        here = {row.host.partition(".")[0] for row in self._rows}
        came = self._came() | own
        return [name for name, has in expected.items() if not came & set(has) and name.partition(".")[0] not in here]

    def _waits_for_more(self) -> Iterable[Claim]:
        """All present nodes have joined; others are missing."""
        least = self._first.launch.nodes[0]
        if self._of_ranks or least < 2:
            return
        hosts = {row.host for row in self._rows}
        own = {address for row in self._rows for address in row.own}
        joined = len(hosts) + len(self._came() - own)
        asked = [node.host for node in self._nodes if node.host not in hosts and not node.missing]
        absent = self._named_absent() or ([] if self._others else asked)
        if joined >= least and not asked:
            return
        some = f"{joined} of {least} nodes {'has' if joined == 1 else 'have'} joined at {self._rows[0].place}"
        if not any(row.is_server() for row in self._rows):
            some = f"{format_hosts(hosts)} has joined at {self._rows[0].place} and waits for more of its {least} nodes"
        if absent and joined < least:
            title = f"{some}: {self._first.launch.program} does not run on {format_hosts(absent)}"
            taken = {row.start.launch.node_rank for row in self._rows}
            free = [[f"--node-rank={number}"] for number in range(least) if number not in taken]
            options = [[] for _ in absent] if taken == {None} else free if len(free) == len(absent) else []
            lines = _lines(zip(absent, [self._first] * len(options), options, strict=False))
            text = f"start it on {format_hosts(absent)}, or ask for fewer nodes: --nnodes {joined}"
            fix = Fix(text=text, commands=lines if self._first.launch.program == "torchrun" else ())
            yield replace(self._made([], self._level(), title, "", fix), hosts=tuple(absent))
            return
        level = self._level() if asked else Level.WARN
        yield self._made(self._rows, level, some, self._leads_home(), self._ask_all(), accuses=False)

    def _leads_home(self) -> str:
        met = self._rows[0].meeting
        return f"{met.host} leads any other node to itself." if met is not None and meets_at_loopback(met) else ""

    def _ranks_missing(self) -> Iterable[Claim]:
        """Ranks wait at rank 0's store, which others have not connected to."""
        gone = any(state.thread.kind in _NOT_COMING and state.member.process for state in self._not_here)
        seen = {row.start.rank for row in self._rows} | {state.member.rank for state in self._not_here}
        size = max((row.start.world_size or 0 for row in self._rows), default=0)
        missing = sorted(set(range(size)) - seen)
        if not (self._of_ranks and missing) or gone or None in seen:
            return
        place, tasks = self._rows[0].place, self._first.tasks
        if tasks and tasks > 1 and self._first.above is None and missing == list(range(tasks, missing[-1] + 1)):
            title = f"WORLD_SIZE is {size}, but the launcher has started {tasks} processes"
            fix = Fix(text=f"set WORLD_SIZE={tasks}, or start {size} processes: srun --ntasks, mpirun -np")
            yield self._made(self._rows, Level.FAIL, title, f"No process is {name_ranks(missing)}.", fix, accuses=False)
            return
        read = {address for node in self._nodes for address in by_interface(node)}
        if not any(row.is_server() for row in self._rows):
            if self._first.joined:
                names = listed(list(dict.fromkeys(row.name for row in self._rows))[:_SHOWN])
                wait = "waits" if len(self._rows) == 1 else "wait"
                title = f"{names} {wait} at {place} for more of its {size} ranks"
                if tasks and tasks < size and self._first.above is None:
                    title += f"; its launcher has started {tasks} tasks"
                yield self._made(self._rows, Level.WARN, title, "", self._ask_all(), accuses=False)
            return
        absent, level = self._named_absent(), self._level()
        if not absent and not self._came() <= read:
            return  # an unread host has ranks
        one = len(absent or missing) == 1
        names = format_hosts(absent) if absent else f"{name_ranks(missing)} of {size}"
        title = f"{names} {'has' if one else 'have'} not connected to {place}"
        title += ", where rank 0 listens" if absent else ""
        detail = f"{'It is' if one else 'They are'} still starting, never started, or exited."
        detail = " ".join((self._leads_home() if absent else "", detail, *self._interfaces(lacking=False))).strip()
        output = format_hosts(absent) if absent else name_ranks(missing)
        text = f"if the output of {output} shows no import in progress, start {'it' if one else 'them'} again"
        fix = Fix(text=text, commands=(f"{self._asked.program} logs FILE",))
        found = self._made([], level, title, detail, fix)
        seen_hosts = {node.host for node in self._nodes if not node.missing}
        accused = [name for name in absent if level is Level.FAIL or name in seen_hosts]
        is_long = level is Level.FAIL and not absent
        yield replace(found, hosts=tuple(accused), ranks=frozenset(missing if is_long else ()))

    def _ask_all(self) -> Fix:
        return Fix(
            text="next: ask all of its nodes; on a missing node, test the path to the first",
            commands=(
                f"{self._asked.program} hang --hosts LIST",
                f"{self._asked.program} ports {self._right_place() or self._rows[0].place}",
            ),
        )


_WHY = {
    port_scan.FILTERED: "A firewall drops it, or that node cannot reach the address.",
    port_scan.REJECTED: "A firewall or router on the way rejects it.",
}
