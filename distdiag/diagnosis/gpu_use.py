"""GPU load of a stuck job's ranks: which rank has not launched the collective. Pure.

While a collective waits for a peer, its kernel spins: the GPU is 100 % busy at low power. The GPU of a rank that has
not launched the collective is idle.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.diagnosis.wording import counted, format_members
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.rank_gpus import RankGpu

_LOW = 0.4
"""A GPU that only spins draws at most this share of its power limit. Seen at 100 % busy in NCCL: H100 152 of 700 W
(nccl#1550), A100 77 of 400 W (pytorch#118369), RTX PRO 6000 120 of 600 W (rtx6kpro#15): 19 to 22 %, with room for a
lowered limit. Idle with a CUDA context: H100 109 to 137 W (gpu-burn#114, nccl#1550), A100 70 W, MI300X 135 to 150 of
750 W (ROCm#4021): power alone does not separate idle from spinning.
"""
_HIGH = 0.6
"""Real kernels draw at least this share. In between may be a small model, or an inference card with a limit of 70 W
that spins at half of it: no claim.
"""
_IDLE_PERCENT = 5
"""nvidia-smi or a monitor may cause a few percent."""
_BUSY_PERCENT = 95
"""A spinning kernel never pauses; training with gaps between kernels occasionally reads lower."""
_READINGS = 2
"""A single reading may coincide with the end of a step: two must agree."""


class GpuKind(StrEnum):
    """The combined state of a job's GPUs."""

    ONE_IDLE = "one-idle"
    """At most half of the GPUs are idle, all others spin."""
    ALL_BUSY_LOW_POWER = "all-busy-low-power"
    ALL_IDLE = "all-idle"
    COMPUTING = "computing"
    """Some draw the power of real kernels; the others are idle or spin."""
    MIXED = "mixed"


@record(kw_only=True)
class GpuVerdict:
    """A judgement. `named`: idle ranks of ONE_IDLE, or the computing ones unless all compute; `spinning`: those
    waiting.

    `is_sure`: pids prove which rank uses which GPU.
    """

    kind: GpuKind
    says: str
    evidence: tuple[str, ...]
    named: tuple[Key, ...] = ()
    spinning: tuple[Key, ...] = ()
    is_sure: bool = True


class _State(StrEnum):
    SPINNING = "spinning"
    COMPUTING = "computing"
    UNCLEAR = "unclear"
    IDLE = "idle"


def judge_gpus(by_rank: Mapping[Key, RankGpu]) -> GpuVerdict | None:
    """Judge the GPUs of one job's ranks; None for fewer than two ranks or without two readings of utilization."""
    if len(by_rank) < 2 or not any(_busy(row) for row in by_rank.values()):
        return None
    states: dict[_State, list[Key]] = {state: [] for state in _State}
    for key, row in by_rank.items():
        states[_state(row)].append(key)
    kind, named = _kind(states)
    return GpuVerdict(
        kind=kind,
        says=_SAYS[kind](_who(named, by_rank), len(by_rank), len(named)),
        evidence=tuple(_evidence(states, by_rank)),
        named=tuple(named),
        spinning=tuple(states[_State.SPINNING]),
        is_sure=all(row.by_pid for row in by_rank.values()),
    )


def _busy(row: RankGpu) -> list[int]:
    """Return the utilization of all readings in percent; empty if one is missing."""
    busy = [percent for percent in row.gpu.busy_percent if percent is not None]
    return busy if len(busy) == len(row.gpu.busy_percent) >= _READINGS else []


def _state(row: RankGpu) -> _State:
    gpu, busy = row.gpu, _busy(row)
    if busy and max(busy) <= _IDLE_PERCENT:
        return _State.IDLE
    shares = [power / gpu.limit_w for power in gpu.power_w if power is not None and gpu.limit_w]
    if not busy or row.shared or len(shares) < len(busy):
        return _State.UNCLEAR
    if min(busy) > _IDLE_PERCENT and min(shares) >= _HIGH:
        return _State.COMPUTING
    if min(busy) >= _BUSY_PERCENT and max(shares) <= _LOW:
        return _State.SPINNING
    return _State.UNCLEAR


def _kind(states: Mapping[_State, Sequence[Key]]) -> tuple[GpuKind, Sequence[Key]]:
    idle, spinning, computing = states[_State.IDLE], states[_State.SPINNING], states[_State.COMPUTING]
    if states[_State.UNCLEAR]:
        return GpuKind.MIXED, ()
    if computing:
        return GpuKind.COMPUTING, computing if idle or spinning else ()
    if not idle:
        return GpuKind.ALL_BUSY_LOW_POWER, ()
    if not spinning:
        return GpuKind.ALL_IDLE, ()
    # A few spinning GPUs among many idle ones may run a collective of a subgroup.
    return (GpuKind.ONE_IDLE, idle) if len(idle) <= len(spinning) else (GpuKind.MIXED, ())


def _one_idle(who: str, total: int, idle: int) -> str:
    return (
        f"the {'GPU' if idle == 1 else 'GPUs'} of {who} {'is' if idle == 1 else 'are'} idle, and "
        f"{counted(total - idle, 'other is', 'others are')} 100 % busy at low power, as in a collective that waits: "
        f"{who} {'has' if idle == 1 else 'have'} not launched it"
    )


def _computing(who: str, total: int, computing: int) -> str:
    if not computing:
        return f"all {total} GPUs that were read compute at high power"
    return (
        f"the {'GPU' if computing == 1 else 'GPUs'} of {who} {'computes' if computing == 1 else 'compute'} at high "
        f"power, and {counted(total - computing, 'other waits', 'others wait')}: the job may only be slow, or a kernel "
        "there does not end"
    )


_SAYS: dict[GpuKind, Callable[[str, int, int], str]] = {
    GpuKind.ONE_IDLE: _one_idle,
    GpuKind.ALL_BUSY_LOW_POWER: lambda _, total, __: (
        f"all {total} GPUs that were read are 100 % busy at low power, as in a collective that waits: all their ranks "
        "have launched one, so the network or a GPU fails, or the collectives differ"
    ),
    GpuKind.ALL_IDLE: lambda _, total, __: (
        f"all {total} GPUs that were read are idle: their ranks wait outside of the GPU, for data, a lock or the host"
    ),
    GpuKind.COMPUTING: _computing,
    GpuKind.MIXED: lambda _, total, __: f"the GPUs of the {total} ranks that were read show no clear pattern",
}


def _evidence(states: Mapping[_State, Sequence[Key]], by_rank: Mapping[Key, RankGpu]) -> Iterable[str]:
    for keys in states.values():
        if keys:
            yield f"{_who(keys, by_rank)}: {_figures([by_rank[key] for key in keys])}"
    shared = [key for key, row in by_rank.items() if row.shared]
    if shared:
        yield f"{_who(shared, by_rank)}: other processes use the same GPU"
    likely = [key for key, row in by_rank.items() if not row.by_pid]
    if likely:
        yield f"{_who(likely, by_rank)}: which GPU is theirs is deduced from local ranks and visible devices"


def _figures(rows: Sequence[RankGpu]) -> str:
    """Format ranges over GPUs and readings: "100 % busy, 110-120 W of 700 W"."""
    busy = _range([percent for row in rows for percent in row.gpu.busy_percent])
    power = _range([power for row in rows for power in row.gpu.power_w])
    limit = _range([row.gpu.limit_w for row in rows])
    return f"{busy} % busy, {power} W of {limit} W"


def _range(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "?"
    least, most = f"{min(known):.0f}", f"{max(known):.0f}"
    return least if least == most else f"{least}-{most}"


def _who(keys: Iterable[Key], by_rank: Mapping[Key, RankGpu]) -> str:
    """Name the ranks; by pid and host if any rank is unknown."""
    ranks = {key: by_rank[key].rank for key in keys}
    if None in ranks.values():
        return format_members([(rank, pid, host) for (host, pid), rank in ranks.items()])
    return format_members([(rank, None, "") for rank in ranks.values()])
