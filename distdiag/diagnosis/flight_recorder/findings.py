"""Findings of flight-recorder, from causes; knowledge/job_verdicts.toml has the texts."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.diagnosis import remedies
from distdiag.diagnosis.flight_recorder.causes import Kind
from distdiag.diagnosis.flight_recorder.types import COMMAND
from distdiag.diagnosis.verdicts import finding
from distdiag.facts.recorder.read_dump import ENDED, FAILED
from distdiag.facts.text import printable
from distdiag.fold import by_key
from distdiag.report import Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from distdiag.diagnosis.flight_recorder.causes import Cause
    from distdiag.diagnosis.flight_recorder.matching import Call, Job
    from distdiag.diagnosis.flight_recorder.types import Request
    from distdiag.facts.recorder.collect import NodeDumps
    from distdiag.report import Finding
    from distdiag.saved_facts import Gathered

_SHOWN = 8
_HANGS_S = 10.0
"""In a running job, a rank that the others have awaited for less may be about to arrive."""
_WAITS = (Kind.NEVER_CALLED, Kind.NO_COUNTERPART, Kind.DEVICE_STUCK)
_SIDES = (Kind.OP, Kind.SIZE, Kind.DTYPE, Kind.ORDER)
"""Without a majority no rank is blamed."""


def finding_of(cause: Cause, job: Job, request: Request, gone: Collection[int] = ()) -> Finding:
    """Return the finding for a cause. `gone`: exited ranks, known from a trigger pipe without a reader."""
    evidence = [_line(call, job) for call in cause.calls[:_SHOWN]]
    others = [rank for rank in cause.ranks if all(call.rank != rank for call in cause.calls)]
    evidence += _each_last(job, others)[:_SHOWN]
    made = finding(
        f"{COMMAND}.{cause.kind}{'-undecided' if cause.kind in _SIDES and not cause.ranks else ''}",
        {**_words(cause, job), **_commands(cause, request)},
        where=Where(ranks=cause.ranks, hosts=_hosts(job, cause.ranks)),
        witnesses=Witnesses(ranks=cause.waiting),
        evidence=tuple(evidence),
    )
    if cause.kind is Kind.NO_DUMP and set(cause.ranks) <= set(gone):
        detail = "Its trigger pipe has no reader: the process has exited."
        return replace(made, level=Level.FAIL, detail=detail)
    if cause.kind is Kind.NO_DUMP and (outdated := [rank for rank in cause.ranks if rank in job.outdated]):
        return replace(made, detail=_is_outdated(outdated, job))
    if job.outdated and cause.kind in _WAITS:
        detail = (
            f"The dumps are not all of one moment, so this may have passed. {_is_outdated(tuple(job.outdated), job)}"
        )
        return replace(made, level=Level.UNKNOWN, detail=detail)
    if request.trigger and cause.kind in _WAITS and (waited := _waited_s(cause, job)) < _HANGS_S:
        detail = f"The others have waited for only {waited:.1f} s: the job may be running. Trigger again to decide."
        return replace(made, level=Level.UNKNOWN, detail=detail)
    return made


def _waited_s(cause: Cause, job: Job) -> float:
    """Return the seconds between the cause's oldest call and the dump of that rank."""
    dumps = ((call, job.dumps.get(call.rank)) for call in cause.calls)
    waits = ((dump.dumped_s or dump.modified_s) - call.created_ns / 1e9 for call, dump in dumps if dump is not None)
    return max(waits, default=0.0)


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


def _placed(call: Call, job: Job) -> str:
    return " at ".join(filter(None, (call_name(call, job), place(call))))


def _line(call: Call, job: Job) -> str:
    sizes = " ".join(
        "x".join(map(str, size)) or "scalar" for size in (call.operation.input_sizes or call.operation.output_sizes)[:4]
    )
    shape = f", {sizes} {','.join(map(printable, call.operation.dtypes))}" if sizes else ""
    at = f" at {place(call)}" if call.site else ""
    return f"rank {call.rank}: {call_name(call, job)}{shape}{at}"


def _each_last(job: Job, ranks: Iterable[int]) -> list[str]:
    """Format the last operation of each rank; ranks with the same text share a line."""
    groups = by_key((_last(job, rank), rank) for rank in ranks)
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
    at = f" at {place(last)}" if last.site else ""
    return f"last call {call_name(last, job)}, {state}{at}"


