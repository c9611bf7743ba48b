"""`distdiag slurm watch JOB...`: whether a job runs or waits, and whether one that waits will ever start."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.slurm.queue import Job
    from distdiag.gathered import Gathered
    from distdiag.output import Progress
    from distdiag.report import Finding, Report
    from distdiag.runner import Subcommand

COMMAND = "slurm watch"

_HELD = (
    *("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue"),
    *("launch failed requeued held", "job requeued in held state"),
)
_NEVER = {
    "DependencyNeverSatisfied": "it depends on a job that failed",
    "PartitionTimeLimit": "its time limit exceeds that of the partition",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "PartitionConfig": "the partition does not have what it asks for",
    "BadConstraints": "no node fulfils its constraints",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "QOSTimeLimit": "its time limit exceeds that of the QOS",
    "AssocMaxCpuPerJobLimit": "it asks for more CPUs than the account allows to one job",
    "AssocMaxNodePerJobLimit": "it asks for more nodes than the account allows to one job",
    "AssocMaxWallDurationPerJobLimit": "its time limit exceeds that of the account",
    "QOSMaxCpuPerJobLimit": "it asks for more CPUs than the QOS allows to one job",
    "QOSMaxNodePerJobLimit": "it asks for more nodes than the QOS allows to one job",
    "QOSMaxWallDurationPerJobLimit": "its time limit exceeds that of the QOS",
}
"""Reasons with which a job stays pending until a person acts. Source: man squeue, JOB REASON CODES, and
https://slurm.schedmd.com/job_reason_codes.html.
"""
_STOPPED = ("SUSPENDED", "STOPPED")
_HELD_STATES = ("REQUEUE_HOLD", "SPECIAL_EXIT")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for: names or ids of jobs of a user."""

    program: str
    cluster: Cluster
    jobs: tuple[str, ...] = ()
    user: str = ""


@dataclass(frozen=True, kw_only=True)
class QueueFacts:
    """What squeue printed on this host, and when, in seconds since 1970."""

    host: str
    at: float
    queue: str


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The jobs of one name or id, those that are over included while SLURM remembers them."""

    asked: str
    state: str
    """running, pending, will-not-start, suspended, or gone."""
    jobs: tuple[Job, ...]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """All that were asked for."""

    watched: tuple[Watched, ...]


def watch(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Names or ids of jobs.")] = None,
    user: Annotated[str, typer.Option(metavar="NAME", help="Whose jobs. [default: yours]")] = "",
    save: SaveOpt = "",
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Check that each job is running, or pending and able to start.

    A job in neither state, a held job and a job whose dependency can never be met are failures. Run this from
    `distdiag slurm cron`, and SLURM mails you: see the last example.

    Exit status: 0 every job is running or pending, 1 a job is not, 2 wrong usage, 3 SLURM did not answer,
    130 interrupted.

    \b
    Examples:
      distdiag slurm watch train-7b,eval-7b
      distdiag slurm watch 4711 --user alice --json
      distdiag slurm cron --name is-alive --every 1h --time 5 \\
        --sbatch=--mail-type=FAIL -- distdiag slurm watch train-7b
    """
    from distdiag import runner
    from distdiag.errors import UsageError

    def asked() -> Request:
        if not jobs and not from_:
            raise UsageError("no job given", hint=f"{called_as()} slurm watch NAME")
        return Request(
            program=called_as(),
            cluster=Cluster(),
            jobs=tuple(dict.fromkeys(name for each in jobs or () for name in each.split(",") if name)),
            user=user,
        )

    runner.run(_subcommand(), asked, runner.Options(as_json, strict, save, from_))


def _subcommand() -> Subcommand[Request, QueueFacts, Watch]:
    from distdiag import runner

    def view(_: Request, __: Gathered[QueueFacts], report: Report[Watch]) -> Iterator[RenderableType]:
        return _view(report.data)

    return runner.Subcommand(
        name=COMMAND,
        request=Request,
        facts=QueueFacts,
        collect=_collect,
        diagnose=diagnose,
        view=view,
        explain=lambda _: [],
        saved_as="slurm-watch",
    )


def _collect(request: Request, _: Progress) -> Gathered[QueueFacts]:
    from distdiag.commands.slurm.queue import jobs_of_user
    from distdiag.facts.machine import host_name
    from distdiag.gathered import Gathered

    return Gathered(facts=[QueueFacts(host=host_name(), at=time.time(), queue=jobs_of_user(request.user))])


