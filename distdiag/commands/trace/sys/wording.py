"""Format times, threads and processes of a trace; and the names of logs. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.diagnosis.wording import format_duration, listed
from distdiag.report import Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.trace.sys.types import TracedThread

_LOG_NAME = re.compile(r"(?:rank-(\d{1,7})\.)?([\w-]+)\.pid(\d{1,10})\.strace", re.ASCII)
_RANK = re.compile(r"rank-(\d{1,7})(?:\.|$)", re.ASCII)


def log_name(rank: int | None, host: str, pid: int) -> str:
    """Return the name of a log: "rank-3.node07.pid4711.strace"; `parse_log_name` reads it."""
    of_rank = f"rank-{rank}." if rank is not None else ""
    return f"{of_rank}{re.sub(r'[^a-zA-Z0-9_-]', '_', host)}.pid{pid}.strace"


def parse_log_name(name: str) -> tuple[int | None, str, int | None]:
    """Parse the rank, host and process in the name of a log; of any other name ("rank-3.4711") only the rank."""
    match = _LOG_NAME.fullmatch(name)
    if match:
        return (int(match[1]) if match[1] else None), match[2], int(match[3])
    rank = _RANK.match(name)
    return (int(rank[1]) if rank else None), "", None


def format_range(seconds: Sequence[float | None]) -> str:
    """Format a range of times: "11 s", "11 to 12 s"."""
    known = [each_s for each_s in seconds if each_s is not None]
    least, most = (format_duration(min(known)), format_duration(max(known))) if known else ("?", "?")
    return least if least == most else f"{least} to {most}"


def name_process(thread: TracedThread, *, whole: bool = False) -> str:
    """Name a thread's process: "rank 1", "rank 1 (node07, pid 4711)", "pid 4711", or its thread."""
    number = f"pid {thread.pid}" if thread.pid is not None else f"thread {thread.tid}"
    name = f"rank {thread.rank}" if thread.rank is not None else number
    more = [thread.host, number] if thread.rank is not None else [thread.host] if thread.host else []
    return f"{name} ({', '.join(more)})" if whole and more else name


def name_thread(thread: TracedThread) -> str:
    """Name a thread: its process, and if it is not the main one, which: "thread 815 (pt_worker) of rank 1"."""
    process = name_process(thread)
    if thread.main or thread.tid is None or thread.pid is None:
        return process
    return f"thread {thread.tid}{f' ({thread.comm})' if thread.comm else ''} of {process}"


def name_processes(threads: Iterable[TracedThread]) -> str:
    """Name processes: "rank 0 (node07, pid 4711)", "ranks 0-1,3 (node[07-08])", "pid 17, pid 19"."""
    processes = list({thread.key: thread for thread in threads}.values())
    if len(processes) == 1:
        return name_process(processes[0], whole=True)
    ranks = [thread.rank for thread in processes if thread.rank is not None]
    if len(ranks) < len(processes):
        return listed(list(map(name_process, processes)))
    hosts = fold(dict.fromkeys(thread.host for thread in processes if thread.host))
    return name_ranks(ranks) + (f" ({hosts})" if hosts else "")


def where_of(threads: Iterable[TracedThread]) -> Where:
    """Return the hosts, ranks and pids that a finding is about."""
    members = list(threads)
    return Where(
        hosts=tuple(dict.fromkeys(thread.host for thread in members if thread.host)),
        ranks=tuple(sorted({thread.rank for thread in members if thread.rank is not None})),
        pids=tuple(dict.fromkeys(thread.pid for thread in members if thread.pid is not None)),
    )
