"""`distdiag slurm cron`: a batch job that runs a command and submits its own next run, and how to stop it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, called_as, parse_duration
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.report import Report

COMMAND = "slurm cron"
_FOLDER = "distdiag-cron"


@record(kw_only=True)
class Cron:
    """A job that resubmits itself. `job`: the submitted run; empty after --stop."""

    name: str
    folder: str
    job: str = ""
    cancelled: tuple[str, ...] = ()


def cron(  # noqa: PLR0913 - an option is an argument
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What to run.")] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the job, unique among yours.")] = "",
    every: Annotated[str, typer.Option(metavar="TIME", help="Time from one start to the next: 30m, 6h, 1d.")] = "",
    time: Annotated[str, typer.Option(metavar="LIMIT", help="Time limit of one run, as sbatch --time takes it.")] = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="An option of sbatch: --partition=cpu, --account=me; repeatable."),
    ] = None,
    folder: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for script and logs, on a file system that all nodes share.")
    ] = _FOLDER,
    keep: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Logs to keep; older logs are deleted.")
    ] = 30,
    stop: Annotated[str, typer.Option(metavar="NAME", help="Stop this series, and cancel its jobs.")] = "",
    as_json: JsonOpt = False,
) -> None:
    """Run a command every few hours as a batch job that submits its own next run.

    The first run is submitted now. Each run first submits the next one, then runs the command: a run that fails or
    reaches its time limit does not end the series. It needs one pending job at a time. `distdiag slurm watch NAME`
    shows whether the series is alive.

    Exit status: 0 submitted or stopped, 2 wrong usage, 3 SLURM refused it or did not answer, 130 interrupted.

    \b
    Examples:
      distdiag slurm cron --name clean --every 1d --time 10 -- \\
        find /scratch/me/tmp -mtime +7 -delete
      distdiag slurm cron --name is-alive --every 1h --time 5 \\
        --sbatch=--mail-type=FAIL -- distdiag slurm watch train
      distdiag slurm cron --stop clean
    """
    from distdiag.output import Output, Whole, deliver

    def report() -> Report[Cron]:
        if stop:
            return _stop(stop, _folder_of(folder, stop))
        path, words = _folder_of(folder, name), [*([f"--time={time}"] if time else []), *(sbatch or [])]
        return _start(name, path, every, _script(path, command or [], name, every, keep, words))

    def view(report: Report[Cron]) -> Iterator[RenderableType]:
        yield Whole(f"script and logs: {report.data.folder}")
        if report.data.job:
            elsewhere = "" if folder == _FOLDER else f" --folder {shlex.quote(folder)}"
            yield "To see whether it is alive, and to stop it:"
            yield Whole(f"    {called_as()} slurm watch {name}")
            yield Whole(f"    {called_as()} slurm cron --stop {name}{elsewhere}")

    deliver(COMMAND, report, view, Output(json=as_json))


def _folder_of(folder: str, name: str) -> str:
    """Return the folder of a series. SLURM substitutes % in log paths. Raises UsageError."""
    from distdiag.errors import UsageError

    if not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
        raise UsageError(f"{name!r} is not a name for a job", hint="--name NAME: letters, digits, dots and dashes")
    path = os.path.join(os.path.abspath(folder), name)
    if re.search(r"[%\\\s\x00-\x1f\x7f]", path):
        raise UsageError(f"--folder {folder}: sbatch takes no blank, % or \\ in a path", hint="choose another folder")
    return path


def _script(folder: str, command: Sequence[str], name: str, every: str, keep: int, sbatch: Sequence[str]) -> str:
    """Return the batch script; it contains all options, so that each run resubmits it unchanged. Raises UsageError."""
    from importlib import resources

    from distdiag.errors import UsageError

    if not command:
        raise UsageError("no COMMAND given", hint=f"{called_as()} slurm cron --name {name} --every 6h -- COMMAND")
    if any("\n" in word or not word.startswith("-") for word in sbatch):
        raise UsageError("--sbatch takes one option with its value", hint="--sbatch=--partition=cpu")
    period_s = int(parse_duration(every, "--every", longest_s=366 * 86400.0))
    if period_s < 60:
        raise UsageError(f"--every {every} is too short", hint="at least 1m: each run is a job of the scheduler")
    options = [
        *(f"--job-name={name}", "--nodes=1", "--ntasks=1", f"--output={folder}/logs/%j.out", "--open-mode=append"),
        "--dependency=singleton",  # a run waits for the previous run if that exceeds the period
        "--no-requeue",  # else a run requeued after a node failure submits a second series
        *sbatch,
    ]
    head = (
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        f"folder={shlex.quote(folder)} every={period_s} keep={keep}",
        f"command=({shlex.join(command)})",
    )
    return "\n".join(head) + "\n" + resources.files(__package__ or "").joinpath("cron.sh").read_text("utf-8")


def _start(name: str, folder: str, every: str, script: str) -> Report[Cron]:
    from distdiag.commands.slurm.queue import alive, slurm
    from distdiag.errors import UsageError
    from distdiag.files import make_folder, write_whole
    from distdiag.report import Report

    if jobs := alive(name):
        stop = f"{called_as()} slurm cron --stop {name}"
        raise UsageError(f"{name} is in the queue already: job {jobs[0].id}, {jobs[0].state}", hint=stop)
    make_folder("--folder", os.path.join(folder, "logs"))
    path = os.path.join(folder, "job.sh")
    write_whole(path, script.encode())
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, "stop"))
    slurm("sbatch", "--test-only", path)  # reports violations of the site's rules
    job = slurm("sbatch", "--parsable", path).strip().partition(";")[0]
    summary = f"{name} runs every {every}: the first run is job {job}"
    return Report(command=COMMAND, data=Cron(name=name, folder=folder, job=job), findings=(), summary=summary)


def _stop(name: str, folder: str) -> Report[Cron]:
    """Forbid the next run, then cancel: a run about to submit one sees the file, or its job is cancelled."""
    from distdiag.commands.slurm.queue import alive, slurm
    from distdiag.diagnosis.wording import counted
    from distdiag.errors import UsageError
    from distdiag.files import write_whole
    from distdiag.report import Report

    if not os.path.isfile(os.path.join(folder, "job.sh")):
        raise UsageError(f"no series in {folder}", hint="give the --folder that it was started with")
    write_whole(os.path.join(folder, "stop"), b"by distdiag slurm cron --stop\n")
    cancelled: set[str] = set()
    while found := {job.id for job in alive(name)} - cancelled:  # a run may have submitted one since the last squeue
        slurm("scancel", *found)
        cancelled |= found
    summary = f"{name} is stopped: {counted(len(cancelled), 'job')} cancelled"
    data = Cron(name=name, folder=folder, cancelled=tuple(sorted(cancelled)))
    return Report(command=COMMAND, data=data, findings=(), summary=summary)
