"""`distdiag slurm cron`: a batch job that runs a command and submits its own next run, and how it is stopped."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, called_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from distdiag.commands.slurm.queue import Job
    from distdiag.report import Report

COMMAND = "slurm cron"
LOG_BYTES = 10 * 2**20
_UNITS = {"m": 60, "h": 3600, "d": 86400}
_SUBMIT_S = 60.0
_FOLDER = "distdiag-cron"
_LONGEST_S = 366 * 86400


@dataclass(frozen=True, kw_only=True)
class Cron:
    """A job that submits itself. `job`: the run that was submitted; 0 where it was stopped."""

    name: str
    folder: str
    every_s: int = 0
    job: int = 0
    cancelled: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was typed."""

    name: str
    folder: str
    every_s: int
    time: str
    keep: int
    sbatch: tuple[str, ...]
    argv: tuple[str, ...]


def cron(  # noqa: PLR0913 - an option is an argument
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND ARGS...", help="What to run each time.")
    ] = None,
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
    print_script: Annotated[bool, typer.Option("--print", help="Print the batch script and exit.")] = False,
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
    from distdiag.output import Output, Whole, deliver, deliver_lines

    def plan() -> Plan:
        return _plan(command or [], name, every, time, sbatch or [], folder, keep)

    if print_script:
        deliver_lines(COMMAND, lambda: batch_script(plan()).splitlines(), as_json=as_json)

    def report() -> Report[Cron]:
        return _stop(stop, folder) if stop else _start(plan())

    def view(report: Report[Cron]) -> Iterator[RenderableType]:
        yield Whole(f"script and logs: {report.data.folder}")
        if report.data.job:
            elsewhere = "" if folder == _FOLDER else f" --folder {shlex.quote(folder)}"
            yield "To see whether it is alive, and to stop it:"
            yield Whole(f"    {called_as()} slurm watch {report.data.name}")
            yield Whole(f"    {called_as()} slurm cron --stop {report.data.name}{elsewhere}")

    deliver(COMMAND, report, view, Output(json=as_json))


def _plan(
    command: Sequence[str], name: str, every: str, time: str, sbatch: Sequence[str], folder: str, keep: int
) -> Plan:
    from distdiag.errors import UsageError

    example = f"{called_as()} slurm cron --name clean --every 6h -- COMMAND"
    if not command or not name or not every:
        missing = "COMMAND" if not command else "--name" if not name else "--every"
        raise UsageError(f"no {missing} given", hint=example)
    if any("\n" in word or not word.startswith("-") for word in sbatch):
        raise UsageError("--sbatch takes one option with its value", hint="--sbatch=--partition=cpu")
    if not re.fullmatch(r"[\d:-]*", time):
        raise UsageError(f"--time {time}: not a time limit", hint="minutes, hours:minutes:seconds or days-hours")
    _check_period(parse_period(every), limit_s(time), every, time)
    return Plan(
        name=_checked(name),
        folder=_folder_of(folder, name),
        every_s=parse_period(every),
        time=time,
        keep=keep,
        sbatch=tuple(sbatch),
        argv=tuple(command),
    )


def _checked(name: str) -> str:
    from distdiag.errors import UsageError

    if not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
        raise UsageError(f"{name!r} is not a name for a job", hint="use letters, digits, dots and dashes")
    return name


def _folder_of(folder: str, name: str) -> str:
    """Return the folder of one series. SLURM puts its own values in for % in the path of a log."""
    from distdiag.errors import UsageError

    path = os.path.join(os.path.abspath(folder), name)
    if re.search(r"[%\\\s\x00-\x1f\x7f]", path):
        raise UsageError(f"--folder {folder}: sbatch takes no blank, % or \\ in a path", hint="choose another folder")
    return path


