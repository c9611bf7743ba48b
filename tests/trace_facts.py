"""Facts in the form sent by nodes to `trace blocked` and `trace fds`, for tests of conclusions from them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspy_facts import node, process

from distdiag.cluster.targets import Cluster
from distdiag.commands.trace import ranks
from distdiag.commands.trace.blocked.diagnose import diagnose
from distdiag.commands.trace.blocked.types import Request, Threads
from distdiag.facts.network.socket_owners import Network, Owned, PeerProcess
from distdiag.facts.network.sockets import Socket
from distdiag.facts.process.blocked_threads import Blocked, Futex, Lock, Target, Thread
from distdiag.facts.process.descriptors import Descriptor, End
from distdiag.jobs.part import SourceEnd
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.trace.blocked.types import TraceBlocked
    from distdiag.jobs.collect import Process
    from distdiag.jobs.types import NodePicture
    from distdiag.report import Report

NET = "net:[1]"
REQUEST = Request(program="distdiag", cluster=Cluster(), wanted=ranks.Wanted())


def thread(tid: int, call: str = "", *, state: str = "S", since_s: float = 60.0, **more: object) -> Thread:
    return replace(Thread(tid, "python", state, syscall=call, since_s=since_s), **more)  # type: ignore[arg-type]


def connection(pid: int, remote: str, *, local: str = "", state: str = "ESTABLISHED", wants: str = "r") -> Target:
    """A socket of this process, whose inode is 10 times the pid."""
    found = Socket(pid * 10, "tcp", state, local=local or f"10.0.0.1:{pid}", remote=remote)
    return Target(7, wants, Descriptor(7, "socket", f"socket:[{pid * 10}]", "rw", 2, inode=pid * 10, socket=found))


def receives(
    pid: int, from_pid: int, *, since_s: float = 60.0, call: str = "recvfrom", tid: int | None = None
) -> Thread:
    """Wait for data of another process, on a connection listed in `owned`."""
    target = connection(pid, f"10.0.0.1:{from_pid}")
    return thread(tid or pid, call, since_s=since_s, targets=(target,))


def reads_pipe(pid: int, *ends: int, kind: str = "pipe", target: str = "pipe:[5]", call: str = "read") -> Thread:
    one = Descriptor(5, kind, target, "r", 0, ends=tuple(End(end, 6, "w") for end in ends))
    return thread(pid, call, targets=(Target(5, "r", one),))


def sleeps(pid: int, since_s: float = 60.0, *, state: str = "S") -> Thread:
    return thread(pid, "clock_nanosleep", state=state, since_s=since_s, wakes_in_s=100.0)


def at_futex(pid: int, since_s: float = 60.0, *, tid: int | None = None) -> Thread:
    return thread(tid or pid, "futex", since_s=since_s, futex=Futex(1, (tid or pid,), None))


def at_lock(pid: int, holder: int) -> Thread:
    file = Descriptor(9, "file", "/data/lock", "rw", 2)
    lock = Lock("FLOCK", "WRITE", holder, "python")
    return thread(pid, "flock", targets=(Target(9, "", file),), locks=(lock,))


def owned(*pairs: tuple[int, int]) -> tuple[Owned, ...]:
    """Connections between processes: that of `pid` to `to` has the ports of their numbers."""
    found = []
    for pid, to in pairs:
        for one, other in ((pid, to), (to, pid)):
            ends = f"10.0.0.1:{one}", f"10.0.0.1:{other}"
            found.append(Owned(one, one * 10, "tcp", "ESTABLISHED", *ends))
    return tuple(dict.fromkeys(found))


def judge(
    threads: Mapping[int, Sequence[Thread] | Thread],
    *,
    sockets: Sequence[Owned] = (),
    peer_processes: Sequence[PeerProcess] = (),
    others: Sequence[Process] = (),
    moved: Sequence[int] = (),
    states: Mapping[int, str] | None = None,
    size: int | None = None,
    gpu: bool = False,
    request: Request = REQUEST,
) -> Report[TraceBlocked]:
    """Judge one node: pid 100 is rank 0, 101 rank 1, ...; `others` are more processes of it."""
    helpers = {one.pid for one in others}
    own = [pid for pid in threads if pid not in helpers]
    size = len(own) if size is None else size
    processes = [*(process(pid, pid - 100, size, gpu=gpu) for pid in own), *others]
    facts = node([replace(one, network=NET) for one in processes], {})
    looked = []
    for pid, some in threads.items():
        them = (some,) if isinstance(some, Thread) else tuple(some)
        state = (states or {}).get(pid, them[0].state)
        looked.append(Blocked(pid, state, None, them, tuple(one.tid for one in them if one.tid in moved)))
    networks = (Network(NET, ("10.0.0.1",), tuple(sockets)),)
    read = replace(facts, blocked=tuple(looked), networks=networks, peer_processes=tuple(peer_processes), ended=BOTH)
    return judge_nodes([read], request)


BOTH = (SourceEnd("stacks", 1.0, "no Python"), SourceEnd("waits", 1.0))


def judge_nodes(nodes: list[NodePicture], request: Request = REQUEST) -> Report[TraceBlocked]:
    return diagnose(request, Gathered(facts=nodes))


def all_threads() -> Request:
    return replace(REQUEST, threads=Threads.ALL)
