"""Rules on the place where a job meets: its name, address, port, firewall, and the process that listens. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.agent import port_scan
from distdiag.diagnosis.stuck.start_fixes import at_place, options_for
from distdiag.diagnosis.stuck.start_group import SHOWN
from distdiag.diagnosis.stuck.start_rows import by_interface, interfaces_in_words, meets_at_loopback, resolved, why_own
from distdiag.diagnosis.wording import format_hosts, listed
from distdiag.fold import by_key
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.diagnosis.stuck.start_group import Group
    from distdiag.diagnosis.stuck.start_rows import StartRow
    from distdiag.diagnosis.stuck.types import Claim

_BEGINS_S = 30.0
"""A launcher may import torch for this long before it listens or connects."""
_REFUSED = (port_scan.FILTERED, port_scan.REJECTED, port_scan.NO_ROUTE, port_scan.DENIED)
_STATES = {
    port_scan.FILTERED: "gets no answer from",
    port_scan.REJECTED: "is rejected on its path to",
    port_scan.NO_ROUTE: "has no route to",
    port_scan.DENIED: "may not connect to",
}
_WHY = {
    port_scan.FILTERED: "A firewall drops it, or that node cannot reach the address.",
    port_scan.REJECTED: "A firewall or router on the way rejects it.",
}


def unresolved(group: Group) -> Iterable[Claim]:
    """A node cannot resolve the name of the rendezvous."""
    bad = [row for row in group.rows if row.meeting is not None and row.meeting.error]
    for name, rows in by_key((row.start.launch.host, row) for row in bad).items():
        hosts = format_hosts(row.host for row in rows)
        reason = rows[0].meeting.error if rows[0].meeting is not None else ""
        text = f"use a name that {hosts} resolves, or the address"
        if rows[0].start.above is not None and rows[0].start.above.program == "torchrun":
            text = f"add {name} to DNS or /etc/hosts, or start torchrun there with --local-addr=ADDRESS"
        fix = None if rows[0].start.above is not None else _start_with(group, rows)
        fix = fix or Fix(text=text, commands=(f"getent hosts {name}",))
        title = f"{hosts} cannot resolve {name}, where the job meets: {reason}"
        yield group.claim(rows, Level.FAIL, title, "", fix)


def itself(group: Group) -> Iterable[Claim]:
    """A node connects to its own loopback, while the store is elsewhere."""
    if not group.several or not group.first.launch.host:
        return
    rows = [row for row in group.rows if row.meeting is not None and meets_at_loopback(row.meeting)]
    # The store of the first node listens at all of its addresses: loopback is right on that host, and only there.
    firsts = {row.host for row in group.rows if 0 in (row.start.launch.node_rank, row.start.rank)}
    others = [row for row in rows if row.host not in firsts]
    alone = len({row.host for row in group.rows}) == 1
    wrong = [row for row in others if row.start.launch.node_rank] if alone else others
    if wrong:
        place = wrong[0].place
        meet = "meets" if len({row.host for row in wrong}) == 1 else "meet"
        title = f"{format_hosts(row.host for row in wrong)} {meet} at {place}, itself: {why_own(wrong[0])}"
        text = "start all nodes with the address of one of them"
        yield group.claim(wrong, Level.FAIL, title, "", _start_with(group, wrong) or Fix(text=text))


def stranger(group: Group) -> Iterable[Claim]:
    """Another program has the port."""
    for row in group.rows:
        met = row.meeting
        if met is None or not met.is_here or met.server is None:
            continue
        if any(met.server in other.family for other in group.rows if other.host == row.host):
            continue
        title = f"port {met.port} on {row.host} is in use by another program: {met.command} (pid {met.server})"
        options = " ".join(options_for(row.start.launch, f"{met.host}:PORT"))
        text = f"end that process, or give this job another port: {options}"
        yield group.claim(
            [row], Level.FAIL, title, "", Fix(text=text, commands=(f"ps -fp {met.server}  # on {row.host}",))
        )
        return
    yield from _another_job(group)
    yield from _no_store(group)


def _another_job(group: Group) -> Iterable[Claim]:
    """The store at the rendezvous belongs to another known job."""
    rows = [row for row in group.rows if row.meeting is not None and row.meeting.state == port_scan.OPEN]
    places = {resolved(row, group.owner): row for row in rows}
    for other in group.others:
        place = resolved(other, group.owner)
        if group.served or not other.is_server() or place not in places:
            continue
        row, pid = places[place], other.start.pid
        title = f"{row.name} meets at {row.place}, the store of another job: {other.start.launch.script or 'python'}"
        options = " ".join(options_for(row.start.launch, f"{row.start.launch.host}:PORT"))
        text = f"end that job if it is left over, or give this job another port: {options}"
        fix = Fix(text=text, commands=(f"ps -fp {pid}  # on {other.host}",))
        found = group.claim(rows, Level.FAIL, f"{title} (pid {pid} on {other.host})", "", fix)
        yield replace(found, hosts=(other.host,), ranks=frozenset())
        return


def _no_store(group: Group) -> Iterable[Claim]:
    """A process that was not read accepts connections to the rendezvous, but sends nothing."""
    rows = [row for row in group.rows if row.start.answered is False]
    if group.served or not rows:
        return
    met = rows[0].start.launch
    title = f"port {met.port} on {met.host} accepts the connection of {listed([row.name for row in rows[:SHOWN]])}"
    title += ", but does not answer: another program listens there, or a store that is stopped"
    commands = (f"ss -ltnp 'sport = :{met.port}'  # on {met.host}",)
    fix = Fix(text="see which process listens there", commands=commands)
    yield group.claim(rows, Level.WARN, title, "", fix, accuses=False)


def other_place(group: Group) -> Iterable[Claim]:
    """Processes of one job use different rendezvous."""
    places = Counter(row.place for row in group.rows)
    if len({resolved(row, group.owner) for row in group.rows}) < 2:
        return
    served = group.served or group.met
    right = {row.place for row in served}
    wrong = [row for row in group.rows if row.place not in right]
    if right and wrong and len({resolved(row, group.owner) for row in served}) == 1:
        hosts = [row.host for row in group.rows if row.place in right]
        is_shared = not {row.host for row in wrong}.isdisjoint(hosts)
        names = listed([f"{row.name} (pid {row.start.pid})" if is_shared else row.name for row in wrong])
        wait = "waits" if len(wrong) == 1 else "wait"
        there = f"; the job's store is at {served[0].place}" if is_shared else ""
        there = there or f", {format_hosts(hosts)} at {group.right_place()}"
        title = f"{names} {wait} at {wrong[0].place}{there}"
        yield group.claim(wrong, Level.FAIL, title, "", _start_with(group, wrong))
        return
    parts = [f"{format_hosts(row.host for row in group.rows if row.place == place)} at {place}" for place in places]
    text = "start all of them with the same rendezvous"
    yield group.claim(group.rows, Level.FAIL, f"the job meets in different places: {listed(parts)}", "", Fix(text=text))


def unreachable(group: Group) -> Iterable[Claim]:
    """The path to the rendezvous is closed."""
    rows = [row for row in group.rows if row.meeting is not None and row.meeting.state in _REFUSED]
    if rows:
        first = rows[0]
        state = first.meeting.state if first.meeting is not None else ""
        title = f"{listed(list(dict.fromkeys(row.name for row in rows)))} {_STATES[state]} {first.place}"
        text = "open the port between these nodes, or name an address that they reach"
        if first.start.above is not None and first.start.above.program == "torchrun":
            text = "torchrun chooses this port: open all ports between these nodes"
        fix = Fix(text=text, commands=(group.asked.again("ports", first.place),))
        found = group.claim(rows, Level.FAIL, f"{title}, where the job meets", _WHY.get(state, ""), fix)
        other = _head(group, first)
        is_reached = any(row.start.joined and row.host != other for row in group.rows)
        ends = [*found.hosts, *([other] if other and not is_reached else [])]
        yield replace(found, hosts=tuple(dict.fromkeys(ends)))


def first_address(group: Group) -> Iterable[Claim]:
    """The resolver's first address does not answer, and torch tries it until its timeout."""
    for row in group.rows:
        met = row.meeting
        if met is None or not met.silent:
            continue
        first, second = met.addresses[:2]
        kind = "IPv6 address " if ":" in first else "address "
        title = f"{row.name} tries the {kind}{first} of {met.host} first, which gives no answer; {second} does"
        place = f"{f'[{second}]' if ':' in second else second}:{met.port}"
        rows = [other for other in group.rows if other.meeting is not None and other.meeting.silent]
        but = f", or remove {first} from DNS or /etc/hosts for {met.host}"
        yield group.claim(rows, Level.FAIL, title, "", at_place(rows, place, job=group.rows, but=but))
        return


