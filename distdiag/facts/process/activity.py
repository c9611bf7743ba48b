"""Activity of a rank between two readings: its other threads, children, files and connections.

A rank whose main thread sleeps may still be at work: a child copies a checkpoint, a thread uploads one, a server
generates samples for it. Each threshold is above the noise of idle libraries. Nothing is judged here.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from functools import partial

from distdiag.facts import deadlines, machine
from distdiag.facts.network.tcp_bytes import TcpBytes, tcp_bytes
from distdiag.facts.process import process_counters, procs
from distdiag.facts.process.local_peers import busy_peers, pipe_ends
from distdiag.facts.process.process_counters import Counters, IoBytes, Position
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_SHARE, _LEAST_S = 0.03, 0.03
"""Share of a core, and total processor seconds: heartbeats and monitors use 0.5 %, and the kernel counts in 0.01 s."""
_LEAST_SHARE = 0.01
"""The same with more runnable threads than cores, where each gets less."""
_ENDED_SHARE = 0.1
"""The same for children that started and ended unseen; a monitor that starts nvidia-smi every few seconds uses less."""
_BYTES_S = 4096.0
"""Log lines, wake-ups through eventfd and heartbeats are below."""
_CHILD_BYTES_S = 256.0
"""For children: an idle one does no I/O at all, and one that sleeps between two downloads does little."""
_TURNS_S, _TURN_S = 0.5, 100e-6
"""For a child: wake-ups per second, and processor seconds of each.

An idle DataLoader worker checks its queue every 5 s (300 us), a loop of sleeps takes below 75 us, and a debugger that
stops a thread 20 to 50 us.
"""
_BURST_BYTES_S = 65536.0
"""For threads other than the main one: a monitor reads some 20 KB of /proc every few seconds."""
_TRICKLE_BYTES_S, _TRICKLE_BYTES, _ONE_WAY = 256.0, 512, 8
"""A slow download: at least these, and 8 times the bytes sent. A heartbeat is smaller, or sends for each answer."""
_FAULTS, _FAULTS_S = 4, 2.0
"""Major page faults, total and per second; above those of a heartbeat that had been swapped out."""
_MOST = 8
_PATIENCE_S = 0.5
_IDLE_THREADS = re.compile(
    r"(NCCL |RCCL |cuda|pt_nccl_|pt_gloo_|pt_tcpstore|pt_autograd_|pt_elastic|iou-|wandb|tensorboard)"
)
"""Threads that spin or tick while a job hangs; pt_autograd_N waits for the GPU in place of the main thread."""
_IDLE_PROGRAMS = re.compile(
    r"(wandb|tensorboard|gpu_stats|nvidia-smi|nvidia-cuda-mps|rocm-smi|amd-smi|dcgmi|nvtop|py-spy|gdb$|strace$|perf$)"
)
"""Programs that record or examine a job."""
_OUTPUT = (1, 2)
"""Shared with the launcher and other ranks, whose log lines advance the position too."""


@record
class Moved:
    """One movement; `amount` in the unit of `what`, over Activity.seconds.

    `what`: "cpu" (processor seconds), "turns" (wake-ups of a child with work), "read", "written" (bytes through calls
    or the block layer), "received", "sent" (bytes of a connection taken by its process, or acknowledged by the peer),
    "offset" (bytes by which the position in a file being read advanced), "faults" (major page faults). `pid`, `comm`:
    the process that moved. `role`: "self" (the rank; its cpu excludes the main thread), "child" (a descendant), "peer"
    (at the other end of a local socket or pipe, or started by that process; not a rank). `detail`: a path, "TCP
    10.0.0.2:443", a thread's name, or a program without its arguments.
    """

    what: str
    pid: int
    comm: str
    role: str
    detail: str
    amount: float


@record
class Activity:
    """The movements of one rank in `seconds`, the highest multiple of its threshold first, at most 8; empty: none.

    `unread`: the counters that could not be read, and the reason.
    """

    pid: int
    seconds: float
    moved: tuple[Moved, ...]
    unread: str = ""


@record
class _Rank:
    """A rank's own counters. `others_s`: processor seconds of all threads but the main one, ended ones included."""

    main_io: IoBytes | None
    others_s: float
    threads: dict[int, Counters]
    targets: dict[int, str]
    positions: dict[tuple[int, str], Position]
    unread: str


