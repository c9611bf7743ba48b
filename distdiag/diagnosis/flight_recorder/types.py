"""Request and report data of flight-recorder."""

from __future__ import annotations

import os

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations
from distdiag.record import record

COMMAND = "flight-recorder"


@record(kw_only=True)
class Request:
    """The options. `world_size`: 0 to infer it from the dumps; `wait_s`: how long to wait for triggered dumps."""

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    trigger: bool = False
    wait_s: float = 20.0
    world_size: int = 0
    verbose: bool = False


@record(kw_only=True)
class CallRow:
    """One operation of one rank. `number`: of the collective within its group, None for p2p.

    `state`: "scheduled", "started", "ended" or "failed". `source` and `target` of a send or recv are global ranks.
    """

    group: str
    operation: str
    number: int | None
    state: str
    created_ns: int
    function: str = ""
    file: str = ""
    line: int = 0
    source: int | None = None
    target: int | None = None

    @property
    def name(self) -> str:
        """The call: "all_reduce #5 of default_pg"."""
        if self.number is not None:
            return f"{self.operation} #{self.number} of {self.group}"
        to, peer = ("to", self.target) if self.operation == "send" else ("from", self.source)
        return f"{self.operation} {to} rank {peer}" if peer is not None else self.operation

    @property
    def site(self) -> str:
        """The calling line: "train (job.py:25)"."""
        return f"{self.function} ({os.path.basename(self.file)}:{self.line})" if self.file else ""


@record(kw_only=True)
class RankRow:
    """One rank. `status`: "waits", "idle" (all issued operations have ended), "failed", "no dump", "old dump".

    `accused`: by a finding; `waiting`: its oldest unfinished operation; `last`: its newest; `recent`: oldest first.
    """

    rank: int
    host: str
    path: str
    form: str
    backends: tuple[str, ...]
    entries: int
    truncated: bool
    status: str
    accused: bool
    error: str
    waiting: CallRow | None
    last: CallRow | None
    recent: tuple[CallRow, ...] = ()


@record(kw_only=True)
class FlightRecorder:
    """The data of the report. `world_size`: number of ranks as far as known."""

    world_size: int
    ranks: tuple[RankRow, ...]
