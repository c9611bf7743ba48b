"""What each source says of a job on its own: whom it accuses, of what, and how surely. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.commands.hang.types import HangClass, Source
from distdiag.diagnosis import wait_findings
from distdiag.diagnosis.outliers import JobVerdict, Outcome, judge_job, place, polls, split
from distdiag.diagnosis.process_index import ProcessIndex
from distdiag.diagnosis.stack_classes import BUSY, StackClass, in_event_loop
from distdiag.diagnosis.stack_wording import briefly, does, rendezvous_in_words, waits, who
from distdiag.diagnosis.wait_findings import Case
from distdiag.diagnosis.wait_graph import WaitGraph, wait_trees
from distdiag.diagnosis.wait_reasons import Kind, lasting, wait_of
from distdiag.gathered import Gathered
from distdiag.jobs.types import NodeStacks
from distdiag.knowledge.activities import activity_of
from distdiag.report import Finding, Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.commands.hang.types import NodeHang, Request
    from distdiag.diagnosis.flight_recorder.types import FlightRecorder
    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.ras import Member, RasVerdict
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.wait_reasons import Wait
    from distdiag.facts.job_output import Bar
    from distdiag.jobs.types import Job
    from distdiag.knowledge.advisories import Advisory


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one source says. `ranks`: whom it accuses; none: it accuses nobody, or says nothing (`class_name` None).

    `is_sure`: the evidence forces it; else it may have another explanation. `seconds`: how long that has lasted.
    """

    source: Source
    says: str
    class_name: HangClass | None = None
    ranks: frozenset[int] = frozenset()
    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    is_sure: bool = True
    detail: str = ""
    evidence: tuple[str, ...] = ()
    fix: Fix | None = None
    seconds: float | None = None
    witnesses: frozenset[int] = frozenset()

    @property
    def accused(self) -> frozenset[int]:
        """Whom it accuses: ranks, or processes where nothing tells their ranks."""
        return self.ranks or frozenset(-pid for pid in self.pids)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of one job, read once.

    `alone`: it is the only job there. `stale_dumps_s`: the age of the newest dump where all are from before the present
    wait, and were not judged.
    """

    request: Request
    nodes: Sequence[NodeHang]
    job: Job
    stacks: JobVerdict
    graph: WaitGraph
    case: Case
    recorder: FlightRecorder | None = None
    recorder_findings: tuple[Finding, ...] = ()
    stale_dumps_s: float = 0.0
    log_findings: tuple[Finding, ...] = ()
    restarts: int = 0
    ras: tuple[RasVerdict, ...] = ()
    advisories: tuple[Advisory, ...] = ()
    bars: tuple[Bar, ...] = ()
    alone: bool = True

    def waited_s(self) -> float | None:
        """Return how long the ranks that wait in a collective have slept; the longest."""
        keys = [(state.member.host, state.member.pid or 0) for state in self.stacks.waiting]
        known = [still.since_s for state in self.stacks.waiting if (still := state.standstill) and still.since_s]
        known += [wait.since_s for key in keys if (wait := self.graph.main(key)) is not None and wait.since_s]
        return max(known, default=None)


def watched_nodes(nodes: Iterable[NodeHang]) -> list[NodeStacks]:
    """Return what pyspy-all's judgement is made of."""
    return [NodeStacks(node.host, node.processes, node.watched, node.missing) for node in nodes]


def wait_graph(nodes: Sequence[NodeHang]) -> WaitGraph:
    """Return who waits for whom, from what /proc says of every thread."""
    ends = {node.host: (node.networks, node.people) for node in nodes}
    index = ProcessIndex(watched_nodes(nodes), ends)
    found: dict[Key, tuple[Wait, ...]] = {}
    for node in nodes:
        for process in node.blocked:
            ordered = sorted(process.threads, key=lambda thread: (thread.tid != process.pid, thread.tid))
            found[node.host, process.pid] = tuple(wait_of(thread, process, node.host, index) for thread in ordered)
    return WaitGraph(found, index)


