"""All evidence about one job, the input of every source. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from shlex import quote
from typing import TYPE_CHECKING

from distdiag.diagnosis.gpu_use import judge_gpus
from distdiag.diagnosis.outliers import JobVerdict, judge_job, waited_s
from distdiag.diagnosis.process_index import ProcessIndex
from distdiag.diagnosis.rank_gpus import rank_gpus
from distdiag.diagnosis.stuck.types import Source
from distdiag.diagnosis.wait_graph import WaitGraph, find_roots
from distdiag.diagnosis.wait_reasons import wait_of
from distdiag.jobs.roles import restart_loop
from distdiag.record import record
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.diagnosis.flight_recorder.types import FlightRecorder
    from distdiag.diagnosis.gpu_use import GpuVerdict
    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.ras import RasVerdict
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.types import Asked
    from distdiag.diagnosis.wait_reasons import Wait
    from distdiag.facts.logs.job_output import Bar
    from distdiag.jobs.types import Job, NodePicture
    from distdiag.knowledge.advisories import Advisory
    from distdiag.report import Finding


_GLOO_THREAD = "pt_gloo_runloop"
"""torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: threads that run collectives, and wait in them with a timeout."""


@record(kw_only=True)
class Evidence:
    """All evidence about one job.

    `alone`: the only job on these nodes, so that logs and dumps belong to it. `stale_dumps_s`: age of the newest dump
    if all predate the current wait and were ignored. `restart_loop`: number of restarts, mean seconds per round.
    """

    asked: Asked
    nodes: Sequence[NodePicture]
    job: Job
    stacks: JobVerdict
    graph: WaitGraph
    gpus: GpuVerdict | None = None
    recorder: FlightRecorder | None = None
    recorder_findings: tuple[Finding, ...] = ()
    stale_dumps_s: float = 0.0
    log_findings: tuple[Finding, ...] = ()
    restarts: int = 0
    restart_loop: tuple[int, float] | None = None
    ras: tuple[RasVerdict, ...] = ()
    advisories: tuple[Advisory, ...] = ()
    bars: tuple[Bar, ...] = ()
    alone: bool = True

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """The processes of the job's ranks."""
        return tuple((member.host, member.process.pid) for member in self.job.members if member.process is not None)

    @cached_property
    def waited_s(self) -> float | None:
        """Longest known wait of the waiting ranks in seconds; None if none waits."""
        keys = [(state.member.host, state.member.pid or 0) for state in self.stacks.waiting]
        slept = [wait.since_s for key in keys if (wait := self.graph.main(key)) is not None and wait.since_s]
        return max([waited_s(self.stacks.waiting), *slept]) or None

    @cached_property
    def ends_in_s(self) -> float | None:
        """Seconds until a Gloo wait of these ranks ends by its process group's own timeout; None if unknown."""
        waiting = {(state.member.host, state.member.pid) for state in self.stacks.waiting}
        left = [
            thread.wakes_in_s
            for node in self.nodes
            for process in node.blocked
            if (node.host, process.pid) in waiting
            for thread in process.threads
            if thread.comm == _GLOO_THREAD and thread.wakes_in_s is not None
        ]
        return min(left, default=None)

    def wait(self, state: RankState) -> Wait | None:
        """Return the wait of a rank's main thread according to /proc."""
        return self.graph.main((state.member.host, state.member.pid or 0))

    def again(self, *words: str) -> str:
        """Format a command about this job to paste, with --job if the nodes run several."""
        is_named = self.job.name and (self.asked.job or not self.alone)
        return self.asked.again(*words, *(("--job", quote(self.job.name)) if is_named else ()))


_NO_RANKS = ("launcher", "tracker", "compile-worker")


def wait_graph(nodes: Sequence[NodePicture]) -> WaitGraph:
    """Build the wait graph from the system calls of all threads of ranks and their helpers."""
    ends = {node.host: (node.networks, node.peer_processes) for node in nodes}
    index = ProcessIndex([node.stacks for node in nodes], ends)
    found: dict[Key, tuple[Wait, ...]] = {}
    for node in nodes:
        others = {process.pid for process in node.processes.processes if process.kind in _NO_RANKS}
        for process in node.blocked:
            if process.pid in others:
                continue
            ordered = sorted(process.threads, key=lambda thread: (thread.tid != process.pid, thread.tid))
            found[node.host, process.pid] = tuple(wait_of(thread, process, node.host, index) for thread in ordered)
    return WaitGraph(found, index)


