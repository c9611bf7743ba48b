"""SLURM's commands, and the jobs that squeue shows."""

from __future__ import annotations

from distdiag.diagnosis.verdicts import read_table
from distdiag.errors import DistdiagError
from distdiag.facts import programs
from distdiag.facts.text import printable
from distdiag.record import record

_FORMAT = "%i|%F|%T|%r|%S|%j"
"""Job, array job, state, reason, (expected) start, name: the name last, as it may contain the separator."""


@record
class Job:
    """A job as squeue shows it, with the fields of _FORMAT; `start` is an ISO time, or N/A."""

    id: str
    array_id: str
    state: str
    reason: str
    start: str
    name: str

    @property
    def never_starts(self) -> str:
        """Why a pending job will not start; empty if it may."""
        return str(read_table("slurm")["never"].get(self.reason.strip("()").replace("_", " "), ""))

    @property
    def status(self) -> str:
        """One of running, pending, suspended, held, will-not-start and gone."""
        status = next(
            (each for each, states in read_table("slurm")["state"].items() if self.state in states), "running"
        )
        if status == "pending" and self.never_starts:
            return "held" if self.never_starts == "it is held" else "will-not-start"
        return str(status)


def slurm(*argv: str) -> str:
    """Run one of SLURM's commands; return its stdout.

    Raises:
        DistdiagError: not installed, timed out, or refused, in SLURM's own words.
    """
    try:
        done = programs.run(argv, timeout_s=60.0)
    except programs.CannotRun as error:
        raise DistdiagError(str(error), hint="run it where SLURM's commands are: a login node") from error
    if done.timed_out or done.status:
        lines = [printable(line) for line in done.stderr.decode("utf-8", "replace").strip().splitlines()]
        text = "; ".join(line.removeprefix(f"{argv[0]}: ").removeprefix("error: ") for line in lines)[:400]
        text = "no answer within 60 s" if done.timed_out else text or f"exit status {done.status}"
        hint = next(hint for sign, hint in read_table("slurm")["hint"].items() if sign in text.lower())
        raise DistdiagError(f"{argv[0]}: {text}", hint=hint)
    return done.stdout.decode("utf-8", "replace")


def jobs_of_user() -> list[Job]:
    """Return all jobs of this user, including recently ended jobs. Raises DistdiagError."""
    return parse_jobs(slurm("squeue", "--me", "--states=all", "--noheader", f"--format={_FORMAT}"))


def parse_jobs(text: str) -> list[Job]:
    """Parse squeue's lines of _FORMAT; skip other lines."""
    lines = (printable(line).split("|", 5) for line in text.splitlines())
    return [Job(*parts) for parts in lines if len(parts) == 6]


def alive(name: str) -> list[Job]:
    """Return this user's running and waiting jobs of a name. Raises DistdiagError."""
    return [job for job in jobs_of_user() if job.name == name and job.status != "gone"]
