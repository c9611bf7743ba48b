"""Claims of the other sources: GPUs, NCCL's RAS, flight recorder, log, kernel, versions. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis.gpu_use import GpuKind
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.diagnosis.stuck.types import Claim, Source, StuckKind
from distdiag.diagnosis.wording import lasting
from distdiag.fold import by_key
from distdiag.knowledge import xids
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.diagnosis.ras import Member, RasVerdict
    from distdiag.diagnosis.stuck.evidence import Evidence
    from distdiag.facts.host.kernel_signs import KernelLine
    from distdiag.jobs.types import NodePicture
    from distdiag.report import Finding


def of_gpus(evidence: Evidence) -> Claim:
    """Return the claim of the GPUs: which run the kernel of a collective, and which are idle."""
    verdict = evidence.gpus
    if verdict is None:
        return Claim(source=Source.GPU, says="no GPU was found to be a rank's")
    index = evidence.graph.index
    ranks = frozenset(rank for rank in map(index.rank, verdict.named) if rank is not None)
    claim = Claim(source=Source.GPU, says=verdict.says, evidence=verdict.evidence, is_sure=False)
    if verdict.kind is GpuKind.ONE_IDLE:
        # An unread GPU may be idle too; the others may then wait in a collective of a subgroup.
        is_whole = len(verdict.named) + len(verdict.spinning) == evidence.job.world_size
        return replace(
            claim,
            kind=StuckKind.NOT_IN_COLLECTIVE,
            ranks=ranks,
            pids=tuple(pid for _, pid in verdict.named),
            hosts=tuple(dict.fromkeys(host for host, _ in verdict.named)),
            is_sure=verdict.is_sure and is_whole,
        )
    return claim


_OF_RECORDER = {
    "flight-recorder.never-called": (StuckKind.NOT_IN_COLLECTIVE, True),
    "flight-recorder.no-counterpart": (StuckKind.NOT_IN_COLLECTIVE, True),
    "flight-recorder.op-mismatch": (StuckKind.DIFFERENT_COLLECTIVES, True),
    "flight-recorder.size-mismatch": (StuckKind.SIZE_MISMATCH, True),
    "flight-recorder.dtype-mismatch": (StuckKind.SIZE_MISMATCH, True),
    "flight-recorder.order-inversion": (StuckKind.DEADLOCK, True),
    "flight-recorder.deadlock": (StuckKind.DEADLOCK, True),
    "flight-recorder.device-stuck": (StuckKind.DEVICE, True),
    "flight-recorder.no-dump": (StuckKind.NOT_IN_COLLECTIVE, False),
    "flight-recorder.in-flight": (StuckKind.NETWORK, False),
    "flight-recorder.late-rank": (StuckKind.SLOW, True),
    "flight-recorder.all-ended": (StuckKind.OUTSIDE, False),
}


def of_recorder(evidence: Evidence) -> Claim:
    """Return the claim of the flight recorders."""
    found = [finding for finding in evidence.recorder_findings if finding.id in _OF_RECORDER]
    if evidence.stale_dumps_s:
        age = lasting(evidence.stale_dumps_s)
        return Claim(source=Source.RECORDER, says=f"the newest dump is {age} old, from before the ranks began to wait")
    if not found:
        first = next(iter(evidence.recorder_findings), None)
        return Claim(source=Source.RECORDER, says=first.title if first else "no dump was read")
    kind, is_sure = _OF_RECORDER[found[0].id]
    claim = replace(_of_finding(Source.RECORDER, found[0]), kind=kind, is_sure=is_sure, detail=found[0].detail)
    return replace(claim, fix=None) if kind is StuckKind.NOT_IN_COLLECTIVE else claim


def _of_finding(source: Source, finding: Finding) -> Claim:
    ranks, witnesses = frozenset(finding.where.ranks), frozenset(finding.witnesses.ranks)
    evidence, fix = finding.evidence, finding.fix
    return Claim(source=source, says=finding.title, ranks=ranks, witnesses=witnesses, evidence=evidence, fix=fix)


_FAILED = ("logs.first-failure", "logs.same-failure", "logs.exit", "logs.left-early")
_ABOUT_COLLECTIVES = {
    "logs.desync": StuckKind.NOT_IN_COLLECTIVE,
    "logs.missing-rank": StuckKind.NOT_IN_COLLECTIVE,
    "logs.collective-mismatch": StuckKind.DIFFERENT_COLLECTIVES,
    "logs.watchdog-mismatch": StuckKind.DIFFERENT_COLLECTIVES,
    "logs.watchdog-outside": StuckKind.OUTSIDE,
}


def of_log(evidence: Evidence) -> Claim:
    """Return the claim of the job's log. A failed rank counts only if it is dead: it may have caught the error."""
    gone = gone_ranks(evidence)
    for finding in evidence.log_findings:
        claim = _of_finding(Source.LOG, finding)
        if finding.id in _ABOUT_COLLECTIVES:
            # After a restart the lines may be of the previous attempt.
            is_sure = finding.level is Level.FAIL and not evidence.restarts
            return replace(claim, kind=_ABOUT_COLLECTIVES[finding.id], is_sure=is_sure)
        if finding.id in _FAILED and claim.ranks & gone:
            return replace(claim, kind=StuckKind.EXITED)
        if finding.level is Level.FAIL:
            says = f"{finding.title}" + ("; it is alive" if claim.ranks else "")
            return replace(claim, says=says, ranks=frozenset())
    bars = [bar for bar in evidence.bars if bar.rank is not None]
    first = next((finding for finding in evidence.log_findings if finding.id != "logs.empty"), None)
    says = "; ".join(f"rank {bar.rank}: {bar.name} {bar.percent} %" for bar in bars[:2])
    return Claim(source=Source.LOG, says=says or (first.title if first is not None else "the log is empty so far"))