def wrong_interface(group: Group) -> Iterable[Claim]:
    """A rank connects to an address of another rank's node that it cannot reach."""
    for row in group.rows:
        for end in row.start.knocks:
            address = end.rpartition(":")[0].strip("[]")
            if row.meeting is not None and address in row.meeting.addresses:
                continue
            other = next((node for node in group.nodes if address in by_interface(node)), None)
            at = f"{other.host}, interface {by_interface(other)[address]}" if other is not None else "another rank"
            title = f"{row.name} gets no answer from {end} ({at})"
            ends = tuple(dict.fromkeys([row.host, *([other.host] if other is not None else [])]))
            text = "choose the interface that all nodes reach: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
            fix = Fix(text=text, commands=(group.asked.again("ports"),))
            detail = " ".join(interfaces_in_words([row], group.nodes, lacking=False))
            yield replace(group.claim([row], Level.FAIL, title, detail, fix), hosts=ends)
            return


def nobody_listens(group: Group) -> Iterable[Claim]:
    """The rendezvous refuses connections."""
    rows = [row for row in group.rows if row.meeting is not None and row.meeting.state == port_scan.CLOSED]
    rows = [row for row in rows if row.start.waited_s > _BEGINS_S] or ([] if group.served else rows)
    if not rows or any(state.member.rank == 0 and state.member.pid for state in group.not_here):
        return
    first = rows[0]
    head = _head(group, first)
    names = listed(list(dict.fromkeys(row.name for row in rows)))
    waits = f"{names} {'wait' if len(rows) > 1 else 'waits'} for {first.place}"
    level = group.level()
    if not head:
        is_own = first.meeting is not None and meets_at_loopback(first.meeting)
        title = f"{waits}, {'itself, ' if is_own else ''}where nothing listens"
        first_one = "Rank 0" if group.of_ranks else "The first node's launcher"
        detail = f"{first_one} is not there yet, has ended, or listens at another port."
        text, hosts = "next: ask both nodes", _with(group, first)
        if is_own:
            detail = f"{first_one} is on another node, which {first.start.launch.host} does not lead to, or has ended."
            text, hosts = "next: ask all nodes; the job needs the address of rank 0's node", "LIST"
        fix = Fix(text=text, commands=(f"{group.asked.program} hang --hosts {hosts}",))
        yield group.claim(rows, level, title, detail, fix, accuses=False)
        return
    there = [row for row in group.rows if row.host == head]
    if there and (group.of_ranks or not there[0].start.launch.node_rank):
        away = [row.name for row in rows if row.host != head] or [row.name for row in rows]
        waits = f"{listed(away)} {'wait' if len(away) > 1 else 'waits'} for {first.place}"
        title = f"{waits}: the process of this job on {head} does not listen there yet"
        yield group.claim(rows, Level.WARN, title, "", _is_host(group, there[0]), accuses=False)
        return
    elsewhere = _first_rank_on(group, head) if group.of_ranks else ""
    if elsewhere:
        title = f"{waits}, where nothing listens: rank 0 on {head} meets at {elsewhere}"
        yield group.claim(rows, Level.WARN, title, "", at_place(rows, elsewhere, job=group.rows), accuses=False)
        return
    one = "rank 0" if group.of_ranks else "node rank 0"
    title = f"{waits}, but nothing listens on {head}: {one} was never started there, or exited"
    fix = Fix(text=f"start it on {head}; if it failed, its log has the reason", commands=())
    found = group.claim(rows, level, title, "", fix)
    yield replace(found, hosts=(head,), ranks=frozenset([0] if group.of_ranks else []))


