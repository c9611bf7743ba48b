"""Ranks of a job, and all facts of one node. Pure data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_within
from distdiag.jobs.collect import Processes, Watched  # noqa: TC001 - decoded by their annotations
from distdiag.jobs.part import Part
from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.jobs.collect import Process, Watched


_ROOM = 160
"""Maximum length of a list of hosts in a title."""


@record(kw_only=True)
class Helper:
    """A process that works for a rank: a DataLoader worker, a tracker, a compile worker."""

    process: Process
    watched: Watched | None


@record(kw_only=True)
class Member:
    """One rank of a job. `rank` is None if unknown; `process` is None if it has exited.

    `deduced`: without a rank in its environment, it started the other ranks and connects to them, and this rank is the
    remaining one. `title`: of a rank without a number, set by its server: "sglang::scheduler_DP6_TP6".
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
        """The pid of its process, if any."""
        return self.process.pid if self.process is not None else None

    @property
    def is_absent(self) -> bool:
        """Whether it left no trace: no process, zombie or orphaned children. It has exited, or did not start yet."""
        return self.process is None and not self.helpers


@record(kw_only=True)
class Job:
    """The members of one job. `unseen`: ranks found on none of the hosts read.

    `rendezvous`: (address, its ranks) if environments disagree, else empty.
    """

    name: str
    launcher: str
    world_size: int | None
    members: tuple[Member, ...]
    unseen: tuple[int, ...] = ()
    rendezvous: tuple[tuple[str, tuple[int, ...]], ...] = ()


@record(kw_only=True)
class JobSummary:
    """One job as shown in reports; `ranks` is the number found."""

    job: str
    launcher: str
    world_size: int | None
    ranks: int
    hosts: tuple[str, ...]

    def title(self) -> str:
        """Format it: "job 4711 (torchrun): 4 of 8 ranks on node[1-2]"."""
        of = f" of {self.world_size}" if self.world_size is not None else ""
        what = "rank" if (self.world_size or self.ranks) == 1 else "ranks"
        # Ranks known from RANK and WORLD_SIZE alone have no launcher name.
        launcher = f" ({self.launcher})" if self.launcher != "environment" else ""
        name = f"job {self.job}{launcher}" if self.job else launcher.strip(" ()") or "ranks without MASTER_ADDR"
        hosts = f" on {fold_within(self.hosts, _ROOM)}" if any(self.hosts) else ""
        return f"{name}: {self.ranks}{of} {what}{hosts}"


def summarize(job: Job) -> JobSummary:
    """Reduce a job to the fields of reports."""
    seen = [member for member in job.members if member.process is not None]
    hosts = tuple(dict.fromkeys(member.host for member in seen))
    return JobSummary(job=job.name, launcher=job.launcher, world_size=job.world_size, ranks=len(seen), hosts=hosts)


@record
class NodeStacks:
    """The facts of one node; `missing`: why it has no stacks, if so."""

    host: str
    processes: Processes
    watched: tuple[Watched, ...]
    missing: str = ""


@record(kw_only=True)
class NodePicture(Part):
    """The facts of one node's ranks from all sources; `missing`: why some are missing, if so."""

    host: str
    processes: Processes
    missing: str = ""

    @property
    def stacks(self) -> NodeStacks:
        """Processes and stacks, for finding jobs."""
        return NodeStacks(self.host, self.processes, self.watched, self.missing)
