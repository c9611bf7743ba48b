"""Root cause of a job's end, from its logs: the first rank that failed, why, and the side effects. Pure."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from distdiag.diagnosis.hosts.unreached_hosts import host_findings
from distdiag.diagnosis.job_logs import book as books
from distdiag.diagnosis.job_logs import desync, findings, nccl
from distdiag.diagnosis.job_logs.book import Round
from distdiag.diagnosis.job_logs.types import COMMAND, Failure, Logs, LogSource, RankEnd
from distdiag.diagnosis.verdicts import finding, worst_first
from distdiag.diagnosis.wording import counted
from distdiag.fold import by_key
from distdiag.knowledge.known_lines import trust
from distdiag.report import Level, Report, Where

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.diagnosis.job_logs.book import Book, Exit
    from distdiag.diagnosis.job_logs.types import Request
    from distdiag.facts.logs.collect import NodeLogs
    from distdiag.facts.logs.scan import Event
    from distdiag.report import Finding
    from distdiag.saved_facts import Gathered

_APART_S = 1.5
"""Minimum time between two ranks' failures that shows an order: launchers log whole seconds."""
_SUDDEN = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL")
"""Signals that are not the result of a Python exception."""
_RETRIED = ("cuda-out-of-memory", "disk-full", "shm-full", "port-in-use", "loader-killed", "loader-exited")
"""Failures that programs catch and retry; other CUDA errors leave the process unusable."""
_LOST = "async exception: NCCL error: remote process exited"
_IN_VAIN = ("clients-missing", "rendezvous-timed-out", "rendezvous-closed", "agents-missing", "rank-never-came")
"""Lines of a process that reached the rendezvous and waited there for others."""
_LATER = {"rank-never-came": 1, "gloo-connect": 2}
"""Lines that explain less than others of the same round."""
_NEAR = 5
"""Maximum lines between an exception and the one raised from it."""
_MOST_RANKS, _MOST_FAILURES = 4096, 5000


def diagnose(request: Request, gathered: Gathered[NodeLogs]) -> Report[Logs]:
    """Report which rank failed first, and why."""
    nodes = gathered.facts
    book = books.make(nodes)
    rounds = [_round(book, number) for number in range(book.generations)]
    failed = next((round_ for round_ in rounds if round_.has_failed), None)
    found: list[Finding] = []
    if failed is not None or book.unnamed_codes:
        found += _first_cause(failed or rounds[0], book)
    elif (not book.warnings and any(node.files for node in nodes)) or any(
        stream.lines for node in nodes for stream in node.streams
    ):
        found.append(findings.nothing(any(file.lines for node in nodes for file in node.files), book.like))
    found += findings.warnings(book.warnings, book)
    if book.generations > 1:
        found.append(finding("restarted", times=book.generations, start=(failed.number if failed else 0) + 1))
    found += nccl.findings_of(book.comms, ended=bool(failed or book.watchdog))
    found += _unread(nodes, gathered)
    found += host_findings(gathered.refusals, gathered.rows)
    found = worst_first(found)
    if len(found) > 1:
        found = [finding for finding in found if finding.id not in ("logs.no-failure", "logs.empty")]
    number = failed.number if failed is not None else 0
    data = Logs(
        sources=_sources(nodes),
        world=book.world,
        generations=book.generations,
        generation=number,
        ranks=tuple(_ends(rounds[number])[:_MOST_RANKS]),
        failures=tuple(book.failures[:_MOST_FAILURES]),
        dropped=sum(node.dropped for node in nodes),
    )
    return Report(
        command=COMMAND,
        data=data,
        findings=tuple(found),
        summary=found[0].title if found else "no log was read",
        interrupted=gathered.interrupted,
    )


def _round(book: Book, number: int) -> Round:
    failures = [failure for failure in book.failures if failure.generation == number]
    exits = [exit_ for exit_ in book.exits if exit_.generation == number]
    job = [failure for failure in failures if failure.role == "job"]
    lost = {failure.rank for failure in failures if failure.role == "consequence"}
    ranks = {one.rank for one in job}
    if {one.known for one in job} == {"interrupted"} and len(ranks) == 1 and None not in ranks and lost - ranks:
        # Ctrl-C would have reached the launcher and the other ranks too.
        alone = [replace(one, role="cause", means="it was interrupted (SIGINT) alone") for one in job]
        failures = [failure for failure in failures if failure not in job] + alone
    return Round(number=number, failures=failures, exits=exits, book=book)


