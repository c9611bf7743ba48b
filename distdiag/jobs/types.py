"""The ranks of a job, and all facts of one node. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_within
from distdiag.jobs.collect import Processes, Watched  # noqa: TC001 - decoded by their annotations
from distdiag.jobs.picture import Part

if TYPE_CHECKING:
    from distdiag.jobs.collect import Process, Watched


_ROOM = 160
"""Characters of a list of hosts in a title."""


@dataclass(frozen=True, kw_only=True)
class Helper:
    """A process that works for a rank: a DataLoader worker, a tracker, a compile worker."""

    process: Process
    watched: Watched | None


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank of a job. `rank` is None if unknown; `process` is None for a rank that has exited.

    `deduced`: its environment has no rank; it started the others, connects to them, and this rank is unaccounted for.
    `title`: of a rank without a number, as its server names it: "sglang::scheduler_DP6_TP6".
    """

    host: str
    rank: int | None
    local_rank: int | None
    process: Process | None
    watched: Watched | None
    helpers: tuple[Helper, ...] = ()
    deduced: bool = False
    title: str = ""

    @property
    def pid(self) -> int | None:
        """The id of its process, if there is one."""
        return self.process.pid if self.process is not None else None


@dataclass(frozen=True, kw_only=True)
class Job:
    """The members of one job. `unseen`: ranks that were found on none of the hosts that were read.

    `rendezvous`: where their environments say that they meet, with the ranks that it says so to; empty if at one place.
    """

    name: str
    launcher: str
    world_size: int | None
    members: tuple[Member, ...]
    unseen: tuple[int, ...] = ()
    rendezvous: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """One job, as reports show it; `ranks` is how many were found."""

    job: str
    launcher: str
    world_size: int | None
    ranks: int
    hosts: tuple[str, ...]

    def title(self) -> str:
        """Format it: "job 4711 (torchrun): 4 of 8 ranks on node[1-2]"."""
        of = f" of {self.world_size}" if self.world_size is not None else ""
        what = "rank" if (self.world_size or self.ranks) == 1 else "ranks"
        # Ranks that nothing but RANK and WORLD_SIZE tell have no launcher to name.
        launcher = f" ({self.launcher})" if self.launcher != "environment" else ""
        name = f"job {self.job}{launcher}" if self.job else launcher.strip(" ()") or "ranks without MASTER_ADDR"
        hosts = f" on {fold_within(self.hosts, _ROOM)}" if any(self.hosts) else ""
        return f"{name}: {self.ranks}{of} {what}{hosts}"


def summarize(job: Job) -> JobSummary:
    """Return what reports show of a job."""
    seen = [member for member in job.members if member.process is not None]
    hosts = tuple(dict.fromkeys(member.host for member in seen))
    return JobSummary(job=job.name, launcher=job.launcher, world_size=job.world_size, ranks=len(seen), hosts=hosts)


@dataclass(frozen=True)
class NodeStacks:
    """The facts of one node; `missing`: why its stacks are missing, if they are."""

    host: str
    processes: Processes
    watched: tuple[Watched, ...]
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class NodePicture(Part):
    """The facts of one node about its ranks, of all sources that were read; `missing`: why they are not complete."""

    host: str
    processes: Processes
    missing: str = ""

    @property
    def stacks(self) -> NodeStacks:
        """What jobs and their ranks are found in."""
        return NodeStacks(self.host, self.processes, self.watched, self.missing)
