"""How what strace saw is put into words. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.diagnosis.wait_reasons import lasting as _lasting
from distdiag.report import Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.trace.sys.model import Subject

PAYLOAD_WARNING = "the logs will hold what is read, written and sent: passwords and tokens, too"
_NAME = re.compile(r"(?:rank-(\d{1,7})\.)?([\w-]+)\.pid(\d{1,10})\.strace", re.ASCII)


def log_name(rank: int | None, host: str, pid: int) -> str:
    """Name a log: "rank-3.node07.pid4711.strace"; `of_log` reads it."""
    whose = f"rank-{rank}." if rank is not None else ""
    return f"{whose}{re.sub(r'[^a-zA-Z0-9_-]', '_', host)}.pid{pid}.strace"


def of_log(name: str) -> tuple[int | None, str, int] | None:
    """Read the rank, host and process from the name of a log; None if it is not one of ours."""
    match = _NAME.fullmatch(name)
    return (int(match[1]) if match[1] else None, match[2], int(match[3])) if match else None


def lasting(seconds: float | None) -> str:
    """Write a time: "0.3 ms", "0.4 s", "214 s", "3.5 h"; "?" where it is not known."""
    if seconds is not None and seconds < 0.1:
        return "0 s" if seconds < 5e-8 else f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
    return _lasting(seconds)


def span(seconds: Sequence[float | None]) -> str:
    """Write from when to when: "11 s", "11 to 12 s"."""
    known = [one for one in seconds if one is not None]
    least, most = (lasting(min(known)), lasting(max(known))) if known else ("?", "?")
    return least if least == most else f"{least} to {most}"


def who(one: Subject, *, whole: bool = False) -> str:
    """Name a thread's process: "rank 1", "rank 1 (node07, pid 4711)", "pid 4711"."""
    number = one.pid if one.pid is not None else one.tid
    kind = "pid" if one.pid is not None else "thread"
    if one.rank is None:
        return f"{kind} {number}" + (f" ({one.host})" if whole and one.host else "")
    return f"rank {one.rank}" + (f" ({one.host}, {kind} {number})" if whole else "")


def thread(one: Subject) -> str:
    """Name a thread: its process, and if it is not the main one, which: "thread 815 (pt_worker) of rank 1"."""
    if one.is_main or one.tid is None:
        return who(one)
    return f"thread {one.tid}{f' ({one.comm})' if one.comm else ''} of {who(one)}" if one.pid is not None else who(one)


def several(ones: Iterable[Subject]) -> str:
    """Name processes: "rank 0 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "pids 17, 19"."""
    all_of_them = list({one.key: one for one in ones}.values())
    ranks = [one.rank for one in all_of_them if one.rank is not None]
    if len(all_of_them) == 1:
        return who(all_of_them[0], whole=True)
    if len(ranks) == len(all_of_them):
        hosts = fold(dict.fromkeys(one.host for one in all_of_them if one.host))
        return name_ranks(ranks) + (f" ({hosts})" if hosts else "")
    return ", ".join(map(who, all_of_them[:4])) + (f" and {len(all_of_them) - 4} more" if len(all_of_them) > 4 else "")


def where(ones: Iterable[Subject]) -> Where:
    """Say whom a finding is about."""
    all_of_them = list(ones)
    return Where(
        hosts=tuple(dict.fromkeys(one.host for one in all_of_them if one.host)),
        ranks=tuple(sorted({one.rank for one in all_of_them if one.rank is not None})),
        pids=tuple(dict.fromkeys(one.pid for one in all_of_them if one.pid is not None)),
    )