def limit_s(time: str) -> int:
    """Return SLURM's time limit in seconds; 0 for none: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S (sbatch(1), --time)."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part or 0) for part in rest.split(":")]
    scale = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, scale, strict=False))


def _check_period(every_s: int, most_s: int, every: str, time: str) -> None:
    """Raise UsageError where one run may last longer than the period: then runs are late, and lost."""
    from distdiag.errors import UsageError

    if most_s > every_s:
        raise UsageError(
            f"--every {every} is shorter than --time {time}: a run may last longer than the period",
            hint=f"use --time {max(1, every_s // 60)} or less, or a longer --every",
        )


def parse_period(text: str) -> int:
    """Parse 30m, 6h or 1d into seconds. Raises UsageError."""
    from distdiag.errors import UsageError

    match = re.fullmatch(r"(\d{1,9})([mhd])", text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(f"--every {text}: not a period from 1m to 366d", hint="write 30m, 6h or 1d")
    return seconds


def batch_script(plan: Plan) -> str:
    """Return the script. Its options stand in it, so that each run submits the next with the same ones."""
    from importlib import resources

    options = [
        f"--job-name={plan.name}",
        "--nodes=1",
        "--ntasks=1",
        *([f"--time={plan.time}"] if plan.time else []),
        f"--output={plan.folder}/logs/%j.out",
        "--open-mode=append",
        "--dependency=singleton",  # a run that waits for the one before, where that takes longer than the period
        "--no-requeue",  # else a run that a node's failure requeues submits a second series
        *plan.sbatch,
    ]
    settings = {
        "folder": shlex.quote(plan.folder),
        "every": str(plan.every_s),
        "keep": str(plan.keep),
        "log_bytes": str(LOG_BYTES),
        "command": f"({shlex.join(plan.argv)})",
    }
    head = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]
    head += [f"{name}={value}" for name, value in settings.items()]
    body = resources.files(__package__ or "").joinpath("cron.sh").read_text("utf-8")
    return "\n".join(head) + "\n" + body


def _start(plan: Plan) -> Report[Cron]:
    from distdiag.commands.slurm.queue import jobs_of_user, parse_jobs, slurm
    from distdiag.errors import DistdiagError, UsageError
    from distdiag.facts.private_files import write_whole
    from distdiag.files import make_folder
    from distdiag.report import Report

    if alive := _alive(parse_jobs(jobs_of_user()), plan.name):
        stop = f"{called_as()} slurm cron --stop {plan.name}"
        raise UsageError(f"{plan.name} is in the queue already: job {alive[0].id}, {alive[0].state}", hint=stop)
    make_folder("--folder", os.path.join(plan.folder, "logs"))
    script = os.path.join(plan.folder, "job.sh")
    try:
        write_whole(script, batch_script(plan).encode())
        if os.path.lexists(os.path.join(plan.folder, "stop")):
            os.unlink(os.path.join(plan.folder, "stop"))
    except OSError as error:
        raise DistdiagError(f"cannot write {script}: {error.strerror}", hint="choose another --folder") from error
    slurm(["sbatch", "--test-only", script], timeout_s=_SUBMIT_S)  # says what the site's rules do not allow
    answer = slurm(["sbatch", "--parsable", script], timeout_s=_SUBMIT_S)
    match = re.match(r"(\d+)", answer.strip())
    if match is None:
        raise DistdiagError(f"sbatch printed no job: {answer.strip()[:200]}", hint=f"squeue --name={plan.name}")
    made = Cron(name=plan.name, folder=plan.folder, every_s=plan.every_s, job=int(match[1]))
    summary = f"{plan.name} runs every {_period(plan.every_s)}: the first run is job {made.job}"
    return Report(command=COMMAND, data=made, findings=(), summary=summary)


def _stop(name: str, folder: str) -> Report[Cron]:
    """Forbid the next run, then cancel: a run that is about to submit one sees the file, or its job is cancelled."""
    from distdiag.commands.slurm.queue import jobs_of_user, parse_jobs, slurm
    from distdiag.diagnosis.wording import counted
    from distdiag.errors import DistdiagError, UsageError
    from distdiag.facts.private_files import write_whole
    from distdiag.report import Report

    path = _folder_of(folder, _checked(name))
    if not os.path.isfile(os.path.join(path, "job.sh")):
        raise UsageError(f"no series {name} in {folder}", hint="give the --folder that it was started with")
    try:
        write_whole(os.path.join(path, "stop"), b"by distdiag slurm cron --stop\n")
    except OSError as error:
        raise DistdiagError(f"cannot write {path}/stop: {error.strerror}", hint=f"scancel --name={name}") from error
    cancelled: list[str] = []
    for _ in range(3):  # a run may have submitted one between our look and its own
        found = [job.id for job in _alive(parse_jobs(jobs_of_user()), name)]
        if not set(found) - set(cancelled):
            break
        slurm(["scancel", *found], timeout_s=_SUBMIT_S)
        cancelled += [job for job in found if job not in cancelled]
    summary = f"{name} is stopped: {counted(len(cancelled), 'job')} cancelled"
    data = Cron(name=name, folder=path, cancelled=tuple(cancelled))
    return Report(command=COMMAND, data=data, findings=(), summary=summary)


def _alive(jobs: Sequence[Job], name: str) -> list[Job]:
    return [job for job in jobs if job.name == name and not job.is_over and job.state != "COMPLETING"]


def _period(seconds: int) -> str:
    unit = next(unit for unit in ("d", "h", "m") if seconds % _UNITS[unit] == 0)
    return f"{seconds // _UNITS[unit]}{unit}"
