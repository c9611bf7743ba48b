"""What is asked of trace blocked. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.trace.ranks import Wanted  # noqa: TC001

COMMAND = "trace blocked"


class Threads(StrEnum):
    """Which threads to show."""

    MAIN = "main"
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    program: str
    cluster: Cluster
    wanted: Wanted
    threads: Threads = Threads.MAIN