def _first_cause(round_: Round, book: Book) -> list[Finding]:
    """Judge one round: first accusations, then causes, then silent exits, then missing ranks."""
    job = [failure for failure in round_.failures if failure.role == "job"]
    suspects = _causes(round_)
    accused = [failure for failure in suspects if findings.accused(failure)]
    if accused:
        ranks = findings.accused(accused[0])
        own = [failure for failure in suspects if failure.rank in ranks and not findings.accused(failure)]
        suspects = own or accused[:1]
    doubtful = [failure for failure in suspects if _may_be_handled(failure, round_)]
    suspects = [failure for failure in suspects if failure not in doubtful]
    wordless = _wordless(round_)
    suspects = _with_shells(suspects, round_, wordless)
    if suspects:
        suspects = _assigned(suspects, wordless)
        reported = {failure.rank for failure in suspects}
        suspects += [
            failure
            for failure in wordless
            if failure.known.startswith("exit")
            and failure.rank not in reported
            and any(exit_.first for exit_ in round_.exits_of(failure.rank))
            and not (None in reported and failure.known == "exit-status")
        ]
    elif not job:
        suspects = _with_last_traceback(wordless, doubtful)
        if suspects is wordless:
            suspects = [failure for failure in wordless if _is_own_end(failure, book)]
    if job and not suspects:
        return [findings.ended_from_outside(job[0])]
    if suspects:
        return _choose(suspects, round_, book, doubtful)
    if lines := _of_timeouts(round_):
        judged = desync.judge(lines, book.ranks)
        return [findings.of_desync(each, round_, first=number == 0) for number, each in enumerate(judged[:4])]
    found = _of_doubtful(doubtful, round_, book) if doubtful else _missing_rank(round_, book)
    if found.level is not Level.FAIL and (apart := findings.of_rendezvous(round_.failures)):
        return [apart]
    if found.level is not Level.FAIL and (best := _alone(round_)):
        return [findings.first_failure([best], round_, book, handled=doubtful)]
    return [found]


def _of_timeouts(round_: Round) -> list[tuple[int, Event]]:
    """Return the watchdog lines of ranks except those that only lost a connection: these stopped at any collective."""
    lines = round_.watchdog
    timed_out = {rank for rank, event in lines if event.id == "watchdog"}
    lost = {failure.rank for failure in round_.failures if failure.known == "nccl-torn-down" and _LOST in failure.what}
    return [(rank, event) for rank, event in lines if rank in timed_out or rank not in lost]


def _alone(round_: Round) -> Failure | None:
    """Return the line that explains the job's end on its own, used if no better evidence exists."""
    alone = [failure for failure in round_.failures if findings.explains_alone(failure) and not failure.job_went_on]
    # A node that cannot connect explains why the others waited for it.
    vain = {failure.file for failure in alone if failure.known in _IN_VAIN}
    # Without all ranks at its store, rank 0 counts them; for the others its own key is the one that never appears.
    # A rank whose WORLD_SIZE is smaller than the others' does not wait for that key, and fails to connect instead.
    alone.sort(
        key=lambda failure: (failure.file in vain or failure.known == "gloo-connect", _LATER.get(failure.known, 0))
    )
    return next((failure for failure in alone if failure.role == "confirmation"), alone[0] if alone else None)


def _with_shells(suspects: list[Failure], round_: Round, wordless: Sequence[Failure]) -> list[Failure]:
    """Drop shells' reports of killed processes if ranks or launchers report more; else add the kernel's reason."""
    shells = [failure for failure in suspects if failure.known == "shell-killed"]
    others = [failure for failure in suspects if failure not in shells]
    if others or not shells:
        return others
    if any(exit_.is_bad for exit_ in round_.exits):
        ended = {failure.what for failure in wordless}
        return [] if ended or any(failure.role == "consequence" for failure in round_.failures) else shells
    return [findings.of_shell(shell, round_) for shell in shells]