def gather_evidence(asked: Asked, nodes: Sequence[NodePicture], job: Job, *, alone: bool) -> Evidence:
    """Judge each source of one job on its own."""
    graph = wait_graph(nodes)
    evidence = Evidence(
        asked=asked,
        nodes=nodes,
        job=job,
        stacks=judge_job(job, _awaits(graph)),
        graph=graph,
        gpus=_judge_gpus(nodes, job),
        restart_loop=restart_loop(job, [node.stacks for node in nodes]),
        bars=tuple(bar for node in nodes for bar in node.bars),
        ras=_judge_ras(nodes) if alone else (),
        advisories=_advisories(nodes),
        alone=alone,
    )
    return _with_log(_with_recorder(evidence)) if alone else evidence


def _awaits(graph: WaitGraph) -> dict[Key, Key]:
    """Map each process to the end of its chain of waits."""
    edges = {edge.waiter: edge.to for edge in map(graph.edge, graph.by_process) if edge is not None}
    return {key: root for key, root in find_roots(edges).items() if root not in edges}  # a cycle has no end


def _judge_gpus(nodes: Sequence[NodePicture], job: Job) -> GpuVerdict | None:
    gpus = {node.host: [gpu for read in node.gpus for gpu in read.gpus] for node in nodes}
    return judge_gpus(rank_gpus(job.members, gpus)) if any(gpus.values()) else None


_CLOCKS_DIFFER_S = 10.0
"""Largest assumed clock difference between a file server and a node."""


def _with_recorder(evidence: Evidence) -> Evidence:
    """Judge the dumps of the current wait only: older ones lack calls made since."""
    from distdiag.diagnosis.flight_recorder.diagnose import diagnose
    from distdiag.diagnosis.flight_recorder.types import Request

    waited_s = evidence.waited_s
    ages, dumps = [], []
    for node in evidence.nodes:
        at_s = next((end.at_s for end in node.ended if end.source == Source.RECORDER), 0.0)
        for each in node.dumps:
            age_s = {dump.path: max(0.0, at_s - (dump.dumped_s or dump.modified_s)) for dump in each.dumps if at_s}
            old = {path for path, age in age_s.items() if waited_s is not None and age > waited_s + _CLOCKS_DIFFER_S}
            ages += [age_s[path] for path in old]
            dumps.append(
                replace(each, host=node.host, dumps=tuple(dump for dump in each.dumps if dump.path not in old))
            )
    if not any(each.dumps for each in dumps):
        return replace(evidence, stale_dumps_s=min(ages, default=0.0))
    request = evidence.asked
    asked = Request(program=request.program, cluster=request.cluster, world_size=evidence.job.world_size or 0)
    report = diagnose(asked, Gathered(facts=dumps))
    return replace(evidence, recorder=report.data, recorder_findings=report.findings)


def _with_log(evidence: Evidence) -> Evidence:
    from distdiag.diagnosis.job_logs.diagnose import diagnose
    from distdiag.diagnosis.job_logs.types import Request

    logs = []
    for node in evidence.nodes:
        if node.logs:
            events = tuple(event for part in node.logs for event in part.events)
            logs.append(replace(node.logs[0], host=node.host, events=events))
    if not logs:
        return evidence
    report = diagnose(Request(program=evidence.asked.program, cluster=evidence.asked.cluster), Gathered(facts=logs))
    return replace(evidence, log_findings=report.findings, restarts=report.data.generations - 1)


def _judge_ras(nodes: Sequence[NodePicture]) -> tuple[RasVerdict, ...]:
    from distdiag.diagnosis.ras import judge

    return tuple(judge(answer) for node in nodes for answer in node.ras)


def _advisories(nodes: Sequence[NodePicture]) -> tuple[Advisory, ...]:
    from distdiag.knowledge.advisories import matching

    found = {}
    for node in nodes:
        for mapped in node.versions:
            found.update({advisory.id: advisory for advisory in matching(mapped.versions) if advisory.kind == "hang"})
    return tuple(found.values())


def in_communicator_init(states: Sequence[RankState]) -> bool:
    """Return whether all ranks wait in ncclCommInitRank or the like: no collective has begun that could differ."""
    return bool(states) and all(state.thread.gpu is not None and state.thread.gpu.meaning == "init" for state in states)


def has_gpu(evidence: Evidence) -> bool:
    """Return whether a rank of the job has a GPU open or waits for one."""
    waits = any(state.thread.gpu is not None for state in evidence.stacks.states)
    return waits or any(member.process is not None and member.process.gpu for member in evidence.job.members)
