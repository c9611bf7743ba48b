"""How ranks failed and why: what is wrong in words, with evidence and a fix. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag import knowledge
from distdiag.cluster.hosts import fold, name_ranks
from distdiag.cluster.rank_runs import Outcome
from distdiag.facts import machine
from distdiag.facts.programs import signal_name
from distdiag.launch import attribution
from distdiag.launch.attribution import is_at_work
from distdiag.launch.wording import fix_from, place, where, who
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.cluster.rank_runs import RankTimeline
    from distdiag.cluster.records import Taken
    from distdiag.errors import DistdiagError
    from distdiag.launch.attribution import Attribution
    from distdiag.launch.record import RunRecord
    from distdiag.launch.types import Request

_STACK_LINES = 8
_TAIL_LINES = 6
_MISSING_IN_FULL = 4


def died(parts: Attribution, traces: list[RankTimeline], request: Request) -> list[Finding]:
    """Ranks that ended without a word, by the way they ended."""
    by_ending: dict[str, list[RankTimeline]] = {}
    for trace in traces:
        if trace.rank in parts.died:
            by_ending.setdefault(how_it_ended(trace), []).append(trace)
    return [_died(how, group, request) for how, group in by_ending.items()]


def how_it_ended(trace: RankTimeline) -> str:
    """Say how a rank process ended: by which signal, or with which exit status."""
    if trace.ending is None or trace.ending.status is None:
        return "not ended even by SIGKILL"
    status = trace.ending.status
    return f"killed by {signal_name(-status)}" if status < 0 else f"ended with exit status {status}"


def _died(how: str, group: list[RankTimeline], request: Request) -> Finding:
    first = group[0]
    assert first.ending is not None
    stage, doing = place(first)
    was = "" if "ended" in how else "was " if len(group) == 1 else "were "
    known = knowledge.recognise(first.ending.tail)
    return Finding(
        id=f"{request.command}.rank-died",
        level=Level.FAIL,
        title=f"{who(group)} {was}{how} in stage {stage} ({doing})",
        detail=known.means if known else "",
        where=where(group),
        evidence=_tail(first.ending.tail),
        fix=fix_from(known, _fix_for_death(first, request)),
    )


def _fix_for_death(trace: RankTimeline, request: Request) -> Fix:
    assert trace.ending is not None
    status = trace.ending.status or 0
    name = signal_name(-status) if status < 0 else ""
    if name == "SIGKILL":
        oom = trace.ending.oom_kills
        text = (
            f"the kernel's out-of-memory killer ended {oom} process(es) meanwhile: give the ranks more memory"
            if oom
            else "somebody sent SIGKILL (an administrator, a scheduler, a container limit); the kernel's out-of-memory "
            "killer did not act meanwhile"
        )
        return Fix(text=text, commands=("dmesg -T | grep -iE 'out of memory|killed process'",))
    if name == "SIGBUS":
        return Fix(text="usually /dev/shm or a file system is full", commands=("df -h /dev/shm /tmp",))
    if name == "SIGILL":
        return Fix(
            text="this torch uses instructions that the CPU does not have",
            commands=("lscpu | grep -i flags",),
        )
    return Fix(
        text="see what the rank printed last, above; run again with the ranks' logs kept",
        commands=(request.again(nccl_debug=""),),
    )


def missing(parts: Attribution, traces: list[RankTimeline], request: Request, course: RunRecord) -> list[Finding]:
    """Ranks that the others waited for in vain."""
    late = [trace for trace in traces if trace.rank in parts.missing]
    if not late:
        return []
    stage, doing = place(late[0])
    waiting = [trace.rank for trace in traces if trace.rank not in parts.missing and not trace.finished]
    others = f"; {name_ranks(waiting)} waited for it" if waiting else ""
    stopped = any(trace.inspection and trace.inspection.state in machine.STOPPED for trace in late)
    starved = not stopped and all(trace.last is not None and trace.last.waiting for trace in late)
    # Data may also stay out because whoever has it got no core yet.
    slow = [trace for trace in (traces if starved else late) if is_at_work(trace)]
    if slow and not stopped:
        return [_still_at_work(late, slow, request, course)]
    return [
        Finding(
            id=f"{request.command}.rank-missing",
            # Interrupted before the timeout: it is behind, and might still have come.
            level=Level.UNKNOWN if course.outcome is Outcome.INTERRUPTED else Level.FAIL,
            title=f"{who(late)} did not come further than stage {stage} ({doing}): {why_missing(late[0])}",
            detail=f"No rank took a step for {course.stalled_s:.0f} s{others}.",
            where=where(late),
            evidence=tuple(line for trace in late[:_MISSING_IN_FULL] for line in _seen_from_outside(trace)),
            witnesses=Witnesses(hosts=_seen_by(late, traces), ranks=tuple(waiting)),
            fix=_fix_for_stopped(late)
            if stopped
            else _fix_for_stuck(late)
            if late[0].inspection and late[0].inspection.stuck
            else _fix_for_starved(late, request)
            if starved
            else _fix_for_late(late, request),
        )
    ]


def _still_at_work(late: list[RankTimeline], slow: list[RankTimeline], request: Request, course: RunRecord) -> Finding:
    """Nobody took a step for the whole timeout, but that is no standstill: it may be a machine with too much to do."""
    stage, doing = place(late[0])
    return Finding(
        id=f"{request.command}.rank-missing",
        level=Level.UNKNOWN,
        title=f"{who(late)} did not come further than stage {stage} ({doing}) in {course.stalled_s:.0f} s: "
        f"{why_missing(late[0])}, and {name_ranks(trace.rank for trace in slow)} was at work, so it may only be slow",
        detail="The time tells no more; that other programs need the same cores is enough for it.",
        where=where(late),
        evidence=tuple(line for trace in late[:_MISSING_IN_FULL] for line in _seen_from_outside(trace)),
        fix=Fix(text="a longer time decides", commands=(_longer(request),)),
    )


def why_missing(trace: RankTimeline) -> str:
    """Say in a few words what a silent rank was doing."""
    seen = trace.inspection
    if seen is None:
        return "it could not be looked at"
    if why := machine.why_it_stands_still(seen.state):
        return f"the process is {why}"
    if seen.stuck:
        return f"it is {attribution.stuck_words(seen.stuck[0])}"
    if seen.frames:
        return f"it is in {seen.frames[0]}"
    return f"in the kernel it is in {seen.wait_channel}" if seen.wait_channel else "its stack could not be read"


def _seen_from_outside(trace: RankTimeline) -> list[str]:
    seen = trace.inspection
    if seen is None:
        return [f"rank {trace.rank}: not looked at"]
    kernel = f", in the kernel: {seen.wait_channel}" if seen.wait_channel else ""
    lines = [f"rank {trace.rank} (pid {trace.pid}): process state {seen.state or 'gone'}{kernel}"]
    frames = [frame for frame in seen.frames if not _is_boot(frame)]
    lines += [f"  {frame}" for frame in frames[:_STACK_LINES]]
    if len(frames) > _STACK_LINES:
        lines.append(f"  ... {len(frames) - _STACK_LINES} more frames")
    return lines if seen.frames else [*lines, f"  no stack: {seen.stack_error}"]


def _is_boot(frame: str) -> bool:
    """Tell the frames below a rank's main, which are the same in every rank."""
    return "(boot.py:" in frame or "(<string>:" in frame