def diagnose(request: Request, gathered: Gathered[QueueFacts]) -> Report[Watch]:
    """Judge the queue; pure."""
    from distdiag.commands.slurm.queue import parse_jobs
    from distdiag.report import Report

    queue = [job for facts in gathered.facts for job in parse_jobs(facts.queue)]
    watched = tuple(_watched(asked, queue) for asked in request.jobs)
    findings = tuple(finding for each in watched for finding in _findings(each, request.program))
    counts = ", ".join(f"{each.asked} {each.state}" for each in watched)
    return Report(
        command=COMMAND,
        data=Watch(watched=watched),
        findings=findings,
        summary=findings[0].title if findings else counts or "no job was asked for",
        interrupted=gathered.interrupted,
    )


def _watched(asked: str, queue: Sequence[Job]) -> Watched:
    jobs = tuple(job for job in queue if asked in (job.name, job.id, job.array_id))
    states = [_state(job) for job in jobs]
    # The best of them: of a chain, one runs and the others wait.
    best = next((state for state in ("running", "pending", "suspended", "will-not-start") if state in states), "gone")
    return Watched(asked=asked, state=best, jobs=jobs)


def _state(job: Job) -> str:
    if job.is_over or job.state == "COMPLETING":
        return "over"
    if job.state in _HELD_STATES or (job.state == "PENDING" and _never(job)):
        return "will-not-start"
    if job.state in _STOPPED:
        return "suspended"
    return "pending" if job.state in ("PENDING", "REQUEUED") else "running"


def _never(job: Job) -> str:
    """Return why a job that waits will not start; empty if it may."""
    if job.state in _HELD_STATES or job.reason.replace("_", " ") in _HELD:  # newer versions write underscores
        return "it is held"
    return _NEVER.get(job.reason, "")


def _findings(watched: Watched, program: str) -> Iterator[Finding]:
    from distdiag.report import Finding, Fix, Level

    asked = watched.asked
    if watched.state == "gone":
        last = watched.jobs[-1] if watched.jobs else None
        ended = f"; its last job, {last.id}, is {last.state}" if last else ""
        yield Finding(
            id="slurm.not-in-queue",
            level=Level.FAIL,
            title=f"{asked} is neither running nor pending{ended}",
            detail="" if last else "SLURM forgets a job some minutes after its end; sacct remembers it, if enabled.",
            evidence=tuple(f"job {job.id}: {job.state}, reason {job.reason}" for job in watched.jobs[-5:]),
            fix=Fix(text="find out why it ended, and submit it again", commands=(f"{program} logs FILE",)),
        )
    elif watched.state == "will-not-start":
        job = next(job for job in watched.jobs if _state(job) == "will-not-start")
        held = _never(job) == "it is held"
        release = Fix(text="release it", commands=(f"scontrol release {shlex.quote(job.id)}",))
        other = Fix(
            text="cancel it, and submit it again with other limits", commands=(f"scancel {shlex.quote(job.id)}",)
        )
        yield Finding(
            id="slurm.will-not-start",
            level=Level.FAIL,
            title=f"{asked} is pending and will not start: {_never(job)}",
            evidence=(f"job {job.id}: {job.state}, reason {job.reason}",),
            fix=release if held else other,
        )
    elif watched.state == "suspended":
        job = next(job for job in watched.jobs if _state(job) == "suspended")
        yield Finding(
            id="slurm.suspended",
            level=Level.WARN,
            title=f"{asked} is suspended: job {job.id} keeps its allocation but does not run",
            fix=Fix(text="ask who suspended it, or resume it", commands=(f"scontrol resume {shlex.quote(job.id)}",)),
        )


def _view(data: Watch) -> Iterator[RenderableType]:
    from rich.table import Column

    from distdiag.output import plain_table

    titles = ("asked", "state", "job", "SLURM", "reason", "start")
    table = plain_table(*(Column(title, overflow="fold") for title in titles))
    for watched in data.watched:
        for job in watched.jobs or (None,):
            cells = (job.id, job.state, job.reason, job.start) if job else ("-", "-", "-", "-")
            table.add_row(watched.asked, watched.state, *cells)
    yield table
