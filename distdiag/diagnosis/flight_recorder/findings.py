"""Findings of flight-recorder, from causes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis import remedies
from distdiag.diagnosis.flight_recorder.causes import Kind
from distdiag.diagnosis.flight_recorder.types import COMMAND
from distdiag.facts.flight_recorder.read_dump import ENDED, FAILED
from distdiag.facts.text import printable
from distdiag.ids import Id
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from distdiag.diagnosis.flight_recorder.causes import Cause
    from distdiag.diagnosis.flight_recorder.matching import Call, Job
    from distdiag.diagnosis.flight_recorder.types import Request
    from distdiag.facts.flight_recorder.collect import NodeDumps, Pipe
    from distdiag.saved_facts import Gathered

_SHOWN = 8
_HANGS_S = 10.0
"""In a running job, a rank that the others have awaited for less may be about to arrive."""
_LEVELS = {
    Kind.ONLY_SOME_CALLED: Level.UNKNOWN,
    Kind.IN_FLIGHT: Level.UNKNOWN,
    Kind.NO_DUMP: Level.UNKNOWN,
    Kind.LATE: Level.WARN,
}
_UNREAD = {
    id_.rpartition(".")[2]: id_
    for id_ in (
        *(Id.FLIGHT_RECORDER_TRUNCATED, Id.FLIGHT_RECORDER_CODE, Id.FLIGHT_RECORDER_MISSING),
        Id.FLIGHT_RECORDER_OTHER,
    )
}
_WAITS = (Kind.NEVER_CALLED, Kind.NO_COUNTERPART, Kind.DEVICE_STUCK)


def finding_of(cause: Cause, job: Job, request: Request, gone: Collection[int] = ()) -> Finding:
    """Return the finding for a cause. `gone`: exited ranks, known from a trigger pipe without a reader."""
    title, detail = _TITLES[cause.kind](cause, job)
    level = _LEVELS.get(cause.kind, Level.FAIL)
    if cause.kind is Kind.NO_DUMP and set(cause.ranks) <= set(gone):
        level, detail = Level.FAIL, "Its trigger pipe has no reader: the process has exited."
    if request.trigger and cause.kind in _WAITS and (waited := _waited_s(cause, job)) < _HANGS_S:
        level = Level.UNKNOWN
        detail = f"The others have waited for only {waited:.1f} s: the job may be running. Trigger again to decide."
    if job.outdated and cause.kind in _WAITS:
        level = Level.UNKNOWN
        detail = (
            f"The dumps are not all of one moment, so this may have passed. {_is_outdated(tuple(job.outdated), job)}"
        )
    evidence = [_line(call, job) for call in cause.calls[:_SHOWN]]
    others = [rank for rank in cause.ranks if all(call.rank != rank for call in cause.calls)]
    evidence += _each_last(job, others)[:_SHOWN]
    return Finding(
        id=Id(f"{COMMAND}.{cause.kind}"),
        level=level,
        title=title,
        detail=detail,
        where=Where(ranks=cause.ranks, hosts=_hosts(job, cause.ranks)),
        witnesses=Witnesses(ranks=cause.waiting),
        evidence=tuple(evidence),
        fix=_fix(cause, request),
    )


def _waited_s(cause: Cause, job: Job) -> float:
    """Return the seconds between the cause's oldest call and the dump of that rank."""
    return max(
        (
            (dump.dumped_s or dump.modified_s) - call.created_ns / 1e9
            for call in cause.calls
            if (dump := job.dumps.get(call.rank)) is not None
        ),
        default=0.0,
    )