def _is_own_end(failure: Failure, book: Book) -> bool:
    """Return whether a silent exit is the rank's own failure.

    Ranks that lost a peer also end with status 1 or SIGABRT: for these, the rank must have written output without an
    error.
    """
    return failure.rank in {*book.writers, *book.last_words} or not failure.what.startswith(
        ("exit status 1 ", "exit status 1;", "SIGABRT")
    )


def _may_be_handled(failure: Failure, round_: Round) -> bool:
    """Return whether a rank may have caught and logged an exception, and continued.

    Uncaught exceptions are written by torch's excepthook with `[rank3]:` before each line. A traceback without the
    prefix is from before init_process_group, a thread or an older torch, or was logged. The rank's exit decides.
    """
    if failure.groups.get("uncaught") or findings.accused(failure):
        return False
    exits = [] if failure.rank is None else [exit_ for exit_ in round_.exits_of(failure.rank) if exit_.is_bad]
    if failure.groups.get("id") != "exception" and failure.known not in _RETRIED:
        return False
    if failure.groups.get("mild"):
        return True
    return _ended_otherwise(failure, exits, round_) if exits else _has_no_end(failure, round_)


def _ended_otherwise(failure: Failure, exits: Sequence[Exit], round_: Round) -> bool:
    """Return whether the rank's exit does not match this failure."""
    if failure.groups.get("id") != "exception":
        return all(exit_.by_launcher for exit_ in exits)
    others = all(exit_.by_launcher or exit_.signal in _SUDDEN or exit_.code not in (None, 1) for exit_ in exits)
    at_exit = any(
        one.known == "exit-without-destroy" and one.file == failure.file and 0 < one.line - failure.line <= _NEAR
        for one in round_.failures
    )
    return (others and not at_exit) or _was_survived(failure, round_)


def _has_no_end(failure: Failure, round_: Round) -> bool:
    """Return whether, without a reported exit, no evidence shows that this failure ended its rank."""
    is_exception = failure.groups.get("id") == "exception"
    went_on = failure.job_went_on and failure.generation == round_.book.generations - 1
    if failure.rank is not None and failure.rank in {rank for rank, _ in round_.book.watchdog}:
        return True
    others = [
        other
        for other in round_.failures
        if other.rank not in (failure.rank, None) and (other.role != "confirmation" or other.groups.get("uncaught"))
    ]
    if any(other.groups.get("uncaught") for other in round_.failures):
        return True
    if is_exception:
        others = [other for other in others if other.role == "consequence" or not _is_gone_on_from(other, round_)]
    else:
        others = [other for other in others if other.role == "consequence" or other.known not in _RETRIED]
    if failure.rank is None and is_exception and not (round_.exits or others):
        # The end of one process's log; otherwise the job wrote on.
        return went_on or (failure.lines_after >= 1 and bool(round_.book.writers))
    if others:
        return False
    if failure.rank is None or not is_exception:
        return went_on and not round_.exits
    # No exit, and ranks continue to write: the job may be running.
    return not round_.exits and bool(round_.book.writers - {failure.rank} or _is_gone_on_from(failure, round_))


def _is_gone_on_from(failure: Failure, round_: Round) -> bool:
    """Return whether a rank continued after an exception of this kind."""
    kind = findings.kind_of(failure)
    return any(other.groups.get("went_on") and findings.kind_of(other) == kind for other in round_.failures)


def _was_survived(failure: Failure, round_: Round) -> bool:
    """Return whether other ranks logged this exception too and continued."""
    kind = findings.kind_of(failure)
    for other in round_.failures:
        if other.rank in (failure.rank, None) or findings.kind_of(other) != kind or other.groups.get("uncaught"):
            continue
        if _was_ended(other, round_) or any(later.groups.get("uncaught") for later in round_.of(other.rank or 0)):
            return True
    return False


