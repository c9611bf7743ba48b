"""Rules on the members that a job's store knows, where the node of the store was not read. Pure.

Warnings only: a store outlives a launcher that was restarted, and may serve several jobs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.stuck.start_fixes import corrected, node_rank_option, options_for
from distdiag.diagnosis.stuck.start_group import LATE_S
from distdiag.diagnosis.wording import format_hosts, listed
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.diagnosis.stuck.start_group import Group
    from distdiag.diagnosis.stuck.start_rows import StartRow
    from distdiag.diagnosis.stuck.types import Claim
    from distdiag.facts.network.tcp_store import Store

_NO_ID = "none"
"""torchrun's default of --rdzv-id, the prefix of its keys."""

_LATE = "It is still starting, never started, or exited."


def in_store(group: Group) -> Iterable[Claim]:
    """A member is missing from the store, or a member's options differ from its own."""
    row = next((row for row in group.rows if row.meeting is not None and row.meeting.store is not None), None)
    if group.served or row is None or row.meeting is None or row.meeting.store is None:
        return
    store = row.meeting.store
    rule = _ranks if group.of_ranks else _c10d if row.start.launch.backend == "c10d" else _static
    yield from rule(group, row, store)


def _c10d(group: Group, row: StartRow, store: Store) -> Iterable[Claim]:
    launch = row.start.launch
    own = next((each for each in store.rendezvous if each.run_id == (launch.run_id or _NO_ID)), None)
    waiting = [each for each in store.rendezvous if each is not own and each.hosts and not each.is_complete]
    least, joined = launch.nodes[0], len(own.hosts) if own is not None else 0
    if own is None or own.is_complete or joined >= least:
        return
    if waiting and set(own.hosts).isdisjoint(waiting[0].hosts):
        values = f"{waiting[0].run_id} on {format_hosts(waiting[0].hosts)}, {own.run_id} on {format_hosts(own.hosts)}"
        line = corrected(row.start, [f"--rdzv-id={waiting[0].run_id}"])
        fix = Fix(text="start all nodes of a job with the same --rdzv-id", commands=(f"{line}  # on {row.host}",))
        detail = f"If these are two jobs, each needs its own port: both wait at {row.place}."
        title = f"the nodes were started with different --rdzv-id: {values}"
        yield _warn(group, title, detail, fix if line else None)
        return
    title = f"{joined} of {least} nodes {'has' if joined == 1 else 'have'} joined at {row.place}"
    absent = _absent(group, own.hosts, missing=least - joined)
    if absent:
        title += f": {launch.program} does not run on {format_hosts(absent)}, or has not connected"
    else:
        title += f": {format_hosts(own.hosts)}"
    yield _warn(group, title, "", None, absent)


def _static(group: Group, row: StartRow, store: Store) -> Iterable[Claim]:
    launch = row.start.launch
    least, own_id = launch.nodes[0], launch.run_id or _NO_ID
    joined = {number for run_id, number in store.node_ranks if run_id == own_id}
    first = next((run_id for run_id, number in store.node_ranks if number == 0), None)
    others = [each for each in store.rendezvous if each.hosts]
    connected = store.connected or 0
    if 0 not in joined and others:
        host = format_hosts(others[0].hosts)
        title = f"the nodes were started with different --rdzv-backend: c10d on {host}, {launch.backend} on {row.host}"
        yield _warn(group, title, "", Fix(text="start all nodes with the same --rdzv-backend"))
    elif 0 not in joined and first is not None:
        title = f"{row.name} meets at {row.place}, the store of another job: its --rdzv-id is {first}, not {own_id}"
        options = " ".join(options_for(launch, f"{launch.host}:PORT"))
        text = f"end that job if it is left over, or give this job another port: {options}"
        yield _warn(
            group, title, "", Fix(text=text, commands=(f"ss -ltnp 'sport = :{launch.port}'  # on {launch.host}",))
        )
    elif connected < least:
        title = f"{connected} of {least} nodes {'has' if connected == 1 else 'have'} connected to {row.place}"
        yield _warn(group, title, "", None, _absent(group, _hosts(group, row), missing=least - connected))
    elif 0 not in joined:
        title = f"{connected} nodes have connected to {row.place}, which waits for more: its --nnodes is not {least}"
        yield _warn(group, title, "", Fix(text="start all nodes with the same --nnodes"))
    elif missing := sorted(set(range(least)) - joined):
        number, option = missing[0], node_rank_option(launch)
        title = f"{connected} nodes have connected to {row.place}, but none was started with {option} {number}"
        ranks = listed(list(map(str, sorted(joined))))
        detail = (
            f"Two of them have the same {option}, or a launcher was started twice. The store has node rank {ranks}."
        )
        line = corrected(row.start, [f"{option}={number}"])
        text = f"give each node its own: 0 to {least - 1}; {row.host}, if another node is {launch.node_rank} too:"
        yield _warn(group, title, detail, Fix(text=text, commands=(line,) if line and len(missing) == 1 else ()))