def gather_evidence(request: Request, nodes: Sequence[NodeHang], job: Job, *, alone: bool) -> Evidence:
    """Read what all sources say of one job. `alone`: it is the only one, so that logs and dumps are of it."""
    graph = wait_graph(nodes)
    keys = tuple((member.host, member.process.pid) for member in job.members if member.process is not None)
    evidence = Evidence(
        request=request,
        nodes=nodes,
        job=job,
        stacks=judge_job(job, request.interval_s),
        graph=graph,
        case=Case(request, job, keys, graph),
        bars=tuple(bar for node in nodes for bar in node.bars),
        ras=_judge_ras(nodes) if alone else (),
        advisories=_advisories(nodes),
        alone=alone,
    )
    if not alone:
        return evidence
    recorder, recorder_findings, stale_dumps_s = _judge_recorder(evidence)
    log_findings, restarts = _judge_log(evidence)
    return replace(
        evidence,
        recorder=recorder,
        recorder_findings=recorder_findings,
        stale_dumps_s=stale_dumps_s,
        log_findings=log_findings,
        restarts=restarts,
    )


_CLOCKS_DIFFER_S = 10.0
"""By how much the clock of a file server may be ahead of or behind that of a node."""


def _judge_recorder(evidence: Evidence) -> tuple[FlightRecorder | None, tuple[Finding, ...], float]:
    """Judge the dumps of the present wait; in an older one, ranks lack calls that they have made since."""
    from distdiag.diagnosis.flight_recorder.diagnose import diagnose
    from distdiag.diagnosis.flight_recorder.types import Request as Asked

    # A rank that waits for its GPU wakes again and again: how long it has waited is not known.
    waited_s = None if has_gpu(evidence) else evidence.waited_s()
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
        return None, (), min(ages, default=0.0)
    request = evidence.request
    asked = Asked(program=request.program, cluster=request.cluster, world_size=evidence.job.world_size or 0)
    report = diagnose(asked, Gathered(facts=dumps))
    return report.data, report.findings, 0.0


def _judge_log(evidence: Evidence) -> tuple[tuple[Finding, ...], int]:
    from distdiag.diagnosis.job_logs.diagnose import diagnose
    from distdiag.diagnosis.job_logs.types import Request as Asked

    logs = []
    for node in evidence.nodes:
        if node.logs:
            events = tuple(event for part in node.logs for event in part.events)
            logs.append(replace(node.logs[0], host=node.host, events=events))
    if not logs:
        return (), 0
    report = diagnose(Asked(program=evidence.request.program, cluster=evidence.request.cluster), Gathered(facts=logs))
    return report.findings, report.data.generations - 1


def _judge_ras(nodes: Sequence[NodeHang]) -> tuple[RasVerdict, ...]:
    from distdiag.diagnosis.ras import judge

    return tuple(judge(answer) for node in nodes for answer in node.ras)


def _advisories(nodes: Sequence[NodeHang]) -> tuple[Advisory, ...]:
    from distdiag.knowledge.advisories import matching

    found = {}
    for node in nodes:
        for mapped in node.versions:
            found.update({advisory.id: advisory for advisory in matching(mapped.versions) if advisory.kind == "hang"})
    return tuple(found.values())


# --- stacks ---------------------------------------------------------------------------------------------------------

_CLASSES = {
    StackClass.EXITED: HangClass.EXITED,
    StackClass.STOPPED: HangClass.STOPPED,
    StackClass.DATA: HangClass.DATA,
    StackClass.STORAGE: HangClass.STORAGE,
    StackClass.COMPILE: HangClass.COMPILE,
    StackClass.LOCK: HangClass.LOCK,
    StackClass.GIL: HangClass.LOCK,
    StackClass.DEBUGGER: HangClass.DEBUGGER,
    StackClass.CUDA_SYNC: HangClass.DEVICE,
}
_LOCKING = ("flock", "fcntl", "futex")
"""Python's own locks have no frame: a thread that waits for a lock or a thread sleeps in a futex."""
_BY_ACTIVITY = {"compiles": HangClass.COMPILE}


