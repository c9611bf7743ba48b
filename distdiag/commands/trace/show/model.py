"""What is asked of trace show. Loaded at each start of distdiag: the types of the answer stand in result.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distdiag.cluster.targets import Cluster

COMMAND = "trace show"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    program: str
    cluster: Cluster
    paths: tuple[str, ...]
    last: int = 5
    grep: str = ""
    count: str = ""
    all_runs: bool = False
    verbose: bool = False
    follow: bool = False
