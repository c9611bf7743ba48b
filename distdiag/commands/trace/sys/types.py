"""The types of trace sys: its request, a traced thread, and the result. Pure data."""

from __future__ import annotations

from typing import TYPE_CHECKING

# msgspec reads the annotations of Request.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.trace.ranks import Wanted  # noqa: TC001
from distdiag.facts.strace.types import WAITING
from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.wait_reasons import Kind
    from distdiag.facts.strace.types import ThreadLog

COMMAND = "trace sys"
MAX_PROCESSES = 64
"""Per node; each process gets its own strace."""
MAX_LOG_BYTES = 256 * 2**20
"""Of one node."""


@record(kw_only=True)
class Request:
    """The options of a run. `logs`: directory of strace's logs."""

    program: str
    cluster: Cluster
    wanted: Wanted
    for_s: float = 5.0
    logs: str = ""


@record(kw_only=True)
class TracedThread:
    """One thread, traced for `span_s` seconds; no `log` if it made no call, or none was traced.

    `state`: "blocked", "runs", or how it ended. `kind`, `on`, `does`: its wait at the end, as in Wait; `call`: in which
    system call, `blocked_s`: for how long. `idle`: in that wait for the whole trace. `peers`: host and pid of the
    processes at the other end, `ranks`: their ranks. `n_calls`: number of calls that returned.
    """

    host: str
    job: str = ""
    rank: int | None
    pid: int | None
    tid: int | None
    comm: str
    main: bool
    state: str
    kind: Kind
    call: str = ""
    on: str = ""
    does: str = ""
    blocked_s: float | None = None
    idle: bool = False
    peers: tuple[Key, ...] = ()
    ranks: tuple[int, ...] = ()
    span_s: float
    n_calls: int = 0
    log: ThreadLog | None

    @property
    def key(self) -> Key:
        """The process; of a log that does not show which, the thread."""
        return self.host, self.pid if self.pid is not None else self.tid or 0


def state_of(log: ThreadLog | None, *, waits: bool) -> str:
    """Return the state of a thread, given its log and whether it waits in a call."""
    ended = log is not None and log.state not in (*WAITING, "returned", "cut")
    return "blocked" if waits else log.state if log is not None and ended else "runs"


@record(kw_only=True)
class TraceSys:
    """The result: all threads, by rank, the main one of each process first."""

    threads: tuple[TracedThread, ...]
