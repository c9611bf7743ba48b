"""How findings and tables write ranks with their hosts, counts, sizes and durations: once for all commands. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks, fold_within, name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

_ROOM = 160
"""Characters of a list of hosts in a sentence; the finding's `where` has all of them."""
_CELL = 24
"""Characters of a host in a table."""
_NAMED = 4
"""Processes to list; the rest are only counted."""
_SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_hosts(hosts: Iterable[str]) -> str:
    """Format hosts in a sentence: "node[07-08]"; of very many the first: "125 hosts (node0001,...)"."""
    return fold_within(hosts, _ROOM)


def shorten_hosts(hosts: Iterable[str]) -> str:
    """Format hosts for a cell of a table: one by its first label, cut in its middle if that is long; several counted.

    The host of a row is then known by its ranks: the findings and --json have whole names.
    """
    names = list(dict.fromkeys(hosts))
    folded = fold_within(names, _CELL)
    if len(names) != 1 or len(folded) <= _CELL:
        return folded.partition(" (")[0]
    label = names[0].partition(".")[0]
    return label if len(label) <= _CELL else f"{label[: _CELL // 2 - 2]}...{label[1 - _CELL // 2 :]}"


def format_ranks(ranks: Collection[int], hosts: Iterable[str] = (), pid: int | None = None) -> str:
    """Format ranks and where they run: "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "rank 2"."""
    return _at(name_ranks(ranks), format_hosts(hosts), pid)


def _at(who: str, hosts: str, pid: int | None) -> str:
    """Add where they run; behind a list that was cut, which ends with a bracket, in words."""
    if hosts and (who.endswith(")") or hosts.endswith(")")):
        return f"{who} on {hosts}"
    place = [part for part in (hosts, "" if pid is None else f"pid {pid}") if part]
    return who + (f" ({', '.join(place)})" if place else "")


def format_members(members: Sequence[tuple[int | None, int | None, str]]) -> str:
    """Format processes, each (rank, pid, host): "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])".

    By pids where a rank is unknown: "pid 812 (node07)". Long lists of ranks are counted.
    """
    ranks = [rank for rank, _, _ in members if rank is not None]
    pids = [pid for _, pid, _ in members if pid is not None]
    hosts = format_hosts(host for _, _, host in members if host)
    if len(ranks) < len(members):
        shown = f"pid{'s' if len(pids) > 1 else ''} {', '.join(map(str, pids[:_NAMED]))}"
        more = f" and {len(pids) - _NAMED} more" if len(pids) > _NAMED else ""
        return _at(f"{shown}{more}", hosts, None)
    return _at(named(ranks), hosts, pids[0] if len(pids) == 1 else None)


def named(ranks: Sequence[int], room: int = 60) -> str:
    """Format ranks: "rank 3", "ranks 0-2,8"; with their number where the list would be too long to be read."""
    text = name_ranks(ranks)
    if len(text) <= room:
        return text
    folded = fold_ranks(ranks)
    cut = folded.rfind(",", 0, room - 30)
    return f"{len(set(ranks))} ranks ({folded[:cut] if cut > 0 else folded[: room - 30]},...)"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number of things: "1 pair", "2 pairs"; `plural` where it is not `noun` and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def format_size(size_bytes: int) -> str:
    """Format a number of bytes: "4 B", "64 MiB", "1.5 GiB"."""
    for unit, size in _SIZES:
        if size_bytes >= size:
            return f"{size_bytes / size:.4g} {unit}"
    return f"{size_bytes} B"


def format_duration(seconds: float | None) -> str:
    """Format a time: "12 us", "0.3 ms", "0.4 s", "214 s", "3.5 h"; "?" where it is unknown."""
    if seconds is None:
        return "?"
    if seconds < 0.1:
        return "0 s" if seconds < 5e-8 else f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_age(seconds: float) -> str:
    """Format how long ago something was: "20 s", "40 min", "3.5 h", "2 days"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
