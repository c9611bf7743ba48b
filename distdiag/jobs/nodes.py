"""All that is known of one node: what --save writes and --from reads."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.jobs.collect import Processes, Watched  # noqa: TC001 - decoded by their annotations


@dataclass(frozen=True)
class NodeStacks:
    """The facts of one node; `missing` says why its stacks did not come, if they did not."""

    host: str
    processes: Processes
    watched: tuple[Watched, ...]
    missing: str = ""
