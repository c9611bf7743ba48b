"""Inference servers: ranks among their titled processes, and the grouping of ranks into jobs. Pure.

A server's processes have titles but no rank of their own: RANK is unset, or it is the node's number in the pod. HTTP
server, detokenizer and coordinator are mostly idle in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.fold import by_key
from distdiag.knowledge.process_titles import Title, read_title
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from distdiag.jobs.collect import Process

_FAMILY = ("rank", "engine", "helper")
_NO_MAIN = ("launcher", "tracker", "compile-worker")


@record(kw_only=True)
class Server:
    """The ranks of one server on one host. `kind`: of the titles, "sglang"; `name`: "pid 4711 sglang.launch_server"."""

    name: str
    kind: str
    ranks: tuple[Process, ...]


@record(kw_only=True)
class Served:
    """The servers of one host. `pids`: of all their processes."""

    servers: tuple[Server, ...]
    pids: frozenset[int]


def find_servers(processes: Sequence[Process]) -> Served:
    """Find the servers among the processes of one host."""
    titles = {process.pid: title for process in processes if (title := read_title(process.command)) is not None}
    family = {pid: title for pid, title in titles.items() if title.role in _FAMILY}
    ranks = [process for process in processes if process.pid in family and _is_rank(process, processes, titles)]
    above = {pid for process in ranks for pid in process.above}
    mains = {process.pid for process in processes if process.pid in above and _is_main(process, titles)}
    own = {process.pid for process in ranks}
    helping = {process.pid for process in processes if not own.isdisjoint(process.above)}
    by_pid = {process.pid: process for process in processes}
    servers = []
    for root, group in _groups(ranks, family.keys() | mains, titles):
        kind = titles[group[0].pid].server
        servers.append(Server(name=_name(root, by_pid.get(root), kind), kind=kind, ranks=tuple(group)))
    return Served(servers=tuple(servers), pids=frozenset({*family, *mains, *helping}))


def _is_rank(process: Process, processes: Sequence[Process], titles: Mapping[int, Title]) -> bool:
    role = titles[process.pid].role
    if role != "engine":
        return role == "rank"
    below = [titles[other.pid].role for other in processes if other.pid in titles and process.pid in other.above]
    # With Ray as executor, an engine's workers are actors started by raylet.
    has_actors = any(title.role == "actor" for title in titles.values()) and not process.gpu
    return "rank" not in below and not has_actors


def _is_main(process: Process, titles: Mapping[int, Title]) -> bool:
    """Return whether this ancestor of ranks is the server's own entry point, such as `vllm serve`."""
    is_plain = process.place is None or process.place.launcher == "environment"
    return process.torch and is_plain and process.kind not in _NO_MAIN and process.pid not in titles


def _groups(
    ranks: Sequence[Process], own: set[int], titles: Mapping[int, Title]
) -> Iterator[tuple[int, list[Process]]]:
    """Group ranks by the topmost process of their server; by parent if titles repeat, as with two engines."""
    known = [[process.parent, *(pid for pid in process.above if pid in own)] for process in ranks]
    for root, group in by_key((pids[-1], process) for pids, process in zip(known, ranks, strict=True)).items():
        if len({titles[process.pid].name for process in group}) == len(group):
            yield root, group
        else:
            yield from by_key((process.parent, process) for process in group).items()


def _name(root: int, process: Process | None, kind: str) -> str:
    words = process.command.split() if process is not None and read_title(process.command) is None else []
    script = next((word for word in words[1:] if not word.startswith("-")), kind)
    return f"pid {root} {script.rpartition('/')[2]}"
