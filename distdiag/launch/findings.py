"""Findings about failed ranks, with evidence and a fix. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distdiag.cluster.hosts import fold, name_ranks
from distdiag.diagnosis.wording import counted
from distdiag.facts import machine
from distdiag.facts.programs import signal_name
from distdiag.knowledge import logs
from distdiag.launch import attribution
from distdiag.launch.attribution import is_at_work
from distdiag.launch.rank_runs import Outcome
from distdiag.launch.wording import found, place
from distdiag.report import Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.agent.protocol import Listening
    from distdiag.errors import DistdiagError
    from distdiag.launch.attribution import Attribution
    from distdiag.launch.rank_runs import RankTimeline
    from distdiag.launch.record import RunRecord
    from distdiag.launch.types import Request
    from distdiag.report import Finding

_STACK_LINES = 8
_TAIL_LINES = 6
_MISSING_IN_FULL = 4


def died(parts: Attribution, traces: list[RankTimeline], request: Request) -> list[Finding]:
    """Return ranks that died without reporting an error, grouped by exit status or signal."""
    by_ending: dict[str, list[RankTimeline]] = {}
    for trace in traces:
        if trace.rank in parts.died:
            by_ending.setdefault(how_it_ended(trace), []).append(trace)
    return [_died(how, group, request) for how, group in by_ending.items()]


def how_it_ended(trace: RankTimeline) -> str:
    """Format a rank's exit status or signal."""
    if trace.ending is None or trace.ending.status is None:
        return "still alive after SIGKILL"
    status = trace.ending.status
    return f"killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"


_DEATHS = {
    "SIGKILL": (
        "SIGKILL was sent from outside (an administrator, a scheduler, a container limit); no kill by the kernel's OOM "
        "killer was seen meanwhile",
        "dmesg -T | grep -iE 'out of memory|killed process'",
    ),
    "SIGBUS": ("usually /dev/shm or a file system is full", "df -h /dev/shm /tmp"),
    "SIGILL": ("this build of torch uses instructions that the CPU lacks", "lscpu | grep -i flags"),
}


def _died(how: str, group: list[RankTimeline], request: Request) -> Finding:
    ending = group[0].ending
    assert ending is not None
    status = ending.status or 0
    name = signal_name(-status) if status < 0 else ""
    otherwise = "see the rank's last output above; rerun and keep the ranks' logs", request.again(nccl_debug="")
    fix, command = _DEATHS.get(name, otherwise)
    if name == "SIGKILL" and ending.oom_kills:
        killed = counted(ending.oom_kills, "process", "processes")
        fix = f"the kernel's OOM killer killed {killed} meanwhile: give the ranks more memory"
    stage, doing = place(group[0])
    was = "" if how.startswith("exited") else "was " if len(group) == 1 else "were "
    known = logs.recognise(ending.tail)
    return found(
        "rank-died",
        request,
        group,
        known=known,
        evidence=_tail(ending.tail),
        ended=f"{was}{how}",
        stage=stage,
        doing=doing,
        detail=known.means if known else "",
        fix=fix,
        look=command,
    )


def missing(parts: Attribution, traces: list[RankTimeline], request: Request, course: RunRecord) -> list[Finding]:
    """Return the ranks that the others were waiting for."""
    late = [trace for trace in traces if trace.rank in parts.missing]
    if not late:
        return []
    waiting = [trace.rank for trace in traces if trace.rank not in parts.missing and not trace.finished]
    wait = "was waiting" if len(waiting) == 1 else "were waiting"
    others = f"{name_ranks(waiting)} {wait} for {name_ranks(parts.missing)}" if waiting else ""
    stopped = any(trace.inspection and trace.inspection.state in machine.STOPPED for trace in late)
    starved = not stopped and all(trace.last is not None and trace.last.waiting for trace in late)
    # Data may also be late because its sender has no core yet.
    slow = [trace for trace in (traces if starved else late) if is_at_work(trace)]
    if slow and not stopped:
        return [_still_at_work(late, slow, request, course)]
    # Interrupted before the timeout: behind, but it might have continued.
    interrupted = course.outcome is Outcome.INTERRUPTED
    hung = ("was behind" if len(late) == 1 else "were behind") if interrupted else "hung"
    inspection = late[0].inspection
    remote = inspection.stuck[0].remote if inspection and inspection.stuck else ""
    address, _, port = remote.rpartition(":")
    has_stack = any(trace.inspection and trace.inspection.frames for trace in late)
    return [
        found(
            "rank-stopped" if stopped else "rank-unanswered" if remote else "rank-starved" if starved else "rank-late",
            request,
            late,
            level=Level.UNKNOWN if interrupted else None,
            evidence=[line for trace in late[:_MISSING_IN_FULL] for line in _seen_from_outside(trace)],
            witnesses=Witnesses(hosts=_seen_by(late, traces), ranks=tuple(waiting)),
            **_standing(late[0], request, course),
            hung=hung,
            why=why_missing(late[0]),
            others=others,
            host=late[0].host,
            remote=remote,
            address=address.strip("[]"),
            port=port,
            stack="the stack above shows what it was doing"
            if has_stack
            else "see above why its stack could not be read",
        )
    ]