def of_stacks(evidence: Evidence) -> Claim:
    """Say what the stacks of all ranks come to."""
    verdict = evidence.stacks
    outcome = verdict.outcome
    waiting = frozenset(s.member.rank for s in verdict.waiting if s.member.rank is not None)
    claim = Claim(source=Source.STACKS, says="", witnesses=waiting, seconds=evidence.waited_s())
    if outcome is Outcome.UNREADABLE:
        reasons = Counter(state.thread.reason for state in verdict.unreadable)
        why = next(iter(reasons), "not all ranks were seen")
        return replace(claim, says=f"not all stacks could be read: {why}")
    if outcome is Outcome.RENDEZVOUS:
        is_sure = _listens_where_told(evidence)
        return replace(claim, class_name=HangClass.RENDEZVOUS, says=rendezvous_in_words(evidence.job), is_sure=is_sure)
    if outcome is Outcome.NOT_HUNG:
        moving = [state for state in verdict.states if state.thread.moving] or list(verdict.states)
        return replace(claim, class_name=HangClass.NOT_HUNG, says=f"{briefly(moving)} made progress between samples")
    if outcome in (Outcome.OUTLIERS, Outcome.OTHER_COLLECTIVE, Outcome.LEAST_PROGRESS, Outcome.CYCLE):
        return _of_outliers(claim, evidence)
    if outcome is Outcome.LEFT:
        gone = [state for state in verdict.states if state.thread.kind is StackClass.EXITED]
        return _accusing(claim, gone, HangClass.EXITED, f"{who(gone)} exited", is_sure=_is_waited_for(evidence))
    words = "; ".join(f"{briefly(group)}: {_place(group[0])}" for group in split(verdict.waiting)[:3])
    return replace(claim, says=f"no rank stands out: {words}")


def _listens_where_told(evidence: Evidence) -> bool:
    """Return whether rank 0 listens at the port of its environment, and others look for another port of that host.

    A rank that had been given the port of rank 0 since by its script would have found it. Ranks that look for another
    host may be of another job, whose other hosts were not looked at.
    """
    hosts = {place.rpartition(":")[0] for place, _ in evidence.job.rendezvous}
    ports = {place.rpartition(":")[2]: ranks for place, ranks in evidence.job.rendezvous}
    first = next((port for port, ranks in ports.items() if 0 in ranks), "")
    pids = {(member.host, member.pid) for member in evidence.job.members if member.rank == 0}
    return (
        len(ports) > 1
        and len(hosts) == 1
        and any(
            (node.host, socket.pid) in pids and socket.state == "LISTEN" and socket.local.rpartition(":")[2] == first
            for node in evidence.nodes
            for network in node.networks
            for socket in network.sockets
        )
    )


def _slept_s(states: Sequence[RankState]) -> float | None:
    known = [still.since_s for state in states if (still := state.standstill) is not None and still.since_s is not None]
    return max(known, default=None)


def _place(state: RankState) -> str:
    return waits(state, alone=True) if state.thread.kind in (StackClass.COMM, StackClass.CUDA_SYNC) else does(state)


def _of_outliers(claim: Claim, evidence: Evidence) -> Claim:
    verdict = evidence.stacks
    first = verdict.outliers[0]
    if verdict.outcome is Outcome.CYCLE:
        says = "; ".join(f"{briefly([state])} waits {waits(state, alone=True)}" for state in verdict.outliers[:4])
        return _accusing(claim, verdict.outliers, HangClass.DEADLOCK, says)
    if verdict.outcome is Outcome.OTHER_COLLECTIVE:
        others = f", {briefly(verdict.waiting)} {waits(verdict.waiting[0])}"
        says = f"{who(verdict.outliers)} waits {waits(first)}{others}"
        return _accusing(claim, verdict.outliers, HangClass.DIFFERENT_COLLECTIVES, says)
    if verdict.outcome is Outcome.LEAST_PROGRESS:
        says = (
            f"{who(verdict.outliers)} is at {_counters(first)}, {briefly(verdict.waiting)} at "
            f"{_counters(verdict.waiting[0])}; "
            f"all wait {waits(first)}"
        )
        return _accusing(claim, verdict.outliers, HangClass.BEHIND, says)
    gone = [state for state in verdict.outliers if state.thread.kind is StackClass.EXITED]
    chosen = gone or [state for state in verdict.outliers if state.thread.kind is StackClass.STOPPED]
    chosen = chosen or list(verdict.outliers)
    groups = split(chosen)
    says = "; ".join(f"{who(group)}: {does(group[0])}" for group in groups[:3])
    class_name = stack_class(groups[0][0], only_slow=verdict.only_slow, evidence=evidence)
    return _accusing(claim, chosen, class_name, says, is_sure=not gone or _is_waited_for(evidence))