def gone_ranks(evidence: Evidence) -> frozenset[int]:
    """Return the ranks whose process has exited."""
    states = evidence.stacks.states
    return frozenset(
        state.member.rank
        for state in states
        if state.thread.kind is StackClass.EXITED and state.member.rank is not None
    )


def _living_ranks(evidence: Evidence) -> frozenset[int]:
    members = (state.member for state in evidence.stacks.states if state.thread.kind is not StackClass.EXITED)
    return frozenset(member.rank for member in members if member.rank is not None and member.process is not None)


def of_ras(evidence: Evidence) -> Claim:
    """Return the claim of NCCL's RAS."""
    from distdiag.diagnosis.ras import RasState

    claim = partial(Claim, source=Source.RAS)
    verdicts = _most_alike(evidence.ras)
    if evidence.ras and not verdicts:
        return claim(says=f"the {len(evidence.ras)} nodes that answered do not agree")
    for verdict in verdicts:
        if verdict.state in (RasState.LAGGING, RasState.DIFFERENT) and verdict.lags:
            lag = verdict.lags[0]
            ranks = _global_ranks(evidence, lag.members, lag.lagging, lag.n_lagging + lag.n_ahead)
            is_lag = verdict.state is RasState.LAGGING
            is_what = "behind" if is_lag else f"{'is' if len(ranks) == 1 else 'are'} in other collectives than the rest"
            says = f"{name_ranks(sorted(ranks))} {is_what}: {verdict.why}" if ranks else verdict.why
            kind = StuckKind.NOT_IN_COLLECTIVE if is_lag else StuckKind.DIFFERENT_COLLECTIVES
            return claim(says=says, kind=kind, ranks=ranks, hosts=_hosts(evidence, lag.members))
        absent = verdict.dead if verdict.state is RasState.DEAD else verdict.missing
        if not absent or verdict.state not in (RasState.DEAD, RasState.MISSING):
            continue
        ranks = _global_ranks(evidence, absent, tuple(member.rank for member in absent), verdict.n_ranks)
        accused = partial(claim, ranks=ranks, hosts=_hosts(evidence, absent))
        if verdict.state is RasState.DEAD and ranks and ranks <= _living_ranks(evidence):
            # Stopped, or its NCCL threads are unreachable: not proven as the reason of the hang.
            says = f"{verdict.why}, but {name_ranks(sorted(ranks))} still run{'s' if len(ranks) == 1 else ''}"
            return accused(says=says, kind=StuckKind.NETWORK, is_sure=False)
        if verdict.state is RasState.DEAD:
            return accused(says=verdict.why, kind=StuckKind.EXITED)
        if verdict.error and ranks and ranks <= gone_ranks(evidence):
            says = f"{name_ranks(sorted(ranks))} exited after NCCL's init; {verdict.error}"
            return accused(says=says, kind=StuckKind.EXITED)
    moving = next((verdict for verdict in verdicts if verdict.state is RasState.MOVING), None)
    if moving is not None:
        return claim(says=moving.why, kind=StuckKind.NOT_HUNG)
    return claim(says=verdicts[0].why if verdicts else "it was not asked")