def _standing(trace: RankTimeline, request: Request, course: RunRecord) -> dict[str, Any]:
    """Return the words of rows about ranks without progress: stage, time, and the commands that decide."""
    # Any: `found` has named arguments of other types.
    stage, doing = place(trace)
    return {
        "stage": stage,
        "doing": doing,
        "seconds": f"{course.stalled_s:.0f}",
        "longer": request.again(stall=f"{min(86400, request.timeout_s * 4):g}"),
        "less": request.again(**request.less(), nccl_debug=""),
        "pairs": request.pairs(),
    }


def _still_at_work(late: list[RankTimeline], slow: list[RankTimeline], request: Request, course: RunRecord) -> Finding:
    """Return ranks that made no progress for the whole timeout, but were at work: the machine may be overloaded."""
    busy = f"{name_ranks(trace.rank for trace in slow)} {'was' if len(slow) == 1 else 'were'} at work"
    return found(
        "rank-at-work",
        request,
        late,
        evidence=[line for trace in late[:_MISSING_IN_FULL] for line in _seen_from_outside(trace)],
        **_standing(late[0], request, course),
        why=why_missing(late[0]),
        busy=busy,
    )


def why_missing(trace: RankTimeline) -> str:
    """Describe a silent rank's activity in a few words."""
    inspection = trace.inspection
    if inspection is None:
        return "it could not be inspected"
    if why := machine.why_it_stands_still(inspection.state):
        return f"the process is {why}"
    if inspection.stuck:
        return f"it is {attribution.format_stuck(inspection.stuck[0])}"
    if inspection.frames:
        return f"it is in {inspection.frames[0]}"
    channel = inspection.wait_channel
    return f"it is in {channel} in the kernel" if channel else "its stack could not be read"


def _seen_from_outside(trace: RankTimeline) -> list[str]:
    inspection = trace.inspection
    if inspection is None:
        return [f"rank {trace.rank}: not inspected"]
    kernel = f", in the kernel: {inspection.wait_channel}" if inspection.wait_channel else ""
    lines = [f"rank {trace.rank} (pid {trace.pid}): process state {inspection.state or 'exited'}{kernel}"]
    # Frames below a rank's main are equal in all ranks.
    frames = [frame for frame in inspection.frames if "(boot.py:" not in frame and "(<string>:" not in frame]
    lines += [f"  {frame}" for frame in frames[:_STACK_LINES]]
    if len(frames) > _STACK_LINES:
        lines.append(f"  ... {counted(len(frames) - _STACK_LINES, 'more frame')}")
    return lines if inspection.frames else [*lines, f"  no stack: {inspection.stack_error}"]


def _seen_by(late: list[RankTimeline], traces: list[RankTimeline]) -> tuple[str, ...]:
    accused = {trace.host for trace in late}
    return tuple(dict.fromkeys(trace.host for trace in traces if trace.host not in accused))


def standstill(parts: Attribution, traces: list[RankTimeline], request: Request, course: RunRecord) -> list[Finding]:
    """Return a standstill in which no rank is behind: all wait for data, or each is blocked on its own."""
    if not parts.standstill:
        return []
    if broken := attribution.stuck(traces, course.meeting):
        return [_no_answer(broken, traces, request, course)]
    waiting = all(trace.last is not None and trace.last.waiting for trace in traces)
    slow = "-slow" if any(is_at_work(trace) for trace in traces) else ""
    return [
        found(
            f"all-waiting{slow}" if waiting else f"all-busy{slow}",
            request,
            traces,
            evidence=[line for trace in _one_for_each_stack(traces) for line in _seen_from_outside(trace)],
            **_standing(traces[0], request, course),
        )
    ]


