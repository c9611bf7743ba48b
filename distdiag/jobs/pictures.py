"""Facts about the ranks on each host, the input of hang, pyspy-all and `trace blocked`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from distdiag import runner
from distdiag.cluster.ship_pyspy import bring_py_spy
from distdiag.cluster.start_fleet import Agent
from distdiag.jobs.collect import Processes
from distdiag.jobs.picture import Part
from distdiag.jobs.roles import to_sample, without_ranks
from distdiag.jobs.types import NodePicture, NodeStacks
from distdiag.runner import Asks, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.cluster.node import Node
    from distdiag.cluster.targets import Cluster
    from distdiag.gathered import Gathered
    from distdiag.output import Progress

COLLECT = "distdiag.jobs.picture"
LONGEST_S = 31.0
"""Longest time hang samples ranks that do not move."""
_SPARE_S = 1.0
_BRING_TO = 256
"""Nodes that get a copy of py-spy, 3 MB each; on clusters it usually is on a shared file system."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How stacks are sampled. `sample_s`: time limit of one sample of one process; `longest_s`: see sample_stacks."""

    samples: int = 2
    interval_s: float = 1.0
    is_quick: bool = False
    sample_s: float = 5.0
    longest_s: float = LONGEST_S
    native: bool = False
    all_threads: bool = False
    helpers: bool = False

    def takes_s(self) -> float:
        """Return the maximum duration of all samples."""
        return max(self.samples * self.interval_s, self.longest_s) + 2 * self.sample_s * (self.samples + 1)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The sources to read, with options. `timeout_s`: for all sources of a node."""

    sources: tuple[str, ...]
    timeout_s: float
    sampling: Sampling = Sampling()
    logs: tuple[str, ...] = ()
    recorder: tuple[str, ...] = ()
    waits_of_all: bool = False


def agent(pids: Sequence[int], user: str) -> Agent:
    """Return the agent that finds a node's ranks, then reads all sources."""
    return Agent(collect=COLLECT, facts=Processes, ask={"pids": list(pids), "user": user})


def gather(
    cluster: Cluster,
    finder: Agent,
    wish: Wish,
    choose: Callable[[Mapping[str, Processes]], Mapping[str, Processes]],
    progress: Progress,
    *,
    doing: str,
) -> Gathered[NodePicture]:
    """Find the processes on all hosts, `choose` some, and read them. Raises the errors of `choose`.

    Args:
        doing: the progress line; {processes} in it is the number of processes.
    """
    kept: dict[str, Processes] = {}

    def plan(hosts: Mapping[str, Processes], _: object) -> Asks:
        kept.update(choose(hosts))
        asks = {host: ask(wish, processes) for host, processes in kept.items()}
        by_host = {host: own for host, own in asks.items() if own is not None}
        count = sum(len(own["pids"]) for own in by_host.values())
        return Asks(
            by_host=by_host,
            timeout_s=wish.timeout_s + _SPARE_S,
            doing=doing.replace("{processes}", f"{count} process{'' if count == 1 else 'es'}"),
            steps=wish.sampling.samples,
            step_s=wish.sampling.interval_s,
        )

    question = Question[Processes, Part, NodePicture](
        part=Part,
        plan=plan,
        join=lambda host, first, parts, why: merge(host, kept.get(host, first), parts, why),
        before=_bring,
    )
    return runner.gather(cluster, finder, question, progress)


def _bring(nodes: Mapping[str, Node]) -> None:
    bring_py_spy(nodes.values(), at_most=_BRING_TO)


def ask(wish: Wish, processes: Processes) -> dict[str, Any] | None:
    """Return a node's request; None if it has no process of a job and no file was requested."""
    from distdiag.knowledge import gpu_libraries, known_lines

    sampling = wish.sampling
    pids, once = to_sample(processes.processes, helpers=sampling.helpers)
    starting = [process.pid for _, process in without_ranks([NodeStacks(processes.host, processes, ())])]
    if not (pids or starting or wish.logs or wish.recorder or (wish.waits_of_all and processes.processes)):
        return None
    sampled = set(pids) - set(once)
    ranks = [(p.pid, p.place.rank if p.place else None) for p in processes.processes if p.pid in sampled]
    return {
        "sources": list(wish.sources),
        "pids": pids,
        "ranks": ranks,
        "waits_of": [process.pid for process in processes.processes] if wish.waits_of_all else pids,
        "starting": starting,
        "launchers": [process.pid for process in processes.processes if process.kind == "launcher"],
        "stacks": {
            "once": once,
            "ranks": _heads(processes, sampled),
            "samples": sampling.samples,
            "interval_s": sampling.interval_s,
            "quick": sampling.is_quick,
            "timeout_s": min(sampling.sample_s, wish.timeout_s / 3),
            "native": sampling.native,
            "all_threads": sampling.all_threads,
            "longest_s": sampling.longest_s,
            "libraries": gpu_libraries.for_nodes(),
        },
        "logs": list(wish.logs),
        "recorder": list(wish.recorder),
        "patterns": known_lines.for_nodes() if "log" in wish.sources else [],
        "kernel": known_lines.for_kernels() if "kernel" in wish.sources else [],
        "timeout_s": wish.timeout_s,
        "ras_s": max(1.0, min(10.0, wish.timeout_s / 2)),
    }


def _heads(processes: Processes, sampled: set[int]) -> list[int]:
    """Return the sampled processes except those under another one of the same rank, such as an evaluation."""
    ranks = {p.pid: p.place.rank for p in processes.processes if p.pid in sampled and p.place is not None}
    below = {
        p.pid for p in processes.processes if p.pid in ranks and any(ranks.get(a) == ranks[p.pid] for a in p.above)
    }
    return [p.pid for p in processes.processes if p.pid in sampled - below]


def merge(host: str, processes: Processes, parts: Sequence[Part], why: str) -> NodePicture:
    """Merge the parts sent by a node; of a process sent twice, the last one counts."""
    joined = {field.name: tuple(each for part in parts for each in getattr(part, field.name)) for field in fields(Part)}
    once = {name: tuple({each.pid: each for each in joined[name]}.values()) for name in ("watched", "blocked")}
    return NodePicture(host=host, processes=processes, missing=why, **{**joined, **once})


def unread(host: str, why: str) -> NodePicture:
    """Return a placeholder for a node that sent no facts, or an unreadable file."""
    nothing = Processes(host, -1, None, may_trace=False, processes=(), asked_missing=())
    return NodePicture(host=host, processes=nothing, missing=why)


def all_nodes(gathered: Gathered[NodePicture]) -> list[NodePicture]:
    """Return the facts of all nodes, with placeholders for nodes that sent none."""
    known = {node.host for node in gathered.facts}
    missing = [unread(host, why) for host, why in gathered.missing.items() if host not in known]
    return [*gathered.facts, *missing]