def _fix_for_stopped(late: list[RankTimeline]) -> Fix:
    return Fix(
        text=f"something on {late[0].host} stops processes (a scheduler that suspends jobs, a debugger, Ctrl-Z, "
        "a frozen container); list what is stopped there, then run again",
        commands=("ps -eo pid,stat,user,etime,cmd | awk 'NR==1 || $2 ~ /^[Tt]/'",),
    )


def _seen_by(late: list[RankTimeline], traces: list[RankTimeline]) -> tuple[str, ...]:
    accused = {trace.host for trace in late}
    return tuple(dict.fromkeys(trace.host for trace in traces if trace.host not in accused))


def _fix_for_stuck(late: list[RankTimeline]) -> Fix:
    assert late[0].inspection is not None
    remote = late[0].inspection.stuck[0].remote
    address, _, port = remote.rpartition(":")
    return Fix(
        text=f"what {late[0].host} sends to {remote} is not answered: see its way there, and what drops it at either "
        "end",
        commands=(
            f"ip route get {address.strip('[]')}",
            f"nft list ruleset | grep -nE 'drop|reject|limit|{port}'",
        ),
    )


def _fix_for_starved(late: list[RankTimeline], request: Request) -> Fix:
    return Fix(
        text=f"it waits for data that does not come, and other ranks have theirs: see the links of {late[0].host}; "
        "if they are only slow, give it longer",
        commands=(_longer(request), request.again(**request.less(), nccl_debug=""), request.pairs()),
    )