def _no_answer(
    broken: Sequence[attribution.Broken], traces: list[RankTimeline], request: Request, course: RunRecord
) -> Finding:
    """Return a standstill explained by the kernels: retransmissions are not acknowledged."""
    accused, witnesses = attribution.accuse(broken)
    which = f"{'of' if witnesses else 'between'} {fold(accused)}"
    return found(
        "no-answer-from-peers",
        request,
        Where(hosts=accused, ranks=tuple(trace.rank for trace in traces if trace.host in accused)),
        witnesses=Witnesses(hosts=witnesses, ranks=tuple(trace.rank for trace in traces if trace.host in witnesses)),
        evidence=list(dict.fromkeys(connection.evidence for connection in broken))[:_STACK_LINES],
        which=which,
        seen_by=fold(witnesses),
        accused=fold(accused),
        **_standing(traces[0], request, course),
    )


def _one_for_each_stack(traces: list[RankTimeline]) -> list[RankTimeline]:
    """List one rank per distinct stack, rarest first."""
    groups: dict[tuple[str, ...], list[RankTimeline]] = {}
    for trace in traces:
        groups.setdefault(trace.inspection.frames if trace.inspection else (), []).append(trace)
    return [group[0] for group in sorted(groups.values(), key=len)][:_MISSING_IN_FULL]


def nodes_lost(parts: Attribution, traces: list[RankTimeline], request: Request, course: RunRecord) -> list[Finding]:
    """Return nodes lost during the run, with their ranks."""
    by_reason: dict[str, list[RankTimeline]] = {}
    for trace in traces:
        if trace.rank in parts.lost:
            by_reason.setdefault(trace.lost, []).append(trace)
    return [
        found(
            "node-lost",
            request,
            group,
            evidence=list(dict.fromkeys(line for refusal in course.lost.values() for line in refusal.evidence)),
            hosts=fold(dict.fromkeys(trace.host for trace in group)),
            reason=reason,
            seen=_last_seen(group),
            host=group[0].host,
        )
        for reason, group in by_reason.items()
    ]


def _last_seen(group: list[RankTimeline]) -> str:
    places: dict[tuple[str, str], list[int]] = {}
    for trace in group:
        places.setdefault(place(trace), []).append(trace.rank)
    return "; ".join(f"{name_ranks(ranks)} in stage {stage} ({doing})" for (stage, doing), ranks in places.items())


def port_not_free(host: str, taken: Listening, request: Request) -> Finding:
    """Return the process that has the rendezvous port; a foreign program that answers is worse than a port in use."""
    port = request.master_port
    owner = f"{taken.command} (pid {taken.pid})" if taken.pid else "a process that this user cannot see"
    title = f"cannot bind rendezvous port {port} on {host}: {taken.error.lower()}"
    if taken.listening is not None:
        title = f"rendezvous port {port} on {host} is in use by {owner}"
    return found(
        "port-taken" if taken.answer is None else "port-answered",
        request,
        Where(hosts=(host,), ranks=(0,), pids=(taken.pid,) if taken.pid else ()),
        evidence=(f"binding port {port}: {taken.error}",),
        title=title,
        answer=taken.answer,
        again=request.again(master_port="0"),
    )


def not_started(error: DistdiagError, request: Request) -> Finding:
    """Return why no rank could be started, in a run on several nodes."""
    return found("not-started", request, why=str(error), fix=error.hint)


def unsupported_archs(traces: list[RankTimeline], request: Request) -> list[Finding]:
    """Return GPUs that this torch was not built for."""
    groups: dict[tuple[str, str], list[RankTimeline]] = {}
    for trace in traces:
        for event in trace.events:
            started = event.payload.get("started", {})
            capability, archs = started.get("capability"), started.get("arch_list")
            if capability and archs and not covers(archs, capability):
                groups.setdefault((f"{started['device_name']} ({capability})", " ".join(archs)), []).append(trace)
    return [
        found("arch-unsupported", request, group, evidence=(f"torch's arch list: {archs}",), gpu=gpu)
        for (gpu, archs), group in groups.items()
    ]


def covers(arch_list: Iterable[str], capability: str) -> bool:
    """Return whether code for these archs runs on a GPU of this compute capability, such as "9.0".

    A cubin (sm_80) runs on the same major version from its minor on; PTX (compute_80) on every later one. The
    architecture-specific forms run on exactly one capability (sm_90a) or one family (sm_100f). Source: CUDA C++
    programming guide, "Binary compatibility" and "PTX compatibility".
    """
    major, minor = (int(part) for part in capability.split("."))
    for arch in arch_list:
        kind, _, number = arch.partition("_")
        specific = number[-1:] if number[-1:] in ("a", "f") else ""
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        has = divmod(int(digits), 10)
        if specific == "a":
            runs = has == (major, minor)
        elif kind == "compute" and not specific:
            runs = has <= (major, minor)
        else:
            runs = has[0] == major and has[1] <= minor
        if runs:
            return True
    return False


def _tail(text: str) -> tuple[str, ...]:
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(lines[-_TAIL_LINES:])
