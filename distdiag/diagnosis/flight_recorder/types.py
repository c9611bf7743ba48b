"""Request and report data of flight-recorder."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations

COMMAND = "flight-recorder"


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options. `world_size`: 0 to infer it from the dumps; `wait_s`: how long to wait for triggered dumps."""

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    trigger: bool = False
    wait_s: float = 20.0
    world_size: int = 0
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class FlightRecorder:
    """The data of the report. `world_size`: number of ranks as far as known."""

    world_size: int
    ranks: tuple[RankRow, ...]
