"""What a command does with ranks, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from distdiag.cluster.access import Agent
from distdiag.workload.facts import NodeFacts
from distdiag.workload.model import Device, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.cluster import launch
    from distdiag.deliver import Progress
    from distdiag.report import Report
    from distdiag.workload.record import Course, NotRun, Plan, Scene, Share

Asked = TypeVar("Asked", bound=Request)
Data = TypeVar("Data")


@dataclass(frozen=True, kw_only=True)
class Job(Generic[Asked, Data]):
    """What one command does with ranks: what they run and are told, and what their run means."""

    request: Asked
    rank: str
    """The module that every rank runs: main(config)."""
    config: Callable[[Asked, Plan, Share, int], dict[str, Any]]
    """What the command itself tells a rank, beside what every rank is told."""
    diagnose: Callable[[Asked, Scene, Plan, Course], Report[Data]]
    no_data: Callable[[Asked, NotRun, dict[str, Any]], Data]
    """Gives the facts of a run that never began, from the fields of RunFacts."""
    tell: Callable[[launch.Run, Progress], str] | None = None
    """Says what is new in a run under way, beside the stages; gives how far it is, for the line that changes."""

    @property
    def agent(self) -> Agent:
        """What runs on the nodes."""
        return Agent(
            collect="distdiag.workload.collect",
            facts=NodeFacts,
            ask={"gpus": self.request.device is not Device.CPU},
            rank=self.rank,
        )
