"""Record of a run of ranks: hosts, plan, course. Input of the judgement, and the content of --save."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Generic, TypeVar

from distdiag.cluster.host_results import HostError, HostResult  # noqa: TC001
from distdiag.cluster.rendezvous_test import RendezvousTest  # noqa: TC001
from distdiag.cluster.start_fleet import Agent
from distdiag.facts import machine
from distdiag.launch.collect import Ask
from distdiag.launch.rank_runs import Outcome, RankTimeline  # noqa: TC001
from distdiag.launch.types import Backend, Device, NodeFacts, Request, RunFacts
from distdiag.record import record
from distdiag.report import Finding  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from distdiag.launch import rank_runs
    from distdiag.output import Progress
    from distdiag.report import Report

# msgspec reads the annotations.


@record(kw_only=True)
class NodeSlot:
    """A node that can run ranks: its name in the fleet, its host for texts, and its facts."""

    node: str
    host: str
    slots: int | None
    facts: NodeFacts
    local: tuple[int, int] | None = None
    """Local rank and local world size of a process started by a launcher; None if distdiag starts the ranks."""
    door: str = ""
    """The node of this machine that tests paths to other machines, if that is another process."""


@record(kw_only=True)
class Allocation:
    """The ranks of one node."""

    node: str
    host: str
    first_rank: int
    nproc: int
    memory_available_bytes: int | None
    """Of the node, None if unknown."""
    cpus: int | None
    """Cores of the node usable by its programs."""
    sharing: int
    """Ranks per GPU."""
    first_local_rank: int
    local_world_size: int
    door: str
    """See NodeSlot."""


@record(kw_only=True)
class Plan:
    """The ranks to run on each node, numbered node by node."""

    shares: tuple[Allocation, ...]
    backend: Backend
    device: Device

    @property
    def nproc(self) -> int:
        """Total number of ranks."""
        return sum(share.nproc for share in self.shares)

    @property
    def machines(self) -> list[list[int]]:
        """Ranks of each machine, by local rank."""
        found: dict[str, list[int]] = {}
        for share in self.shares:
            found.setdefault(share.door, []).extend(range(share.first_rank, share.first_rank + share.nproc))
        return list(found.values())


@record(kw_only=True)
class Inventory:
    """The state before ranks start: a row per host, refusals by host, and the nodes' facts."""

    places: tuple[NodeSlot, ...]
    rows: tuple[HostResult, ...] = ()
    refusals: dict[str, HostError] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    twins: tuple[tuple[str, str], ...] = ()
    """(left out, kept): two names of one machine."""


@record
class RunRecord:
    """The course of a run: outcome, trace of each rank in order, and seconds without progress at the end."""

    outcome: Outcome
    traces: list[RankTimeline]
    log_dirs: dict[str, str]
    """By host."""
    stalled_s: float
    meeting: RendezvousTest | None = None
    lost: dict[str, HostError] = field(default_factory=dict)


@record(kw_only=True)
class NotStarted:
    """Why no rank was started."""

    scene: Inventory
    why: tuple[Finding, ...] = ()
    plan: Plan | None = None
    meeting: RendezvousTest | None = None
    interrupted: bool = False


@record(kw_only=True)
class SavedRun:
    """A run (`scene`, `plan`, `course`), or why it did not start (`not_run`). `host`: where distdiag ran.

    `program`: the command that restarts all ranks, if under a launcher. `extra`: an additional finding.
    """

    host: str
    program: str = ""
    scene: Inventory | None = None
    plan: Plan | None = None
    course: RunRecord | None = None
    not_run: NotStarted | None = None
    extra: Finding | None = None

    @classmethod
    def of_none(cls, why: NotStarted) -> SavedRun:
        """Return the record of a run that was not started."""
        return cls(host=machine.host_name(), not_run=why)


Asked = TypeVar("Asked", bound=Request)
Data = TypeVar("Data", bound=RunFacts)


@record(kw_only=True)
class Job(Generic[Asked, Data]):
    """A command's use of ranks: their module, configuration, and the diagnosis of the run."""

    request: Asked
    rank: str
    """The module of every rank, with main(config)."""
    config: Callable[[Asked, Plan, Allocation, int], Mapping[str, object]]
    """The command's own part of a rank's configuration."""
    diagnose: Callable[[Asked, Inventory, Plan, RunRecord], Report[Data]]
    data: type[Data]
    report_progress: Callable[[rank_runs.Run, Progress], str] | None = None
    """Reports news of a run besides its stages; returns its progress for the updating line."""

    @property
    def agent(self) -> Agent:
        """The agent for the nodes."""
        return Agent(
            collect="distdiag.launch.collect",
            facts=NodeFacts,
            ask=Ask(gpus=self.request.device is not Device.CPU),
            rank=self.rank,
        )
