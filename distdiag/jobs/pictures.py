"""Facts about the ranks on each host, the input of hang, pyspy-all and `trace blocked`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag import runner
from distdiag.cluster.ship_pyspy import bring_py_spy
from distdiag.cluster.start_fleet import Agent
from distdiag.jobs import collect
from distdiag.jobs.collect import Processes
from distdiag.jobs.part import Part
from distdiag.jobs.roles import to_sample, without_ranks
from distdiag.jobs.sample_stacks import Sampled
from distdiag.jobs.types import NodePicture, NodeStacks
from distdiag.runner import Asks, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.cluster.targets import Cluster
    from distdiag.jobs.picture import Ask
    from distdiag.output import Progress
    from distdiag.saved_facts import Gathered

COLLECT = "distdiag.jobs.picture"
_SPARE_S = 1.0
_STORE_CLIENTS = 8
"""Maximum number of nodes that read a waiting job's store: with all nodes of a large job asked, it adds little."""
_BRING_TO = 256
"""Nodes that get a copy of py-spy, 3 MB each; on clusters it usually is on a shared file system."""


def agent(pids: Sequence[int], user: str) -> Agent:
    """Return the agent that finds a node's ranks, then reads all sources."""
    return Agent(collect=COLLECT, facts=Processes, ask=collect.Ask(pids, user))


def gather(
    cluster: Cluster,
    finder: Agent,
    ask: Ask,
    choose: Callable[[Mapping[str, Processes]], Mapping[str, Processes]],
    progress: Progress,
    *,
    doing: str,
) -> Gathered[NodePicture]:
    """Find the processes on all hosts, `choose` some, and read them. Raises the errors of `choose`.

    If no node has a chosen process, the pictures list all processes, unread, for an error that names the jobs.
    `ask`: without the processes of a node. `doing`: the progress line; {processes} in it is the number of processes.
    """
    kept: dict[str, Processes] = {}

    def plan(hosts: Mapping[str, Processes], _: object) -> Asks:
        chosen = choose(hosts)
        if any(processes.processes for processes in chosen.values()):
            kept.update(chosen)
        own = replace(ask, stores=len(kept) <= _STORE_CLIENTS)
        asks = {host: _of_node(own, processes) for host, processes in chosen.items()}
        by_host = {host: each for host, each in asks.items() if each is not None}
        count = sum(len(each.sampled.pids) for each in by_host.values())
        return Asks(
            by_host=by_host,
            timeout_s=ask.timeout_s + _SPARE_S,
            doing=doing.replace("{processes}", f"{count} process{'' if count == 1 else 'es'}"),
            steps=ask.sampling.samples,
            step_s=ask.sampling.interval_s,
        )

    question = Question[Processes, Part, NodePicture](
        part=Part,
        plan=plan,
        join=lambda host, first, parts, why: merge(host, kept.get(host, first), parts, why),
        before=lambda nodes: bring_py_spy(nodes.values(), at_most=_BRING_TO),
    )
    return runner.gather(cluster, finder, question, progress)


def _of_node(ask: Ask, processes: Processes) -> Ask | None:
    """Return a node's request; None if it has no process of a job and no file was requested."""
    from distdiag.knowledge import gpu_libraries, known_lines

    pids, once = to_sample(processes.processes)
    starting = [process.pid for _, process in without_ranks([NodeStacks(processes.host, processes, ())])]
    if not (pids or starting or ask.logs or ask.recorder or (ask.waits_of_all and processes.processes)):
        return None
    sampled = set(pids) - set(once)
    return replace(
        ask,
        sampling=replace(ask.sampling, sample_s=min(ask.sampling.sample_s, ask.timeout_s / 3)),
        ras_s=max(1.0, min(10.0, ask.timeout_s / 2)),
        patterns=known_lines.for_nodes() if "log" in ask.sources else (),
        kernel=known_lines.for_kernels() if "kernel" in ask.sources else (),
        sampled=Sampled(pids, once, _heads(processes, sampled), gpu_libraries.for_nodes()),
        ranks=[(p.pid, p.place.rank if p.place else None) for p in processes.processes if p.pid in sampled],
        waiting=[process.pid for process in processes.processes] if ask.waits_of_all else pids,
        starting=starting,
        launchers=[process.pid for process in processes.processes if process.kind == "launcher"],
    )


def _heads(processes: Processes, sampled: set[int]) -> list[int]:
    """Return the sampled processes except those under another one of the same rank, such as an evaluation."""
    ranks = {p.pid: p.place.rank for p in processes.processes if p.pid in sampled and p.place is not None}
    below = {
        p.pid for p in processes.processes if p.pid in ranks and any(ranks.get(a) == ranks[p.pid] for a in p.above)
    }
    return [p.pid for p in processes.processes if p.pid in sampled - below]


def merge(host: str, processes: Processes, parts: Sequence[Part], why: str) -> NodePicture:
    """Merge the parts sent by a node; of a process sent twice, the last one counts."""
    joined = runner.merged(parts)
    once = {name: tuple({each.pid: each for each in joined.get(name, ())}.values()) for name in ("watched", "blocked")}
    return NodePicture(host=host, processes=processes, missing=why, **{**joined, **once})
