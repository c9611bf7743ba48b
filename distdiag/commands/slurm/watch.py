"""`distdiag slurm watch JOB...`: check that a job runs, or waits and can start."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, StrictOpt  # noqa: TC001 - Typer reads the annotations
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.slurm.queue import Job
    from distdiag.report import Finding, Report

_BEST_FIRST = ("running", "pending", "suspended", "held", "will-not-start", "gone")


@record(kw_only=True)
class Watched:
    """The jobs of one name or id, including ended jobs while SLURM remembers them.

    `state` is the best state of these jobs (in a chain, one runs and the others wait): running, pending,
    suspended, held, will-not-start, or gone.
    """

    asked: str
    state: str
    jobs: tuple[Job, ...]


@record(kw_only=True)
class Watch:
    """One entry per name or id given."""

    watched: tuple[Watched, ...]


def watch(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Names or ids of jobs.")],
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Check that each job is running, or pending and able to start.

    A job in neither state, a held job and a job whose dependency can never be met are failures. Run this from
    `distdiag slurm cron`, and SLURM mails you.

    Exit status: 0 every job is running or pending, 1 a job is not, 2 wrong usage, 3 SLURM did not answer,
    130 interrupted.

    \b
    Examples:
      distdiag slurm watch train-7b,eval-7b
      distdiag slurm watch 4711 --json
    """
    from distdiag.output import Output, deliver

    def report() -> Report[Watch]:
        from distdiag.commands.slurm.queue import jobs_of_user

        return diagnose([name for each in jobs for name in each.split(",") if name], jobs_of_user())

    deliver("slurm watch", report, _view, Output(json=as_json, strict=strict))


def diagnose(asked: Sequence[str], queue: Sequence[Job]) -> Report[Watch]:
    """Judge the queue; pure."""
    from distdiag.report import Report

    watched = tuple(_watched(name, queue) for name in dict.fromkeys(asked))
    findings = tuple(_finding(each) for each in watched if each.state not in ("running", "pending"))
    summary = findings[0].title if findings else ", ".join(f"{each.asked} {each.state}" for each in watched)
    return Report(command="slurm watch", data=Watch(watched=watched), findings=findings, summary=summary)


def _watched(asked: str, queue: Sequence[Job]) -> Watched:
    jobs = tuple(job for job in queue if asked in (job.name, job.id, job.array_id))
    return Watched(
        asked=asked, state=min((job.status for job in jobs), key=_BEST_FIRST.index, default="gone"), jobs=jobs
    )


def _finding(watched: Watched) -> Finding:
    from distdiag.diagnosis.verdicts import finding

    jobs = [job for job in watched.jobs if job.status == watched.state][-5:]
    verdict = "not-in-queue" if watched.state == "gone" else watched.state
    words = {"asked": watched.asked}
    for job in jobs:
        words |= {"job": job.id, "id": shlex.quote(job.id), "state": job.state, "why": job.never_starts}
    forgotten = ("SLURM forgets a job some minutes after its end; sacct remembers it, if enabled",)
    evidence = tuple(f"job {job.id}: {job.state}, reason {job.reason}" for job in jobs)
    return finding(verdict, words, evidence=evidence or forgotten)


def _view(report: Report[Watch]) -> Iterator[RenderableType]:
    from rich.table import Column

    from distdiag.output import plain_table

    titles = ("asked", "state", "job", "SLURM", "reason", "start")
    table = plain_table(*(Column(title, overflow="fold") for title in titles))
    for watched in report.data.watched:
        for job in watched.jobs or (None,):
            cells = (job.id, job.state, job.reason, job.start) if job else ("-", "-", "-", "-")
            table.add_row(watched.asked, watched.state, *cells)
    yield table
