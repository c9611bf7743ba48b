"""The end of a SLURM job's time limit, for a snapshot shortly before."""

from __future__ import annotations

import os
import re
import shutil

from distdiag.facts import programs

_BEFORE_S = 120.0
"""SLURM's SIGTERM reaches every process of a step: ranks exit before they can be inspected."""
_ASK_S = 5.0
_MANY_NODES = 64
"""Beyond this, one squeue per node at the start of a job would overload slurmctld."""


def look_at(now: float) -> float | None:
    """Return when to inspect the job, in seconds since the epoch: 2 minutes before its end, later if it is short."""
    end = _end(now)
    return None if end is None or end <= now else end - min(_BEFORE_S, (end - now) / 4)


def _end(now: float) -> float | None:
    """Return the end of the job: from SLURM's environment since 23.02, else from squeue."""
    if (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
        return float(end)
    job = os.environ.get("SLURM_JOB_ID", "")
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if not (job.isdigit() and nodes.isdigit() and int(nodes) <= _MANY_NODES) or shutil.which("squeue") is None:
        return None
    done = programs.run(["squeue", "-h", "-j", job, "-o", "%L"], timeout_s=_ASK_S)
    left = seconds(done.stdout.decode("ascii", "replace").strip())
    return None if left is None else now + left


def seconds(text: str) -> float | None:
    """Parse squeue's times: "1-02:03:04", "02:03:04", "3:04"; None for "UNLIMITED", "INVALID" and similar."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + rest