def _words(cause: Cause, job: Job) -> dict[str, object]:
    """Return the words of a cause's texts: the ranks with verbs in singular or plural, the calls, the group."""
    calls = cause.calls
    is_one, is_one_waiting = (len(set(ranks)) == 1 for ranks in (cause.ranks, cause.waiting))
    words: dict[str, object] = {
        "ranks": name_ranks(cause.ranks) if cause.ranks else "",
        "waiting": name_ranks(cause.waiting) if cause.waiting else "",
        "s": "s" if is_one else "",
        "w": "s" if is_one_waiting else "",
        "have": "has" if is_one else "have",
        "waiting_have": "has" if is_one_waiting else "have",
        "they": "It is" if is_one else "They are",
        "their": "its stack shows" if is_one else "their stacks show",
        "seq": cause.seq,
    }
    if calls:
        words |= {
            "call": call_name(calls[0], job),
            "at": place(calls[0]),
            "operation": printable(calls[0].operation.name),
        }
    if cause.group is not None:
        words |= {"group": printable(cause.group.label), "number": f"#{cause.seq} of {printable(cause.group.label)}"}
    return {**words, **_own_words(cause, job)}


def _own_words(cause: Cause, job: Job) -> dict[str, object]:
    """Return the words of this kind of cause alone."""
    calls, is_one = cause.calls, len(set(cause.waiting)) == 1
    if cause.kind in (Kind.OP, Kind.SIZE, Kind.DTYPE):
        right, *others = (_differs(call, cause.kind) for call in calls)
        return {"right": right, "other": " or ".join(dict.fromkeys(others))}
    if cause.kind is Kind.ORDER:
        return {"first": _placed(calls[0], job), "second": _placed(calls[1], job)}
    if cause.kind is Kind.NO_COUNTERPART:
        return {"counterpart": "recv" if calls[0].operation.name == "send" else "send"}
    if cause.kind is Kind.ONLY_SOME_CALLED and cause.group is not None:
        rest = [rank for rank in cause.group.members if rank not in cause.waiting]
        return {"others": name_ranks(rest), "others_are": "is" if len(rest) == 1 else "are"}
    if cause.kind is Kind.NO_DUMP:
        verbs = ("has failed", "have failed") if calls[0].state == FAILED else ("waits", "wait")
        return {"lack": _lack(cause, job), "waits": verbs[not is_one]}
    if cause.kind is Kind.DEVICE_STUCK:
        is_same = all((other.group, other.seq) == (calls[0].group, calls[0].seq) for other in calls)
        return {"apart": "" if is_same else "in its group"}
    if cause.kind is Kind.DEADLOCK:
        shown = "; ".join(f"rank {call.rank} in {call_name(call, job)}" for call in calls[:_SHOWN])
        return {"calls": shown + (f"; and {len(calls) - _SHOWN} more" if len(calls) > _SHOWN else "")}
    return {"late": f"{cause.late_ns / 1e6:.1f} ms", "clock": "ahead" if cause.clock else ""}


def _differs(call: Call, kind: Kind) -> str:
    """Format the property in which the sides differ."""
    if kind is Kind.OP:
        return printable(call.operation.name)
    if kind is Kind.DTYPE:
        return ",".join(map(printable, call.operation.dtypes))
    return f"{call.operation.elements} elements"


def _lack(cause: Cause, job: Job) -> str:
    outdated = sum(rank in job.outdated for rank in cause.ranks)
    if not outdated:
        partial = any(rank in job.dumps for rank in cause.ranks)
        return "left an incomplete dump" if partial else "left no dump"
    if len(cause.ranks) == 1:
        return "left an outdated dump"
    return "left outdated dumps" if outdated == len(cause.ranks) else "left no dump or outdated dumps"


def _is_outdated(ranks: Sequence[int], job: Job) -> str:
    """Explain why a dump must be older or newer than the others."""
    rank = next(rank for rank in ranks if rank in job.outdated)
    dump = job.outdated[rank]
    return (
        f"Rank {dump.witness} finished collective #{dump.seq} of {dump.group}, so all ranks had called it; "
        f"the dump of rank {rank} ends at #{dump.issued}: it is of an earlier moment, or of another run."
    )


