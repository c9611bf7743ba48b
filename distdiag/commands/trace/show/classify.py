"""Group processes into runs of a job, place each rank by its last lines, and find the outliers. Pure.

As with stacks, the outlier is the rank outside communication while the others are in it, not the rarest line;
diagnosis/outliers judges that. This module adds evidence found only in recorded lines: the age of a line in place of
two samples, and the order and exceptions of ranks that ended.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from distdiag.diagnosis.outliers import minority_of, stuck_of
from distdiag.facts.recorder.line_trace_file import JOB_NAMES
from distdiag.knowledge.calls import call_in
from distdiag.knowledge.frames import kind_of
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from distdiag.commands.trace.show.collect import Line, NodeLines, Process

COMM = "communication wait"
FRESH_S = 2.0
"""A process with a younger last line makes progress."""
LONG_S = 10.0
"""A line that takes longer than this counts as stuck, if the others wait."""


class Place(NamedTuple):
    """Where a main thread is, or was when it ended. `kind` and `operation`: the wait there and the call it is in.

    `user`: the last line of the user's own code, `library`: the last line, if from a library.
    """

    kind: str = ""
    operation: str = ""
    user: Line | None = None
    library: Line | None = None

    @property
    def line(self) -> Line | None:
        """The user's line, else the library's."""
        return self.user or self.library


@record(kw_only=True, eq=False)
class Member:
    """One rank of a run. `helpers` are processes it started: data workers."""

    host: str
    process: Process
    helpers: tuple[Process, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank; None if unknown."""
        return self.process.rank

    @property
    def processes(self) -> tuple[Process, ...]:
        """The rank's own process and its helpers."""
        return (self.process, *self.helpers)

    @property
    def order(self) -> tuple[bool, int]:
        """Sort key: by rank, unknown ranks last."""
        return self.rank is None, self.rank or 0

    @cached_property
    def place(self) -> Place:
        """Where its main thread is."""
        return _place_of(self.process)

    @property
    def goes_on(self) -> bool:
        """Whether its last line is fresh."""
        return self.process.state == "running" and self.process.age_s is not None and self.process.age_s < FRESH_S


@record(kw_only=True)
class Run:
    """The processes that ran at the same time as one job."""

    name: str
    world_size: int | None
    members: tuple[Member, ...]
    began_s: float


class Outcome(StrEnum):
    """The classification of a run by its last lines."""

    ENDED = "ended"
    GOES_ON = "goes-on"
    STUCK = "stuck-rank"
    STRAGGLER = "straggler"
    GONE = "exited"
    LEFT_FIRST = "exited-first"
    ELSEWHERE = "elsewhere"
    SAME = "same-place"
    APART = "undecided"
    ALONE = "last-line"
    NOTHING = "no-lines"


class RunVerdict(NamedTuple):
    """`outliers`: the suspects; `others`: the ranks waiting for them, or all remaining ranks."""

    run: Run
    outcome: Outcome
    outliers: Sequence[Member] = ()
    others: Sequence[Member] = ()


def classify_run(run: Run) -> RunVerdict:
    """Classify a run, and find its outliers if the lines show any."""
    members = [member for member in run.members if member.place.line is not None]
    ended, raised, died, running = (
        [member for member in members if member.process.state == state]
        for state in ("ended", "raised", "died", "running")
    )
    if not members:
        return RunVerdict(run, Outcome.NOTHING)
    if len(ended) == len(members):
        return RunVerdict(run, Outcome.ENDED)
    first = _first_to_leave(ended, raised, died)
    if running and len(running) < len(members):
        return RunVerdict(run, Outcome.GONE, first or [*ended, *raised, *died], running)
    if running and all(member.goes_on for member in running):
        return RunVerdict(run, Outcome.GOES_ON, (), running)
    if len(members) == 1:
        return RunVerdict(run, Outcome.ALONE, (), members)
    if first and len(died) < len(members):
        return RunVerdict(run, Outcome.LEFT_FIRST, first, [member for member in members if member not in first])
    return RunVerdict(run, *_compare(members))


def _first_to_leave(ended: list[Member], raised: list[Member], died: list[Member]) -> list[Member]:
    """Find the rank whose end caused the others': an exception in a collective usually means another rank exited."""
    causes = [member for member in raised if member.place.kind != COMM]
    if causes:
        return [min(causes, key=_ended_s)]
    if died and (raised or not ended):
        return died
    return [min(ended, key=_ended_s)] if ended else []


def _ended_s(member: Member) -> float:
    return float("inf") if member.process.ended_s is None else member.process.ended_s