def _fix_for_late(late: list[RankTimeline], request: Request) -> Fix:
    seen = any(trace.inspection and trace.inspection.frames for trace in late)
    busy = "the stack above says what it was busy with" if seen else "see why its stack could not be read, above"
    return Fix(text=f"{busy}; if it was only slow, give it longer", commands=(_longer(request),))


def _longer(request: Request) -> str:
    return request.again(timeout=f"{min(86400, request.timeout_s * 4):g}")


def standstill(parts: Attribution, traces: list[RankTimeline], request: Request, course: RunRecord) -> list[Finding]:
    """Nothing moves and no rank is behind the others: either all wait for data, or all are busy with themselves."""
    if not parts.standstill:
        return []
    stage, doing = place(traces[0])
    if broken := attribution.stuck(traces, course.meeting):
        return [_no_answer(broken, traces, request, course)]
    waiting = all(trace.last is not None and trace.last.waiting for trace in traces)
    busy = any(is_at_work(trace) for trace in traces)
    longer = _longer(request)
    if waiting:
        title = f"all ranks are in stage {stage} ({doing}) and none came out for {course.stalled_s:.0f} s"
        detail = "No rank is behind the others: as far as can be seen the data does not get through."
        fix = Fix(
            text="if the system is only slow, give it longer or send less; else see the transport that is used",
            commands=(longer, request.again(**request.less(), nccl_debug=""), request.pairs()),
        )
        if busy:
            detail = "No rank is behind the others, and some are computing or wait for a core: they may only be slow."
    else:
        title = f"all ranks are still in stage {stage} ({doing}) after {course.stalled_s:.0f} s without a step"
        detail = "They do not wait for each other there; each one is held up by itself."
        if busy:
            detail += " Some are computing or reading files, so they may only be slow."
        fix = Fix(text="the stack says at what; if it is only slow, give it longer", commands=(longer,))
    return [
        Finding(
            id=f"{request.command}.all-waiting" if waiting else f"{request.command}.all-busy",
            level=Level.UNKNOWN if busy else Level.FAIL,
            title=title,
            detail=detail,
            where=where(traces),
            evidence=tuple(line for trace in _one_for_each_stack(traces) for line in _seen_from_outside(trace)),
            fix=fix,
        )
    ]


def _no_answer(
    broken: Sequence[attribution.Broken], traces: list[RankTimeline], request: Request, course: RunRecord
) -> Finding:
    """Nothing moves, and the kernels know why: what they send again and again is not answered."""
    stage, doing = place(traces[0])
    accused, witnesses = attribution.accuse(broken)
    which = f"connections of {fold(accused)}, as seen by {fold(witnesses)}," if witnesses else ""
    which = which or f"connections between {fold(accused)}"
    return Finding(
        id=f"{request.command}.all-waiting",
        level=Level.FAIL,
        title=f"{which} get no answer any more: all ranks are in stage {stage} ({doing}) for {course.stalled_s:.0f} s",
        detail="They were open before. Packets are sent again and again and nobody acknowledges them: a firewall or a "
        "limit on connections drops them, or the cable is out.",
        where=Where(hosts=accused, ranks=tuple(trace.rank for trace in traces if trace.host in accused)),
        witnesses=Witnesses(hosts=witnesses, ranks=tuple(trace.rank for trace in traces if trace.host in witnesses)),
        evidence=tuple(dict.fromkeys(one.evidence for one in broken))[:_STACK_LINES],
        fix=Fix(
            text=f"on {fold(accused)}, see what drops them, and the counters of its interface",
            commands=(
                "nft list ruleset | grep -nE 'drop|reject|quota|ct (bytes|count|state)|limit'",
                "ip -s link show",
                request.pairs(),
            ),
        ),
    )


