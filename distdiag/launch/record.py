"""All that is known of a run of ranks: hosts, plan, how it went. What --save writes of it, and what is judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distdiag.cluster.host_results import HostError, HostResult  # noqa: TC001
from distdiag.cluster.rank_runs import Outcome, RankTimeline  # noqa: TC001
from distdiag.cluster.rendezvous_test import RendezvousTest  # noqa: TC001
from distdiag.cluster.start_fleet import Agent
from distdiag.facts import machine
from distdiag.launch.types import Backend, Device, NodeFacts, Request
from distdiag.report import Finding  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.cluster import rank_runs
    from distdiag.output import Progress
    from distdiag.report import Report

# msgspec reads the annotations.


@dataclass(frozen=True, kw_only=True)
class NodeSlot:
    """A node that ranks can run on: its name in the fleet, what to call it, and its facts."""

    node: str
    host: str
    slots: int | None
    facts: NodeFacts
    local: tuple[int, int] | None = None
    """Local rank and local world size of a process that a launcher started; None where we start the ranks."""
    door: str = ""
    """The node of the same machine that tests the paths to other machines, if that is another process."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The ranks of one node."""

    node: str
    host: str
    first_rank: int
    nproc: int
    memory_available_bytes: int | None
    """Of the node, None if it is unknown."""
    cpus: int | None
    """Cores of the node that its programs may use."""
    sharing: int
    """Ranks on one GPU."""
    first_local_rank: int
    local_world_size: int
    door: str
    """See NodeSlot."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be run, on which nodes; ranks are numbered node by node."""

    shares: tuple[Allocation, ...]
    backend: Backend
    device: Device

    @property
    def nproc(self) -> int:
        """Ranks in all."""
        return sum(share.nproc for share in self.shares)

    @property
    def machines(self) -> list[list[int]]:
        """Ranks of each machine, by local rank."""
        found: dict[str, list[int]] = {}
        for share in self.shares:
            found.setdefault(share.door, []).extend(range(share.first_rank, share.first_rank + share.nproc))
        return list(found.values())


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What is known before ranks start: a row for each host, which cannot be used and why, and the nodes' facts."""

    places: tuple[NodeSlot, ...]
    rows: tuple[HostResult, ...] = ()
    refusals: dict[str, HostError] = field(default_factory=dict)
    duplicates: tuple[str, ...] = ()
    twins: tuple[tuple[str, str], ...] = ()
    """(left out, kept): two names of one machine."""


@dataclass(frozen=True)
class RunRecord:
    """How the run went: its end, every rank's trace in order of rank, and how long no rank made progress at the end."""

    outcome: Outcome
    traces: list[RankTimeline]
    log_dirs: dict[str, str]
    """By host."""
    stalled_s: float
    meeting: RendezvousTest | None = None
    lost: dict[str, HostError] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NotStarted:
    """Why no rank was started."""

    scene: Inventory
    why: tuple[Finding, ...] = ()
    plan: Plan | None = None
    meeting: RendezvousTest | None = None
    interrupted: bool = False


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run: `scene`, `plan` and `course`; or why there was none: `not_run`. `host`: where it was started from.

    `program`: how all ranks are started again, if a launcher started them. `extra`: a finding besides.
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
Data = TypeVar("Data")


@dataclass(frozen=True, kw_only=True)
class Job(Generic[Asked, Data]):
    """What a command does with ranks: what they run, their configuration, and the diagnosis of the run."""

    request: Asked
    rank: str
    """The module that every rank runs: main(config)."""
    config: Callable[[Asked, Plan, Allocation, int], dict[str, Any]]
    """The command's own part of a rank's configuration."""
    diagnose: Callable[[Asked, Inventory, Plan, RunRecord], Report[Data]]
    no_data: Callable[[Asked, NotStarted, dict[str, Any]], Data]
    """Returns the facts of a run that never began, from the fields of RunFacts."""
    report_progress: Callable[[rank_runs.Run, Progress], str] | None = None
    """Reports what is new in a run under way, besides the stages; returns how far it is, for the line that changes."""

    @property
    def agent(self) -> Agent:
        """What runs on the nodes."""
        return Agent(
            collect="distdiag.launch.collect",
            facts=NodeFacts,
            ask={"gpus": self.request.device is not Device.CPU},
            rank=self.rank,
        )
