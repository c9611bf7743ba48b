"""Parts of a verdict on a stuck job: sources, kinds of faults, claims. Pure data."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.diagnosis.remedies import again
from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.cluster.targets import Cluster
    from distdiag.report import Fix


class Source(StrEnum):
    """A kind of evidence, in the order of reports."""

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
"""The sources of pyspy-all and `trace blocked`."""


class StuckKind(StrEnum):
    """A kind of fault. Its finding id is "hang." and this, in every command."""

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
"""These end on their own unless the timeout expires first: warnings, never failures."""


class Stand(StrEnum):
    """Whether a source agrees with the verdict."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    CANNOT_TELL = "cannot tell"
    NOT_AVAILABLE = "not available"


@record(kw_only=True)
class Asked:
    """The parts of a command's request that the judgement needs. `job`, `pids`, `user`: selection, if any."""

    program: str
    cluster: Cluster
    command: str
    job: str = ""
    pids: tuple[int, ...] = ()
    user: str = ""
    sources: tuple[Source, ...] = tuple(Source)

    def again(self, *words: str) -> str:
        """Format a command to paste, with this program and the same hosts."""
        return again(self.program, self.cluster, *words)


@record(kw_only=True)
class Claim:
    """The claim of one source. `ranks`: the accused, if any; `kind`: None if undecided.

    `is_sure`: the evidence forces it; else another explanation is possible. `seconds`: how long the fault has lasted.
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
    """It accuses the ranks that differ from all others."""

    @property
    def accused(self) -> frozenset[int]:
        """The accused: ranks, or negative pids if no rank is known."""
        return self.ranks or frozenset(-pid for pid in self.pids)


@record(kw_only=True)
class SourceRow:
    """One source: its claim, the accused ranks, whether it agrees with the verdict, and how to get more from it."""

    source: Source
    stand: Stand
    says: str
    ranks: tuple[int, ...] = ()
    hint: str = ""
    seconds: float = 0.0