def _is_waited_for(evidence: Evidence) -> bool:
    """Return whether the others wait for the ranks that are gone.

    Ranks that leave one after the other are a job that ends: who left first is not known, and may not have been seen.
    """
    waiting = evidence.stacks.waiting
    lasts = [polls(state) or (_slept_s([state]) or 0.0) > wait_findings.LONG_S for state in waiting]
    return bool(waiting) and all(lasts) and not evidence.job.unseen


def stack_class(state: RankState, *, only_slow: bool, evidence: Evidence) -> HangClass:
    """Classify a rank that is not in the collective by what it does."""
    thread = state.thread
    found = _CLASSES.get(thread.kind)
    if found in (HangClass.EXITED, HangClass.STOPPED, HangClass.DEBUGGER):
        return found
    wait = evidence.graph.main((state.member.host, state.member.pid or 0))
    if wait is not None and wait.kind is Kind.CHILD and thread.kind in (StackClass.LOCK, StackClass.PYTHON):
        # What it waits for works: an evaluation, a download, a compiler of its own.
        runs = wait.thread is not None and any(child.state == "R" for child in wait.thread.children)
        return HangClass.BUSY if runs else HangClass.SLOW if only_slow else HangClass.NOT_IN_COLLECTIVE
    still = state.standstill
    if still is not None and still.state == "D":
        is_device = still.path.startswith("/dev/") or "nv" in still.wait_channel[:3]
        return HangClass.DEVICE if is_device else HangClass.STORAGE
    if still is not None and still.syscall in _LOCKING and thread.kind in (StackClass.PYTHON, StackClass.STORAGE):
        return HangClass.LOCK
    activity = activity_of(thread.frames)
    if activity in _BY_ACTIVITY:
        return _BY_ACTIVITY[activity]
    if found is HangClass.LOCK and in_event_loop(thread.frames):
        found = None
    if found is not None and not (found is HangClass.DATA and activity and thread.moving):
        return found
    is_working = (thread.busy or 0.0) >= BUSY or bool(thread.moving) or thread.runs
    if only_slow and not activity and (not is_working or (evidence.waited_s() or 0.0) <= wait_findings.LONG_S):
        return HangClass.SLOW
    return HangClass.BUSY if is_working or activity else HangClass.NOT_IN_COLLECTIVE


def _counters(state: RankState) -> str:
    return ", ".join(f"{name} {value}" for name, value in state.thread.counters)


def _accusing(
    claim: Claim, states: Sequence[RankState], class_name: HangClass, says: str, *, is_sure: bool = True
) -> Claim:
    return replace(
        claim,
        class_name=class_name,
        says=says,
        is_sure=is_sure,
        ranks=frozenset(state.member.rank for state in states if state.member.rank is not None),
        pids=tuple(state.member.pid for state in states if state.member.pid is not None),
        hosts=tuple(dict.fromkeys(state.member.host for state in states if state.member.host)),
    )


# --- /proc ----------------------------------------------------------------------------------------------------------

_OF_WAITS = {
    "trace.stopped": HangClass.STOPPED,
    "trace.storage": HangClass.STORAGE,
    "trace.lock-held": HangClass.LOCK,
    "trace.waits-for": HangClass.NOT_IN_COLLECTIVE,
    "trace.stuck-rank": HangClass.NOT_IN_COLLECTIVE,
    "trace.straggler": HangClass.SLOW,
}


