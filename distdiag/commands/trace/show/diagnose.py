"""What the tracer kept on all nodes -> Report. Pure."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.cluster.reached import host_findings
from distdiag.commands.trace.show.model import COMMAND
from distdiag.commands.trace.show.result import Group, LastLine, Ring, TraceShow
from distdiag.commands.trace.show.runs import find_runs, newest
from distdiag.commands.trace.show.standing import COMM, Outcome, judge, split
from distdiag.commands.trace.show.words import does, end_of, spot, waits, who
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.show.collect import Line, NodeLines, Process, Thread
    from distdiag.commands.trace.show.model import Request
    from distdiag.commands.trace.show.result import Member, Run, Stand
    from distdiag.commands.trace.show.standing import Judged
    from distdiag.gathered import Gathered

_PATHS = 6
LONG_S = 10.0
"""A line that takes longer than this is taken for one that hangs, if the others wait."""


def diagnose(request: Request, gathered: Gathered[NodeLines]) -> Report[TraceShow]:
    """Say where every rank of the newest run is, or was when it ended, and who is odd."""
    nodes = gathered.facts
    runs = find_runs(nodes)
    shown = runs if request.all_runs else newest(runs)
    judged = [judge(run) for run in shown]
    found: list[Finding] = []
    for one in judged:
        found += _of_run(request, one)
    if not runs and nodes:
        found.append(_nothing(request, nodes))
    found += [*_unread(nodes), *_not_ours(request, nodes)]
    found += host_findings(gathered.refusals, gathered.rows)
    found += [
        Finding(id="trace.no-answer", level=Level.UNKNOWN, title=f"{host}: {why}", where=Where(hosts=(host,)))
        for host, why in gathered.missing.items()
    ]
    data = TraceShow(
        run="; ".join(run.name for run in shown),
        rings=tuple(ring for run in shown for ring in _rings(request, run)),
        groups=tuple(_group(group) for one in judged for group in split(one.stands)),
        odd=tuple(_number(stand) for one in judged for stand in one.odd),
        older_runs=len(runs) - len(shown),
        unread=tuple((node.host, path, why) for node in nodes for path, why in (*node.unread, *node.not_ours)),
    )
    return Report(
        command=COMMAND,
        data=data,
        findings=tuple(found),
        summary=_summary(judged, found),
        interrupted=gathered.interrupted,
    )


def _number(stand: Stand) -> int:
    return stand.member.rank if stand.member.rank is not None else -stand.member.process.pid


def _of_run(request: Request, judged: Judged) -> Iterator[Finding]:
    maker = _MAKERS.get(judged.outcome)
    if maker is not None:
        yield maker(request, judged)
    yield from _about_tracing(judged.run)


def _odd(request: Request, judged: Judged) -> Finding:
    groups = split(judged.odd)
    parts = [
        f"{who(group)} {'is' if len(group) == 1 else 'are'} not in the collective: {does(group[0])}"
        for group in groups[:3]
    ]
    if len(groups) > 3:
        parts.append(f"{sum(map(len, groups[3:]))} more are elsewhere")
    slow = _is_young(judged.odd)
    return Finding(
        id="trace.odd-rank",
        level=Level.WARN if slow else Level.FAIL,
        title="; ".join([*parts, _waiting(judged.waiting)]),
        detail="It may only be slower than the others: look again in a while." if slow else "",
        where=_where(judged.odd),
        fix=_stacks(request, judged),
    )


def _is_young(stands: Sequence[Stand]) -> bool:
    return all(one.member.process.state == "running" and (one.member.process.age_s or 0) < LONG_S for one in stands)


def _gone(request: Request, judged: Judged) -> Finding:
    first = judged.odd[0]
    what = "have ended" if len(judged.odd) > 1 else _ended(first)
    return Finding(
        id="trace.exited",
        level=Level.FAIL,
        title=f"{who(judged.odd)} {what}, last {does(first)}; {_waiting(judged.waiting)}",
        where=_where(judged.odd),
        fix=Fix(
            text="see what it printed last; if it left a core, what crashed", commands=(f"{request.program} core-bt",)
        ),
    )


def _ended(one: Stand) -> str:
    return f"was {end_of(one)}" if one.member.process.state == "died" else end_of(one)


def _ended_first(one: Stand) -> str:
    return end_of(one).replace("ended by", "ended first, by", 1) if _is_raised(one) else f"{_ended(one)} first"


def _is_raised(one: Stand) -> bool:
    return one.member.process.state == "raised"


def _left_first(request: Request, judged: Judged) -> Finding:
    groups = split(judged.odd)
    parts = [f"{who(group)} {_ended_first(group[0])}, last {does(group[0])}" for group in groups[:3]]
    rest = split(judged.waiting)[::-1]
    parts += [f"after that {who(group)} {_ended(group[0])}" for group in rest[:1]]
    core = Fix(text="if it left a core, what crashed", commands=(f"{request.program} core-bt",))
    return Finding(
        id="trace.left-first",
        level=Level.FAIL,
        title="; ".join(parts),
        where=_where(judged.odd),
        fix=core if judged.odd[0].member.process.state == "died" else None,
    )


def _elsewhere(request: Request, judged: Judged) -> Finding:
    first = judged.odd[0]
    return Finding(
        id="trace.elsewhere",
        level=Level.WARN if first.kind == judged.waiting[0].kind == "" or _is_young(judged.odd) else Level.FAIL,
        title=f"{who(judged.odd)} {_are(judged.odd)} in another place than the others: "
        f"{does(first)}; {_waiting(judged.waiting)}",
        where=_where(judged.odd),
        fix=_stacks(request, judged),
    )


def _same(request: Request, judged: Judged) -> Finding:
    if judged.waiting[0].kind != COMM:
        return Finding(
            id="trace.same-place",
            level=Level.UNKNOWN,
            title=f"all ranks are {waits(judged.waiting[0])}, which is no collective",
            detail="" if judged.waiting[0].member.process.state == "died" else "It may only take long: look again.",
            where=_where(judged.waiting),
        )
    return Finding(
        id="trace.same-place",
        level=Level.UNKNOWN,
        title=f"the last lines cannot decide: all ranks are {waits(judged.waiting[0])}",
        detail="Nobody is elsewhere: a message was lost, an earlier collective differs, or a link or a GPU is stuck. "
        f"What would decide: how often each rank was there ({request.program} trace show --count 'PATTERN'), or the "
        "lines of torch too (trace py --include torch).",
        where=_where(judged.waiting),
    )


def _apart(request: Request, judged: Judged) -> Finding:
    groups = split(judged.waiting)
    parts = [f"{who(group)} {does(group[0])}" for group in groups[:4]]
    more = f"; {len(groups) - 4} more places" if len(groups) > 4 else ""
    return Finding(
        id="trace.undecided",
        level=Level.UNKNOWN,
        title="the last lines cannot decide who is odd: " + "; ".join(parts) + more,
        where=_where(judged.waiting),
    )


def _alone(request: Request, judged: Judged) -> Finding:
    (one,) = judged.waiting
    died = one.member.process.state != "running"
    return Finding(
        id="trace.last-line",
        level=Level.FAIL if died else Level.UNKNOWN,
        title=f"{who([one])} {f'{_ended(one)}, last' if died else 'is'} {does(one)}",
        detail="" if died else "One process alone: nothing to compare it with.",
        where=_where([one]),
    )


def _no_lines(request: Request, judged: Judged) -> Finding:
    return Finding(
        id="trace.no-lines",
        level=Level.UNKNOWN,
        title=f"no line was kept of {judged.run.name}: it had not come to code that is traced",
        detail="By default that is the user's own code, not packages.",
        fix=Fix(text="trace packages too", commands=(f"{request.program} trace py --include all -- train.py",)),
    )


_MAKERS = {
    Outcome.ODD: _odd,
    Outcome.GONE: _gone,
    Outcome.LEFT_FIRST: _left_first,
    Outcome.ELSEWHERE: _elsewhere,
    Outcome.SAME: _same,
    Outcome.APART: _apart,
    Outcome.ALONE: _alone,
    Outcome.NOTHING: _no_lines,
}


def _are(stands: Sequence[Stand]) -> str:
    return "is" if len(stands) == 1 else "are"


def _waiting(stands: Sequence[Stand]) -> str:
    groups = split(stands)[::-1]
    parts = [
        f"{who(group)} {'waits' if len(group) == 1 else 'wait'} {waits(group[0])}"
        if group[0].operation
        else f"{who(group)} {_are(group)} {waits(group[0])}"
        for group in groups[:2]
    ]
    rest = sum(map(len, groups[2:]))
    return "; ".join(parts) + (f"; {rest} more elsewhere" if rest else "")


def _about_tracing(run: Run) -> Iterator[Finding]:
    """Tell what the answer may lack: ranks without a file, threads without room."""
    ranks = {member.rank for member in run.members}
    absent = sorted(set(range(run.world_size or 0)) - {rank for rank in ranks if rank is not None})
    if absent and None not in ranks:
        from distdiag.cluster.hosts import name_ranks

        yield Finding(
            id="trace.unseen",
            level=Level.WARN,
            title=f"no lines of {name_ranks(absent)} were found: on other nodes (--hosts), or not traced",
            where=Where(ranks=tuple(absent)),
        )
    untold = [member for member in run.members if member.process.untold]
    if untold:
        yield Finding(
            id="trace.threads-left-out",
            level=Level.INFO,
            title=f"{sum(member.process.untold for member in untold)} threads found no room in the files",
            fix=Fix(text="keep more threads: trace py --threads 256"),
        )


def _nothing(request: Request, nodes: Sequence[NodeLines]) -> Finding:
    searched = tuple(dict.fromkeys(path for node in nodes for path in node.searched)) or request.paths
    return Finding(
        id="trace.nothing-kept",
        level=Level.UNKNOWN,
        title=f"there are no traced lines in {', '.join(searched[:_PATHS])}",
        where=Where(hosts=tuple(node.host for node in nodes)),
        fix=Fix(
            text="run the job so that its lines are kept",
            commands=(
                f"{request.program} trace py -- train.py",
                "torchrun --nproc-per-node 8 -m distdiag trace py -- train.py",
            ),
        ),
    )


def _unread(nodes: Sequence[NodeLines]) -> Iterator[Finding]:
    found = [(node.host, path, why) for node in nodes for path, why in node.unread]
    if found:
        yield Finding(
            id="trace.unread",
            level=Level.UNKNOWN,
            title=f"{len(found)} file{'s' if len(found) > 1 else ''} could not be read: {found[0][1]}: {found[0][2]}",
            where=Where(hosts=tuple(dict.fromkeys(host for host, _, _ in found))),
            evidence=tuple(f"{host}: {path}: {why}" for host, path, why in found[1:_PATHS]),
        )
    left_out = sum(node.left_out for node in nodes)
    if left_out:
        yield Finding(id="trace.too-many", level=Level.INFO, title=f"{left_out} older files were not read")


def _not_ours(request: Request, nodes: Sequence[NodeLines]) -> Iterator[Finding]:
    """Name what other users have put there: it may say anything, so it is not taken for the job."""
    found = [(node.host, path, why) for node in nodes for path, why in node.not_ours]
    if found:
        _, path, why = found[0]
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield Finding(
            id="trace.not-yours",
            level=Level.WARN,
            title=f"{path}{more} not read: {why}",
            detail="Only files of the job's own user tell of the job.",
            where=Where(hosts=tuple(dict.fromkeys(host for host, _, _ in found))),
            evidence=tuple(f"{host}: {path}: {why}" for host, path, why in found[1:_PATHS]),
            fix=Fix(
                text="if the job is that user's, name the file or folder",
                commands=(f"{request.program} trace show {shlex.quote(path)}",),
            ),
        )


def _stacks(request: Request, judged: Judged) -> Fix | None:
    if all(one.member.process.state == "running" for one in judged.odd):
        return Fix(text="the job still runs; see the whole stacks", commands=(f"{request.program} pyspy-all",))
    return None


def _where(stands: Sequence[Stand]) -> Where:
    return Where(
        hosts=tuple(dict.fromkeys(one.member.host for one in stands)),
        ranks=tuple(one.member.rank for one in stands if one.member.rank is not None),
        pids=tuple(one.member.process.pid for one in stands),
    )


def _rings(request: Request, run: Run) -> Iterator[Ring]:
    for member in run.members:
        for process in (member.process, *member.helpers):
            for thread in process.threads:
                yield _ring(request, member, process, thread)


def _ring(request: Request, member: Member, process: Process, thread: Thread) -> Ring:
    helper = "" if process is member.process else f"pid {process.pid} "
    return Ring(
        host=member.host,
        rank=member.rank,
        pid=process.pid,
        thread=f"{helper}{thread.name}",
        state=process.state,
        age_s=process.age_s,
        last=tuple(_last_line(line) for line in thread.last[-request.last :]),
        matches=tuple(_last_line(line) for line in thread.matches),
        count=thread.count if request.count else None,
        kept=thread.kept,
        full=thread.kept >= process.lines,
    )


def _last_line(line: Line) -> LastLine:
    return LastLine(
        time=line.at_s,
        file=line.file,
        line=line.line,
        function=line.function,
        source=line.source,
        returned=line.back,
    )


def _group(group: Sequence[Stand]) -> Group:
    first = group[0]
    line = first.user or first.library
    ages = [one.member.process.age_s for one in group if one.member.process.age_s is not None]
    return Group(
        ranks=tuple(one.member.rank for one in group if one.member.rank is not None),
        pids=tuple(one.member.process.pid for one in group),
        hosts=tuple(dict.fromkeys(one.member.host for one in group)),
        kind=first.kind,
        operation=first.operation,
        file=line.file if line is not None else "",
        line=line.line if line is not None else 0,
        function=line.function if line is not None else "",
        source=first.source,
        library=spot(first.library) if first.library is not None else "",
        state=first.member.process.state,
        oldest_age_s=max(ages, default=None),
    )


def _summary(judged: Sequence[Judged], found: Sequence[Finding]) -> str:
    for finding in found:
        if finding.level in (Level.FAIL, Level.UNKNOWN, Level.WARN):
            return finding.title
    if judged and judged[-1].outcome is Outcome.GOES_ON:
        return f"{judged[-1].run.name}: all ranks go on"
    if not judged:
        return "nothing was kept"
    number = len(judged[-1].stands)
    ended = "it came to its own end" if number == 1 else f"all {number} processes came to their own end"
    return f"{judged[-1].run.name}: {ended}"