@record
class _Reading:
    """All counters at one time. `owners`: the rank of each descendant. `tcp`: by network namespace, then inode.

    `io`: of all processes, as any may be at the other end of a rank's pipe. `turns`: of descendants.

    `crowd`: runnable threads per core of the machine, at least 1.
    """

    at_s: float
    crowd: float
    table: dict[int, Counters]
    owners: dict[int, int]
    io: dict[int, IoBytes | None]
    turns: dict[int, tuple[float, int]]
    ranks: dict[int, _Rank]
    tcp: dict[str, dict[int, TcpBytes]]
    tcp_unread: dict[str, str]


class Meter:
    """Reads once when created, and again for each comparison with that first reading."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Take the first reading; `pids`: all ranks of the job on this machine."""
        self._pids = list(pids)
        reads = {pid: partial(procs.variables, pid) for pid in self._pids}
        environments, _ = deadlines.together(reads, patience_s=_PATIENCE_S)
        self._store = {(names or {}).get("MASTER_PORT", "") for names in environments.values()} - {""}
        self._networks = {pid: machine.network_namespace(pid) for pid in self._pids}
        self._first = self._take(None)

    def has_children(self, pid: int) -> bool:
        """Return whether a rank had descendants at the first reading."""
        return pid in self._first.owners.values()

    def read(self) -> list[Activity]:
        """Return the activity of each rank since the first reading, in the order of the pids."""
        first, last = self._first, self._take(self._first)
        change = _Change(first, last)
        found: dict[int, list[tuple[float, Moved]]] = {pid: [] for pid in self._pids}
        for pid in self._pids:
            if pid in last.ranks and pid in first.ranks:
                found[pid] += [*change.own(pid), *change.children(pid)]
        for pid, row in self._connections(change):
            found[pid].append(row)
        for pid, row in self._peers(change):
            found[pid].append(row)
        return [self._activity(pid, found[pid], change) for pid in self._pids]

    def _activity(self, pid: int, rows: list[tuple[float, Moved]], change: _Change) -> Activity:
        rows.sort(key=lambda row: -row[0])
        unread = [part for part in (change.unread(pid), change.last.tcp_unread.get(self._networks[pid], "")) if part]
        return Activity(pid, change.seconds, tuple(_named(moved) for _, moved in rows[:_MOST]), "; ".join(unread))

    def _take(self, before: _Reading | None) -> _Reading:
        at_s, crowd, table = time.monotonic(), process_counters.crowd(), process_counters.table()
        owners = _owners(table, self._pids)
        least_s = _least_s(at_s - before.at_s, max(crowd, before.crowd)) if before is not None else 0.0

        def rank(pid: int) -> _Rank:
            return _rank(table[pid], before.ranks.get(pid) if before is not None else None, least_s)

        known = [pid for pid in self._pids if pid in table]
        ranks, _ = deadlines.each(known, rank, patience_s=_PATIENCE_S)
        io, _ = deadlines.each(table, process_counters.io_bytes, patience_s=_PATIENCE_S)
        turns = {pid: process_counters.turns(pid) for pid in owners}
        tcp, unread = self._tcp(known)
        return _Reading(at_s, crowd, table, owners, io, turns, ranks, tcp, unread)

    def _tcp(self, pids: Iterable[int]) -> tuple[dict[str, dict[int, TcpBytes]], dict[str, str]]:
        found: dict[str, dict[int, TcpBytes]] = {}
        unread = {}
        for name, pid in {self._networks[pid]: pid for pid in pids}.items():
            try:
                found[name] = tcp_bytes(pid)
            except OSError as error:
                unread[name] = f"the bytes of its TCP connections: {error.strerror or error}"
        return found, unread

    def _connections(self, change: _Change) -> Iterator[tuple[int, tuple[float, Moved]]]:
        """Find the connections that moved, except those between ranks and to the store."""
        last = change.last
        for name, connections in last.tcp.items():
            moved = {now.inode: rows for now in connections.values() if (rows := list(change.connection(name, now)))}
            ranks = [pid for pid in last.ranks if self._networks[pid] == name]
            users = _users({pid: last.ranks[pid].targets for pid in ranks}) if moved else {}
            if moved.keys() - users.keys():
                children = [child for child, owner in last.owners.items() if owner in ranks]
                users = {**_users({pid: process_counters.visible_links(pid) for pid in children}), **users}
            ends = {(each.local, each.remote): each.inode for each in connections.values()}
            for inode, rows in moved.items():
                now = connections[inode]
                to_rank = any(pid in last.ranks for pid in users.get(ends.get((now.remote, now.local), 0), ()))
                if not to_rank and not self._is_store(now):
                    yield from _by_user(rows, now, users.get(inode, []), last)

    def _is_store(self, connection: TcpBytes) -> bool:
        return any(end.rpartition(":")[2] in self._store for end in (connection.local, connection.remote))

    def _peers(self, change: _Change) -> Iterator[tuple[int, tuple[float, Moved]]]:
        """Find the busy processes at the other end of pipes and local sockets."""
        last = change.last
        above = _ancestors(last.table, [*self._pids, os.getpid()])
        others = [pid for pid in last.table if pid not in above and pid not in last.owners]
        targets = {pid: rank.targets for pid, rank in last.ranks.items()}
        connections = [each for network in last.tcp.values() for each in network.values()]
        computing = change.busy(others)
        for peer in busy_peers(targets, computing, last.table, connections, above):
            moved = Moved("cpu", peer.pid, last.table[peer.pid].comm, "peer", "", computing[peer.pid])
            yield peer.rank, (moved.amount / change.least_s, moved)
        least = _BYTES_S * change.seconds
        moving = {pid: sizes for pid in others if max(sizes := change.bytes_of(pid)) >= least}
        for peer in pipe_ends(targets, sorted(moving, key=lambda pid: -max(moving[pid]))):
            size = moving[peer.pid][not peer.reads]
            if size >= least:
                what = "read" if peer.reads else "written"
                moved = Moved(what, peer.pid, last.table[peer.pid].comm, "peer", "", size)
                yield peer.rank, (size / least, moved)


