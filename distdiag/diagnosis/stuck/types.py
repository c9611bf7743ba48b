"""What a verdict on a stuck job is made of: sources, kinds of faults, claims. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.diagnosis.remedies import again

if TYPE_CHECKING:
    from distdiag.cluster.targets import Cluster
    from distdiag.report import Fix


class Source(StrEnum):
    """A kind of evidence, in the order in which reports list it."""

    STACKS = "stacks"
    WAITS = "waits"
    GPU = "gpu"
    RAS = "ras"
    RECORDER = "recorder"
    LOG = "log"
    KERNEL = "kernel"
    VERSIONS = "versions"
    START = "start"


OF_PROCESSES = (Source.STACKS, Source.WAITS)
"""What pyspy-all and `trace blocked` read."""


class StuckKind(StrEnum):
    """A kind of fault. The id of its finding is "hang." and this, whichever command reports it."""

    NOT_IN_COLLECTIVE = "not-in-collective"
    RENDEZVOUS = "rendezvous"
    EXITED = "exited"
    STOPPED = "stopped"
    DIFFERENT_COLLECTIVES = "different-collectives"
    SIZE_MISMATCH = "size-mismatch"
    BEHIND = "behind"
    DEADLOCK = "deadlock"
    DEVICE = "device-stuck"
    NETWORK = "network"
    STORAGE = "storage"
    DATA = "data-loading"
    COMPILE = "compile"
    BUSY = "busy-rank"
    LOCK = "lock"
    DEBUGGER = "debugger"
    RESTART = "elastic-restart"
    SLOW = "slow"
    OUTSIDE = "outside-the-job"
    KNOWN_BUG = "known-bug"
    NOT_HUNG = "not-hung"
    UNKNOWN = "unknown"


GOES_ON = (StuckKind.SLOW, StuckKind.BUSY, StuckKind.COMPILE)
"""What ends on its own unless the timeout comes first: a warning, never a failure."""


class Stand(StrEnum):
    """Whether a source agrees with the verdict."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    CANNOT_TELL = "cannot tell"
    NOT_AVAILABLE = "not available"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the judgement needs of a command's request. `job`, `pids`, `user`: what was asked for, if anything."""

    program: str
    cluster: Cluster
    command: str
    job: str = ""
    pids: tuple[int, ...] = ()
    user: str = ""
    sources: tuple[Source, ...] = tuple(Source)
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def again(self, *words: str) -> str:
        """Format a command to paste: this program with the same hosts."""
        return again(self.program, self.cluster, *words)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one source claims. `ranks`: the accused; none: it accuses no rank, or decides nothing (`kind` None).

    `is_sure`: the evidence forces it; else it may have another explanation. `seconds`: how long that has lasted.
    """

    source: Source
    says: str
    kind: StuckKind | None = None
    ranks: frozenset[int] = frozenset()
    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    is_sure: bool = True
    detail: str = ""
    evidence: tuple[str, ...] = ()
    fix: Fix | None = None
    seconds: float | None = None
    witnesses: frozenset[int] = frozenset()
    by_exclusion: bool = False
    """It accuses the ranks that do something else than all the others."""

    @property
    def accused(self) -> frozenset[int]:
        """The accused: ranks, or negative pids where no rank is known."""
        return self.ranks or frozenset(-pid for pid in self.pids)


@dataclass(frozen=True, kw_only=True)
class SourceRow:
    """One source: its claim, the accused ranks, whether it agrees with the verdict, and how to get more from it."""

    source: Source
    stand: Stand
    says: str
    ranks: tuple[int, ...] = ()
    hint: str = ""
    seconds: float = 0.0