def _commands(cause: Cause, request: Request) -> dict[str, object]:
    is_one = len(cause.ranks) == 1
    return {
        "stacks": remedies.again(request.program, request.cluster, "pyspy-all"),
        "gpu_test": remedies.again(request.program, request.cluster, "gpu-test"),
        "whose": "the stack of the rank" if is_one else "the stacks",
        "alive": "the rank is alive, and show its stack" if is_one else "the ranks are alive, and show their stacks",
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
        yield finding(
            f"{COMMAND}.unreadable",
            where=Where(ranks=tuple(damaged)),
            rank=damaged[0],
            unreadable=dump.unreadable,
            entries=dump.unreadable + dump.count,
            version=printable(dump.version) or "unknown",
            path=printable(dump.path),
            more=name_ranks(damaged[1:]) if damaged[1:] else "",
        )
    for host, why in gathered.missing.items():
        yield finding(f"{COMMAND}.incomplete", where=Where(hosts=(host,)), host=host, why=why)
    if outdated := tuple(rank for rank in sorted(job.outdated) if rank not in accused):
        several = "" if len(outdated) == 1 else "s"
        words = {"ranks": name_ranks(outdated), "s": several, "detail": _is_outdated(outdated, job)}
        yield finding(f"{COMMAND}.outdated", words, where=Where(ranks=outdated))
    known = {*job.dumps, *job.outdated, *accused}
    missing = [rank for rank in range(job.world_size) if rank not in known]
    if missing and job.dumps:
        yield finding(
            f"{COMMAND}.missing-dump",
            level=Level.INFO if accused else Level.UNKNOWN,
            where=Where(ranks=() if accused else tuple(missing)),
            ranks=name_ranks(missing),
            other="" if accused else "other",
        )
    for dump in job.without_rank[:_SHOWN]:
        yield finding(f"{COMMAND}.no-rank", path=printable(dump.path))
    if job.replaced:
        paths = tuple(printable(dump.path) for dump in job.replaced[:_SHOWN])
        yield finding(f"{COMMAND}.older", evidence=paths, number=len(job.replaced))
    if not job.dumps and not any(node.unread for node in nodes) and not gathered.refusals:
        asked = " ".join(shlex.quote(path) for path in request.paths) or "the running jobs"
        yield finding(f"{COMMAND}.nothing", asked=asked, program=request.program)


def _of_files(nodes: Sequence[NodeDumps], *, any_read: bool) -> Iterator[Finding]:
    """Report unreadable files, one finding per reason."""
    groups = by_key(
        ((each.kind, each.why.partition(":")[0]), (node.host, each.path, each.why))
        for node in nodes
        for each in node.unread
    )
    for (kind, _), unsorted in groups.items():
        files = sorted(unsorted, key=lambda file: file[1])
        yield finding(
            f"{COMMAND}.{'code' if kind == 'code' else 'file'}",
            {} if kind == "code" else {"name": kind},
            level=Level.WARN if kind == "truncated" and any_read else Level.UNKNOWN,
            where=Where(hosts=tuple(dict.fromkeys(host for host, _, _ in files))),
            evidence=tuple(printable(path) for _, path, _ in files[1:_SHOWN]),
            path=printable(files[0][1]),
            why=printable(files[0][2]),
            more=len(files) - 1 or "",
        )


def _of_pipes(nodes: Sequence[NodeDumps]) -> Iterator[Finding]:
    """Report ranks that did not answer the trigger."""
    mute = ((node.host, pipe) for node in nodes for pipe in node.pipes if pipe.answer != "dumped")
    groups = by_key((pipe.answer, (host, pipe)) for host, pipe in mute)
    for answer, pipes in groups.items():
        ranks = tuple(sorted({pipe.rank for _, pipe in pipes}))
        where = Where(hosts=tuple(dict.fromkeys(host for host, _ in pipes)), ranks=ranks)
        words = {"ranks": name_ranks(ranks), "path": printable(pipes[0][1].path), "answer": printable(answer)}
        yield finding(f"{COMMAND}.no-answer", words, where=where)


def undecided(ranks: Sequence[int]) -> Finding:
    """Report that ranks wait, but the dumps do not show for which rank."""
    words = {"ranks": name_ranks(ranks), "s": "s" if len(ranks) == 1 else ""}
    return finding(f"{COMMAND}.undecided", words, witnesses=Witnesses(ranks=tuple(ranks)))


def all_ended(job: Job, request: Request, *, is_slow: bool) -> Finding:
    """Report that all recorded calls have ended: a hang would be elsewhere, unless late ranks explain it."""
    last = max(job.last.values(), key=lambda call: call.created_ns, default=None)
    return finding(
        f"{COMMAND}.all-ended",
        level=Level.INFO if is_slow else Level.UNKNOWN,
        number=len(job.dumps),
        call="" if last is None else call_name(last, job),
        at="" if last is None else place(last),
        recorder="recorder" if any("gloo" in dump.backends for dump in job.dumps.values()) else "",
        program=request.program,
    )