class _Change:
    """The difference between two readings. Each movement is paired with its multiple of its threshold."""

    def __init__(self, first: _Reading, last: _Reading) -> None:
        self.first, self.last = first, last
        self.seconds = max(last.at_s - first.at_s, 1e-3)
        self.least_s = _least_s(self.seconds, max(first.crowd, last.crowd))
        self._families: dict[int, list[int]] = {}
        for child, owner in last.owners.items():
            self._families.setdefault(owner, []).append(child)
        self._gone_s: dict[int, float] = {}
        """By parent: processor seconds at the first reading of children that ended since, and of their own children."""
        for gone in first.table.values():
            if _same(gone, last.table.get(gone.pid)) is None:
                self._gone_s[gone.parent] = self._gone_s.get(gone.parent, 0.0) + gone.cpu_s + gone.reaped_s

    def own(self, pid: int) -> Iterator[tuple[float, Moved]]:
        before, now, comm = self.first.ranks[pid], self.last.ranks[pid], self.last.table[pid].comm
        for tid, thread in now.threads.items():
            cpu_s = thread.cpu_s - _cpu_s(before.threads.get(tid), thread)
            if tid != pid and cpu_s >= self.least_s and not _IDLE_THREADS.match(thread.comm):
                yield cpu_s / self.least_s, Moved("cpu", pid, comm, "self", thread.comm, cpu_s)
        yield from self._faults(pid, "self")
        main_io = _since(before.main_io, now.main_io)
        all_io = _since(self.first.io.get(pid), self.last.io.get(pid))
        for number, what in enumerate(("read", "written")):
            main, others = main_io[number], all_io[number] - main_io[number]
            over = max(main / (_BYTES_S * self.seconds), others / (_BURST_BYTES_S * max(1.0, self.seconds)))
            if over >= 1:
                yield self._by_file(pid, what, over, all_io[number])

    def children(self, pid: int) -> Iterator[tuple[float, Moved]]:
        """List the movements of a rank's descendants, ended ones included."""
        family = self._families.get(pid, [])
        for child in family:
            now = self.last.table[child]
            cpu_s = now.cpu_s - _cpu_s(self.first.table.get(child), now)
            if cpu_s >= self.least_s:
                yield cpu_s / self.least_s, Moved("cpu", child, now.comm, "child", "", cpu_s)
            yield from self._faults(child, "child")
            known = _same(self.first.table.get(child), now)
            if known and cpu_s < self.least_s:
                yield from self._turns(known)
            before = self.first.io.get(child) if known else IoBytes()
            for what, size in zip(("read", "written"), _since(before, self.last.io.get(child))):
                if size >= _CHILD_BYTES_S * self.seconds:
                    yield size / (_CHILD_BYTES_S * self.seconds), Moved(what, child, now.comm, "child", "", size)
        for parent in (pid, *family):
            cpu_s = self._ended_s(parent)
            if cpu_s >= _ENDED_SHARE / _SHARE * self.least_s:
                moved = Moved("cpu", parent, self.last.table[parent].comm, "child", "children that ended", cpu_s)
                yield cpu_s / self.least_s, moved

    def busy(self, pids: Iterable[int]) -> dict[int, float]:
        """Return the processor seconds of each busy process, by pid."""
        table, before = self.last.table, self.first.table
        used = {pid: table[pid].cpu_s - _cpu_s(before.get(pid), table[pid]) for pid in pids}
        return {
            pid: cpu_s
            for pid, cpu_s in used.items()
            if cpu_s >= self.least_s and not _IDLE_PROGRAMS.match(table[pid].comm)
        }

    def bytes_of(self, pid: int) -> tuple[int, int]:
        """Return the bytes read and written by a process since the first reading; zeros if it is new."""
        is_same = _same(self.first.table.get(pid), self.last.table[pid]) is not None
        return _since(self.first.io.get(pid), self.last.io.get(pid)) if is_same else (0, 0)

    def connection(self, network: str, now: TcpBytes) -> Iterator[tuple[float, str, int]]:
        """List the movements of a connection: (multiple of its threshold, "received" or "sent", bytes)."""
        before = self.first.tcp.get(network, {}).get(now.inode)
        is_same = before is not None and (before.local, before.remote) == (now.local, now.remote)
        taken = now.taken - (before.taken if before is not None and is_same else 0)
        sent = now.sent - (before.sent if before is not None and is_same else 0)
        one_way = taken >= _TRICKLE_BYTES and taken >= _ONE_WAY * sent
        least = (_TRICKLE_BYTES_S if one_way else _BYTES_S) * self.seconds
        if taken >= least:
            yield taken / least, "received", taken
        if sent >= _BYTES_S * self.seconds:
            yield sent / (_BYTES_S * self.seconds), "sent", sent

    def unread(self, pid: int) -> str:
        ranks = [reading.ranks.get(pid) for reading in (self.first, self.last)]
        if pid not in self.last.table:
            return "it has exited"
        if None in ranks:
            return f"its counters: the kernel did not answer within {_PATIENCE_S} s"
        return next((rank.unread for rank in ranks if rank is not None and rank.unread), "")

    def _faults(self, pid: int, role: str) -> Iterator[tuple[float, Moved]]:
        now = self.last.table[pid]
        before = _same(self.first.table.get(pid), now)
        faults, least = (
            now.faults - (before.faults if before is not None else 0),
            max(_FAULTS, _FAULTS_S * self.seconds),
        )
        if faults >= least and before is not None:  # a starting program always has some
            yield faults / least, Moved("faults", pid, now.comm, role, "", faults)

    def _turns(self, child: Counters) -> Iterator[tuple[float, Moved]]:
        """Find a child that sleeps between short pieces of work, as between two small downloads."""
        before, now = self.first.turns.get(child.pid, (0.0, 0)), self.last.turns.get(child.pid, (0.0, 0))
        times, cpu_s = now[1] - before[1], now[0] - before[0]
        if times >= max(3.0, _TURNS_S * self.seconds) and cpu_s >= times * _TURN_S:
            yield times / (_TURNS_S * self.seconds), Moved("turns", child.pid, child.comm, "child", "", times)

    def _by_file(self, pid: int, what: str, over: float, size: float) -> tuple[float, Moved]:
        """Name the file whose position accounts for most of the bytes, if any."""
        now, before = self.last.ranks[pid].positions, self.first.ranks[pid].positions
        advanced = [
            (place.at - (before[key].at if key in before else 0), place.path)
            for key, place in now.items()
            if key[0] not in _OUTPUT and place.writes == (what == "written")
        ]
        most, path = max(advanced, default=(0, ""))
        comm = self.last.table[pid].comm
        if most < size / 2:
            return over, Moved(what, pid, comm, "self", "", size)
        return over, Moved("offset" if what == "read" else what, pid, comm, "self", path, most)

    def _ended_s(self, parent: int) -> float:
        """Return the processor seconds used since the first reading by children that ended."""
        now = self.last.table[parent]
        before = _same(self.first.table.get(parent), now)
        reaped_s = now.reaped_s - (before.reaped_s if before is not None else 0.0)
        return reaped_s - self._gone_s.get(parent, 0.0)