def _with_last_traceback(wordless: list[Failure], doubtful: Sequence[Failure]) -> list[Failure]:
    """Assign the only traceback without a rank to the only rank that exited with status 1."""
    nameless = [failure for failure in doubtful if failure.rank is None]
    if len(wordless) != 1 or len(nameless) != 1 or re.split(" without|; ", wordless[0].what)[0] != "exit status 1":
        return wordless
    return [replace(nameless[0], rank=wordless[0].rank, what=f"exit status 1, probably of {nameless[0].what}")]


def _of_doubtful(doubtful: list[Failure], round_: Round, book: Book) -> Finding:
    """Judge a round in which each candidate cause may have been handled."""
    alive = [failure for failure in doubtful if _was_ended(failure, round_)]
    ranks = {failure.rank for failure in doubtful}
    reported = {failure.rank for failure in round_.failures}
    others_silent = [rank for rank in range(book.world) if rank not in reported]
    raised = all(failure.groups.get("id") == "exception" for failure in doubtful)
    cut_off = any(failure.known == "traceback-cut" for failure in round_.failures)
    went_on = not round_.exits and all(one.groups.get("went_on") or one.job_went_on for one in doubtful)
    if raised and not (alive or others_silent or cut_off or went_on) and len(ranks) == 1:
        return findings.first_failure(doubtful, round_, book)
    missing = _missing_rank(round_, book)
    if cut_off and missing.level is not Level.FAIL:
        return missing
    if missing.level is Level.FAIL and not ranks & {*missing.where.ranks} and {*missing.where.ranks} <= {*book.ranks}:
        return missing
    groups = by_key((findings.kind_of(failure), failure) for failure in doubtful)
    return findings.several(list(groups.values()), round_, book)


def _was_ended(failure: Failure, round_: Round) -> bool:
    """Return whether only the launcher ended the rank."""
    exits = [] if failure.rank is None else round_.exits_of(failure.rank)
    return bool(exits) and all(exit_.by_launcher for exit_ in exits)


def _assigned(suspects: list[Failure], wordless: list[Failure]) -> list[Failure]:
    """Assign failures without a rank to the ranks that ended silently: to the only one, or one to each."""
    if any(failure.rank is not None for failure in suspects):
        return suspects
    if len(wordless) == 1:
        return [replace(failure, rank=wordless[0].rank) for failure in suspects]
    if len(suspects) == 1 and suspects[0].count == len(wordless):
        return [replace(suspects[0], rank=failure.rank) for failure in wordless]
    return suspects


def _causes(round_: Round) -> list[Failure]:
    """Return one candidate cause per rank: its last exception, else its first line with role cause."""
    found: list[Failure] = []
    ranks = dict.fromkeys(failure.rank for failure in round_.failures)
    for rank in ranks:
        own = _without_bare([failure for failure in round_.failures if failure.rank == rank])
        exceptions = [failure for failure in own if failure.groups["id"] == "exception"]
        lines = [failure for failure in own if failure.groups["id"] != "exception" and failure.role == "cause"]
        last = exceptions[-1] if exceptions and rank is not None else None
        if last is not None and last.role == "consequence" and last.groups.get("uncaught"):
            # Later lines of this file are results of the other rank's failure.
            lines = [line for line in lines if line.file != last.file or line.line < last.line]
        lines = _without_echo(lines)
        sure = [line for line in lines if not _may_be_handled(line, round_)]
        if last is not None and sure and _may_be_handled(last, round_):
            last, lines = None, sure
        if rank is None:
            found += _merged([failure for failure in exceptions if failure.role == "cause"] + lines)
        elif (
            last is not None
            and last.role == "cause"
            and not (lines and last.known == "exception" and "NCCL error" in last.text)
        ):
            # Unless it is torch's wrapper around an NCCL error already reported.
            found.append(last)
        elif lines:
            found.append(lines[0])
    return found


def _merged(failures: Sequence[Failure]) -> list[Failure]:
    """Merge adjacent lines, as one failure writes several; the most trusted pattern wins."""
    kept: list[Failure] = []
    for failure in sorted(failures, key=lambda failure: (failure.file, failure.line)):
        last = kept[-1] if kept else None
        apart = failure.line - last.line if last is not None and last.file == failure.file else _NEAR + 1
        if last is None or apart > _NEAR or (_has_frames(last) and _has_frames(failure)):
            kept.append(failure)
        elif trust(failure.known) < trust(last.known):
            kept[-1] = replace(failure, count=last.count)
    return kept