def _one_for_each_stack(traces: list[RankTimeline]) -> list[RankTimeline]:
    """Take one rank for each different stack, the rarest first: the odd one is worth a look."""
    groups: dict[tuple[str, ...], list[RankTimeline]] = {}
    for trace in traces:
        groups.setdefault(trace.inspection.frames if trace.inspection else (), []).append(trace)
    return [group[0] for group in sorted(groups.values(), key=len)][:_MISSING_IN_FULL]


def nodes_lost(parts: Attribution, traces: list[RankTimeline], request: Request, course: RunRecord) -> list[Finding]:
    """Nodes that went away during the run, with their ranks."""
    by_reason: dict[str, list[RankTimeline]] = {}
    for trace in traces:
        if trace.rank in parts.lost:
            by_reason.setdefault(trace.lost, []).append(trace)
    return [
        Finding(
            id=f"{request.command}.node-lost",
            level=Level.FAIL,
            title=f"{fold(dict.fromkeys(trace.host for trace in group))} went away during the test: {reason}",
            detail=f"Last seen: {_last_seen(group)}.",
            where=where(group),
            evidence=tuple(dict.fromkeys(line for refusal in course.lost.values() for line in refusal.evidence)),
            fix=Fix(
                text="see whether the node is up, and its network; what ran there has ended itself",
                commands=(f"ping -c 3 {group[0].host}",),
            ),
        )
        for reason, group in by_reason.items()
    ]


def _last_seen(group: list[RankTimeline]) -> str:
    places: dict[tuple[str, str], list[int]] = {}
    for trace in group:
        places.setdefault(place(trace), []).append(trace.rank)
    return "; ".join(f"{name_ranks(ranks)} in stage {stage} ({doing})" for (stage, doing), ranks in places.items())


def port_not_free(host: str, taken: Taken, request: Request) -> Finding:
    """Name who holds the rendezvous port; a stranger that answers is more than a port that is taken."""
    port = request.master_port
    owner = f"{taken.command} (pid {taken.pid})" if taken.pid else "a process that is not ours to see"
    foreign = taken.answer is not None
    title = f"rendezvous port {port} on {host} cannot be had: {taken.error.lower()}"
    if taken.listening is not None:
        title = f"rendezvous port {port} on {host} is held by {owner}"
    if foreign:
        title += f', which answers "{taken.answer}"'
    return Finding(
        id=f"{request.command}.port-foreign" if foreign else f"{request.command}.port-taken",
        level=Level.FAIL,
        title=title,
        detail="No rank was started: rank 0 could not have listened there.",
        where=Where(hosts=(host,), ranks=(0,), pids=(taken.pid,) if taken.pid else ()),
        evidence=(f"binding port {port}: {taken.error}",),
        fix=Fix(
            text="end that program if it is a leftover, or let distdiag take a free port",
            commands=(request.again(master_port="0"),),
        ),
    )


def not_started(error: DistdiagError, request: Request) -> Finding:
    """Name the node that kept the ranks from being started, in a run on several."""
    return Finding(
        id=f"{request.command}.not-started",
        level=Level.UNKNOWN,
        title=f"no rank was started: {error}",
        fix=Fix(text=error.hint) if error.hint else None,
    )


def unsupported_archs(traces: list[RankTimeline], request: Request) -> list[Finding]:
    """GPUs that this torch holds no code for."""
    groups: dict[tuple[str, str], list[RankTimeline]] = {}
    for trace in traces:
        for event in trace.events:
            started = event.payload.get("started", {})
            capability, archs = started.get("capability"), started.get("arch_list")
            if capability and archs and not covers(archs, capability):
                groups.setdefault((f"{started['device_name']} ({capability})", " ".join(archs)), []).append(trace)
    return [
        Finding(
            id=f"{request.command}.arch-unsupported",
            level=Level.FAIL,
            title=f"torch holds no code for the GPU of {who(group)}: {gpu}",
            where=where(group),
            evidence=(f"torch's arch list: {archs}",),
            fix=Fix(text="install a torch build whose arch list covers this GPU"),
        )
        for (gpu, archs), group in groups.items()
    ]


def covers(arch_list: Iterable[str], capability: str) -> bool:
    """Tell whether code for these archs runs on a GPU of this compute capability, such as "9.0".

    A cubin (sm_80) runs on the same major version from its minor on; PTX (compute_80) on everything from there on. The
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
