"""Clauses that describe a rank's measured activity. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.facts.process.activity import Activity, Moved

_MOST = 8
"""The collector keeps at most this many rows in Activity.moved."""
_PHRASES = 2
_ENDED = "children that ended"
_PLAIN = {"read": "reads", "written": "writes", "offset": "reads", "received": "receives", "sent": "sends"}
_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3))


def moves_in_words(activity: Activity) -> str:
    """Format the one or two clearest movements, as in "reads /data/ckpt.pt at 3 MB/s"; empty without any."""
    groups: dict[tuple[str, ...], list[Moved]] = {}
    named: set[int] = set()
    for moved in activity.moved:
        if moved.role == "self" or moved.pid not in named:
            groups.setdefault(_kind(moved), []).append(moved)
        if moved.role != "self" and moved.detail != _ENDED:
            named.add(moved.pid)
    is_cut = len(activity.moved) >= _MOST
    phrases = [_phrase(group, activity.seconds, is_cut=is_cut) for group in groups.values()]
    return " and ".join(phrases[:_PHRASES])


def _kind(moved: Moved) -> tuple[str, ...]:
    """Group movements that share a phrase: computing threads and children are counted together."""
    if moved.what == "cpu" and moved.role != "peer" and moved.detail != _ENDED:
        return moved.role, moved.what
    return moved.role, moved.what, str(moved.pid), moved.detail


def _phrase(group: Sequence[Moved], seconds: float, *, is_cut: bool) -> str:
    first = group[0]
    if first.what == "cpu":
        return _computes(group, seconds, is_cut=is_cut)
    verb = _does(first, seconds)
    if first.role == "self":
        return verb
    return f"its child {_name(first)} {verb}" if first.role == "child" else f"{_connected(first)} {verb}"


def _computes(group: Sequence[Moved], seconds: float, *, is_cut: bool) -> str:
    first, share = group[0], _share(group, seconds)
    if first.role == "peer":
        return f"{_connected(first)} computes"
    if first.detail == _ENDED:
        return f"the children that {first.comm} starts compute and end ({share})"
    several = f"{len(group)} or more" if is_cut and len(group) > 1 else str(len(group))
    if first.role == "child":
        return (
            f"its {several} children compute ({share})"
            if len(group) > 1
            else f"its child {_name(first)} computes ({share})"
        )
    if len(group) > 1:
        return f"{several} of its threads use {share}"
    return f"its thread {first.detail} uses {share}" if first.detail != first.comm else f"a thread of it uses {share}"


def _does(moved: Moved, seconds: float) -> str:
    if moved.what == "faults":
        return f"reads mapped files: {moved.amount / seconds:.0f} page faults a second"
    if moved.what == "turns":
        return f"works briefly, {moved.amount / seconds:.1f} times a second"
    verb, rate = _PLAIN[moved.what], _rate(moved.amount / seconds)
    if moved.what in ("received", "sent"):
        return f"{verb} {rate} {'from' if moved.what == 'received' else 'to'} {moved.detail.removeprefix('TCP ')}"
    return f"{verb} {moved.detail} at {rate}" if moved.detail.startswith("/") else f"{verb} {rate}"


def _name(moved: Moved) -> str:
    program = moved.comm if moved.detail.startswith(("/", "TCP ")) or not moved.detail else moved.detail
    return f"{program} (pid {moved.pid})"


def _connected(moved: Moved) -> str:
    return f"{_name(moved)}, to which it is connected,"


def _share(group: Iterable[Moved], seconds: float) -> str:
    return f"{sum(moved.amount for moved in group) / seconds:.0%} of a core".replace("%", " %")


def _rate(bytes_s: float) -> str:
    for unit, size in _RATES:
        if bytes_s >= size:
            return f"{bytes_s / size:.2g} {unit}" if bytes_s < 10 * size else f"{bytes_s / size:.0f} {unit}"
    return f"{bytes_s:.0f} B/s"
