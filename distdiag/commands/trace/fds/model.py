"""What is asked of trace fds. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.trace.ranks import Wanted  # noqa: TC001

COMMAND = "trace fds"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    program: str
    cluster: Cluster
    wanted: Wanted
