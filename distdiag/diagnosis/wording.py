"""Texts for ranks with their hosts, counts, sizes and durations, shared by all commands. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks, fold_within, name_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from distdiag.jobs.collect import Processes

_ROOM = 160
"""Maximum length of a list of hosts in a sentence; the finding's `where` has all of them."""
_CELL = 24
"""Maximum length of a host in a table."""
_NAMED = 4
"""Processes to list; the rest are counted."""
_SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_hosts(hosts: Iterable[str]) -> str:
    """Format hosts in a sentence: "node[07-08]"; if too long "125 hosts (node0001,...)"."""
    return fold_within(hosts, _ROOM)


def shorten_hosts(hosts: Iterable[str]) -> str:
    """Format hosts for a table cell: one by its first label, cut in the middle if long; several counted.

    Ranks identify the row; findings and --json have whole names.
    """
    names = list(dict.fromkeys(hosts))
    folded = fold_within(names, _CELL)
    if len(names) != 1 or len(folded) <= _CELL:
        return folded.partition(" (")[0]
    label = names[0].partition(".")[0]
    return label if len(label) <= _CELL else f"{label[: _CELL // 2 - 2]}...{label[1 - _CELL // 2 :]}"


def format_ranks(ranks: Collection[int], hosts: Iterable[str] = (), pid: int | None = None) -> str:
    """Format ranks and their place: "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "rank 2"."""
    return _at(name_ranks(ranks), format_hosts(hosts), pid)


def _at(who: str, hosts: str, pid: int | None) -> str:
    """Append the place, in parentheses unless either text ends with one."""
    if hosts and (who.endswith(")") or hosts.endswith(")")):
        return f"{who} on {hosts}"
    place = [part for part in (hosts, "" if pid is None else f"pid {pid}") if part]
    return who + (f" ({', '.join(place)})" if place else "")


def format_members(members: Sequence[tuple[int | None, int | None, str]], titles: Sequence[str] = ()) -> str:
    """Format processes, each (rank, pid, host): "rank 2 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])".

    By distinct titles, if all have one, or by pids if a rank is unknown: "sglang::scheduler_TP1 (node07, pid 4711)",
    "pid 812 (node07)". Long lists of ranks are counted.
    """
    ranks = [rank for rank, _, _ in members if rank is not None]
    pids = [pid for _, pid, _ in members if pid is not None]
    hosts = format_hosts(host for _, _, host in members if host)
    pid = pids[0] if len(pids) == 1 else None
    if len(ranks) == len(members):
        return _at(named(ranks), hosts, pid)
    if members and len(titles) == len(members) and all(titles):
        return _at(format_titles(titles, pids), hosts, pid)
    return _at(f"pid{'s' if len(pids) > 1 else ''} {listed(pids)}", hosts, None)


def format_titles(titles: Sequence[str], pids: Sequence[int] = ()) -> str:
    """Format titles: "VLLM::Worker_TP0, VLLM::Worker_TP1"; "ray::train (pids 812, 813)" for several of one title."""
    own = sorted(set(titles), key=lambda title: [int(part) if part.isdigit() else part for part in _parts(title)])
    if len(own) == len(titles):
        return listed(own)
    return f"{listed(own)} (pids {listed(pids)})" if pids else f"{len(titles)} processes {listed(own)}"


def _parts(title: str) -> list[str]:
    """Split "scheduler_DP10" into alternating text and digits, for sorting by value."""
    return re.split(r"(\d+)", title)


def listed(items: Sequence[int | str]) -> str:
    """Format a list in a sentence: "812, 813, 814, 815 and 12 more"."""
    more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
    return ", ".join(map(str, items[:_NAMED])) + more


def no_rank_seen(nodes: Iterable[Processes]) -> str:
    """Describe the search if no rank was found, and the nodes where /proc hides processes."""
    closed = [node.host for node in nodes if not node.shows_others]
    hidden = f" On {format_hosts(closed)}, /proc is mounted with hidepid: this user sees no process of other users."
    return (
        "A rank is a process with RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK or similar in its environment, or "
        "a Python process that has loaded torch. Only root can see those of other users." + (hidden if closed else "")
    )


def named(ranks: Sequence[int], room: int = 60) -> str:
    """Format ranks: "rank 3", "ranks 0-2,8"; counted if the list is too long to read."""
    text = name_ranks(ranks)
    if len(text) <= room:
        return text
    folded = fold_ranks(ranks)
    cut = folded.rfind(",", 0, room - 30)
    return f"{len(set(ranks))} ranks ({folded[:cut] if cut > 0 else folded[: room - 30]},...)"


def three_digits(value: float) -> str:
    """Format a number with three digits, without an exponent: 0.098, 45.2, 1410."""
    return f"{float(f'{value:.3g}'):g}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a count: "1 pair", "2 pairs"; `plural` unless `noun` with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def format_size(size_bytes: int) -> str:
    """Format a number of bytes: "4 B", "64 MiB", "1.5 GiB"."""
    for unit, size in _SIZES:
        if size_bytes >= size:
            return f"{size_bytes / size:.4g} {unit}"
    return f"{size_bytes} B"


def format_duration(seconds: float | None) -> str:
    """Format a duration: "12 us", "0.3 ms", "0.4 s", "214 s", "3.5 h"; "?" if unknown."""
    if seconds is not None and seconds < 0.1:
        return "0 s" if seconds < 5e-8 else f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
    return lasting(seconds)


def lasting(seconds: float | None) -> str:
    """Format a duration: "0.4 s", "214 s", "3.5 h"; "?" if unknown."""
    if seconds is None:
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_age(seconds: float) -> str:
    """Format an age: "20 s", "40 min", "3.5 h", "2 days"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.0f} days"
