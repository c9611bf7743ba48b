"""Causes in words: rank, place, reason, and what to do."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks, name_ranks
from distdiag.commands.flight_recorder.causes import Kind
from distdiag.commands.flight_recorder.types import COMMAND
from distdiag.node.wire import printable
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from distdiag.commands.flight_recorder.causes import Cause
    from distdiag.commands.flight_recorder.collect import NodeDumps
    from distdiag.commands.flight_recorder.matching import Call, Job
    from distdiag.commands.flight_recorder.types import Request
    from distdiag.gathered import Gathered

_SHOWN = 8
_LEVELS = {Kind.ONLY_SOME_CALLED: Level.UNKNOWN, Kind.IN_FLIGHT: Level.UNKNOWN, Kind.LATE: Level.WARN}


def finding_of(cause: Cause, job: Job, request: Request) -> Finding:
    """Write what a cause is."""
    title, detail = _TITLES[cause.kind](cause, job)
    evidence = [_line(call, job) for call in cause.calls[:_SHOWN]]
    evidence += [_last(job, rank) for rank in cause.ranks[:_SHOWN] if all(call.rank != rank for call in cause.calls)]
    return Finding(
        id=f"{COMMAND}.{cause.kind}",
        level=_LEVELS.get(cause.kind, Level.FAIL),
        title=title,
        detail=detail,
        where=Where(ranks=cause.ranks, hosts=_hosts(job, cause.ranks)),
        witnesses=Witnesses(ranks=cause.waiting),
        evidence=tuple(evidence),
        fix=_fix(cause, request),
    )


def _hosts(job: Job, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(sorted({job.dumps[rank].host for rank in ranks if rank in job.dumps and job.dumps[rank].host}))


def call_name(call: Call, job: Job) -> str:
    """Name a call: "all_reduce #5 of default_pg", "recv from rank 3"."""
    name = printable(call.operation.name)
    if call.pair is not None:
        source, target = call.pair
        return f"send to rank {target}" if name == "send" else f"recv from rank {source}"
    return f"{name} #{call.seq} of {printable(job.groups[call.group].label)}"


def place(call: Call) -> str:
    """Name the line of the user's code: "train (job.py:25)"; empty if it was not recorded."""
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


def _last(job: Job, rank: int) -> str:
    dump, last = job.dumps.get(rank), job.last.get(rank)
    if dump is None:
        return f"rank {rank}: no dump"
    if dump.truncated:
        return f"rank {rank}: the dump is cut short: {printable(dump.path)}"
    if last is None:
        return f"rank {rank}: no operation is recorded"
    state = "failed" if last.state == 3 else "ended" if last.state == 2 else "not ended"
    return f"rank {rank}: its last is {call_name(last, job)}, {state}{_at(last)}"


def _does(ranks: Sequence[int], one: str, several: str) -> str:
    return f"{name_ranks(ranks)} {one if len(set(ranks)) == 1 else several}"


def _mismatch(cause: Cause, job: Job) -> tuple[str, str]:
    assert cause.group is not None
    right, *others = cause.calls
    number = f"collective #{cause.seq} of {printable(cause.group.label)}"
    if cause.kind is Kind.OP:
        what, other = (
            printable(right.operation.name),
            " or ".join(dict.fromkeys(printable(call.operation.name) for call in others)),
        )
    elif cause.kind is Kind.DTYPE:
        what, other = (
            ",".join(map(printable, right.operation.dtypes)),
            " or ".join(",".join(map(printable, call.operation.dtypes)) for call in others),
        )
    else:
        what, other = (
            f"{right.operation.elements} elements",
            " or ".join(f"{call.operation.elements}" for call in others),
        )
    if not cause.ranks:
        return (
            f"ranks {fold_ranks(cause.waiting)} do not call the same {number}: {what} against {other}; it cannot be told who is right",
            "As many ranks are on one side as on the other.",
        )
    if cause.kind is Kind.OP:
        return (
            f"{_does(cause.ranks, 'calls', 'call')} {other} as {number}, {_does(cause.waiting, 'calls', 'call')} {what}{_at(right)}",
            "From there on the collectives of these ranks do not fit together: a call was left out or added before it, or its line depends on the rank.",
        )
    verb = f"with {other}" + (" elements" if cause.kind is Kind.SIZE else "")
    return (
        f"{_does(cause.ranks, 'calls', 'call')} {printable(right.operation.name)} #{cause.seq} of {printable(cause.group.label)} {verb}, {name_ranks(cause.waiting)} with {what}{_at(right)}",
        "The tensors of all ranks must have the same number of elements of the same type there.",
    )