def _rank(process: Counters, before: _Rank | None, least_s: float) -> _Rank:
    """Read a rank; its threads a second time only if their total moved."""
    pid = process.pid
    unread = ""
    try:
        targets = process_counters.links(pid)
    except PermissionError:
        targets, unread = {}, "its files and connections: permission denied"
    main = process_counters.thread(pid, pid)
    others_s = process.cpu_s - (main.cpu_s if main is not None else 0.0)
    still = before is not None and others_s - before.others_s < least_s
    return _Rank(
        main_io=process_counters.io_bytes(pid, pid),
        others_s=others_s,
        threads=before.threads if still and before is not None else process_counters.threads(pid),
        targets=targets,
        positions=process_counters.positions(pid, targets),
        unread=unread,
    )


def _owners(table: dict[int, Counters], ranks: Sequence[int]) -> dict[int, int]:
    """Return the rank of each descendant, without programs that record or examine the job and their children."""
    known: dict[int, int] = {pid: pid for pid in ranks}
    known.update({pid: 0 for pid, process in table.items() if pid not in known and _IDLE_PROGRAMS.match(process.comm)})
    known[0] = known[os.getpid()] = 0
    for pid in table:
        way = []
        while pid in table and pid not in known:
            known[pid] = 0  # ends a cycle of reused ids
            way.append(pid)
            pid = table[pid].parent
        known.update(dict.fromkeys(way, known.get(pid, 0)))
    return {pid: owner for pid, owner in known.items() if owner and pid != owner}