def _start_with(group: Group, rows: Sequence[StartRow]) -> Fix | None:
    place = group.right_place()
    return at_place(rows, place, job=group.rows) if place else None


def _head(group: Group, row: StartRow) -> str:
    """Return the host that a rendezvous resolves to; empty if that host was not read."""
    addresses = set(row.meeting.addresses) if row.meeting is not None else set()
    name = row.start.launch.host.partition(".")[0]
    heads = (
        node.host for node in group.nodes if addresses & set(by_interface(node)) or node.host.partition(".")[0] == name
    )
    return next(heads, "")


def _first_rank_on(group: Group, host: str) -> str:
    """Return the rendezvous of the same program's rank 0 on this host; empty if none."""
    own = {(row.host, row.start.pid) for row in group.rows}
    processes = [(node.host, process) for node in group.nodes for process in node.processes.processes]
    commands = {process.command for at, process in processes if (at, process.pid) in own}
    for at, process in processes:
        is_first = process.python and process.place is not None and process.place.rank == 0
        if at == host and is_first and process.command in commands and "MASTER_ADDR" in process.job:
            return f"{process.job['MASTER_ADDR']}:{process.job.get('MASTER_PORT', '')}"
    return ""


def _is_host(group: Group, row: StartRow) -> Fix | None:
    if row.start.launch.backend != "c10d" or row.start.launch.is_host is not None or row.start.waited_s < _BEGINS_S:
        return None
    return Fix(text=f"if it stays so, tell torchrun on {row.host} that it hosts the store: --rdzv-conf is_host=1")


def _with(group: Group, row: StartRow) -> str:
    return ",".join(dict.fromkeys([row.start.launch.host, row.host]))
