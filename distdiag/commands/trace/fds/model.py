"""What is asked of trace fds. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdiag.cluster.targets import Cluster
    from distdiag.commands.trace.ranks import Wanted

COMMAND = "trace fds"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    program: str
    cluster: Cluster
    wanted: Wanted
