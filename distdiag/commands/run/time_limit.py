"""When SLURM will end this job, so that it can be looked at shortly before."""

from __future__ import annotations

import os
import re
import shutil

from distdiag.facts import programs

_BEFORE_S = 120.0
"""SLURM's SIGTERM goes to every process of a step: the ranks are gone before anything can be read of them."""
_ASK_S = 5.0
_MANY_NODES = 64
"""Beyond this, a squeue from each node of a job at its start is more than slurmctld should be asked."""


def look_at(now: float) -> float | None:
    """Return when to look at the job, in seconds since the epoch: 2 minutes before its end, later if it is short."""
    end = _end(now)
    return None if end is None or end <= now else end - min(_BEFORE_S, (end - now) / 4)


def _end(now: float) -> float | None:
    """Return when the job ends: SLURM says so in its environment since 23.02, and squeue before."""
    if (told := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
        return float(told)
    job = os.environ.get("SLURM_JOB_ID", "")
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if not (job.isdigit() and nodes.isdigit() and int(nodes) <= _MANY_NODES) or shutil.which("squeue") is None:
        return None
    done = programs.run(["squeue", "-h", "-j", job, "-o", "%L"], timeout_s=_ASK_S)
    left = seconds(done.stdout.decode("ascii", "replace").strip())
    return None if left is None else now + left


def seconds(text: str) -> float | None:
    """Read how squeue writes a time: "1-02:03:04", "02:03:04", "3:04"; None for "UNLIMITED", "INVALID" and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + rest