def of_waits(evidence: Evidence) -> Claim:
    """Say what /proc tells of who waits for whom."""
    case = evidence.case
    keys = set(case.keys)
    trees = [
        tree
        for tree in wait_trees(evidence.graph)
        if not {tree.root, *(edge.waiter for edge in tree.edges)}.isdisjoint(keys)
    ]
    found = [*wait_findings.of_trees(case, trees), *wait_findings.of_themselves(case, trees)]
    found += wait_findings.of_gone(case)
    found = found or wait_findings.by_exclusion(case) or wait_findings.undecided(case)
    order = (Level.FAIL, Level.WARN, Level.UNKNOWN, Level.INFO)
    worst = min(found, key=lambda finding: order.index(finding.level), default=None)
    if worst is None:
        return Claim(source=Source.WAITS, says="/proc shows no wait of any rank")
    class_name = _OF_WAITS.get(worst.id)
    if worst.id == "trace.waits-for" and any(tree.is_cycle for tree in trees):
        class_name = HangClass.DEADLOCK
    if worst.id == "trace.not-hung":
        class_name = HangClass.NOT_HUNG
    is_sure = worst.level is Level.FAIL and not (worst.id in _BY_EXCLUSION and _are_alike(evidence, worst))
    claim = Claim(source=Source.WAITS, says=worst.title, class_name=class_name, is_sure=is_sure, fix=worst.fix)
    if class_name is HangClass.NOT_HUNG or class_name is None:
        return replace(claim, witnesses=frozenset(worst.where.ranks))
    own = [rank for rank in worst.where.ranks]
    return replace(claim, ranks=frozenset(own), pids=worst.where.pids, hosts=worst.where.hosts)


_BY_EXCLUSION = ("trace.stuck-rank", "trace.straggler")


def _are_alike(evidence: Evidence, finding: Finding) -> bool:
    """Return whether the stacks of the ranks that /proc leaves over are those of others: then none is to blame."""
    left_over = set(finding.where.pids)
    states = evidence.stacks.states
    others = {place(state) for state in states if state.member.pid not in left_over and state.thread.frames}
    return any(place(state) in others for state in states if state.member.pid in left_over)


# --- recorder, log, RAS, kernel, versions ---------------------------------------------------------------------------

_OF_RECORDER = {
    "flight-recorder.never-called": (HangClass.NOT_IN_COLLECTIVE, True),
    "flight-recorder.no-counterpart": (HangClass.NOT_IN_COLLECTIVE, True),
    "flight-recorder.op-mismatch": (HangClass.DIFFERENT_COLLECTIVES, True),
    "flight-recorder.size-mismatch": (HangClass.SIZE_MISMATCH, True),
    "flight-recorder.dtype-mismatch": (HangClass.SIZE_MISMATCH, True),
    "flight-recorder.order-inversion": (HangClass.DEADLOCK, True),
    "flight-recorder.deadlock": (HangClass.DEADLOCK, True),
    "flight-recorder.device-stuck": (HangClass.DEVICE, True),
    "flight-recorder.no-dump": (HangClass.NOT_IN_COLLECTIVE, False),
    "flight-recorder.in-flight": (HangClass.NETWORK, False),
    "flight-recorder.late-rank": (HangClass.SLOW, True),
    "flight-recorder.all-ended": (HangClass.OUTSIDE, False),
}


def of_recorder(evidence: Evidence) -> Claim:
    """Say what the dumps come to."""
    found = [finding for finding in evidence.recorder_findings if finding.id in _OF_RECORDER]
    if evidence.stale_dumps_s:
        age = lasting(evidence.stale_dumps_s)
        return Claim(source=Source.RECORDER, says=f"the newest dump is {age} old, from before the ranks began to wait")
    if not found:
        first = next(iter(evidence.recorder_findings), None)
        return Claim(source=Source.RECORDER, says=first.title if first else "no dump was read")
    first = found[0]
    class_name, is_sure = _OF_RECORDER[first.id]
    return Claim(
        source=Source.RECORDER,
        says=first.title,
        class_name=class_name,
        is_sure=is_sure,
        ranks=frozenset(first.where.ranks),
        witnesses=frozenset(first.witnesses.ranks),
        evidence=first.evidence,
        detail=first.detail,
        fix=first.fix if class_name is not HangClass.NOT_IN_COLLECTIVE else None,
    )