def _has_frames(failure: Failure) -> bool:
    return failure.groups["id"] == "exception" and not failure.groups.get("bare")


def _without_bare(own: list[Failure]) -> list[Failure]:
    """Drop bare exceptions if better evidence exists; of adjacent ones keep the last."""
    bare = [failure for failure in own if failure.groups.get("bare") and failure.known == "exception"]
    better = [failure for failure in own if failure.role == "cause" and failure not in bare]
    if better:
        return [failure for failure in own if failure not in bare]
    chained = [one for one, later in pairwise(bare) if 0 < later.line - one.line <= _NEAR]
    return [failure for failure in own if failure not in chained]


def _without_echo(lines: list[Failure]) -> list[Failure]:
    """Drop reports of an abort or a dead worker if the reason is known."""
    own = [line for line in lines if (line.known, line.groups.get("error")) != ("fatal-python", "Aborted")]
    killed = {"loader-killed", "shm-full"} & {line.known for line in own}
    return [line for line in own if not (killed and line.known == "loader-exited")] or lines


def _wordless(round_: Round) -> list[Failure]:
    """Return failures for ranks that ended with a bad status and logged no reason."""
    found = []
    bad = by_key((exit_.rank, exit_) for exit_ in round_.exits if exit_.is_bad and not exit_.by_launcher)
    for rank, exits in bad.items():
        exit_ = next((each for each in reversed(exits) if each.first), exits[0])
        written = [
            failure
            for failure in round_.of(rank)
            if failure.role == "consequence" or (failure.role == "cause" and not _may_be_handled(failure, round_))
        ]
        if any(failure.role == "cause" or exit_.signal not in _SUDDEN for failure in written):
            continue
        found.append(findings.wordless(exit_, round_))
    return found


def _choose(suspects: list[Failure], round_: Round, book: Book, handled: Sequence[Failure] = ()) -> list[Finding]:
    """Return the earliest candidate's finding; if the order is unknown, one finding with all of them."""
    groups: list[list[Failure]] = []
    for failure in suspects:
        group = next((group for group in groups if findings.is_alike(group[0], failure)), None)
        if group is None:
            groups.append([failure])
        else:
            group.append(failure)
    if len(groups) > 1 and None in {failure.rank for failure in suspects}:
        # Failures with a rank take precedence over failures without one.
        groups = [group for group in groups if any(failure.rank is not None for failure in group)] or groups
    if len(groups) == 1:
        return [findings.first_failure(groups[0], round_, book, handled=handled)]
    if earliest := _earliest(groups, round_):
        later = [failure for group in groups if group is not earliest for failure in group]
        return [findings.first_failure(earliest, round_, book, later=later, handled=handled)]
    return [findings.several(groups, round_, book)]


def _earliest(groups: list[list[Failure]], round_: Round) -> list[Failure] | None:
    """Return the group that certainly failed first, comparing times of one kind and clock; else None."""
    exits: dict[int | None, float | None] = {
        exit_.rank: exit_.at for exit_ in reversed(round_.exits) if exit_.at is not None
    }
    of_lines = [[failure.at for failure in group] for group in groups]
    of_exits = [[exits.get(failure.rank) for failure in group] for group in groups]
    for times in (of_lines, of_exits):
        if any(time is None for group in times for time in group):
            continue
        hosts = {round_.book.hosts.get(failure.rank or 0, "") for group in groups for failure in group}
        apart = _APART_S if len(hosts) <= 1 else 4 * _APART_S
        starts = sorted((min(time for time in group if time is not None), number) for number, group in enumerate(times))
        if starts[1][0] - starts[0][0] > apart:
            return groups[starts[0][1]]
    return None


