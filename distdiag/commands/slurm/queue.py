"""What squeue shows of a user's jobs."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.facts import programs
from distdiag.facts.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

_QUERY_S = 30.0
_PING = "is the controller up? scontrol ping"
_HINTS = (
    ("partition", "list the partitions: sinfo -s"),
    ("account", "list your accounts: sacctmgr show associations user=$USER format=account,partition,qos"),
    ("qos", "list your QOS: sacctmgr show associations user=$USER format=account,partition,qos"),
    ("time limit", "list the limits: sinfo -o '%P %l'"),
    ("invalid user", "check the name: id NAME"),
)
"""What to type next, by a word of SLURM's answer; see slurm_errno.c for its wording."""
_FORMAT = "%i|%F|%T|%r|%S|%j"
"""Job, array job, state, reason, (expected) start, name: the name last, as it may hold the separator."""
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)
"""States of jobs that are over. Source: man squeue, JOB STATE CODES. SLURM forgets them after MinJobAge (300 s)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as squeue shows it; `start` is when it began, or is expected to: an ISO time, or N/A."""

    id: str
    array_id: str
    name: str
    state: str
    reason: str
    start: str

    @property
    def is_over(self) -> bool:
        """Whether it ran to its end or was ended."""
        return self.state in ENDED


def slurm(argv: Sequence[str], *, timeout_s: float = _QUERY_S) -> str:
    """Run one of SLURM's commands; returns its stdout.

    Raises:
        DistdiagError: it is not there, did not answer in time, or refused; in SLURM's own words.
    """
    from distdiag.errors import DistdiagError

    try:
        done = programs.run(argv, timeout_s=timeout_s)
    except programs.CannotRun as error:
        raise DistdiagError(str(error), hint="run it where SLURM's commands are: a login node") from error
    if done.timed_out:
        raise DistdiagError(
            f"{argv[0]} did not answer within {timeout_s:g} s",
            hint=_PING,
        )
    if done.status:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.status}"]
        lines = [printable(line.removeprefix(f"{argv[0]}: ").removeprefix("error: ")) for line in said]
        text = "; ".join(lines)[:400]
        raise DistdiagError(
            f"{argv[0]}: {text}", hint=next((hint for sign, hint in _HINTS if sign in text.lower()), _PING)
        )
    return done.stdout.decode("utf-8", "replace")


def jobs_of_user(user: str = "") -> str:
    """Return what squeue prints of all jobs of a user, also those that have just ended. Raises DistdiagError."""
    return slurm(["squeue", "--states=all", "--noheader", f"--user={user or getpass.getuser()}", f"--format={_FORMAT}"])


def parse_jobs(text: str) -> tuple[Job, ...]:
    """Parse the lines of `jobs_of_user`; what is no such line is left out."""
    found = []
    for line in text.splitlines():
        parts = printable(line).split("|", 5)
        if len(parts) == 6:
            job, array_id, state, reason, start, name = parts
            found.append(Job(id=job, array_id=array_id, name=name, state=state, reason=reason.strip("()"), start=start))
    return tuple(found)