def _ranks(group: Group, row: StartRow, store: Store) -> Iterable[Claim]:
    size, connected = row.start.world_size or 0, store.connected or 0
    ready = dict(store.ranks)
    missing = sorted(set(range(size)) - set(ready))
    is_of_rank_0 = row.start.above is None  # the store of a torchrun waits for no rank
    if connected < size and 0 in ready and is_of_rank_0:
        title = f"rank 0 has gone on with {connected} ranks, but {row.name} waits for WORLD_SIZE={size}"
        yield _warn(group, title, "", Fix(text="start all ranks with the same WORLD_SIZE"))
    elif 0 < connected < size:
        title = f"{connected} of {size} ranks {'has' if connected == 1 else 'have'} connected to {row.place}"
        each = size // len(group.expected) if group.expected and size % len(group.expected) == 0 else 0
        late = (size - connected) // each if each and (size - connected) % each == 0 else 0
        absent = _absent(group, _hosts(group, row), missing=late)
        title += f": {format_hosts(absent)} {'has' if len(absent) == 1 else 'have'} not" if absent else ""
        if row.start.above is None and row.start.tasks is not None and row.start.tasks < size:
            title += f"; the launcher has started {row.start.tasks} tasks"
        yield _warn(group, title, _LATE if absent else "", None, absent)
    elif ready and missing and is_of_rank_0:
        title = f"{connected} ranks have connected to {row.place}, but none of them is {name_ranks(missing)} of {size}"
        places = [f"{rank} on {host}" if host else str(rank) for rank, host in sorted(ready.items())]
        detail = f"Two have the same RANK, or a rank was started twice. The store has rank {listed(places[:8])}."
        yield _warn(group, title, detail, Fix(text=f"give each process its own RANK: 0 to {size - 1}"))


def _hosts(group: Group, row: StartRow) -> list[str]:
    """Return the hosts of this node and of the store, by the job's list of nodes."""
    here = row.own | set(row.meeting.addresses if row.meeting is not None else ())
    return [name for name, own in group.expected.items() if here & set(own)]


def _absent(group: Group, joined: Sequence[str], *, missing: int) -> list[str]:
    """Return the nodes of the job's list that have not joined; none if their number does not fit."""
    short = {name.partition(".")[0] for name in joined}
    absent = [name for name in group.expected if name.partition(".")[0] not in short]
    return absent if len(absent) == missing else []


def _warn(group: Group, title: str, detail: str, fix: Fix | None, absent: Sequence[str] = ()) -> Claim:
    """Claim it, with the command that asks all nodes if there is no better one. Slow nodes are not accused."""
    found = group.claim(group.rows, Level.WARN, title, detail, fix or group.ask_all(absent), accuses=False)
    return replace(found, hosts=tuple(absent) if group.waited_s > LATE_S else ())