_FAILED = ("logs.first-failure", "logs.same-failure", "logs.exit", "logs.left-early")
_ABOUT_COLLECTIVES = {
    "logs.desync": HangClass.NOT_IN_COLLECTIVE,
    "logs.missing-rank": HangClass.NOT_IN_COLLECTIVE,
    "logs.collective-mismatch": HangClass.DIFFERENT_COLLECTIVES,
    "logs.watchdog-mismatch": HangClass.DIFFERENT_COLLECTIVES,
    "logs.watchdog-outside": HangClass.OUTSIDE,
}


def of_log(evidence: Evidence) -> Claim:
    """Say what the job's own lines come to. That a rank failed counts only if it is gone: it may have caught it."""
    gone = gone_ranks(evidence)
    for finding in evidence.log_findings:
        claim = Claim(
            source=Source.LOG,
            says=finding.title,
            ranks=frozenset(finding.where.ranks),
            witnesses=frozenset(finding.witnesses.ranks),
            evidence=finding.evidence,
            fix=finding.fix,
        )
        if finding.id in _ABOUT_COLLECTIVES:
            # After a restart the lines may be of the attempt before.
            is_sure = finding.level is Level.FAIL and not evidence.restarts
            return replace(claim, class_name=_ABOUT_COLLECTIVES[finding.id], is_sure=is_sure)
        if finding.id in _FAILED and claim.ranks & gone:
            return replace(claim, class_name=HangClass.EXITED)
        if finding.level is Level.FAIL:
            says = f"{finding.title}" + ("; it is alive" if claim.ranks else "")
            return replace(claim, says=says, ranks=frozenset())
    bars = [bar for bar in evidence.bars if bar.rank is not None]
    first = next((finding for finding in evidence.log_findings if finding.id != "logs.empty"), None)
    says = "; ".join(f"rank {bar.rank}: {bar.name} {bar.percent} %" for bar in bars[:2])
    return Claim(source=Source.LOG, says=says or (first.title if first is not None else "the log is empty so far"))


def gone_ranks(evidence: Evidence) -> frozenset[int]:
    """Return the ranks whose process has ended."""
    states = evidence.stacks.states
    return frozenset(
        state.member.rank
        for state in states
        if state.thread.kind is StackClass.EXITED and state.member.rank is not None
    )


def _living_ranks(evidence: Evidence) -> frozenset[int]:
    """Return the ranks whose process was seen, whatever it does."""
    members = (state.member for state in evidence.stacks.states if state.thread.kind is not StackClass.EXITED)
    return frozenset(member.rank for member in members if member.rank is not None and member.process is not None)


def of_ras(evidence: Evidence) -> Claim:
    """Say what NCCL's own RAS comes to."""
    from distdiag.diagnosis.ras import RasState

    verdicts = _most_alike(evidence.ras)
    if evidence.ras and not verdicts:
        return Claim(source=Source.RAS, says=f"the {len(evidence.ras)} nodes that answered do not agree")
    for verdict in verdicts:
        if verdict.state is RasState.LAGGING and verdict.lags:
            lag = verdict.lags[0]
            ranks = _global_ranks(evidence, lag.members, lag.lagging, lag.n_lagging + lag.n_ahead)
            says = f"{name_ranks(sorted(ranks))} behind: {verdict.why}" if ranks else verdict.why
            claim = Claim(source=Source.RAS, says=says, class_name=HangClass.NOT_IN_COLLECTIVE)
            return replace(claim, ranks=ranks, hosts=_hosts(evidence, lag.members))
        if verdict.state is RasState.DEAD and verdict.dead:
            own = tuple(member.rank for member in verdict.dead)
            ranks = _global_ranks(evidence, verdict.dead, own, verdict.n_ranks)
            hosts = _hosts(evidence, verdict.dead)
            if ranks and ranks <= _living_ranks(evidence):
                # Stopped, or NCCL's threads in it cannot be reached: that it hangs for this reason is not proven.
                says = f"{verdict.why}, but {name_ranks(sorted(ranks))} still run{'s' if len(ranks) == 1 else ''}"
                return Claim(
                    source=Source.RAS, says=says, class_name=HangClass.NETWORK, ranks=ranks, hosts=hosts, is_sure=False
                )
            return Claim(source=Source.RAS, says=verdict.why, class_name=HangClass.EXITED, ranks=ranks, hosts=hosts)
    moving = next((verdict for verdict in verdicts if verdict.state is RasState.MOVING), None)
    if moving is not None:
        return Claim(source=Source.RAS, says=moving.why, class_name=HangClass.NOT_HUNG)
    first = next(iter(verdicts), None)
    return Claim(source=Source.RAS, says=first.why if first else "it was not asked")


