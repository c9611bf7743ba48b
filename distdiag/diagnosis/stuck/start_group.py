"""The waiting processes of one job that does not start, and the parts that all rules share. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.diagnosis.stuck.start_rows import (
    LOOPBACK,
    StartRow,
    evidence_of,
    interfaces_in_words,
    is_served,
    limit_s,
    meets_at_loopback,
    owners,
)
from distdiag.diagnosis.stuck.types import Claim, Source, StuckKind
from distdiag.diagnosis.wording import lasting
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.types import Asked
    from distdiag.jobs.types import NodePicture

LATE_S = 300.0
"""A node or rank that others have waited for this long is not just slow to start."""
SHOWN = 8


class Group:
    """The waiting processes of one job. `others`: those of other jobs; `states`: all ranks of this job.

    `served`: the processes that run its store; `met`: those connected to a store elsewhere. `not_here`: ranks that do
    not wait. `waited_s`: the longest wait. `expected`: the addresses of each node of deepspeed's or SLURM's list.
    """

    def __init__(
        self,
        asked: Asked,
        nodes: Sequence[NodePicture],
        rows: Sequence[StartRow],
        others: Sequence[Sequence[StartRow]] = (),
        states: Sequence[RankState] = (),
    ) -> None:
        self.asked, self.nodes, self.rows = asked, nodes, rows
        self.others = [row for job in others for row in job]
        self.owner = owners(nodes)
        self.first = rows[0].start
        self.of_ranks = rows[0].is_rank
        self.several = max(row.start.launch.nodes[0] for row in rows) > 1 or self.of_ranks
        self.served = [row for row in rows if is_served(row, rows)]
        self.met = [row for row in rows if row.start.joined and row.meeting is not None and not row.meeting.is_here]
        self.waited_s = max(row.start.waited_s for row in rows)
        self.expected = {name: own for node in nodes for read in node.starts for name, own in read.expected.items()}
        here = {(row.host, row.start.pid) for row in rows}
        self.not_here = [state for state in states if (state.member.host, state.member.pid) not in here]

    def claim(
        self, rows: Iterable[StartRow], level: Level, title: str, detail: str, fix: Fix | None, *, accuses: bool = True
    ) -> Claim:
        """Claim that these processes hold up the start, or with accuses=False only wait. FAIL: sure."""
        rows = list(rows)
        hosts = tuple(dict.fromkeys(row.host for row in rows)) if accuses else ()
        ranks = frozenset(row.start.rank for row in rows if row.start.rank is not None) if accuses else frozenset()
        return Claim(
            source=Source.START,
            kind=StuckKind.RENDEZVOUS,
            is_sure=level is Level.FAIL,
            says=title,
            detail=" ".join(
                filter(None, (detail, *interfaces_in_words(self.rows, self.nodes, lacking=True), self._ends()))
            ),
            hosts=hosts,
            ranks=ranks,
            pids=tuple(row.start.pid for row in rows),
            evidence=tuple(evidence_of(row) for row in self.rows)[:SHOWN],
            fix=fix,
            seconds=self.waited_s,
        )

    def _ends(self) -> str:
        """Format the waiting time, and the time left until the timeout."""
        left = [seconds - row.start.waited_s for row in self.rows if (seconds := limit_s(row)) is not None]
        ends = f"; it gives up in {lasting(min(left))}" if left and min(left) > 0 else ""
        return f"The job has waited for {lasting(self.waited_s)}{ends}."

    def level(self) -> Level:
        """FAIL once missing processes are too late to be expected, else WARN."""
        return Level.FAIL if self.waited_s > LATE_S else Level.WARN

    def right_place(self) -> str:
        """Return the rendezvous served by a process of this job, else rank 0's; empty if neither is known."""
        served = self.served or self.met
        if served and not (served[0].meeting is not None and meets_at_loopback(served[0].meeting)):
            return served[0].place
        first = next(iter(served), None) or next(
            (row for row in self.rows if row.is_rank and row.start.rank == 0), None
        )
        if first is None:
            return ""
        own = [address for address in first.own - LOOPBACK if self.owner.get(address, first.host) == first.host]
        address = min(own, key=lambda address: (":" in address, address), default=first.host)
        return f"{f'[{address}]' if ':' in address else address}:{first.start.launch.port}"

    def ask_all(self, absent: Iterable[str] = ()) -> Fix:
        """Return the command that asks all nodes of the job, or these and those already read."""
        hosts = ",".join(dict.fromkeys([*(row.host for row in self.rows), *absent])) if absent else "LIST"
        return Fix(
            text="next: ask all of its nodes; on a missing node, test the path to the first",
            commands=(
                f"{self.asked.program} hang --hosts {hosts}",
                f"{self.asked.program} ports {self.right_place() or self.rows[0].place}",
            ),
        )
