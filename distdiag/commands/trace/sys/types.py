"""The types of trace sys: its request, a traced thread, and the result. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

# msgspec reads the annotations of Request.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.trace.ranks import Wanted  # noqa: TC001

if TYPE_CHECKING:
    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.wait_reasons import Kind
    from distdiag.facts.strace.types import Count, Place, Spin, ThreadLog

COMMAND = "trace sys"
MAX_PROCESSES = 64
"""Of one node; each has a strace of its own."""
MAX_LOG_BYTES = 256 * 2**20
"""Of one node."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of a run. `only`: classes of calls; `logs`: directory of strace's logs."""

    program: str
    cluster: Cluster
    wanted: Wanted
    for_s: float = 5.0
    only: tuple[str, ...] = ()
    logs: str = ""


@dataclass(frozen=True, kw_only=True)
class TracedThread:
    """One thread as strace traced it for `span_s` seconds; no `log` if it made no call, or none of those traced.

    `kind`, `on`, `does`: what it waits for at the end, as Wait has them; `call`: in which system call, `blocked_s`: how
    long. `idle`: it did nothing else all the time. `peers`: the processes at the other end, `ranks`: their ranks.
    """

    host: str
    rank: int | None
    pid: int | None
    tid: int | None
    comm: str
    is_main: bool
    log: ThreadLog | None
    span_s: float
    kind: Kind
    call: str = ""
    on: str = ""
    does: str = ""
    blocked_s: float | None = None
    idle: bool = False
    peers: tuple[Key, ...] = ()
    ranks: tuple[int, ...] = ()
    job: str = ""

    @property
    def key(self) -> Key:
        """The process; of a log that does not say which, the thread."""
        return self.host, self.pid if self.pid is not None else self.tid or 0

    @property
    def n_calls(self) -> int:
        """How many calls returned while it was traced."""
        return self.log.n_calls if self.log is not None else 0


@dataclass(frozen=True, kw_only=True)
class Log:
    """One log. `cut`: strace detached early, at the size limit. `path`: where it is, if it was kept."""

    host: str
    rank: int | None
    pid: int | None
    path: str
    size_bytes: int
    span_s: float
    cut: bool = False
    unread: str = ""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A process that strace was not attached to: why, see collect.Attached; "too-many" is decided by the parent."""

    host: str
    rank: int | None
    pid: int
    why: str
    words: str
    tracer: int | None
    user: int


@dataclass(frozen=True, kw_only=True)
class LastCall:
    """The last system call of a thread. `blocked_s`: since when it has not returned; None if it did."""

    call: str
    args: str
    fd_target: str
    peer_rank: int | None
    blocked_s: float | None


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """An error worth reporting. `places`: at how many paths the file was looked for."""

    call: str
    error: str
    target: str
    places: int
    count: int


@dataclass(frozen=True, kw_only=True)
class ThreadRow:
    """One thread. `state`: "blocked", "runs", or how it ended; `kind` and `on` as in trace blocked."""

    host: str
    job: str
    rank: int | None
    pid: int | None
    tid: int | None
    comm: str
    main: bool
    state: str
    kind: str
    on: str
    n_calls: int
    traced_s: float
    last: LastCall | None
    calls: tuple[Count, ...]
    errors: tuple[ErrorRow, ...]
    places: tuple[Place, ...]
    spins: tuple[Spin, ...]


@dataclass(frozen=True, kw_only=True)
class TraceSys:
    """The result."""

    only: tuple[str, ...]
    threads: tuple[ThreadRow, ...]
    logs: tuple[Log, ...] = ()
    refused: tuple[Refused, ...] = field(default=())
