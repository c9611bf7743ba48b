"""From names to connections that greet as ssh does, for many hosts at once in one thread.

A host that does not answer costs a descriptor, not a thread, and is asked well before its turn to be logged in to: so
its deadline is over by the time that the others are done. Those that have greeted us and wait for their turn are not so
many that an sshd would lose its patience (LoginGraceTime).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import queue
import random
import resource
import selectors
import socket
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.transports.ssh_login import Refused, Retry
from distdiag.cluster.transports.threads import Threads
from distdiag.facts.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.cluster.hosts import Host
    from distdiag.cluster.transports import Arrivals
    from distdiag.cluster.transports.ssh_config import SshSettings
    from distdiag.cluster.transports.ssh_login import Login

_BYTES = 65536


class ReadsAhead(socket.socket):
    """Takes from the kernel what is there: half the calls, for each of which paramiko's threads pass on Python's lock.

    Not to be waited for by select() any more once it was read without flags: it may hold what was sent.
    """

    _held = b""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As of any socket."""
        if flags:
            return super().recv(size, flags)
        held = self._held or super().recv(_BYTES)
        self._held = held[size:]
        return held[:size]


ATTEMPTS = 3
_ASKED = 4
"""For each of the threads that log in so many hosts are asked at a time, and have not greeted us yet."""
_AHEAD = 16
"""For each of those threads so many hosts that have greeted us wait for their login, or are in it."""
_RESOLVERS = 16
_ANSWERS_SOON_S = 0.3
"""A host that has not answered by then no longer holds up others."""
_GREETING_BYTES = 4096
_KNOCK = b"SSH-2.0-distdiag\r\n\r\n"
_KNOCK_S = 1.0
_DROPPED = (
    "another program may listen there; or sshd drops connections: too many at once, or not allowed (MaxStartups, "
    "PerSourcePenalties, hosts.deny): check its log"
)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds for each stage."""

    resolve_s: float = 10.0
    connect_s: float = 5.0
    banner_s: float = 10.0
    login_s: float = 20.0


@dataclass(eq=False)
class Target:
    """One host on its way."""

    host: Host
    settings: SshSettings
    addresses: list[tuple[int, tuple[object, ...]]] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    attempts: int = 0
    deadline: float = 0.0
    socket: socket.socket | None = None
    counts_as: str = ""
    """Whether it counts among those that are "asked" or have "greeted"."""
    has_room: bool = False
    answered: bool = False
    knocked: bool = False
    said: bytes = b""


class Connector:
    """Connects to targets, looks at what greets us, and has threads log in."""

    def __init__(
        self, targets: list[Target], patience: Patience, arrivals: Arrivals, room: Room, login: Login, width: int
    ) -> None:
        """`width` threads log in."""
        self._patience = patience
        self._arrivals = arrivals
        self._room = room
        self._login = login
        self._width = width
        self._logins = Threads(width, "ssh-login")
        self._resolvers = Threads(_RESOLVERS, "ssh-resolve")
        self._left = set(targets)
        self._unresolved = set(targets)
        self._resolved_at = 0.0
        self._ready: deque[Target] = deque()
        self._later: list[tuple[float, Target]] = []
        self._counted = Counter({"asked": 0, "greeted": 0})
        self._soon: deque[tuple[float, Target]] = deque()
        self._selector = selectors.DefaultSelector()
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._push = socket.socketpair()
        for end in (self._bell, self._push):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._closed = False

    def go(self) -> None:
        """Work until every target is logged in to or given up."""
        self._resolved_at = time.monotonic()
        for target in list(self._left):
            self._resolvers.submit(self._resolve, target)
        try:
            while self._left and not self._closed:
                self._look()
                self._begin_more()
                self._give_up_late()
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            for target in list(self._left):
                self._give_up(target, HostError(state=HostState.FAILED, stage="connect", message=repr(error)))
        finally:
            self._end()

    def close(self) -> None:
        """Stop; who is not there yet is dropped."""
        self._closed = True

    def _end(self) -> None:
        self._logins.close()
        self._resolvers.close()
        for target in self._left:
            self._hang_up(target)
        self._selector.close()
        self._bell.close()
        self._push.close()

    def _look(self) -> None:
        for key, _ in self._selector.select(0.05):
            if key.data is None:
                self._bell.recv(65536)
            else:
                key.data[0](key.data[1])
        while not self._news.empty():
            self._news.get()()
        now = time.monotonic()
        self._ready += [target for at, target in self._later if at <= now]
        self._later = [(at, target) for at, target in self._later if at > now]
        while self._soon and self._soon[0][0] <= now:
            target = self._soon.popleft()[1]
            if not target.answered:
                self._count(target, "")

    def _tell(self, news: Callable[..., None], *arguments: object) -> None:
        """Have something done by our own thread; for the others."""
        self._news.put(functools.partial(news, *arguments))
        try:
            self._push.send(b".")
        except OSError:  # full: it rings already; closed: nobody listens any more
            return

    def _resolve(self, target: Target) -> None:
        families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6, "any": socket.AF_UNSPEC}
        name, port = target.settings.hostname, target.settings.port
        try:
            found = socket.getaddrinfo(name, port, families[target.settings.address_family], socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            words = (getattr(error, "strerror", None) or str(error)).lower()
            self._tell(self._resolved, target, [], words if name == target.host.name else f"{name}: {words}")
        else:
            self._tell(self._resolved, target, [(entry[0], entry[4]) for entry in found], "")

    def _resolved(self, target: Target, addresses: list[tuple[int, tuple[object, ...]]], trouble: str) -> None:
        self._resolved_at = time.monotonic()
        if target not in self._unresolved:  # given up meanwhile
            return
        self._unresolved.discard(target)
        if trouble:
            self._give_up(target, HostError(state=HostState.UNKNOWN_NAME, stage="resolve", message=trouble))
            return
        target.addresses = addresses
        self._ready.append(target)

    def _begin_more(self) -> None:
        while self._ready and self._is_time_for_more() and self._room.take():
            target = self._ready.popleft()
            target.has_room = True
            self._connect(target)
        on_the_way = len(self._selector.get_map()) - 1 + self._counted.total()
        if self._ready and not on_the_way and time.monotonic() - self._room.changed > self._patience.connect_s:
            words = f"no file descriptor left: the limit of {self._room.limit} is enough for {self._room.hosts} hosts"
            hint = "raise the limit (ulimit -n 8192), or use fewer hosts at once"
            for target in self._ready:
                self._give_up(target, HostError(state=HostState.FAILED, stage="connect", message=words, hint=hint))
            self._ready.clear()

    def _is_time_for_more(self) -> bool:
        counted = self._counted
        return counted["asked"] < _ASKED * self._width and counted["greeted"] < _AHEAD * self._width

    def _connect(self, target: Target) -> None:
        """Connect to the first of the addresses that are left; the target has its room."""
        self._arrivals.stage(target.host.name, "connect")
        now = time.monotonic()
        target.deadline = now + self._patience.connect_s
        target.answered = target.knocked = False
        target.said = b""
        self._count(target, "asked")
        self._soon.append((now + _ANSWERS_SOON_S, target))
        family, address = target.addresses[0]
        try:
            target.socket = ReadsAhead(family, socket.SOCK_STREAM)
            target.socket.setblocking(False)
            if target.settings.bind_address:
                target.socket.bind((target.settings.bind_address, 0))
            status = target.socket.connect_ex(address)
        except OSError as error:
            status = error.errno or errno.EINVAL
        if status not in (0, errno.EINPROGRESS):
            self._not_connected(target, status)
            return
        assert target.socket is not None
        self._selector.register(target.socket, selectors.EVENT_WRITE, (self._connected, target))

    def _connected(self, target: Target) -> None:
        assert target.socket is not None
        self._selector.unregister(target.socket)
        status = target.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            self._not_connected(target, status)
            return
        self._arrivals.stage(target.host.name, "banner")
        target.answered = True
        self._count(target, "asked")
        target.deadline = time.monotonic() + self._patience.banner_s
        self._selector.register(target.socket, selectors.EVENT_READ, (self._greeted, target))

    def _not_connected(self, target: Target, status: int) -> None:
        """Go on with the next address, if there is one."""
        port = target.settings.port
        words = os.strerror(status).lower()
        if status == errno.ECONNREFUSED:
            state, message = HostState.REFUSED, f"nothing listens on port {port}"
        elif status == errno.ETIMEDOUT:
            words = f"no answer within {self._patience.connect_s:g} s"
            state, message = HostState.FILTERED, f"no answer on port {port} within {self._patience.connect_s:g} s"
        else:
            lost = status in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
            state, message = HostState.NO_ROUTE if lost else HostState.FAILED, words
        target.tried.append(f"{target.addresses.pop(0)[1][0]} port {port}: {words}")
        self._hang_up(target)
        if target.addresses:
            self._connect(target)
            return
        evidence = tuple(dict.fromkeys(target.tried))
        self._give_up(target, HostError(state=state, stage="connect", message=message, evidence=evidence))

    def _greeted(self, target: Target) -> None:
        """Look at the greeting without taking it: paramiko wants to read it itself."""
        assert target.socket is not None
        try:
            target.said = target.socket.recv(_GREETING_BYTES, socket.MSG_PEEK)
        except OSError as error:
            words = (error.strerror or str(error)).lower()
        else:
            words = "it closed the connection without an ssh banner"
        if not target.said:
            self._again(target, HostError(state=HostState.NOT_SSH, stage="banner", message=words, hint=_DROPPED))
        elif _greets_as_ssh(target.said):
            self._selector.unregister(target.socket)
            self._enter(target)
        elif b"\n" in target.said or len(target.said) >= _GREETING_BYTES:
            self._not_ssh(target)
        else:  # wake up when there is more, or its end
            target.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(target.said) + 1)

    def _enter(self, target: Target) -> None:
        assert target.socket is not None
        if target.knocked:  # what we said is no beginning of a login
            late = f"its ssh banner came only after {self._patience.banner_s - self._knock_s:g} s"
            self._again(target, HostError(state=HostState.TIMEOUT, stage="banner", message=late))
            return
        target.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        target.socket.setblocking(True)
        self._count(target, "greeted")
        self._logins.submit(self._log_in, target, target.socket)

    def _log_in(self, target: Target, connection: socket.socket) -> None:
        """Done by one of the threads."""
        if self._closed:
            return
        name = target.host.name
        self._arrivals.stage(name, "login")
        try:
            link = self._login.enter(connection, target.settings)
        except Retry as error:
            self._tell(self._again, target, error.refusal)
        except Refused as error:
            self._tell(self._give_up, target, error.refusal)
        except Exception as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            refusal = HostError(state=HostState.FAILED, stage="login", message=repr(error))
            self._tell(self._give_up, target, refusal)
        else:
            link.when_dropped = self._room.give_back
            self._arrivals.link(name, link)
            self._tell(self._arrived, target)

    def _arrived(self, target: Target) -> None:
        target.socket, target.has_room = None, False  # they are the link's now
        self._let_go(target)
        self._left.discard(target)

    def _again(self, target: Target, refusal: HostError) -> None:
        """Try once more a little later: sshd drops connections when too many come at once."""
        target.attempts += 1
        if target.attempts >= ATTEMPTS:
            self._give_up(target, refusal)
            return
        self._let_go(target)
        self._later.append((time.monotonic() + 0.2 + random.random() * 0.5 * target.attempts, target))

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for key in list(self._selector.get_map().values()):
            if key.data is None:
                continue
            target = key.data[1]
            if target.answered and not target.knocked and now > target.deadline - self._knock_s:
                self._knock(target)
            if now > target.deadline:
                if target.answered:
                    self._silent(target)
                else:
                    self._not_connected(target, errno.ETIMEDOUT)
        if self._unresolved and now - self._resolved_at > self._patience.resolve_s:
            words = f"the name server did not answer within {self._patience.resolve_s:g} s"
            for target in list(self._unresolved):
                self._give_up(target, HostError(state=HostState.UNKNOWN_NAME, stage="resolve", message=words))
            self._unresolved.clear()

    @property
    def _knock_s(self) -> float:
        return min(_KNOCK_S, self._patience.banner_s / 2)

    def _knock(self, target: Target) -> None:
        """Send first: servers of other kinds wait for that, and their answer shows what they are."""
        assert target.socket is not None
        target.knocked = True
        with contextlib.suppress(OSError):
            target.socket.send(_KNOCK)

    def _silent(self, target: Target) -> None:
        if target.said:
            self._not_ssh(target)
            return
        port, patience_s = target.settings.port, self._patience.banner_s
        words = f"port {port} accepts the connection but sends nothing for {patience_s:g} s"
        self._give_up(target, HostError(state=HostState.TIMEOUT, stage="banner", message=words))

    def _not_ssh(self, target: Target) -> None:
        line = target.said.split(b"\n")[0][:80].decode("ascii", "replace").strip()
        words = f'port {target.settings.port} is not ssh, it answers "{printable(line)}"'
        self._give_up(target, HostError(state=HostState.NOT_SSH, stage="banner", message=words))

    def _give_up(self, target: Target, refusal: HostError) -> None:
        self._let_go(target)
        self._left.discard(target)
        self._arrivals.refuse(target.host.name, refusal)

    def _let_go(self, target: Target) -> None:
        """Take back what the target has."""
        self._hang_up(target)
        self._count(target, "")
        if target.has_room:
            target.has_room = False
            self._room.give_back()

    def _hang_up(self, target: Target) -> None:
        if target.socket is not None:
            with contextlib.suppress(KeyError, ValueError):  # not watched just now
                self._selector.unregister(target.socket)
            target.socket.close()
            target.socket = None

    def _count(self, target: Target, what: str) -> None:
        if target.counts_as:
            self._counted[target.counts_as] -= 1
        if what:
            self._counted[what] += 1
        target.counts_as = what


def _greets_as_ssh(said: bytes) -> bool:
    """Return whether a line begins with the greeting; others may come before it (RFC 4253, 4.2)."""
    return said.startswith(b"SSH-") or b"\nSSH-" in said


_FDS_PER_HOST = 3
"""The connection, and the pipe by which paramiko signals that there is something to read."""
_SPARE_FDS = 64


class Room:
    """Descriptors for hosts; our limit of them is raised as far as we may."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = soft
        wanted = min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            self.limit = wanted
        self.hosts = self._free = max(4, (self.limit - _SPARE_FDS) // _FDS_PER_HOST)
        self.changed = time.monotonic()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one host's share, if there is one."""
        with self._lock:
            if self._free == 0:
                return False
            self._free -= 1
            self.changed = time.monotonic()
            return True

    def give_back(self) -> None:
        """Have one host's share back."""
        with self._lock:
            self._free += 1
            self.changed = time.monotonic()
