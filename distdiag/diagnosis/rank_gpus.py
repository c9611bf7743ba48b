"""The GPU of each rank: by the pids in the vendor tool's list, else by local rank and visible devices. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.diagnosis.process_index import Key
    from distdiag.facts.gpu.gpu_use import GpuUse
    from distdiag.jobs.types import Member


@record(kw_only=True)
class RankGpu:
    """A rank's GPU. `by_pid`: its process is listed on it; otherwise this is only likely.

    `shared`: another rank or job uses it too, so that the load may not be this rank's.
    """

    rank: int | None
    gpu: GpuUse
    by_pid: bool
    shared: bool = False


def rank_gpus(members: Iterable[Member], gpus: Mapping[str, Sequence[GpuUse]]) -> dict[Key, RankGpu]:
    """Assign each host's GPUs to the ranks of one job; ranks whose GPU cannot be determined are left out."""
    members = list(members)
    own = {(member.host, pid) for member in members for pid in _pids(member)}
    found: dict[Key, RankGpu] = {}
    for member in members:
        # In a container, old drivers list the host's pids: without an open GPU an equal pid is a coincidence.
        if member.process is None or not member.process.gpu:
            continue
        gpu, by_pid = _gpu_of(member, gpus.get(member.host, ()))
        if gpu is not None:
            strangers = by_pid and any((member.host, pid) not in own for pid in gpu.pids)
            found[member.host, member.process.pid] = RankGpu(rank=member.rank, gpu=gpu, by_pid=by_pid, shared=strangers)
    users = Counter((host, row.gpu.index) for (host, _), row in found.items())
    return {key: replace(row, shared=row.shared or users[key[0], row.gpu.index] > 1) for key, row in found.items()}


def _pids(member: Member) -> set[int]:
    pids = {helper.process.pid for helper in member.helpers}
    return pids if member.pid is None else pids | {member.pid}


def _gpu_of(member: Member, gpus: Sequence[GpuUse]) -> tuple[GpuUse | None, bool]:
    """Return a rank's GPU and whether its pid proves it.

    A script that calls cuda() before set_device() leaves a small context of every rank on GPU 0: of several GPUs, a
    rank's own is the one where it uses the most memory of all processes.
    """
    listed = [gpu for gpu in gpus if member.pid in gpu.pids]
    most = [gpu for gpu in listed if gpu.pids[0] == member.pid]
    for candidates in (listed, most):
        if len(candidates) == 1:
            return candidates[0], True
    deduced = _deduced(member, gpus)
    return (deduced if not listed or deduced in listed else None), False


def _deduced(member: Member, gpus: Sequence[GpuUse]) -> GpuUse | None:
    """Return the GPU at the local rank among the visible ones, or the only visible one."""
    visible = sorted(gpus, key=lambda gpu: gpu.index)
    for names in member.process.visible_gpus if member.process is not None else ():
        visible = _named(names, visible)
    if len(visible) == 1:
        return visible[0]
    local_rank = member.local_rank
    return visible[local_rank] if local_rank is not None and 0 <= local_rank < len(visible) else None


def _named(names: str, gpus: Sequence[GpuUse]) -> list[GpuUse]:
    """Choose GPUs as CUDA does: by position or UUID prefix; an unknown entry hides itself and all after it."""
    chosen = []
    for name in map(str.strip, names.split(",")):
        if name.isascii() and name.isdigit():
            matches = list(gpus[int(name) : int(name) + 1])
        else:
            matches = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if len(matches) != 1:
            break
        chosen += matches
    return chosen
