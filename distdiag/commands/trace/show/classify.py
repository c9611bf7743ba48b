"""Group processes into runs of a job, place each rank by its last lines, and find the outliers. Pure.

As with stacks, the outlier is the rank outside communication while the others are in it, not the rarest line;
diagnosis/outliers judges that. This module adds evidence found only in recorded lines: the age of a line in place of
two samples, and the order and exceptions of ranks that ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.diagnosis.outliers import minority_of, stuck_of
from distdiag.knowledge.calls import call_in
from distdiag.knowledge.frames import kind_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from distdiag.commands.trace.show.collect import Line, NodeLines, Process

COMM = "communication wait"
FRESH_S = 2.0
"""A process with a younger last line makes progress."""
LONG_S = 10.0
"""A line that takes longer than this counts as stuck, if the others wait."""
_JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT")
_STATES = ("running", "ended", "raised", "died")


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank of a run. `helpers` are processes it started: data workers."""

    host: str
    process: Process
    helpers: tuple[Process, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank; None if unknown."""
        return self.process.rank


@dataclass(frozen=True, kw_only=True)
class Run:
    """The processes that ran at the same time as one job."""

    name: str
    world_size: int | None
    members: tuple[Member, ...]
    began_s: float


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a member's main thread is, or was when it ended.

    `kind` and `operation`: the wait there and the call it is in. `user`: the last line of the user's own code,
    `library`: the last line, if from a library.
    """

    member: Member
    kind: str = ""
    operation: str = ""
    user: Line | None = None
    library: Line | None = None

    @property
    def line(self) -> Line | None:
        """The user's line, else the library's."""
        return self.user or self.library

    @property
    def state(self) -> str:
        """Of its process: "running", "ended", "raised" or "died"."""
        return self.member.process.state


class Outcome(StrEnum):
    """The classification of a run by its last lines."""

    ENDED = "ended"
    GOES_ON = "goes-on"
    STUCK = "stuck-rank"
    STRAGGLER = "straggler"
    GONE = "exited"
    LEFT_FIRST = "left-first"
    ELSEWHERE = "elsewhere"
    SAME = "same-place"
    APART = "undecided"
    ALONE = "last-line"
    NOTHING = "no-lines"


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """`outliers`: the suspects; `others`: the ranks waiting for them, or all remaining ranks."""

    run: Run
    positions: tuple[Position, ...]
    outcome: Outcome
    outliers: tuple[Position, ...]
    others: tuple[Position, ...]


def classify_run(run: Run) -> RunVerdict:
    """Classify a run, and find its outliers if the lines show any."""
    positions = tuple(map(position_of, run.members))
    outcome, outliers, others = _classify([position for position in positions if position.line is not None])
    return RunVerdict(run=run, positions=positions, outcome=outcome, outliers=tuple(outliers), others=tuple(others))


def _classify(positions: Sequence[Position]) -> tuple[Outcome, Sequence[Position], Sequence[Position]]:
    if not positions:
        return Outcome.NOTHING, [], []
    by_state = {state: [position for position in positions if position.state == state] for state in _STATES}
    running, gone = by_state["running"], [position for position in positions if position.state != "running"]
    if len(by_state["ended"]) == len(positions):
        return Outcome.ENDED, [], []
    if running and gone:
        return Outcome.GONE, _first_to_leave(by_state) or gone, running
    if running and all(map(_goes_on, running)):
        return Outcome.GOES_ON, [], running
    if len(positions) == 1:
        return Outcome.ALONE, [], positions
    first = _first_to_leave(by_state)
    if first and len(by_state["died"]) < len(positions):
        left_first = set(map(id, first))
        return Outcome.LEFT_FIRST, first, [position for position in positions if id(position) not in left_first]
    return _compare(positions)


def _first_to_leave(by_state: Mapping[str, list[Position]]) -> list[Position]:
    """Find the rank whose end caused the others': an exception in a collective usually means another rank exited."""
    causes = [position for position in by_state["raised"] if position.kind != COMM]
    if causes:
        return [min(causes, key=_ended_s)]
    if by_state["died"] and (by_state["raised"] or not by_state["ended"]):
        return by_state["died"]
    return [min(by_state["ended"], key=_ended_s)] if by_state["ended"] else []


def _ended_s(position: Position) -> float:
    ended_s = position.member.process.ended_s
    return float("inf") if ended_s is None else ended_s


def _compare(positions: Sequence[Position]) -> tuple[Outcome, Sequence[Position], Sequence[Position]]:
    waiting = [position for position in positions if position.kind == COMM]
    others = [position for position in positions if position.kind != COMM]
    if waiting and others:
        # Stricter than for stacks, where half is enough: these are the lines of one moment, not two samples.
        if len(others) > len(waiting) and all(map(_goes_on, others)):
            return Outcome.GOES_ON, [], positions
        outliers = stuck_of(others, _goes_on)
        return Outcome.STRAGGLER if are_young(outliers) else Outcome.STUCK, outliers, waiting
    groups = by_place(positions)
    if len(groups) == 1:
        return Outcome.SAME, [], positions
    if few := minority_of(groups):
        return Outcome.ELSEWHERE, few, groups[1]
    return Outcome.APART, [], positions


def _goes_on(position: Position) -> bool:
    age_s = position.member.process.age_s
    return position.state == "running" and age_s is not None and age_s < FRESH_S


def are_young(positions: Iterable[Position]) -> bool:
    """Return whether all may only be slow."""
    return all(position.state == "running" and (position.member.process.age_s or 0) < LONG_S for position in positions)


def by_place(positions: Iterable[Position]) -> list[list[Position]]:
    """Group positions by place, the smallest group first."""
    groups: dict[Hashable, list[Position]] = {}
    for position in positions:
        line = position.line
        place = (position.kind, position.operation, line.file, line.line) if line is not None else None
        groups.setdefault((place, position.state), []).append(position)
    return sorted(groups.values(), key=lambda group: (len(group), *_rank_order(group[0].member)))


def _rank_order(member: Member) -> tuple[bool, int]:
    return member.rank is None, member.rank or 0


def position_of(member: Member) -> Position:
    """Classify where a process's main thread is, by the source of its last line and the library function it is in."""
    raised_at = member.process.error_at
    if raised_at is not None:
        kind, operation = call_in(raised_at.source)
        return Position(member=member, kind=kind, operation=operation, user=raised_at)
    thread = next((thread for thread in member.process.threads if thread.main), None)
    if thread is None or not thread.last:
        return Position(member=member)
    last = thread.last[-1]
    library = last if last.kind != "user" else None
    user = last if library is None else thread.user
    kind, operation = call_in(user.source) if user is not None else ("", "")
    if library is not None:
        found = (kind_of(line.function, line.file) for line in _library_lines(thread.last))
        inner = next((inner for inner in found if inner[0]), None)
        if inner is not None and not inner[1]:
            kind, operation = inner[0], operation if operation and kind == inner[0] else library.function
    return Position(member=member, kind=kind, operation=operation, user=user, library=library)


def _library_lines(lines: Sequence[Line]) -> Iterable[Line]:
    """List the library lines since the user's last one, the newest first."""
    for line in reversed(lines):
        if line.kind == "user":
            return
        yield line


def latest_helper(position: Position) -> tuple[Process, Line] | None:
    """For a rank waiting for data, find the helper process idle for the longest, with its last line."""
    if position.kind != "data loading":
        return None
    helpers = [
        (helper, line)
        for helper in position.member.helpers
        for line in [thread.last[-1] for thread in helper.threads if thread.main and thread.last][:1]
        # Multiprocessing's servers, which fork workers or clean up after a job, have a single line.
        if helper.state != "ended" and helper.age_s is not None and line.file != "<string>"
    ]
    return max(helpers, key=lambda item: item[0].age_s or 0.0, default=None)


def find_runs(nodes: Iterable[NodeLines]) -> list[Run]:
    """Group processes into runs, the newest run last.

    Jobs can share an identity (the same port every day): a second process with the same rank starts a new run.
    """
    jobs: dict[tuple[object, ...], list[list[Member]]] = {}
    members = [member for node in nodes for member in _members(node)]
    for member in sorted(members, key=_began_s):
        runs = jobs.setdefault(_job(member), [])
        if not runs or member.rank in {other.rank for other in runs[-1]}:
            runs.append([])
        runs[-1].append(member)
    groups = sorted((group for runs in jobs.values() for group in runs), key=lambda group: _began_s(group[-1]))
    return [
        Run(
            name=_name(group[0].process),
            world_size=group[0].process.world_size,
            members=tuple(sorted(group, key=lambda member: (*_rank_order(member), member.host))),
            began_s=_began_s(group[0]),
        )
        for group in groups
    ]


def newest(runs: Sequence[Run]) -> list[Run]:
    """Return the runs shown by default: the newest, and every other run still alive."""
    alive = [run for run in runs[:-1] if any(member.process.state == "running" for member in run.members)]
    return [*alive, *runs[-1:]]


def _began_s(member: Member) -> float:
    return member.process.began_s


def _members(node: NodeLines) -> list[Member]:
    """Separate ranks from their child processes, which inherit the rank in their environment."""
    by_pid = {process.pid: process for process in sorted(node.processes, key=lambda process: process.began_s)}
    helpers: dict[int, list[Process]] = {}
    heads = []
    for process in node.processes:
        head = _head(process, by_pid)
        if head is process:
            heads.append(process)
        else:
            helpers.setdefault(id(head), []).append(process)
    return [Member(host=node.host, process=head, helpers=tuple(helpers.get(id(head), ()))) for head in heads]


def _head(process: Process, by_pid: Mapping[int, Process]) -> Process:
    """Find the topmost traced ancestor, also past untraced processes such as a shell."""
    head, known = process, {process.pid}
    while True:
        above = next((pid for pid in (head.parent, *head.ancestors) if pid in by_pid), None)
        if above is None or above in known:
            return head
        known.add(above)
        parent = by_pid[above]
        if parent.owner != process.owner or parent.rank != process.rank or parent.began_s > head.began_s:
            return head
        head = parent


def _job(member: Member) -> tuple[object, ...]:
    process = member.process
    if process.rank is None:
        return ("", process.owner, member.host, process.pid)
    # Whoever may write beside a job's files must not become one of its ranks.
    return (process.launcher, process.owner, *(process.job.get(name, "") for name in _JOB_NAMES), process.world_size)


def _name(process: Process) -> str:
    job = process.job
    if process.rank is None:
        name = f"pid {process.pid}"
    elif "SLURM_STEP_ID" in job:
        name = f"SLURM {job.get('SLURM_JOB_ID', '')}.{job['SLURM_STEP_ID']}"
    elif "MASTER_ADDR" in job:
        name = f"job {job['MASTER_ADDR']}:{job.get('MASTER_PORT', '')}"
    else:
        name = f"job of {process.launcher}"
    return f"{name} of user {process.owner}" if process.owner else name
