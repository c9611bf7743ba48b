"""What flight-recorder is asked, and what its report holds."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations

COMMAND = "flight-recorder"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. `world_size`: 0 if the dumps are to tell; `wait_s`: for dumps that are triggered."""

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    trigger: bool = False
    wait_s: float = 20.0
    world_size: int = 0
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class CallRow:
    """One operation of one rank. `group` as it is shown; `number`: of the collective in its group, None for p2p.

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
    """One rank. `status`: "waits", "idle" (all it issued has ended), "failed", "no dump", "old dump".

    `accused`: by a finding; `waiting`: its oldest operation that has not ended; `last`: the newest; `recent`: the last
    ones, the newest last.
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
    """The facts of the answer. `world_size`: how many ranks there are, as far as dumps tell."""

    world_size: int
    ranks: tuple[RankRow, ...]