def _never_called(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    return (
        f"{_does(cause.ranks, 'has', 'have')} not called {call_name(call, job)}, in which {_does(cause.waiting, 'waits', 'wait')}{_at(call)}",
        "It is outside of the collectives: what it does there, its stack shows.",
    )


def _no_counterpart(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    wanted = "recv" if call.operation.name == "send" else "send"
    return (
        f"{_does(cause.ranks, 'has', 'have')} no {wanted} for the {call.operation.name} in which {_does(cause.waiting, 'waits', 'wait')}{_at(call)}",
        "",
    )


def _no_dump(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    cut = [rank for rank in cause.ranks if rank in job.dumps]
    lacks = "left a dump that is cut short" if cut else "left no dump"
    failed = call.state == 3
    waits = (
        ("failed" if failed else _does(cause.waiting, "waits", "wait"))
        if not failed
        else f"{_does(cause.waiting, 'has', 'have')} failed"
    )
    return (
        f"{name_ranks(cause.ranks)} {lacks}, and {waits} in {call_name(call, job)}{_at(call)}, which all others have called",
        "A rank that was killed or is stopped writes none. Whether it called this, a dump would show.",
    )


def _device_stuck(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    others = (
        ""
        if all((other.group, other.seq) == (call.group, call.seq) for other in cause.calls)
        else " (each in its group)"
    )
    return (
        f"{_does(cause.ranks, 'has', 'have')} not finished {call_name(call, job)}{others}, which {_does(cause.waiting, 'has', 'have')} finished",
        "All have called it: the device of this rank, or an earlier kernel on its stream, does not come to its end.",
    )


def _order(cause: Cause, job: Job) -> tuple[str, str]:
    many, few = cause.calls[:2]
    both = f"{call_name(few, job)}{_at(few)} before {call_name(many, job)}{_at(many)}"
    if cause.ranks:
        return (
            f"{_does(cause.ranks, 'calls', 'call')} {both}; {_does(cause.waiting, 'calls', 'call')} them the other way round",
            "Each side waits for the other: collectives of two groups need one order on all ranks.",
        )
    return (
        f"ranks {fold_ranks(cause.waiting)} call {call_name(many, job)}{_at(many)} and {call_name(few, job)}{_at(few)} in different orders; it cannot be told who is right",
        "Each side waits for the other: collectives of two groups need one order on all ranks.",
    )


def _deadlock(cause: Cause, job: Job) -> tuple[str, str]:
    shown = "; ".join(f"rank {call.rank} in {call_name(call, job)}" for call in cause.calls[:_SHOWN])
    more = f"; and {len(cause.calls) - _SHOWN} more" if len(cause.calls) > _SHOWN else ""
    return f"{name_ranks(cause.ranks)} wait for each other: {shown}{more}", ""


def _only_some(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    assert cause.group is not None
    others = [rank for rank in cause.group.members if rank not in cause.waiting]
    return (
        f"only {_does(cause.waiting, 'has', 'have')} called {call_name(call, job)}{_at(call)}; {_does(others, 'has', 'have')} not, and {'waits' if len(others) == 1 else 'wait'} for nothing",
        "Either the few have one call more (an uneven number of batches), or the many are held up outside of the collectives.",
    )


def _in_flight(cause: Cause, job: Job) -> tuple[str, str]:
    call = cause.calls[0]
    return (
        f"all ranks have called {call_name(call, job)}{_at(call)}, and {_does(cause.waiting, 'has', 'have')} not finished it: no rank is to blame by its calls",
        "The network or a device does not come to its end, or the dumps are of a job that was running.",
    )


def _late_rank(cause: Cause, job: Job) -> tuple[str, str]:
    assert cause.group is not None
    clock = ", unless its clock is ahead by that" if cause.clock else ""
    return (
        f"{_does(cause.ranks, 'calls', 'call')} the collectives of {printable(cause.group.label)} {cause.late_ns / 1e6:.1f} ms after the first, in the median of {cause.seq}{clock}",
        "All others wait for it there.",
    )


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
    if cause.kind in (Kind.NEVER_CALLED, Kind.ONLY_SOME_CALLED, Kind.NO_COUNTERPART):
        return Fix(text="while it runs, see where it is", commands=(f"{request.program} pyspy-all",))
    if cause.kind is Kind.NO_DUMP:
        return Fix(text="see whether it lives, and where it is", commands=(f"{request.program} pyspy-all",))
    if cause.kind is Kind.DEVICE_STUCK:
        return Fix(
            text="look for Xid errors on its host, then run with CUDA_LAUNCH_BLOCKING=1",
            commands=("dmesg | grep -i xid",),
        )
    if cause.kind is Kind.IN_FLIGHT:
        return Fix(text="test the network and the devices with nothing else", commands=(f"{request.program} gpu-test",))
    return None


def notes(
    job: Job, nodes: Sequence[NodeDumps], gathered: Gathered[NodeDumps], accused: set[int], request: Request
) -> Iterator[Finding]:
    """Report what could not be read, and who left no dump."""
    for node in nodes:
        for unread in node.unread:
            level = Level.UNKNOWN if unread.kind in ("code", "missing", "damaged") else Level.WARN
            title = f"{printable(unread.path)}: {printable(unread.why)}"
            if unread.kind == "code":
                title = f"{printable(unread.path)} is refused: {printable(unread.why)}"
            yield Finding(id=f"{COMMAND}.{unread.kind}", level=level, title=title, where=Where(hosts=(node.host,)))
        for pipe in node.pipes:
            if pipe.answer != "dumped":
                title = f"rank {pipe.rank} wrote no dump when it was asked by {printable(pipe.path)}: {printable(pipe.answer)}"
                yield Finding(
                    id=f"{COMMAND}.no-answer",
                    level=Level.WARN,
                    title=title,
                    where=Where(hosts=(node.host,), ranks=(pipe.rank,)),
                )
    for host, why in gathered.missing.items():
        yield Finding(
            id=f"{COMMAND}.incomplete",
            level=Level.UNKNOWN,
            title=f"not all of {host} is known: {why}",
            where=Where(hosts=(host,)),
        )
    missing = [rank for rank in range(job.world_size) if rank not in job.dumps and rank not in accused]
    if missing and job.dumps:
        yield Finding(
            id=f"{COMMAND}.missing-dump",
            level=Level.INFO if accused else Level.UNKNOWN,
            title=f"{_does(missing, 'has', 'have')} no dump" + ("" if accused else ", and no other rank is to blame"),
            where=Where(ranks=() if accused else tuple(missing)),
        )
    for dump in job.without_rank[:_SHOWN]:
        yield Finding(
            id=f"{COMMAND}.no-rank",
            level=Level.WARN,
            title=f"{printable(dump.path)} is left out: neither its content nor its name tells of which rank it is",
            fix=Fix(text="give it a name that ends in its rank"),
        )
    if job.replaced:
        title = f"{len(job.replaced)} older dumps of ranks that have a newer one are left out"
        paths = tuple(printable(dump.path) for dump in job.replaced[:_SHOWN])
        yield Finding(id=f"{COMMAND}.older", level=Level.INFO, title=title, evidence=paths)
    if not job.dumps and not any(node.unread for node in nodes) and not gathered.refusals:
        hint = Fix(text="see how to get dumps", commands=(f"{request.program} flight-recorder --how",))
        paths = " ".join(shlex.quote(path) for path in request.paths) or "what was asked"
        yield Finding(id=f"{COMMAND}.nothing", level=Level.UNKNOWN, title=f"no dump was found in {paths}", fix=hint)


def undecided(ranks: Sequence[int]) -> Finding:
    """Say that ranks wait, and that the dumps do not tell for whom."""
    title = f"{_does(ranks, 'waits', 'wait')}, and the dumps do not tell for whom"
    detail = "Its counterpart is in the ring no more, or in no dump."
    return Finding(
        id=f"{COMMAND}.undecided",
        level=Level.UNKNOWN,
        title=title,
        detail=detail,
        witnesses=Witnesses(ranks=tuple(ranks)),
    )


def healthy(job: Job, request: Request) -> Finding:
    """Say that all that was called has ended: if the job hangs, it does so elsewhere."""
    last = max(job.last.values(), key=lambda call: call.created_ns, default=None)
    end = f"; the last is {call_name(last, job)}{_at(last)}" if last is not None else ""
    gloo = any("gloo" in dump.backends for dump in job.dumps.values())
    unseen = " Gloo's recorder does not see send and recv." if gloo else ""
    return Finding(
        id=f"{COMMAND}.all-ended",
        level=Level.INFO,
        title=f"every collective that was called has ended on all {len(job.dumps)} ranks{end}",
        detail=f"If the job hangs, it hangs outside of the collectives.{unseen}",
        fix=Fix(text="if it hangs, see where the ranks are", commands=(f"{request.program} pyspy-all",)),
    )