def _missing_rank(round_: Round, book: Book) -> Finding:
    """Judge a round without any cause: blame a silent rank, or one that waits in a different collective."""
    waiting = {
        failure.rank: failure
        for failure in round_.failures
        if failure.role == "consequence" and failure.rank is not None
    }
    at = {rank: failure for rank, failure in waiting.items() if findings.timed_out(failure)}
    collectives = {rank: (failure.collective, failure.place) for rank, failure in at.items() if failure.collective}
    if len({name for name, _ in collectives.values()}) > 1:
        return findings.different_collectives(collectives, round_)
    silent = [rank for rank in range(book.world) if rank not in waiting]
    # A rank that failed on its own did not hang.
    of_silent = (exit_ for rank in silent for exit_ in round_.exits_of(rank))
    has_failed = any(exit_.is_bad and not exit_.by_launcher for exit_ in of_silent)
    if at and len(silent) == 1 and _is_certain(silent[0], at, round_) and not has_failed:
        return findings.absent_rank("never-came", silent[0], at, round_)
    gone = [rank for rank in silent if not any(exit_.by_launcher for exit_ in round_.exits_of(rank))]
    lost = [failure for failure in waiting.values() if not findings.timed_out(failure)]
    if (
        lost
        and len(lost) == len(waiting)
        and len(gone) == 1
        and _is_certain(gone[0], waiting, round_)
        and not any(failure.known == "traceback-cut" for failure in round_.of(gone[0]))
    ):
        if ends := [failure for failure in _wordless(round_) if failure.rank == gone[0]]:
            return findings.first_failure(ends, round_, book)
        return findings.absent_rank("left-early", gone[0], waiting, round_)
    return findings.cannot_tell(round_, book, silent)


def _is_certain(rank: int, waiting: Mapping[int, Failure], round_: Round) -> bool:
    """Return whether the log covers this rank and the job's end; a log still being written may lack both."""
    if len({failure.file for failure in waiting.values()}) == 1 and min(waiting) < rank < max(waiting):
        return True  # one console for all ranks
    return rank in round_.book.ranks and (len(waiting) > 1 or bool(round_.exits))


def _unread(nodes: Sequence[NodeLogs], gathered: Gathered[NodeLogs]) -> list[Finding]:
    broken = [(node.host, file) for node in nodes for file in node.files if file.error]
    read = any(file.lines for node in nodes for file in node.files)
    found = [findings.unreadable(broken, all_=not read)] if broken else []
    found += [
        finding("long-lines", path=file.path, host=node.host, lines=counted(file.cut, "line"))
        for node in nodes
        for file in node.files
        if file.cut
    ]
    found += [
        finding("incomplete", where=Where(hosts=(host,)), host=host, why=why) for host, why in gathered.missing.items()
    ]
    return found


def _sources(nodes: Sequence[NodeLogs]) -> tuple[LogSource, ...]:
    shown = [field.name for field in fields(LogSource) if field.name != "host"]
    return tuple(
        LogSource(host=node.host, **{name: getattr(file, name) for name in shown})
        for node in nodes
        for file in node.files
    )


def _ends(round_: Round) -> list[RankEnd]:
    ends = []
    causes = {failure.rank: failure for failure in _causes(round_)}
    for rank in sorted(round_.book.ranks):
        own = round_.of(rank)
        failure_shown = causes.get(rank) or next((failure for failure in own if failure.role == "consequence"), None)
        exits = [exit_ for exit_ in round_.exits_of(rank) if exit_.is_bad]
        exit_ = exits[-1] if exits else None
        watching = [event for who, event in round_.book.watchdog if who == rank]
        what = failure_shown.what if failure_shown else watching[0].text[:200] if watching else ""
        role = failure_shown.role if failure_shown else "consequence" if watching else ""
        status = (exit_.signal or f"exit {exit_.code}") if exit_ else ""
        if not role and status and exit_:
            role = "ended" if exit_.by_launcher else "cause"
        ends.append(
            RankEnd(
                rank=rank,
                host=round_.book.hosts.get(rank, ""),
                role=role,
                what=what,
                exit=status,
                lines=round_.book.ranks[rank],
            )
        )
    return _with_ended(ends)


def _with_ended(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """Reclassify ranks ended by the launcher as consequences, if any rank has a cause."""
    has_cause = any(end.role == "cause" for end in ends)
    role, what = ("consequence", "ended by the launcher") if has_cause else ("", "")
    return [replace(end, role=role, what=what) if end.role == "ended" else end for end in ends]