def _most_alike(verdicts: Sequence[RasVerdict]) -> list[RasVerdict]:
    """Return the majority of answers: every process answers for the whole job, so a deviating one is doubtful."""

    def key(verdict: RasVerdict) -> tuple[object, ...]:
        return verdict.state, tuple(lag.lagging for lag in verdict.lags), tuple(dead.rank for dead in verdict.dead)

    counts = Counter(map(key, verdicts))
    chosen, count = counts.most_common(1)[0] if counts else (None, 0)
    return [verdict for verdict in verdicts if key(verdict) == chosen] if 2 * count > len(verdicts) else []


def _global_ranks(evidence: Evidence, members: Sequence[Member], listed: Sequence[int], size: int) -> frozenset[int]:
    """Translate RAS members, numbered within a communicator and listed by address, to ranks of the job.

    By host and pid; else by number if the communicator spans all ranks. Empty if in doubt.
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
    """Map addresses to hosts, without addresses of several hosts such as loopback."""
    networks = [(node.host, network) for node in evidence.nodes for network in node.networks]
    found = by_key((address, host) for host, network in networks for address in network.addresses)
    return {address: hosts[0] for address, hosts in found.items() if len({*hosts}) == 1}


def _hosts(evidence: Evidence, members: Sequence[Member]) -> tuple[str, ...]:
    addresses = _addresses(evidence)
    return tuple(dict.fromkeys(addresses.get(member.host, member.host) for member in members if member.host))


def of_kernel(evidence: Evidence) -> Claim:
    """Return the claim of the kernel: OOM kills, Xids, links, unacknowledged data."""
    claim = partial(Claim, source=Source.KERNEL)
    by_pid: dict[tuple[str, int | None], int | None] = {
        (member.host, member.pid): member.rank for member in evidence.job.members if member.pid is not None
    }
    gone = gone_ranks(evidence)
    read = [(node.host, signs) for node in evidence.nodes for signs in node.kernel]
    lines = [
        (host, line)
        for host, signs in read
        for line in signs.lines
        if line.pid is None or (host, line.pid) in by_pid or (line.kind == "oom" and gone) or _is_of_gpu(line)
    ]
    for host, line in lines:
        rank = by_pid.get((host, line.pid))
        says = f"{line.text} ({host}, {lasting(line.age_s)} ago)"
        if line.kind == "oom" and (rank is not None or gone):
            ranks = frozenset([rank]) if rank is not None else gone if len(gone) == 1 else frozenset()
            return claim(says=says, kind=StuckKind.EXITED, ranks=ranks, hosts=(host,), is_sure=bool(ranks))
        if line.kind in ("nvlink", "sxid", "gpu-lost") or (line.kind == "xid" and not _is_remark(line)):
            says = f"{name_ranks([rank])}: {says}" if rank is not None else says
            return claim(says=says, kind=StuckKind.DEVICE, hosts=(host,), is_sure=False, fix=_of_xid(line))
    lost = [(host, each) for host, signs in read for each in signs.unacknowledged]
    if lost:
        host, each = lost[0]
        senders = [rank for host, each in lost if (rank := by_pid.get((host, each.pid))) is not None]
        says = (
            f"{name_ranks(senders) if senders else f'pid {each.pid}'}: {each.queued_bytes} bytes to {each.remote} are "
            f"not acknowledged after {each.retransmits} retransmissions"
        )
        hosts = tuple(dict.fromkeys(host for host, _ in lost))
        return claim(says=says, kind=StuckKind.NETWORK, is_sure=False, hosts=hosts, witnesses=frozenset(senders))
    other = [f"{line.text} ({host})" for host, line in lines]
    kills = [f"{count} OOM kills in cgroup {path}" for _, signs in read for path, count in signs.oom_kills if count]
    unread = next((signs.log_error for _, signs in read if signs.log_error), "")
    unread = f"the kernel log cannot be read ({unread}); nothing else" if unread else "nothing"
    return claim(says="; ".join([*other[:2], *kills[:1]]) or f"{unread} stands out")


def _is_of_gpu(line: KernelLine) -> bool:
    """Return whether an Xid is a fault of the GPU, whichever process its line has."""
    xid = xids.read_line(line.text) if line.kind == "xid" else None
    return xid is not None and xid.blames in ("gpu", "memory")


def _is_remark(line: KernelLine) -> bool:
    xid = xids.read_line(line.text)
    return xid is not None and xid.blames in ("none", "remap")


def _of_xid(line: KernelLine) -> Fix:
    """Return the fix for a GPU's error, by its culprit."""
    xid = xids.read_line(line.text)
    means = f": {xid.xid.means}" if xid is not None and xid.xid.means else ""
    if xid is not None and xid.blames == "application":
        text = f"a kernel of that process failed{means}; the next run then stops at its line"
        return Fix(text=text, commands=("export CUDA_LAUNCH_BLOCKING=1",))
    text = f"the GPU or its link failed{means}; drain the node, and read the GPU's counters"
    return Fix(text=text, commands=("nvidia-smi -q -d ECC,ROW_REMAPPER", "dmesg -T | grep -iE 'nvrm|xid' | tail"))


