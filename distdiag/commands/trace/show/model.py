"""What is asked of trace show. Loaded at each start of distdiag: the types of the answer stand in result.py."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.cluster.targets import Cluster  # noqa: TC001 - msgspec reads the annotations

COMMAND = "trace show"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. No `paths`: where trace py keeps its files on each node."""

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    last: int = 5
    grep: str = ""
    count: str = ""
    all_runs: bool = False
    verbose: bool = False
    follow: bool = False