def _ancestors(table: dict[int, Counters], pids: Iterable[int]) -> set[int]:
    """Return these processes and their ancestors: launchers and shells, whose work does not count for ranks."""
    found: set[int] = {0}
    for pid in pids:
        while pid not in found:
            found.add(pid)
            pid = table[pid].parent if pid in table else 0
    return found


def _users(targets: Mapping[int, Mapping[int, str]]) -> dict[int, list[int]]:
    """Return the processes with each socket open, by inode."""
    found: dict[int, list[int]] = {}
    for pid, links in targets.items():
        for target in set(links.values()):
            if target.startswith("socket:["):
                found.setdefault(int(target[8:-1]), []).append(pid)
    return found


def _by_user(
    rows: Iterable[tuple[float, str, int]], now: TcpBytes, users: Sequence[int], last: _Reading
) -> Iterator[tuple[int, tuple[float, Moved]]]:
    """Assign a connection to the ranks that have it open, else to the first such child."""
    for user in [pid for pid in users if pid in last.ranks] or users[:1]:
        rank = last.owners.get(user, user)
        role = "self" if user == rank else "child"
        for over, what, size in rows:
            yield rank, (over, Moved(what, user, last.table[user].comm, role, f"TCP {now.remote}", size))


def _named(moved: Moved) -> Moved:
    """Add the program of a process other than the rank: the base name of its script, or of its argv[0]."""
    if moved.role == "self" or moved.detail:
        return moved
    words, _ = deadlines.each([moved.pid], procs.command_words, patience_s=_PATIENCE_S)
    command = words.get(moved.pid) or [moved.comm]
    is_script = os.path.basename(command[0]).startswith("python") and command[1:] and not command[1].startswith("-")
    return replace(moved, detail=os.path.basename(command[1] if is_script else command[0]) or moved.comm)


def _least_s(seconds: float, crowd: float) -> float:
    return max(max(_SHARE / crowd, _LEAST_SHARE) * seconds, _LEAST_S)


def _same(before: Counters | None, now: Counters | None) -> Counters | None:
    """Return the earlier counters if both belong to one process: ids are reused."""
    return before if before is not None and now is not None and before.started == now.started else None


def _cpu_s(before: Counters | None, now: Counters) -> float:
    same = _same(before, now)
    return same.cpu_s if same is not None else 0.0


def _since(before: IoBytes | None, now: IoBytes | None) -> tuple[int, int]:
    return now.since(before) if now is not None and before is not None else (0, 0)
