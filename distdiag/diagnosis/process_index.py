"""Ranks by process, names of processes, and the processes at the other end of a descriptor. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.socket_peers import Endpoint, match
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import format_hosts
from distdiag.jobs.roles import find_jobs
from distdiag.record import record
from distdiag.report import Where

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.facts.network.socket_owners import Network, PeerProcess
    from distdiag.facts.process.descriptors import Descriptor
    from distdiag.jobs.collect import Process
    from distdiag.jobs.types import Job, Member, NodePicture, NodeStacks
    from distdiag.report import Finding

Key = tuple[str, int]
"""A process: (host, pid)."""
_HELPERS = {
    "data-worker": "DataLoader worker",
    "compile-worker": "compile worker",
    "tracker": "resource tracker",
    "launcher": "launcher",
}
_NAMED = 3


@record
class Place:
    """The role of a process in a job. `is_rank`: the rank itself rather than a helper."""

    job: Job
    member: Member
    is_rank: bool

    @property
    def rank(self) -> int | None:
        """The rank it is or works for."""
        return self.member.rank


def not_found(nodes: Sequence[NodeStacks | NodePicture], pids: Iterable[int]) -> list[Finding]:
    """Report the requested processes that are on no node."""
    absent = set(pids).difference(process.pid for node in nodes for process in node.processes.processes)
    if not nodes or not absent:
        return []
    numbers = ", ".join(map(str, sorted(absent)))
    return [finding("process-not-found", pids=numbers, hosts=format_hosts(node.host for node in nodes))]


def ranks_not_found(job: Job, ranks: Sequence[int]) -> list[Finding]:
    """Report the ranks of a job that were found on none of its hosts."""
    if not ranks:
        return []
    hosts = format_hosts(member.host for member in job.members)
    words = {"ranks": name_ranks(ranks), "size": job.world_size, "hosts": hosts}
    return [finding("hang.unseen", words, where=Where(ranks=tuple(ranks)))]


class ProcessIndex:
    """All known processes of all nodes, by host and pid."""

    def __init__(
        self, nodes: Sequence[NodeStacks], ends: Mapping[str, tuple[Sequence[Network], Sequence[PeerProcess]]]
    ) -> None:
        self.processes: dict[Key, Process] = {
            (node.host, process.pid): process for node in nodes for process in node.processes.processes
        }
        self.peer_processes: dict[Key, PeerProcess] = {
            (host, person.pid): person for host, (_, peer_processes) in ends.items() for person in peer_processes
        }
        self.places: dict[Key, Place] = {}
        for job in find_jobs(nodes, whole=False):
            for member in job.members:
                self._place(job, member)
        self._ends = _matched(ends)

    def _place(self, job: Job, member: Member) -> None:
        if member.process is not None:
            self.places[member.host, member.process.pid] = Place(job, member, is_rank=True)
        for helper in member.helpers:
            self.places[member.host, helper.process.pid] = Place(job, member, is_rank=False)

    def role(self, key: Key) -> str:
        """Return "rank", "helper" or, for unrelated ones, "process"."""
        place = self.places.get(key)
        if place is not None and not place.is_rank:
            return "helper"
        return "process" if self.rank(key) is None else "rank"

    def rank(self, key: Key) -> int | None:
        """Return the process's own rank; None for helpers and unrelated processes."""
        place = self.places.get(key)
        return place.rank if place is not None and place.is_rank else None

    def others(self, host: str, pid: int, descriptor: Descriptor) -> tuple[Key, ...]:
        """Find the other processes at the far end of a pipe or socket."""
        keys = dict.fromkeys(key for key in self._all_ends(host, pid, descriptor) if key != (host, pid))
        return tuple(key for key in keys if not self._has_inherited(key, keys))

    def is_own(self, host: str, pid: int, descriptor: Descriptor) -> bool:
        """Return whether the process also has the far end open."""
        return (host, pid) in self._all_ends(host, pid, descriptor)

    def _all_ends(self, host: str, pid: int, descriptor: Descriptor) -> list[Key]:
        if descriptor.ends or descriptor.socket is None:
            return [(host, end.pid) for end in descriptor.ends]
        return [(end.host, end.pid) for end in self._ends.get((host, pid, descriptor.socket.inode), ())]

    def _has_inherited(self, key: Key, keys: Iterable[Key]) -> bool:
        """Return whether a helper just inherited the descriptor of its rank across fork."""
        place = self.places.get(key)
        process = place.member.process if place is not None and not place.is_rank else None
        return place is not None and process is not None and (place.member.host, process.pid) in keys

    def is_store(self, key: Key, descriptor: Descriptor) -> bool:
        """Return whether the connection leads to the job's store at MASTER_ADDR:MASTER_PORT."""
        process = self.processes.get(key)
        port = process.job.get("MASTER_PORT") if process is not None else None
        return bool(port) and descriptor.socket is not None and descriptor.socket.remote.rpartition(":")[2] == port

    def name(self, key: Key, *, seen_from: str = "", whole: bool = False) -> str:
        """Format a process: "rank 1", "DataLoader worker 812 of rank 0", "launcher 700 (torchrun)", "pid 812 (sh)".

        `seen_from`: a host; processes on other hosts get theirs appended. `whole`: "rank 1 (node07, pid 4711)".
        """
        host, pid = key
        place = self.places.get(key)
        on_host = f" on {host}" if seen_from and host != seen_from else ""
        if place is None:
            return self._stranger(key) + on_host
        title = place.member.title
        owner = f"rank {place.rank}" if place.rank is not None else title or f"pid {place.member.pid or '?'}"
        if place.is_rank and (place.rank is not None or title):
            return f"{owner} ({host}, pid {pid})" if whole else owner + on_host
        if place.is_rank:
            return f"pid {pid} ({host})" if whole else f"pid {pid}{on_host}"
        kind = _HELPERS.get(self.processes[key].kind, "process")
        return f"{kind} {pid} of {owner}{on_host}"

    def names(self, keys: Iterable[Key], *, seen_from: str = "") -> str:
        """Format several processes: "ranks 1-3", "rank 1 or pid 812 (sh)"; many are counted."""
        keys = list(dict.fromkeys(keys))
        ranks = [rank for rank in map(self.rank, keys) if rank is not None]
        if len(ranks) == len(keys) > 1:
            return name_ranks(ranks)
        owners = {id(place.member) for place in map(self.places.get, keys) if place is not None and not place.is_rank}
        if len(owners) == 1 and 1 < len(keys) <= _NAMED and all(key in self.places for key in keys):
            first = self.name(keys[0], seen_from=seen_from)
            return first.replace(f" {keys[0][1]} ", f" {' or '.join(str(pid) for _, pid in keys)} ", 1)
        all_of_them = list(dict.fromkeys(self.name(key, seen_from=seen_from) for key in keys))
        if len(all_of_them) <= _NAMED:
            return " or ".join(all_of_them)
        return f"{all_of_them[0]} or {len(all_of_them) - 1} others"

    def _stranger(self, key: Key) -> str:
        _, pid = key
        process, person = self.processes.get(key), self.peer_processes.get(key)
        if process is not None and process.kind == "launcher":
            return f"launcher {pid} ({_script(process.command)})"
        command = process.command if process is not None else person.command if person is not None else ""
        return f"pid {pid} ({_script(command)})" if command else f"pid {pid}"


def _matched(
    ends: Mapping[str, tuple[Sequence[Network], Sequence[PeerProcess]]],
) -> dict[tuple[str, int, int], tuple[Endpoint, ...]]:
    own = [(host, network) for host, (networks, _) in ends.items() for network in networks]
    endpoints = [
        Endpoint(**vars(each), host=host, network=network.name) for host, network in own for each in network.sockets
    ]
    return match(endpoints, {(host, network.name): network.addresses for host, network in own})


def _script(command: str) -> str:
    """Shorten a command line to its program, or to the script of an interpreter."""
    words = [word for word in command.split() if word != "..."]
    if not words:
        return ""
    program = words[0].rpartition("/")[2]
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    if program.startswith("python") and script:
        return script.rpartition("/")[2]
    return program