def of_versions(evidence: Evidence) -> Claim:
    """Return the claim of known hangs of the job's versions."""
    if not evidence.advisories:
        return Claim(source=Source.VERSIONS, says="no known hang matches the versions of this job")
    first = evidence.advisories[0]
    return Claim(
        source=Source.VERSIONS,
        says=f"{first.applies}: {first.symptom}",
        kind=StuckKind.KNOWN_BUG,
        is_sure=False,
        detail=first.title,
        evidence=(first.source,),
        fix=Fix(text=first.fix, commands=first.commands),
    )


def of_start(evidence: Evidence) -> Claim:
    """Return the number of ranks in init_process_group; starts.py judges the reason for the whole job."""
    waiting = [start for node in evidence.nodes for read in node.starts for start in read.starts]
    kind = StuckKind.RENDEZVOUS if waiting else None
    return Claim(source=Source.START, says=f"{len(waiting)} processes wait for others to start", kind=kind)


def availability(evidence: Evidence) -> Mapping[Source, tuple[str, str]]:
    """Return, for each source read on no node, the reason and a hint."""
    found: dict[Source, tuple[str, str]] = {}
    for source in evidence.asked.sources:
        ends = [end for node in evidence.nodes for end in node.ended if end.source == source]
        if not ends and not _was_read(evidence.nodes, source):
            found[source] = ("it was not read", "")
        elif ends and all(end.why for end in ends) and not _was_read(evidence.nodes, source):
            found[source] = (ends[0].why, ends[0].hint)
    return found


_FACTS = {Source.STACKS: "watched", Source.WAITS: "blocked", Source.RECORDER: "dumps", Source.LOG: "logs"}
"""Partial results of these are kept after a deadline."""


def _was_read(nodes: Sequence[NodePicture], source: Source) -> bool:
    return source in _FACTS and any(getattr(node, _FACTS[source]) for node in nodes)


def seconds_of(evidence: Evidence, source: Source) -> float:
    """Return the longest time a node took to read a source."""
    return max((end.seconds for node in evidence.nodes for end in node.ended if end.source == source), default=0.0)