def _hosts(job: Job, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(sorted({job.dumps[rank].host for rank in ranks if rank in job.dumps and job.dumps[rank].host}))


def call_name(call: Call, job: Job) -> str:
    """Format a call: "all_reduce #5 of default_pg", "recv from rank 3"."""
    name = printable(call.operation.name)
    if call.pair is not None:
        source, target = call.pair
        return f"send to rank {target}" if name == "send" else f"recv from rank {source}"
    return f"{name} #{call.seq} of {printable(job.groups[call.group].label)}"


def place(call: Call) -> str:
    """Format the line of user code, "train (job.py:25)"; empty if not recorded."""
    if call.site is None:
        return ""
    function, file, line = call.site
    return f"{printable(function)} ({printable(file)}:{line})"


def _at(call: Call) -> str:
    return f" at {where}" if (where := place(call)) else ""


def _line(call: Call, job: Job) -> str:
    sizes = " ".join(
        "x".join(map(str, size)) or "scalar" for size in (call.operation.input_sizes or call.operation.output_sizes)[:4]
    )
    shape = f", {sizes} {','.join(map(printable, call.operation.dtypes))}" if sizes else ""
    return f"rank {call.rank}: {call_name(call, job)}{shape}{_at(call)}"


def _each_last(job: Job, ranks: Iterable[int]) -> list[str]:
    """Format the last operation of each rank; ranks with the same text share a line."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_last(job, rank), []).append(rank)
    return [f"{name_ranks(members)}: {words}" for words, members in groups.items()]


def _last(job: Job, rank: int) -> str:
    dump, last = job.dumps.get(rank), job.last.get(rank)
    if dump is None:
        return "no dump"
    if dump.truncated:
        return f"truncated dump {printable(dump.path)}"
    if dump.unreadable:
        return f"{dump.unreadable} unreadable entries in {printable(dump.path)}"
    if last is None:
        return "no operation recorded"
    state = {FAILED: "failed", ENDED: "ended"}.get(last.state, "not ended")
    return f"last call {call_name(last, job)}, {state}{_at(last)}"


def _does(ranks: Sequence[int], one: str, several: str) -> str:
    return f"{name_ranks(ranks)} {one if len(set(ranks)) == 1 else several}"


def _mismatch(cause: Cause, job: Job) -> tuple[str, str]:
    assert cause.group is not None
    right, *others = cause.calls
    what, other = _differs(right, cause.kind), " or ".join(dict.fromkeys(_differs(call, cause.kind) for call in others))
    group = printable(cause.group.label)
    number = f"collective #{cause.seq} of {group}"
    if not cause.ranks:
        who = f"{name_ranks(cause.waiting)} disagree on {number}"
        detail = "Neither side has the majority, so the dumps do not show which side is wrong."
        return f"{who}: {what} against {other}", detail
    wrong, rest = _does(cause.ranks, "calls", "call"), _does(cause.waiting, "calls", "call")
    if cause.kind is Kind.OP:
        return f"{wrong} {other} as {number}, {rest} {what}{_at(right)}", _OP_DETAIL
    name = f"{printable(right.operation.name)} #{cause.seq} of {group}"
    return f"{wrong} {name} with {other}, {name_ranks(cause.waiting)} with {what}{_at(right)}", _TENSOR_DETAIL


_OP_DETAIL = (
    "From this call on the ranks are out of step: an earlier call was skipped or added, or this call depends on the "
    "rank."
)
_TENSOR_DETAIL = "All ranks must pass the same number of elements of the same dtype."


def _differs(call: Call, kind: Kind) -> str:
    """Format the property in which the sides differ."""
    if kind is Kind.OP:
        return printable(call.operation.name)
    if kind is Kind.DTYPE:
        return ",".join(map(printable, call.operation.dtypes))
    return f"{call.operation.elements} elements"


def _never_called(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    waiting = _does(cause.waiting, "waits", "wait")
    return (
        f"{name_ranks(cause.ranks)} never called {call_name(call, job)}; {waiting} in it{_at(call)}",
        "It is busy or stuck outside the collectives: its stack shows where."
        if len(cause.ranks) == 1
        else "They are busy or stuck outside the collectives: their stacks show where.",
    )


def _no_counterpart(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    wanted = "recv" if call.operation.name == "send" else "send"
    waiting = _does(cause.waiting, "waits", "wait")
    lacks = f"{name_ranks(cause.ranks)} called no {wanted} to match the {call.operation.name}"
    return f"{lacks} in which {waiting}{_at(call)}", ""


def _no_dump(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    partial = any(rank in job.dumps for rank in cause.ranks)
    lacks = "left an incomplete dump" if partial else "left no dump"
    outdated = [job.outdated[rank] for rank in cause.ranks if rank in job.outdated]
    if outdated:
        lacks = "left an outdated dump" if len(cause.ranks) == 1 else "left no dump or outdated dumps"
        if len(outdated) == len(cause.ranks) > 1:
            lacks = "left outdated dumps"
    have = _does(cause.waiting, "has failed", "have failed") if call.state == FAILED else ""
    waits = have or _does(cause.waiting, "waits", "wait")
    return (
        f"{name_ranks(cause.ranks)} {lacks}; {waits} in {call_name(call, job)}{_at(call)}",
        _is_outdated(cause.ranks, job)
        if outdated
        else "All others called it. A killed or stopped rank writes no dump, but its dump may also be lost.",
    )


def _is_outdated(ranks: Sequence[int], job: Job) -> str:
    """Explain why a dump must be older or newer than the others."""
    rank = next(rank for rank in ranks if rank in job.outdated)
    dump = job.outdated[rank]
    return (
        f"Rank {dump.witness} finished collective #{dump.seq} of {dump.group}, so all ranks had called it; "
        f"the dump of rank {rank} ends at #{dump.issued}: it is of an earlier moment, or of another run."
    )


def _device_stuck(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    is_one = all((other.group, other.seq) == (call.group, call.seq) for other in cause.calls)
    name = call_name(call, job) + ("" if is_one else " (each in its group)")
    others = _does(cause.waiting, "has", "have")
    return (
        f"{_does(cause.ranks, 'has', 'have')} not finished {name}, which {others} finished",
        "All ranks called it: this rank's GPU is stuck, in the collective or in an earlier kernel on its stream.",
    )


_ORDER_DETAIL = "Each side waits for the other. All ranks must call the collectives of two groups in the same order."


def _order(cause: Cause, job: Job) -> tuple[str, str]:
    first, second = (f"{call_name(call, job)}{_at(call)}" for call in cause.calls[:2])
    if cause.ranks:
        wrong, rest = _does(cause.ranks, "calls", "call"), _does(cause.waiting, "calls", "call")
        return f"{wrong} {second} before {first}; {rest} them in the opposite order", _ORDER_DETAIL
    who = f"{name_ranks(cause.waiting)} call {first} and {second}"
    return f"{who} in opposite orders", _ORDER_DETAIL


def _deadlock(cause: Cause, job: Job) -> tuple[str, str]:
    shown = "; ".join(f"rank {call.rank} in {call_name(call, job)}" for call in cause.calls[:_SHOWN])
    more = f"; and {len(cause.calls) - _SHOWN} more" if len(cause.calls) > _SHOWN else ""
    return f"{name_ranks(cause.ranks)} wait for each other: {shown}{more}", ""


def _only_some(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    assert cause.group is not None
    others = [rank for rank in cause.group.members if rank not in cause.waiting]
    few = f"only {name_ranks(cause.waiting)} called {call_name(call, job)}{_at(call)}"
    many = f"{name_ranks(others)} did not, and {'is' if len(others) == 1 else 'are'} not in a collective"
    detail = "Either the few make one call too many (uneven batches), or the others are stuck outside the collectives."
    return f"{few}; {many}", detail


def _in_flight(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    unfinished = f"{_does(cause.waiting, 'has', 'have')} not finished it"
    return (
        f"all ranks called {call_name(call, job)}{_at(call)}; {unfinished}: no rank is behind",
        "Either the network or a GPU is stuck, or the job was still running when it wrote the dumps.",
    )


def _late_rank(cause: Cause, job: Job) -> tuple[str, str]:
    assert cause.group is not None
    who = f"{_does(cause.ranks, 'calls', 'call')} the collectives of {printable(cause.group.label)}"
    clock = ", or its clock is ahead" if cause.clock else ""
    late = f"{cause.late_ns / 1e6:.1f} ms after the first rank (median of {cause.seq})"
    return f"{who} {late}{clock}", "The others wait for it in every one of these collectives."


_TITLES = {
    Kind.OP: _mismatch,
    Kind.SIZE: _mismatch,
    Kind.DTYPE: _mismatch,
    Kind.NEVER_CALLED: _never_called,
    Kind.ONLY_SOME_CALLED: _only_some,
    Kind.NO_COUNTERPART: _no_counterpart,
    Kind.NO_DUMP: _no_dump,
    Kind.DEVICE_STUCK: _device_stuck,
    Kind.ORDER: _order,
    Kind.DEADLOCK: _deadlock,
    Kind.IN_FLIGHT: _in_flight,
    Kind.LATE: _late_rank,
}


def _fix(cause: Cause, request: Request) -> Fix | None:
    stacks = remedies.again(request.program, request.cluster, "pyspy-all")
    is_one = len(cause.ranks) == 1
    if cause.kind in (Kind.NEVER_CALLED, Kind.ONLY_SOME_CALLED, Kind.NO_COUNTERPART):
        whose = "the stack of the rank" if is_one else "the stacks"
        return Fix(text=f"while the job hangs, show {whose}", commands=(stacks,))
    if cause.kind is Kind.NO_DUMP:
        whose = "the rank is alive, and show its stack" if is_one else "the ranks are alive, and show their stacks"
        return Fix(text=f"check whether {whose}", commands=(stacks,))
    if cause.kind is Kind.DEVICE_STUCK:
        return Fix(
            text="look for Xid errors on the host of the rank, then rerun with CUDA_LAUNCH_BLOCKING=1",
            commands=("dmesg | grep -i xid",),
        )
    if cause.kind is Kind.IN_FLIGHT:
        again = remedies.again(request.program, request.cluster, "gpu-test")
        return Fix(text="test the network and the GPUs without the job", commands=(again,))
    return Fix(text=_FIXES[cause.kind]) if cause.kind in _FIXES else None


_FIXES = {
    Kind.OP: "find the branch on the rank before that line: all ranks need the same calls",
    Kind.SIZE: "make the tensors equal on all ranks: pad uneven batches, or gather their sizes first",
    Kind.DTYPE: "use one dtype on all ranks: compare autocast, and the dtype of what each rank loads",
    Kind.ORDER: "issue these calls in one order on all ranks",
    Kind.DEADLOCK: "use one order of groups on all ranks; let one of a pair send while the other receives",
}


def notes(
    job: Job, nodes: Sequence[NodeDumps], gathered: Gathered[NodeDumps], accused: set[int], request: Request
) -> Iterator[Finding]:
    """Report unreadable data, and ranks without a dump."""
    yield from _of_files(nodes, any_read=bool(job.dumps))
    yield from _of_pipes(nodes)
    damaged = [rank for rank, dump in sorted(job.dumps.items()) if dump.unreadable]
    if damaged:
        dump = job.dumps[damaged[0]]
        title = f"{dump.unreadable} of {dump.unreadable + dump.count} entries of rank {damaged[0]} are unreadable"
        shown = f"{title} (format {printable(dump.version) or 'unknown'}): {printable(dump.path)}"
        more = f"; so are entries of {name_ranks(damaged[1:])}" if damaged[1:] else ""
        where = Where(ranks=tuple(damaged))
        yield Finding(id=Id.FLIGHT_RECORDER_UNREADABLE, level=Level.WARN, title=f"{shown}{more}", where=where)
    for host, why in gathered.missing.items():
        title = f"{host} answered only in part: {why}"
        yield Finding(id=Id.FLIGHT_RECORDER_INCOMPLETE, level=Level.UNKNOWN, title=title, where=Where(hosts=(host,)))
    outdated = tuple(rank for rank in sorted(job.outdated) if rank not in accused)
    if outdated:
        yield Finding(
            id=Id.FLIGHT_RECORDER_OUTDATED,
            level=Level.UNKNOWN,
            title=f"ignored the outdated dump{'' if len(outdated) == 1 else 's'} of {name_ranks(outdated)}",
            detail=_is_outdated(outdated, job),
            where=Where(ranks=outdated),
            fix=Fix(text="empty the folder of the dumps before a run, and let all ranks write theirs at one time"),
        )
    known = {*job.dumps, *job.outdated, *accused}
    missing = [rank for rank in range(job.world_size) if rank not in known]
    if missing and job.dumps:
        yield Finding(
            id=Id.FLIGHT_RECORDER_MISSING_DUMP,
            level=Level.INFO if accused else Level.UNKNOWN,
            title=f"{name_ranks(missing)} left no dump" + ("" if accused else ", and no other rank is behind"),
            where=Where(ranks=() if accused else tuple(missing)),
        )
    for dump in job.without_rank[:_SHOWN]:
        title = f"ignored {printable(dump.path)}: neither content nor name shows its rank"
        fix = Fix(text="end the file name with the rank")
        yield Finding(id=Id.FLIGHT_RECORDER_NO_RANK, level=Level.WARN, title=title, fix=fix)
    if job.replaced:
        title = f"ignored {len(job.replaced)} older dumps of ranks that also left a newer dump"
        paths = tuple(printable(dump.path) for dump in job.replaced[:_SHOWN])
        yield Finding(id=Id.FLIGHT_RECORDER_OLDER, level=Level.INFO, title=title, evidence=paths)
    if not job.dumps and not any(node.unread for node in nodes) and not gathered.refusals:
        hint = Fix(text="show how to get dumps", commands=(f"{request.program} flight-recorder --how",))
        asked = " ".join(shlex.quote(path) for path in request.paths) or "the running jobs"
        yield Finding(
            id=Id.FLIGHT_RECORDER_NOTHING,
            level=Level.UNKNOWN,
            title=f"no flight recorder dump found in {asked}",
            fix=hint,
        )


def _of_files(nodes: Sequence[NodeDumps], *, any_read: bool) -> Iterator[Finding]:
    """Report unreadable files, one finding per reason."""
    groups: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for node in nodes:
        for unread in node.unread:
            alike = unread.kind, unread.why.partition(":")[0]
            groups.setdefault(alike, []).append((node.host, unread.path, unread.why))
    for (kind, _), unsorted in groups.items():
        files = sorted(unsorted, key=lambda file: file[1])
        why = files[0][2]
        is_refused = " is refused" if kind == "code" else ""
        more = f"; {len(files) - 1} more files likewise" if len(files) > 1 else ""
        yield Finding(
            id=_UNREAD.get(kind, Id.FLIGHT_RECORDER_DAMAGED),
            level=Level.WARN if kind == "truncated" and any_read else Level.UNKNOWN,
            title=f"{printable(files[0][1])}{is_refused}: {printable(why)}{more}",
            where=Where(hosts=tuple(dict.fromkeys(host for host, _, _ in files))),
            evidence=tuple(printable(path) for _, path, _ in files[1:_SHOWN]),
        )


def _of_pipes(nodes: Sequence[NodeDumps]) -> Iterator[Finding]:
    """Report ranks that did not answer the trigger."""
    groups: dict[str, list[tuple[str, Pipe]]] = {}
    for node in nodes:
        for pipe in node.pipes:
            if pipe.answer != "dumped":
                groups.setdefault(pipe.answer, []).append((node.host, pipe))
    for answer, pipes in groups.items():
        ranks = tuple(sorted({pipe.rank for _, pipe in pipes}))
        title = f"{name_ranks(ranks)} wrote no dump when triggered: {printable(pipes[0][1].path)}: {printable(answer)}"
        where = Where(hosts=tuple(dict.fromkeys(host for host, _ in pipes)), ranks=ranks)
        yield Finding(id=Id.FLIGHT_RECORDER_NO_ANSWER, level=Level.WARN, title=title, where=where)


def undecided(ranks: Sequence[int]) -> Finding:
    """Report that ranks wait, but the dumps do not show for which rank."""
    title = f"{_does(ranks, 'waits', 'wait')}; the dumps do not show for which rank"
    detail = "The counterpart was overwritten in the ring buffer, or its dump is missing."
    return Finding(
        id=Id.FLIGHT_RECORDER_UNDECIDED,
        level=Level.UNKNOWN,
        title=title,
        detail=detail,
        witnesses=Witnesses(ranks=tuple(ranks)),
    )


def all_ended(job: Job, request: Request, *, is_slow: bool) -> Finding:
    """Report that all recorded calls have ended: a hang would be elsewhere, unless late ranks explain it."""
    last = max(job.last.values(), key=lambda call: call.created_ns, default=None)
    end = f"; the last is {call_name(last, job)}{_at(last)}" if last is not None else ""
    gloo = any("gloo" in dump.backends for dump in job.dumps.values())
    unseen = " Gloo's recorder does not record send and recv." if gloo else ""
    return Finding(
        id=Id.FLIGHT_RECORDER_ALL_ENDED,
        level=Level.INFO if is_slow else Level.UNKNOWN,
        title=f"every recorded collective has ended on all {len(job.dumps)} ranks{end}",
        detail=f"If the job hangs, it hangs outside the collectives.{unseen}",
        fix=Fix(text="if the job hangs, show what every rank is doing", commands=(f"{request.program} pyspy-all",)),
    )
