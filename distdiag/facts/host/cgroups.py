"""Limits of this process's cgroups (v1 and v2) and their parents: memory, processors, processes; OOM kills."""

from __future__ import annotations

import re

from distdiag.facts import machine
from distdiag.facts.machine import cgroup_folders
from distdiag.record import record

_NO_LIMIT = 2**60
"""Larger values are no limit: without one, cgroup v1 reads about 2**63."""


@record
class Cgroup:
    """The tightest limits; None: unlimited. `cpus`: a quota, in processors; `oom_kills`: of our own cgroup."""

    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None
    pids_used: int | None = None
    oom_kills: int = 0


def look() -> Cgroup:
    """Read the limits."""
    memory = min(
        (
            (limit, _number(f"{folder}/{used}") or 0)
            for folder, name, used in (
                *((folder, "memory.max", "memory.current") for folder in cgroup_folders("")),
                *((folder, "memory.limit_in_bytes", "memory.usage_in_bytes") for folder in cgroup_folders("memory")),
            )
            if (limit := _number(f"{folder}/{name}")) is not None
        ),
        default=(None, None),
    )
    pids = min(
        (
            (limit, _number(f"{folder}/pids.current") or 0)
            for folder in (*cgroup_folders(""), *cgroup_folders("pids"))
            if (limit := _number(f"{folder}/pids.max")) is not None
        ),
        default=(None, None),
    )
    quotas = [
        quota for folder in (*cgroup_folders(""), *cgroup_folders("cpu")) if (quota := _quota(folder)) is not None
    ]
    return Cgroup(
        memory_bytes=memory[0],
        memory_used_bytes=memory[1],
        cpus=min((quota for quota in quotas if quota is not None), default=None),
        pids=pids[0],
        pids_used=pids[1],
        oom_kills=_oom_kills(),
    )


def _number(path: str) -> int | None:
    text = machine.read_text(path).strip()
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def _quota(folder: str) -> float | None:
    words = machine.read_text(f"{folder}/cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = _number(f"{folder}/cpu.cfs_quota_us"), _number(f"{folder}/cpu.cfs_period_us")
    return quota / period if quota and period else None


def _oom_kills() -> int:
    texts = [machine.read_text(f"{folder}/memory.events") for folder in list(cgroup_folders(""))[:1]]
    texts += [machine.read_text(f"{folder}/memory.oom_control") for folder in list(cgroup_folders("memory"))[:1]]
    counts = (re.search(r"^oom_kill (\d+)", text, re.MULTILINE) for text in texts)
    return max((int(count[1]) for count in counts if count is not None), default=0)
