"""What the tracer recorded on all nodes -> Report. Pure."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import name_ranks
from distdiag.commands.trace.show.classify import COMM, Outcome, are_young, by_place, classify_run, find_runs, newest
from distdiag.commands.trace.show.types import COMMAND, Group, Ring, TraceShow
from distdiag.commands.trace.show.wording import briefly, does, end_of, waits, who
from distdiag.diagnosis import remedies
from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.verdicts import worst_first
from distdiag.diagnosis.wording import counted
from distdiag.ids import Id
from distdiag.report import Finding, Fix, Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.commands.trace.show.classify import Member, Run, RunVerdict
    from distdiag.commands.trace.show.collect import NodeLines
    from distdiag.commands.trace.show.types import Request
    from distdiag.saved_facts import Gathered

_PATHS = 6
_MOST_RANKS = 2**20
"""Beyond this world size, missing ranks are not listed."""


def diagnose(request: Request, gathered: Gathered[NodeLines]) -> Report[TraceShow]:
    """Report where every rank of the newest run is, or was when it ended, and the outliers."""
    nodes = gathered.facts
    runs = find_runs(nodes)
    shown = runs if request.all_runs else newest(runs)
    verdicts = [classify_run(run) for run in shown]
    findings = [finding for verdict in verdicts for finding in _of_run(request, verdict)]
    if not runs and nodes and not any(node.unread for node in nodes):
        findings.append(_nothing_recorded(request, nodes))
    findings += [*_unread(request, nodes), *host_findings(gathered.refusals, gathered.rows)]
    findings += [
        Finding(id=Id.TRACE_NO_ANSWER, level=Level.UNKNOWN, title=f"{host}: {why}", where=Where(hosts=(host,)))
        for host, why in gathered.missing.items()
    ]
    outliers = (member for verdict in verdicts for member in verdict.outliers)
    data = TraceShow(
        run="; ".join(run.name for run in shown),
        rings=tuple(ring for run in shown for ring in _rings(request, run)),
        groups=tuple(_group(group) for run in shown for group in by_place(run.members)),
        outliers=tuple(-member.process.pid if member.rank is None else member.rank for member in outliers),
        older_runs=len(runs) - len(shown),
        unread=tuple((node.host, path, why) for node in nodes for path, why in (*node.unread, *node.not_ours)),
    )
    return Report(
        command=COMMAND,
        data=data,
        findings=tuple(findings),
        summary=_summary(verdicts, findings),
        interrupted=gathered.interrupted,
    )


def _of_run(request: Request, verdict: RunVerdict) -> Iterator[Finding]:
    if verdict.outcome in _FINDINGS:
        finding = _FINDINGS[verdict.outcome](request, verdict)
        yield replace(finding, where=_where(verdict.outliers or verdict.others))
    yield from _not_traced(verdict.run)


def _outside(request: Request, verdict: RunVerdict) -> Finding:
    groups = by_place(verdict.outliers)
    parts = [f"{who(group)} {_are(group)} not in the collective: {does(group[0])}" for group in groups[:3]]
    if len(groups) > 3:
        parts.append(f"{sum(map(len, groups[3:]))} more are elsewhere")
    title, fix = "; ".join([*parts, _wait(verdict.others)]), _stacks(request, verdict.outliers)
    if verdict.outcome is Outcome.STUCK:
        return Finding(id=Id.TRACE_STUCK_RANK, level=Level.FAIL, title=title, fix=fix)
    detail = "It may only be slower than the others: run this again in a minute."
    return Finding(id=Id.TRACE_STRAGGLER, level=Level.WARN, title=title, detail=detail, fix=fix)


def _gone(request: Request, verdict: RunVerdict) -> Finding:
    first = verdict.outliers[0]
    ended = "have exited" if len(verdict.outliers) > 1 else _ended(first)
    title = f"{who(verdict.outliers)} {ended}, last {does(first)}; {_wait(verdict.others)}"
    return Finding(id=Id.TRACE_EXITED, level=Level.FAIL, title=title, fix=_end_of_log(request, verdict.outliers))


def _left_first(request: Request, verdict: RunVerdict) -> Finding:
    groups, largest = by_place(verdict.outliers)[:3], by_place(verdict.others)[-1:]
    parts = [f"{who(group)} {_ended_first(group[0])}, last {does(group[0])}" for group in groups]
    parts += [f"then {who(group)} {_ended(group[0])}" for group in largest]
    fix = _end_of_log(request, verdict.outliers)
    return Finding(id=Id.TRACE_EXITED_FIRST, level=Level.FAIL, title="; ".join(parts), fix=fix)


def _elsewhere(request: Request, verdict: RunVerdict) -> Finding:
    outliers, others = verdict.outliers, verdict.others
    may_be_fine = outliers[0].place.kind == others[0].place.kind == "" or are_young(outliers)
    place = f"{who(outliers)} {_are(outliers)} at a different line than the others"
    level, title = Level.WARN if may_be_fine else Level.FAIL, f"{place}: {does(outliers[0])}; {_wait(others)}"
    return Finding(id=Id.TRACE_ELSEWHERE, level=level, title=title, fix=_stacks(request, outliers))


def _same_place(request: Request, verdict: RunVerdict) -> Finding:
    first = verdict.others[0]
    if first.place.kind == COMM:
        title = f"the last lines cannot decide: all ranks are {waits(first)}"
        detail = "No rank is elsewhere: a message was lost, an earlier collective differs, or a link or a GPU is stuck."
        fix: Fix | None = Fix(
            text="count how often each rank called it; in the next run, record the lines of torch too",
            commands=(
                _again(request, "trace", "show", "--count", shlex.quote(first.place.operation)),
                f"{request.program} trace py --include torch -- train.py",
            ),
        )
    else:
        title = f"all ranks are {waits(first)}, which is not a collective"
        detail = "" if first.process.state == "died" else "It may just be a slow line: run this again in a minute."
        fix = _stacks(request, verdict.others)
    return Finding(id=Id.TRACE_SAME_PLACE, level=Level.UNKNOWN, title=title, detail=detail, fix=fix)


def _undecided(request: Request, verdict: RunVerdict) -> Finding:
    groups = by_place(verdict.others)
    parts = [f"{briefly(group)} {does(group[0])}" for group in groups[:4]]
    more = f"; {len(groups) - 4} more places" if len(groups) > 4 else ""
    title = "the last lines cannot decide which rank is stuck: " + "; ".join(parts) + more
    return Finding(id=Id.TRACE_UNDECIDED, level=Level.UNKNOWN, title=title, fix=_stacks(request, verdict.others))


def _last_line(request: Request, verdict: RunVerdict) -> Finding:
    (member,) = verdict.others
    level, title, detail = Level.UNKNOWN, "is", "It is the only process: no other to compare it with."
    if member.process.state != "running":
        level, title, detail = Level.FAIL, f"{_ended(member)}, last", ""
    fix = (_end_of_log if level is Level.FAIL else _stacks)(request, verdict.others)
    title = f"{who(verdict.others)} {title} {does(member)}"
    return Finding(id=Id.TRACE_LAST_LINE, level=level, title=title, detail=detail, fix=fix)


def _no_lines(request: Request, verdict: RunVerdict) -> Finding:
    return Finding(
        id=Id.TRACE_NO_LINES,
        level=Level.UNKNOWN,
        title=f"no line of {verdict.run.name} was recorded: it did not reach traced code",
        detail="By default, only your own code is traced, not packages.",
        fix=Fix(text="also trace packages", commands=(f"{request.program} trace py --include all -- train.py",)),
    )


_FINDINGS = {
    Outcome.STUCK: _outside,
    Outcome.STRAGGLER: _outside,
    Outcome.GONE: _gone,
    Outcome.LEFT_FIRST: _left_first,
    Outcome.ELSEWHERE: _elsewhere,
    Outcome.SAME: _same_place,
    Outcome.APART: _undecided,
    Outcome.ALONE: _last_line,
    Outcome.NOTHING: _no_lines,
}


def _end_of_log(request: Request, members: Sequence[Member]) -> Fix:
    log = "its log" if len(members) == 1 else "their logs"
    if all(member.process.state == "raised" for member in members):
        return Fix(text=f"read the traceback at the end of {log}")
    text = f"read the end of {log}; if there is a core, find out what crashed"
    return Fix(text=text, commands=(f"{request.program} core-bt",))


def _stacks(request: Request, members: Sequence[Member]) -> Fix | None:
    if all(member.process.state == "running" for member in members):
        return Fix(text="the job is still running: show the whole stacks", commands=(_again(request, "pyspy-all"),))
    return None


def _again(request: Request, *words: str) -> str:
    return remedies.again(request.program, request.cluster, *words)


def _ended(member: Member) -> str:
    return f"{'was ' * (member.process.state == 'died')}{end_of(member.process.state, member.process.error)}"


def _ended_first(member: Member) -> str:
    if member.process.state == "raised":
        return _ended(member).replace("raised", "was the first to exit: it raised", 1)
    return f"{_ended(member)} first"


def _are(members: Sequence[Member]) -> str:
    return "is" if len(members) == 1 else "are"


def _wait(members: Sequence[Member]) -> str:
    """Format the places where the others wait, the most common first."""
    groups = by_place(members)[::-1]
    parts = [
        f"{briefly(group)} {'waits' if len(group) == 1 else 'wait'} {waits(group[0])}"
        if group[0].place.operation
        else f"{briefly(group)} {_are(group)} {waits(group[0])}"
        for group in groups[:2]
    ]
    rest = sum(map(len, groups[2:]))
    return "; ".join(parts) + (f"; {rest} more are elsewhere" if rest else "")


def _not_traced(run: Run) -> Iterator[Finding]:
    """List gaps in the evidence: ranks without a file, threads that were not recorded."""
    ranks = {member.rank for member in run.members}
    absent = sorted(set(range(min(run.world_size or 0, _MOST_RANKS))) - {rank for rank in ranks if rank is not None})
    if absent and None not in ranks:
        yield Finding(
            id=Id.TRACE_UNSEEN,
            level=Level.WARN,
            title=f"no recorded lines of {name_ranks(absent)}: on other nodes (--hosts), or not traced",
            where=Where(ranks=tuple(absent)),
        )
    threads = sum(member.process.untold for member in run.members)
    if threads:
        yield Finding(
            id=Id.TRACE_THREADS_NOT_RECORDED,
            level=Level.INFO,
            title=f"{threads} thread{'s were' if threads > 1 else ' was'} not recorded (limit: trace py --max-threads)",
            fix=Fix(text="raise the limit in the next run: trace py --max-threads 256"),
        )


def _nothing_recorded(request: Request, nodes: Sequence[NodeLines]) -> Finding:
    searched = tuple(dict.fromkeys(path for node in nodes for path in node.searched)) or request.paths
    again = (f"{request.program} trace py -- train.py", "torchrun --nproc-per-node 8 -m distdiag trace py -- train.py")
    return Finding(
        id=Id.TRACE_NO_RECORDING,
        level=Level.UNKNOWN,
        title=f"no recorded lines in {', '.join(searched[:_PATHS])}",
        where=Where(hosts=tuple(node.host for node in nodes)),
        fix=Fix(text="run the job with trace py, which records its lines", commands=again),
    )


def _unread(request: Request, nodes: Sequence[NodeLines]) -> Iterator[Finding]:
    """Report unreadable files, and other users' files, which are untrusted and so not read."""
    unread = [(node.host, path, why) for node in nodes for path, why in node.unread]
    if unread:
        yield _of_files(Id.TRACE_UNREAD, Level.UNKNOWN, unread)
    foreign = [(node.host, path, why) for node in nodes for path, why in node.not_ours]
    if foreign:
        detail, named = "Only files of the user who runs the job are read.", shlex.quote(foreign[0][1])
        commands = (f"{request.program} trace show {named}",)
        fix = Fix(text="if that user runs the job, name the file or folder", commands=commands)
        yield replace(_of_files(Id.TRACE_OTHER_USER, Level.WARN, foreign), detail=detail, fix=fix)


