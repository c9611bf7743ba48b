"""Why a job does not start, by its waiting launchers, or its ranks in init_process_group. Pure.

torchrun prints no reason until it gives up, 1 to 10 minutes later, and then only a timeout. The nodes' views of the
rendezvous are compared: a name, a port, a firewall, a missing node.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.diagnosis.outliers import in_init
from distdiag.diagnosis.stack_wording import briefly
from distdiag.diagnosis.stuck import start_members as members
from distdiag.diagnosis.stuck import start_places as places
from distdiag.diagnosis.stuck.start_group import Group
from distdiag.diagnosis.stuck.start_rows import StartRow, owners, resolved
from distdiag.diagnosis.stuck.start_store import in_store
from distdiag.diagnosis.stuck.types import Claim, Source, StuckKind
from distdiag.fold import by_key
from distdiag.report import Fix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.types import Asked
    from distdiag.jobs.types import NodePicture

_RULES = (
    places.unresolved,
    places.itself,
    places.stranger,
    places.other_place,
    members.other_options,
    members.other_ranks,
    places.unreachable,
    places.first_address,
    places.wrong_interface,
    members.on_the_way,
    places.nobody_listens,
    in_store,
    members.waits_for_more,
    members.ranks_missing,
)
"""The first rule with a claim decides."""


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
    found = (Group(asked, nodes, rows, [job for job in jobs if job is not rows], states) for rows in jobs)
    return sorted((claim for group in found for claim in _claims(group)), key=lambda claim: not claim.is_sure)


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
    by_place = by_key((resolved(row, owner), row) for row in rows)
    served = [place for place, own in by_place.items() if any(row.is_server() for row in own)]
    each_its_own = len(by_place) == len({row.host for row in rows}) == rows[0].start.launch.nodes[0]
    return list(by_place.values()) if len(served) > 1 and not each_its_own else [list(rows)]


def _claims(group: Group) -> list[Claim]:
    return next((found for rule in _RULES if (found := list(rule(group)))), [])