def _most_alike(verdicts: Sequence[RasVerdict]) -> list[RasVerdict]:
    """Return the answers of most nodes: every process answers for the whole job, so one that differs is in doubt."""

    def key(verdict: RasVerdict) -> tuple[object, ...]:
        return verdict.state, tuple(lag.lagging for lag in verdict.lags), tuple(dead.rank for dead in verdict.dead)

    counts = Counter(map(key, verdicts))
    chosen, count = counts.most_common(1)[0] if counts else (None, 0)
    return [verdict for verdict in verdicts if key(verdict) == chosen] if 2 * count > len(verdicts) else []


def _global_ranks(evidence: Evidence, members: Sequence[Member], listed: Sequence[int], size: int) -> frozenset[int]:
    """Return the ranks of the job that these are: RAS numbers them within a communicator, and names addresses.

    By host and process; else by number, if the communicator is of all ranks. None where that leaves a doubt.
    """
    addresses = _addresses(evidence)
    by_process: dict[tuple[str, int | None], int | None] = {
        (member.host, member.pid): member.rank for member in evidence.job.members
    }
    found = [by_process.get((addresses.get(each.host, each.host), each.pid)) for each in members]
    if found and all(rank is not None for rank in found):
        return frozenset(rank for rank in found if rank is not None)
    return frozenset(listed) if size == evidence.job.world_size else frozenset()


def _addresses(evidence: Evidence) -> dict[str, str]:
    """Return the hosts by their addresses; an address that several have, such as that of loopback, is nobody's."""
    found: dict[str, set[str]] = {}
    for node in evidence.nodes:
        for network in node.networks:
            for address in network.addresses:
                found.setdefault(address, set()).add(node.host)
    return {address: next(iter(hosts)) for address, hosts in found.items() if len(hosts) == 1}


def _hosts(evidence: Evidence, members: Sequence[Member]) -> tuple[str, ...]:
    addresses = _addresses(evidence)
    return tuple(dict.fromkeys(addresses.get(member.host, member.host) for member in members if member.host))