def _compare(members: Sequence[Member]) -> tuple[Outcome, Sequence[Member], Sequence[Member]]:
    waiting = [member for member in members if member.place.kind == COMM]
    others = [member for member in members if member.place.kind != COMM]
    if waiting and others:
        # Stricter than for stacks, where half is enough: these are the lines of one moment, not two samples.
        if len(others) > len(waiting) and all(member.goes_on for member in others):
            return Outcome.GOES_ON, (), members
        outliers = stuck_of(others, lambda member: member.goes_on)
        return Outcome.STRAGGLER if are_young(outliers) else Outcome.STUCK, outliers, waiting
    groups = by_place(members)
    if len(groups) == 1:
        return Outcome.SAME, (), members
    if few := minority_of(groups):
        return Outcome.ELSEWHERE, few, groups[1]
    return Outcome.APART, (), members


def are_young(members: Iterable[Member]) -> bool:
    """Return whether all may only be slow."""
    return all(member.process.state == "running" and (member.process.age_s or 0) < LONG_S for member in members)


def by_place(members: Iterable[Member]) -> list[list[Member]]:
    """Group members by place, the smallest group first."""
    groups: dict[Hashable, list[Member]] = {}
    for member in members:
        line, place = member.place.line, member.place
        where = (place.kind, place.operation, line.file, line.line) if line is not None else None
        groups.setdefault((where, member.process.state), []).append(member)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].order))


def _place_of(process: Process) -> Place:
    """Classify where a process's main thread is, by the source of its last line and the library function it is in."""
    if process.error_at is not None:
        return Place(*call_in(process.error_at.source), process.error_at)
    thread = next((thread for thread in process.threads if thread.main and thread.last), None)
    if thread is None:
        return Place()
    last = thread.last[-1]
    if last.kind == "user":
        return Place(*call_in(last.source), last)
    kind, operation = call_in(thread.user.source) if thread.user is not None else ("", "")
    inside = takewhile(lambda line: line.kind != "user", reversed(thread.last))  # since the user's last line
    inner, is_weak = next((found for line in inside if (found := kind_of(line.function, line.file))[0]), ("", True))
    if inner and not is_weak:
        kind, operation = inner, operation if operation and kind == inner else last.function
    return Place(kind, operation, thread.user, last)


def latest_helper(member: Member) -> tuple[Process, Line] | None:
    """For a rank waiting for data, find the helper process idle for the longest, with its last line."""
    helpers = [
        (helper, thread.last[-1])
        for helper in (member.helpers if member.place.kind == "data loading" else ())
        for thread in helper.threads
        # Multiprocessing's servers, which fork workers or clean up after a job, have a single line.
        if thread.main and thread.last and thread.last[-1].file != "<string>"
        if helper.state != "ended" and helper.age_s is not None
    ]
    return max(helpers, key=lambda item: item[0].age_s or 0.0, default=None)


def find_runs(nodes: Iterable[NodeLines]) -> list[Run]:
    """Group processes into runs, the newest run last.

    Jobs can share an identity (the same port every day): a second process with the same rank starts a new run.
    """
    jobs: dict[Hashable, list[list[Member]]] = {}
    members = [member for node in nodes for member in _members(node)]
    for member in sorted(members, key=lambda member: member.process.began_s):
        runs = jobs.setdefault(_job(member), [])
        if not runs or member.rank in {other.rank for other in runs[-1]}:
            runs.append([])
        runs[-1].append(member)
    groups = sorted((group for runs in jobs.values() for group in runs), key=lambda group: group[-1].process.began_s)
    return [
        Run(
            name=_name(group[0].process),
            world_size=group[0].process.world_size,
            members=tuple(sorted(group, key=lambda member: (member.order, member.host))),
            began_s=group[0].process.began_s,
        )
        for group in groups
    ]


def newest(runs: Sequence[Run]) -> list[Run]:
    """Return the runs shown by default: the newest, and every other run still alive."""
    alive = [run for run in runs[:-1] if any(member.process.state == "running" for member in run.members)]
    return [*alive, *runs[-1:]]


def _members(node: NodeLines) -> list[Member]:
    """Separate ranks from their child processes, which inherit the rank in their environment."""
    by_pid = {process.pid: process for process in sorted(node.processes, key=lambda process: process.began_s)}
    heads = {id(process): _head(process, by_pid) for process in node.processes}
    helpers: dict[int, list[Process]] = {}
    for process in node.processes:
        helpers.setdefault(id(heads[id(process)]), []).append(process)
    return [
        Member(host=node.host, process=head, helpers=tuple(one for one in helpers[id(head)] if one is not head))
        for head in node.processes
        if heads[id(head)] is head
    ]


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


def _job(member: Member) -> Hashable:
    process = member.process
    if process.rank is None:
        return ("", process.owner, member.host, process.pid)
    # Whoever may write beside a job's files must not become one of its ranks.
    return (process.launcher, process.owner, *(process.job.get(name, "") for name in JOB_NAMES), process.world_size)


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