def _of_files(id_: Id, level: Level, files: Sequence[tuple[str, str, str]]) -> Finding:
    more = f" and {counted(len(files) - 1, 'more file')}" if len(files) > 1 else ""
    title = f"{files[0][1]}{more} not read: {files[0][2]}"
    where = Where(hosts=tuple(dict.fromkeys(host for host, _, _ in files)))
    return Finding(id=id_, level=level, title=title, where=where, evidence=tuple(map(": ".join, files[1:_PATHS])))


def _where(members: Sequence[Member]) -> Where:
    return Where(
        hosts=tuple(dict.fromkeys(member.host for member in members)),
        ranks=tuple(member.rank for member in members if member.rank is not None),
        pids=tuple(member.process.pid for member in members),
    )


def _rings(request: Request, run: Run) -> Iterator[Ring]:
    for member in run.members:
        for process in member.processes:
            for thread in process.threads:
                yield Ring(
                    host=member.host,
                    rank=member.rank,
                    pid=process.pid,
                    state=process.state,
                    age_s=process.age_s,
                    full=thread.kept >= process.lines,
                    thread=replace(thread, last=thread.last[-request.last :]),
                )


def _group(group: Sequence[Member]) -> Group:
    where, place = _where(group), group[0].place
    return Group(
        ranks=where.ranks,
        pids=where.pids,
        hosts=where.hosts,
        kind=place.kind,
        operation=place.operation,
        user=place.user,
        library=place.library,
        state=group[0].process.state,
        oldest_age_s=max((age_s for member in group if (age_s := member.process.age_s) is not None), default=None),
    )


def _summary(verdicts: Sequence[RunVerdict], findings: Sequence[Finding]) -> str:
    if worst := next((each.title for each in worst_first(findings) if each.level is not Level.INFO), ""):
        return worst
    if not verdicts:
        return "no recorded lines"
    run = verdicts[-1].run
    if verdicts[-1].outcome is Outcome.GOES_ON:
        return f"{run.name}: all ranks are making progress"
    number = len(run.members)
    return f"{run.name}: {'the process finished' if number == 1 else f'all {number} processes finished'}"
