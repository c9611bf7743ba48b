"""Rules on the members of a job: contradictory options and ranks, missing nodes and ranks. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.agent import port_scan
from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.outliers import split
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.diagnosis.stack_wording import briefly, does, who
from distdiag.diagnosis.stuck.start_fixes import corrected, node_rank_option
from distdiag.diagnosis.stuck.start_group import LATE_S, SHOWN
from distdiag.diagnosis.stuck.start_rows import by_interface, interfaces_in_words, meets_at_loopback, value_in_words
from distdiag.diagnosis.wording import format_hosts, listed
from distdiag.facts.network.interfaces import is_loopback
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.diagnosis.stuck.start_group import Group
    from distdiag.diagnosis.stuck.types import Claim
    from distdiag.jobs.starts import Start

_GROUPS = 2
_NOT_COMING = (StackClass.EXITED, StackClass.STOPPED, StackClass.DEBUGGER, StackClass.UNREADABLE)


def _lines(wanted: Iterable[tuple[str, Start, list[str]]]) -> tuple[str, ...]:
    lines = [(host, corrected(start, options)) for host, start, options in wanted]
    return tuple(f"{line}  # on {host}" for host, line in lines if line)[:SHOWN]


def other_options(group: Group) -> Iterable[Claim]:
    """Launchers have contradictory options."""
    launches = [(row, row.start.launch) for row in group.rows]
    if group.of_ranks:
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
            if of == "run_id" and group.served:
                right = group.served[0].start.launch.run_id
                wrong = [row for row, launch in launches if launch.run_id != right]
                lines = _lines((row.host, row.start, [f"--rdzv-id={right}"]) for row in wrong)
            fix = Fix(text=f"start all with the same {what}", commands=lines)
            yield group.claim(group.rows, Level.FAIL, title, "", fix)
            return
    ranks = Counter(launch.node_rank for _, launch in launches if launch.node_rank is not None)
    for rank, count in ranks.items():
        if count > 1:
            rows = [row for row, launch in launches if launch.node_rank == rank]
            both = "both" if count == 2 else "all"
            option = node_rank_option(group.first.launch)
            title = f"{format_hosts(row.host for row in rows)} were {both} started with {option} {rank}"
            text = f"give each node its own: 0 to {group.first.launch.nodes[0] - 1}"
            free = sorted(set(range(group.first.launch.nodes[0])) - set(ranks))
            own = zip(rows[1:], free, strict=False)
            lines = _lines((row.host, row.start, [f"{option}={number}"]) for row, number in own)
            yield group.claim(rows, Level.FAIL, title, "", Fix(text=text, commands=lines))


def other_ranks(group: Group) -> Iterable[Claim]:
    """Ranks contradict each other in RANK or WORLD_SIZE."""
    if not group.of_ranks:
        return
    sizes = Counter(row.start.world_size for row in group.rows if row.start.world_size is not None)
    if len(sizes) > 1:
        parts = [
            f"{size} for {name_ranks(row.start.rank or 0 for row in group.rows if row.start.world_size == size)}"
            for size in sizes
        ]
        title = f"the ranks were started with different WORLD_SIZE: {listed(parts)}"
        yield group.claim(group.rows, Level.FAIL, title, "", Fix(text="start all ranks with the same WORLD_SIZE"))
    for rank, count in Counter(row.start.rank for row in group.rows if row.start.rank is not None).items():
        if count > 1 and len(sizes) < 2:
            rows = [row for row in group.rows if row.start.rank == rank]
            title = f"{count} processes were started with RANK={rank}: on {format_hosts(row.host for row in rows)}"
            size = group.first.world_size or 1
            fix = Fix(text=f"give each process its own RANK: 0 to {size - 1}")
            free = sorted(set(range(size)) - {row.start.rank for row in group.rows})
            detail = f"None of these processes is {name_ranks(free)} of {size}." if free else ""
            yield group.claim(rows, Level.FAIL, title, detail, fix)


def on_the_way(group: Group) -> Iterable[Claim]:
    """Ranks or launchers still import or load: no fault yet."""
    late = [state for state in group.not_here if state.thread.kind not in _NOT_COMING and state.member.pid]
    if late and group.waited_s <= LATE_S:
        says = "; ".join(f"{who(alike)}: {does(alike[0])}" for alike in split(late)[:_GROUPS])
        reaches = "has" if len(late) == 1 else "have"
        title = f"{briefly(late)} {reaches} not reached init_process_group yet: {says.partition(': ')[2]}"
        names = listed(list(dict.fromkeys(row.name for row in group.rows))[:SHOWN])
        wait = "wait" if len(group.rows) > 1 else "waits"
        detail = f"{names[:1].upper()}{names[1:]} {wait} for {'it' if len(late) == 1 else 'them'}."
        fix = Fix(text="wait, then ask again", commands=(group.asked.again("hang"),))
        yield group.claim(group.rows, Level.WARN, title, detail, fix, accuses=False)
    rows = [row for row in group.rows if row.start.joined is False and not row.is_server() and not row.start.knocks]
    rows = [row for row in rows if row.meeting is not None and row.meeting.state == port_scan.OPEN]
    if rows and not group.of_ranks:
        program = rows[0].start.launch.program
        title = f"{program} on {format_hosts(row.host for row in rows)} runs, but has not connected to"
        is_long = max(row.start.waited_s for row in rows) > LATE_S
        fix = Fix(text="see what it does", commands=(f"py-spy dump --pid {rows[0].start.pid}  # on {rows[0].host}",))
        fix = fix if is_long else Fix(text="wait, then ask again", commands=(group.asked.again("hang"),))
        detail = "" if is_long else "It still imports or loads."
        yield group.claim(rows, Level.WARN, f"{title} {rows[0].place} yet", detail, fix, accuses=is_long)


def waits_for_more(group: Group) -> Iterable[Claim]:
    """All present nodes have joined; others are missing."""
    least = group.first.launch.nodes[0]
    if group.of_ranks or least < 2:
        return
    hosts = {row.host for row in group.rows}
    own = {address for row in group.rows for address in row.own}
    joined = len(hosts) + len(_came(group) - own)
    asked = [node.host for node in group.nodes if node.host not in hosts and not node.missing]
    absent = _named_absent(group) or ([] if group.others else asked)
    if joined >= least and not asked:
        return
    some = f"{joined} of {least} nodes {'has' if joined == 1 else 'have'} joined at {group.rows[0].place}"
    if not any(row.is_server() for row in group.rows):
        one = "is connected to {} and waits" if len(hosts) == 1 else "are connected to {} and wait"
        wait = one.format(group.rows[0].place)
        some = f"{format_hosts(hosts)} {wait} for more of its {least} nodes"
    if absent and joined < least:
        title = f"{some}: {group.first.launch.program} does not run on {format_hosts(absent)}"
        taken = {row.start.launch.node_rank for row in group.rows}
        free = [[f"--node-rank={number}"] for number in range(least) if number not in taken]
        options = [[] for _ in absent] if taken == {None} else free if len(free) == len(absent) else []
        lines = _lines(zip(absent, [group.first] * len(options), options, strict=False))
        text = f"start it on {format_hosts(absent)}, or ask for fewer nodes: --nnodes {joined}"
        fix = Fix(text=text, commands=lines if group.first.launch.program == "torchrun" else ())
        yield replace(group.claim([], group.level(), title, "", fix), hosts=tuple(absent))
        return
    level = group.level() if asked else Level.WARN
    yield group.claim(group.rows, level, some, _leads_home(group), group.ask_all(), accuses=False)


def ranks_missing(group: Group) -> Iterable[Claim]:
    """Ranks wait at rank 0's store, which others have not connected to."""
    gone = any(state.thread.kind in _NOT_COMING and state.member.process for state in group.not_here)
    there = (state.member for state in group.not_here if not state.member.is_absent)
    seen = {row.start.rank for row in group.rows} | {member.rank for member in there}
    size = max((row.start.world_size or 0 for row in group.rows), default=0)
    missing = sorted(set(range(size)) - seen)
    if not (group.of_ranks and missing) or gone or None in seen:
        return
    place, tasks = group.rows[0].place, group.first.tasks
    if tasks and tasks > 1 and group.first.above is None and missing == list(range(tasks, missing[-1] + 1)):
        title = f"WORLD_SIZE is {size}, but the launcher has started {tasks} processes"
        fix = Fix(text=f"set WORLD_SIZE={tasks}, or start {size} processes: srun --ntasks, mpirun -np")
        yield group.claim(group.rows, Level.FAIL, title, f"No process is {name_ranks(missing)}.", fix, accuses=False)
        return
    read = {address for node in group.nodes for address in by_interface(node)}
    if not any(row.is_server() for row in group.rows):
        if group.first.joined:
            names = listed(list(dict.fromkeys(row.name for row in group.rows))[:SHOWN])
            wait = "waits" if len(group.rows) == 1 else "wait"
            title = f"{names} {wait} at {place} for more of its {size} ranks"
            if tasks and tasks < size and group.first.above is None:
                title += f"; its launcher has started {tasks} tasks"
            yield group.claim(group.rows, Level.WARN, title, "", group.ask_all(), accuses=False)
        return
    absent, level = _named_absent(group), group.level()
    if not absent and not _came(group) <= read:
        return  # an unread host has ranks
    one = len(absent or missing) == 1
    names = format_hosts(absent) if absent else f"{name_ranks(missing)} of {size}"
    title = f"{names} {'has' if one else 'have'} not connected to {place}"
    title += ", where rank 0 listens" if absent else ""
    detail = f"{'It is' if one else 'They are'} still starting, never started, or exited."
    detail = " ".join(
        (_leads_home(group) if absent else "", detail, *interfaces_in_words(group.rows, group.nodes, lacking=False))
    ).strip()
    output = format_hosts(absent) if absent else name_ranks(missing)
    text = f"if the output of {output} shows no import in progress, start {'it' if one else 'them'} again"
    fix = Fix(text=text, commands=(f"{group.asked.program} logs FILE",))
    found = group.claim([], level, title, detail, fix)
    seen_hosts = {node.host for node in group.nodes if not node.missing}
    accused = [name for name in absent if level is Level.FAIL or name in seen_hosts]
    is_long = level is Level.FAIL and not absent
    yield replace(found, hosts=tuple(accused), ranks=frozenset(missing if is_long else ()))


def _came(group: Group) -> frozenset[str]:
    """Return the addresses connected to this job's stores, except those of other jobs."""
    clients = {client for row in group.rows if row.is_server() and row.meeting for client in row.meeting.clients}
    others = {address for row in group.others for address in row.own}
    own = {address for row in group.rows for address in row.own}
    return frozenset(client for client in clients - (others - own) if not is_loopback(client))


def _named_absent(group: Group) -> list[str]:
    """Return the unconnected nodes of deepspeed's or SLURM's list; none if ambiguous."""
    expected = group.expected
    own = {address for row in group.rows for address in row.own}
    known = {address for addresses in expected.values() for address in addresses}
    if not all(expected.values()) or not _came(group) <= known | own:
        return []
    here = {row.host.partition(".")[0] for row in group.rows}
    came = _came(group) | own
    return [name for name, has in expected.items() if not came & set(has) and name.partition(".")[0] not in here]


def _leads_home(group: Group) -> str:
    met = group.rows[0].meeting
    return f"{met.host} leads any other node to itself." if met is not None and meets_at_loopback(met) else ""