def of_kernel(evidence: Evidence) -> Claim:
    """Say what the kernel and the GPUs tell: OOM kills, Xid, links, data that nobody acknowledges."""
    by_pid: dict[tuple[str, int | None], int | None] = {
        (member.host, member.pid): member.rank for member in evidence.job.members if member.pid is not None
    }
    gone = gone_ranks(evidence)
    lines = [
        (node.host, line)
        for node in evidence.nodes
        for signs in node.kernel
        for line in signs.lines
        if line.pid is None or (node.host, line.pid) in by_pid or (line.kind == "oom" and gone)
    ]
    for host, line in lines:
        rank = by_pid.get((host, line.pid))
        if line.kind == "oom" and (rank is not None or gone):
            ranks = frozenset([rank]) if rank is not None else gone if len(gone) == 1 else frozenset()
            says = f"{line.text} ({host}, {lasting(line.age_s)} ago)"
            return Claim(
                source=Source.KERNEL,
                says=says,
                class_name=HangClass.EXITED,
                ranks=ranks,
                hosts=(host,),
                is_sure=bool(ranks),
            )
        if line.kind in ("xid", "nvlink", "gpu-lost"):
            says = f"{line.text} ({host}, {lasting(line.age_s)} ago)"
            return Claim(source=Source.KERNEL, says=says, class_name=HangClass.DEVICE, hosts=(host,), is_sure=False)
    lost = [(node.host, each) for node in evidence.nodes for signs in node.kernel for each in signs.unacknowledged]
    if lost:
        host, each = lost[0]
        senders = [rank for host, each in lost if (rank := by_pid.get((host, each.pid))) is not None]
        says = (
            f"{name_ranks(senders) if senders else f'pid {each.pid}'}: {each.queued_bytes} bytes to {each.remote} are "
            f"not acknowledged after {each.retransmits} retransmissions"
        )
        return Claim(
            source=Source.KERNEL,
            says=says,
            class_name=HangClass.NETWORK,
            is_sure=False,
            hosts=tuple(dict.fromkeys(host for host, _ in lost)),
            witnesses=frozenset(senders),
        )
    other = [f"{line.text} ({host})" for host, line in lines]
    kills = [
        f"{count} OOM kills in cgroup {path}"
        for node in evidence.nodes
        for signs in node.kernel
        for path, count in signs.oom_kills
        if count
    ]
    busy = [load for node in evidence.nodes for signs in node.kernel for load in signs.gpus if load.busy_percent]
    gpus = f"{len(busy)} GPUs are busy" if busy else ""
    unread = next((s.log_error for n in evidence.nodes for s in n.kernel if s.log_error), "")
    says = "; ".join([*other[:2], *kills[:1], *filter(None, [gpus])])
    unread = f"the kernel log cannot be read ({unread}); nothing else" if unread else "nothing"
    says = says or f"{unread} stands out"
    return Claim(source=Source.KERNEL, says=says)


def of_versions(evidence: Evidence) -> Claim:
    """Say which known hangs of versions match."""
    if not evidence.advisories:
        return Claim(source=Source.VERSIONS, says="no known hang matches the versions of this job")
    first = evidence.advisories[0]
    return Claim(
        source=Source.VERSIONS,
        says=f"{first.applies}: {first.symptom}",
        class_name=HangClass.KNOWN_BUG,
        is_sure=False,
        detail=first.title,
        evidence=(first.source,),
        fix=Fix(text=first.fix, commands=first.commands),
    )


def has_gpu(evidence: Evidence) -> bool:
    """Return whether a rank of the job has a GPU open."""
    return any(member.process is not None and member.process.gpu for member in evidence.job.members)


def availability(evidence: Evidence) -> Mapping[Source, tuple[str, str]]:
    """Return, of the sources that told nothing on any node, why, and what would make them tell."""
    found: dict[Source, tuple[str, str]] = {}
    for source in Source:
        ends = [end for node in evidence.nodes for end in node.ended if end.source == source]
        if not ends:
            found[source] = ("it was not asked", "")
        elif all(end.why for end in ends) and not _has_told(evidence.nodes, source):
            found[source] = (ends[0].why, ends[0].hint)
    return found


_FACTS = {Source.STACKS: "watched", Source.WAITS: "blocked", Source.RECORDER: "dumps", Source.LOG: "logs"}
"""Keep what each source returned before its deadline."""


def _has_told(nodes: Sequence[NodeHang], source: Source) -> bool:
    return source in _FACTS and any(getattr(node, _FACTS[source]) for node in nodes)


def seconds_of(evidence: Evidence, source: Source) -> float:
    """Return how long asking a source took, on the slowest node."""
    return max((end.seconds for node in evidence.nodes for end in node.ended if end.source == source), default=0.0)


CLAIMS = {
    Source.STACKS: of_stacks,
    Source.WAITS: of_waits,
    Source.RAS: of_ras,
    Source.RECORDER: of_recorder,
    Source.LOG: of_log,
    Source.KERNEL: of_kernel,
    Source.VERSIONS: of_versions,
}
"""In the order in which they are shown."""


def all_claims(evidence: Evidence) -> dict[Source, Claim]:
    """Return what every source says that told anything."""
    missing = availability(evidence)
    return {source: claim_of(evidence) for source, claim_of in CLAIMS.items() if source not in missing}
