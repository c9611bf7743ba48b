"""Findings of logs; each explanation of a job's end is one finding."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold_ranks, name_ranks
from distdiag.diagnosis.job_logs.book import SIGNALS, WRITER
from distdiag.diagnosis.job_logs.types import Failure, number_in
from distdiag.diagnosis.verdicts import ending, finding
from distdiag.diagnosis.wording import counted
from distdiag.fold import by_key
from distdiag.ids import FindingId, Id, RowId
from distdiag.knowledge.known_lines import known_lines
from distdiag.report import Finding, Fix, Level, Where, Witnesses

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.diagnosis.job_logs.book import Book, Exit, Round
    from distdiag.diagnosis.job_logs.desync import Desync
    from distdiag.facts.logs.collect import LogFile

_NAMED = 6
_QUOTE = 300
_SHAPE = re.compile(r"0x[0-9a-f]+|\d+")
_JOB = re.compile(r"(?:JOB|STEP) (\d{1,18})")


def accused(failure: Failure) -> tuple[int, ...]:
    """Return the ranks that a line blames; empty if it concerns its own rank."""
    row = known_lines().get(failure.known)
    if row is None or not row.accuses or row.accuses == "none":
        return ()
    return tuple(int(number) for number in re.findall(r"\d{1,7}", failure.groups.get(row.accuses, ""))[:1000])


def kind_of(failure: Failure) -> tuple[str, str]:
    """Return a key shared by failures of one kind: known id, and exception type or the message without numbers."""
    if failure.known.startswith("exit-"):
        return failure.known, failure.what.partition("; ")[0] + _SHAPE.sub("#", failure.groups.get("words", ""))
    name = failure.groups.get("type", "")
    shape = name or _SHAPE.sub("#", failure.what)
    return (failure.known, shape if failure.known == "exception" else "")


def is_alike(one: Failure, other: Failure) -> bool:
    """Return whether two failures have one kind, and the same message or line."""
    if kind_of(one) != kind_of(other):
        return False
    return (
        one.known != "exception" or one.place == other.place or _SHAPE.sub("#", one.what) == _SHAPE.sub("#", other.what)
    )


def explains_alone(failure: Failure) -> bool:
    """Return whether a line suffices to explain a job's end without better evidence."""
    row = known_lines().get(failure.known)
    return row is not None and row.alone


def of_shell(failure: Failure, round_: Round) -> Failure:
    """Return a shell's report of a killed process, with the kernel's reason if a line has it."""
    pid = failure.groups.get("pid")
    proof = next(
        (one for one in round_.failures if one.known == "oom-kill" and one.groups.get("pid") in (None, pid)), None
    )
    if proof is None or failure.groups.get("signal") != "Killed":
        return failure
    row = known_lines()["oom-kill"]
    what = f"process {pid} was killed by the kernel: out of memory" if pid else "killed by the kernel: out of memory"
    return replace(
        failure, known="oom-kill", what=what, means=f"{what}: {proof.what}", fix=row.fix, commands=row.commands
    )


def timed_out(failure: Failure) -> bool:
    """Return whether a rank timed out, rather than lost a peer."""
    return bool(re.search(r"[Tt]imed out waiting|wait timeout|caught collective operation timeout", failure.text))


def last_words(rank: int, round_: Round) -> str:
    """Return the last line of a rank without a traceback, else the line without a rank most like a reason."""
    if words := round_.book.last_words.get(rank):
        return f"its last line: {words}"
    alone = len({exit_.rank for exit_ in round_.exits if exit_.is_bad and not exit_.by_launcher}) == 1
    like = [line for line in round_.book.like if line.rank in ((None, rank) if alone else (rank,))]
    return f"the line most like a reason: {like[-1].what}" if like and not like[-1].job_went_on else ""


def wordless(exit_: Exit, round_: Round) -> Failure:
    """Return a failure made of a rank's exit status."""
    means, known = "", "exit-signal"
    words = last_words(exit_.rank, round_) if exit_.signal in ("", "SIGABRT") else ""
    if exit_.signal:
        what = _of_signal(exit_.signal)
        proof = _oom(exit_, round_)
        if exit_.signal == "SIGKILL" and (proof is not None or exit_.out_of_memory):
            what, means = "killed by the kernel: out of memory", proof.what if proof is not None else ""
            known = "exit-oom"
    else:
        what, known = f"exit status {exit_.code} without a traceback", "exit-status"
        means = "it called sys.exit or os._exit, or its output is not in these logs"
        if any(one.rank is None and one.groups["id"] == "exception" for one in round_.failures):
            means = "it called sys.exit or os._exit, or its exception is among the lines without a rank"
        if words:
            what, means = f"exit status {exit_.code}", ""
        if any(one.groups["id"] == "exception" for one in round_.of(exit_.rank)):
            what, means, words = f"exit status {exit_.code}", "it called sys.exit or os._exit after what it logged", ""
    return Failure(
        role="cause",
        known=known,
        rank=exit_.rank,
        host=exit_.host or round_.book.hosts.get(exit_.rank, ""),
        generation=exit_.generation,
        what=f"{what}; {words}" if words else what,
        means=means,
        at=exit_.at,
        groups={"id": "exit", "end": exit_.signal or "status", "words": words},
    )


def _of_signal(signal: str) -> str:
    row = ending(signal)
    return row.title if row is not None else signal


def _oom(exit_: Exit, round_: Round) -> Failure | None:
    """Return the line that proves the OOM kill: it has the rank's pid, or only one rank was killed."""
    killed = [other for other in round_.exits if other.signal == "SIGKILL" and not other.by_launcher]
    for failure in round_.failures:
        if failure.known == "oom-kill":
            pid = failure.groups.get("pid")
            if (pid and exit_.pid and number_in(pid) == exit_.pid) or (
                not (pid and exit_.pid) and len({other.rank for other in killed}) == 1
            ):
                return failure
    return None


def first_failure(
    group: Sequence[Failure],
    round_: Round,
    book: Book,
    *,
    later: Sequence[Failure] = (),
    handled: Sequence[Failure] = (),
) -> Finding:
    """Report the ranks that failed first in the same way, and why."""
    failure = group[0]
    row = known_lines().get(failure.known)
    named = accused(failure)
    ranks = named or tuple(sorted({one.rank for one in group if one.rank is not None}))
    blames = row is None or row.accuses != "none"
    others = sorted(set(book.ranks) - set(ranks))
    where_ = f", at {failure.place}" if failure.place else ""
    message = failure.what
    if message.endswith(":"):  # a multi-line message
        message = " ".join([message, *failure.text.splitlines()[1:2]])
        message = " ".join(message[:_QUOTE].split()).rstrip(":")
    reason = f"{message.rstrip('.')}{where_}" if where_ else message
    paths, hosts_of_paths = _paths(group, book)
    if not blames:
        title = failure.means + paths
        id_: FindingId = RowId(f"logs.{failure.known}")
    elif named:
        title = f"{_ranks(ranks, book)} did not reach the barrier: {failure.what}"
        id_ = RowId("logs.missing-rank")
    elif not ranks:
        title, id_ = f"{reason} (rank unknown)", Id.LOGS_FAILURE
    elif len(ranks) == 1:
        title, id_ = f"{_ranks(ranks, book)} failed first: {reason}", Id.LOGS_FIRST_FAILURE
    else:
        title, id_ = f"{_ranks(ranks, book)} failed alike: {reason}", Id.LOGS_SAME_FAILURE
    if not ranks and row is not None and row.alone and blames:
        title, id_ = f"{failure.means}: {failure.what}" if failure.means not in failure.what else failure.what, id_
    if others and blames and ranks:
        followers = [rank for rank in others if _followed(rank, round_)]
        if followers:
            title += f"; {counted(len(followers), 'other rank')} ended because of it"
    hosts = tuple(sorted({book.hosts.get(rank, "") for rank in ranks} - {""}))
    meaning = failure.means if failure.means and blames else ""
    if failure.known == "exit-without-destroy" and len(ranks) == 1 and (words := last_words(ranks[0], round_)):
        meaning += f"; {words}"
    more = (_sentence(meaning), _differences(group) if blames else "", _others("Later, unrelated", later, book))
    caught = _others("Logged, but nothing shows that it ended a rank", handled, book)
    return Finding(
        id=id_,
        level=Level.FAIL,
        title=title,
        detail=" ".join(filter(None, (*more, caught))),
        where=Where(ranks=ranks, hosts=hosts) if blames else Where(hosts=hosts_of_paths),
        witnesses=Witnesses(ranks=tuple(others) if blames else tuple(sorted({*ranks, *others}))),
        evidence=_evidence(group),
        fix=_fix(failure),
    )


def _followed(rank: int, round_: Round) -> bool:
    """Return whether a rank lost its peer or was ended by the launcher."""
    lost = any(failure.role == "consequence" for failure in round_.of(rank))
    return lost or any(exit_.is_bad and exit_.by_launcher for exit_ in round_.exits_of(rank))


def _paths(group: Sequence[Failure], book: Book) -> tuple[str, tuple[str, ...]]:
    """Format the host pairs between which InfiniBand failed; also return a host common to all of several pairs."""
    names = {comm.address.partition("<")[0]: comm.host for comm in book.comms if comm.address}
    paths: dict[tuple[str, str], str] = {}
    for failure in group:
        writer, peer = WRITER.search(failure.text), failure.groups.get("peer", "")
        if writer and peer:
            end = names.get(peer, peer)
            paths[writer[1], end] = f"{writer[1]} to {end}" + (f" ({peer})" if end != peer else "")
    if not paths:
        return "", ()
    shown = list(paths.values())
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    common = set.intersection(*({*ends} for ends in paths))
    several = len({frozenset(ends) for ends in paths}) > 1
    return f"; {', '.join(shown[:3])}{more}", tuple(sorted(common)) if several and len(common) == 1 else ()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _differences(group: Sequence[Failure]) -> str:
    """Format the differences between similar failures: messages and places."""
    texts = by_key((f"{one.what[:120]} at {one.place}", one.rank) for one in group if one.rank is not None)
    if len(texts) < 2:
        return ""
    parts = [f"{name_ranks(ranks)}: {text}" for text, ranks in list(texts.items())[:_NAMED]]
    more = f"; and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return f"They differ: {'; '.join(parts)}{more}."


def _others(heading: str, failures: Sequence[Failure], book: Book) -> str:
    """Format other failures as one sentence; empty without any."""
    parts = [
        f"{_ranks((one.rank,), book) if one.rank is not None else 'no rank named'}: {one.what[:120]}"
        for one in failures[:_NAMED]
    ]
    return f"{heading}: {'; '.join(parts)}." if parts else ""


def _fix(failure: Failure) -> Fix | None:
    if failure.fix:
        return Fix(text=failure.fix, commands=failure.commands)
    if failure.known == "exit-oom":
        row = known_lines()["oom-kill"]
        return Fix(text=row.fix, commands=row.commands)
    if not failure.known.startswith("exit-") or (failure.known == "exit-status" and failure.groups.get("words")):
        return None
    end = ending(failure.groups["end"])
    own = end.repair() if end is not None else None
    return own or Fix(text="see its stack in the core", commands=("distdiag core-bt --check-setup", "distdiag core-bt"))


def several(groups: Sequence[Sequence[Failure]], round_: Round, book: Book) -> Finding:
    """Report that ranks failed in different ways and unknown order."""
    parts = []
    for group in groups[:_NAMED]:
        ranks = tuple(sorted({one.rank for one in group if one.rank is not None}))
        who = _ranks(ranks, book) if ranks else "a line without a rank"
        parts.append(f"{who}: {group[0].what[:160]}")
    more = f"; and {len(groups) - _NAMED} more" if len(groups) > _NAMED else ""
    first = next((exit_ for exit_ in round_.exits if exit_.first), None)
    return finding(
        "order-unknown" if len(groups) > 1 else "maybe-handled",
        witnesses=Witnesses(ranks=_ranks_of(one for group in groups for one in group)),
        evidence=tuple(line for group in groups[:_NAMED] for line in _evidence(group)[:1]),
        number=len(groups),
        failures="; ".join(parts) + more,
        launcher=first.launcher if first else "",
        first=first.rank if first else None,
    )


def different_collectives(collectives: Mapping[int, tuple[str, str]], round_: Round) -> Finding:
    """Report the collectives that ranks waited in, blaming a minority."""
    by_name = by_key((name, rank) for rank, (name, _) in collectives.items())
    ordered = sorted(by_name.items(), key=lambda item: -len(item[1]))
    few = sorted(rank for _, ranks in ordered[1:] for rank in ranks)
    clear = len(ordered[0][1]) > len(few)
    words = "; ".join(f"{name_ranks(ranks)} in {name} ({collectives[ranks[0]][1]})" for name, ranks in ordered[:_NAMED])
    return finding(
        "collective-mismatch",
        where=Where(ranks=tuple(few) if clear else ()),
        witnesses=Witnesses(ranks=tuple(sorted(set(collectives) - set(few))) if clear else tuple(sorted(collectives))),
        evidence=_evidence([one for one in round_.failures if one.collective]),
        calls=words,
    )


def absent_rank(verdict: str, rank: int, waiting: Mapping[int, Failure], round_: Round) -> Finding:
    """Report a rank that the others timed out waiting for ("never-came"), or all lost ("left-early")."""
    return finding(
        verdict,
        where=Where(ranks=(rank,), hosts=tuple(filter(None, (round_.book.hosts.get(rank, ""),)))),
        witnesses=Witnesses(ranks=tuple(sorted(waiting))),
        evidence=_evidence(waiting.values()),
        who=_ranks((rank,), round_.book),
        others=name_ranks(waiting),
        place=min((one.place or one.collective for one in waiting.values()), default=""),
        wrote=_wrote(rank, round_.book),
    )


def cannot_tell(round_: Round, book: Book, silent: Sequence[int]) -> Finding:
    """Report the available evidence if the first failure is unknown."""
    known = by_key((failure.known, failure) for failure in round_.failures)
    waiting = [failure for failure in round_.failures if failure.role == "consequence"]
    if stuck := known.get("heartbeat"):
        ranks = _ranks_of(stuck)
        who = _ranks(ranks, book) if ranks else "unknown rank"
        return finding("heartbeat", witnesses=Witnesses(ranks=ranks), evidence=_evidence(stuck), who=who)
    if cut_off := known.get("traceback-cut"):
        ranks, others = _ranks_of(cut_off), _ranks_of(waiting)
        return finding(
            "traceback-cut",
            witnesses=Witnesses(ranks=ranks),
            evidence=_evidence([*cut_off, *waiting]),
            who=name_ranks(ranks) if ranks else "a rank",
            place=cut_off[0].place,
            others=name_ranks(others) if others else "",
        )
    if (lines := known.get("slurm-cancelled")) and not _ranks_of(waiting):
        job = next((match[1] for failure in lines if (match := _JOB.search(failure.text))), "JOBID")
        return finding("cancelled", evidence=_evidence(lines), job=job)
    return _consequences_only(round_, waiting, known.get("oom-kill", []), silent)


def _ranks_of(failures: Iterable[Failure]) -> tuple[int, ...]:
    return tuple(sorted({failure.rank for failure in failures if failure.rank is not None}))


def _consequences_only(
    round_: Round, waiting: Sequence[Failure], killed: Sequence[Failure], silent: Sequence[int]
) -> Finding:
    book = round_.book
    who = _ranks_of(waiting)
    title = f"consequences only: {name_ranks(who)} lost a peer or timed out"
    if not who:
        title = "no rank reports a failure of its own" + (f", only: {waiting[0].what[:100]}" if waiting else "")
    if book.unnamed_codes and not who:
        title = f"one rank ended with {_return_code(book.unnamed_codes[0])}; DeepSpeed's launcher does not name it"
    ended = [exit_ for exit_ in round_.exits if exit_.is_bad and not exit_.by_launcher and exit_.launcher]
    if ended and not who:
        how = _of_signal(ended[0].signal) or f"exit status {ended[0].code}"
        why = last_words(ended[0].rank, round_) or "no line of these logs gives the reason"
        title = f"{ended[0].launcher_name} reports rank {ended[0].rank}: {how}; {why}"
    if killed:
        title += "; the kernel killed a process because memory ran out"
    for wrote in ("logged nothing", "logged no error"):
        if ranks := [rank for rank in silent if who and _wrote(rank, book) == wrote]:
            title += f"; {name_ranks(ranks)} {wrote}"
    by_signal = bool(book.unnamed_codes) and bool(waiting) and not who and (number_in(book.unnamed_codes[0]) or 0) < 0
    return finding(
        "undecided-signal" if by_signal else "undecided",
        witnesses=Witnesses(ranks=who),
        evidence=_evidence([*killed, *waiting]),
        known=title,
        code=_unnamed(book),
    )


def _wrote(rank: int, book: Book) -> str:
    return "logged no error" if rank in book.writers or book.has_nameless else "logged nothing"


def _unnamed(book: Book) -> str:
    """Format a return code that the launcher reports without a rank."""
    if not book.unnamed_codes:
        return ""
    return (
        f"DeepSpeed's launcher reports {_return_code(book.unnamed_codes[0])} of one rank; the --local_rank it prints "
        "is wrong."
    )


def _return_code(text: str) -> str:
    code = number_in(text) or 0
    return f"return code {code}" + (f" ({SIGNALS[-code]})" if -code in SIGNALS else "")


def of_rendezvous(failures: Sequence[Failure]) -> Finding | None:
    """Compare torchruns that each waited in vain: for different runs, or with different backends; None if neither."""
    dynamic = {failure.file: failure for failure in failures if failure.known == "rendezvous-timed-out"}
    static = {
        failure.groups["run"]: failure
        for failure in failures
        if failure.known == "agents-missing"
        and not failure.groups.get("run", "torch.rendezvous").startswith("torch.rendezvous")
    }
    others = [failure for file, failure in dynamic.items() if file not in {each.file for each in static.values()}]
    evidence = _evidence([*static.values(), *others])
    if len(static) > 1:
        return finding("rendezvous-ids", evidence=evidence, runs=" and ".join(sorted(static)))
    return finding("rendezvous-backends", evidence=evidence) if static and others else None


def ended_from_outside(failure: Failure) -> Finding:
    """Report that the whole job was ended from outside."""
    return Finding(
        id=RowId(f"logs.{failure.known}"),
        level=Level.FAIL,
        title=f"no rank failed: {failure.means}",
        evidence=_evidence([failure]),
        fix=_fix(failure),
    )


def of_desync(desync: Desync, round_: Round, *, first: bool) -> Finding:
    """Return the finding for a process group's desync."""
    everyone = "all ranks" if 1 < len(desync.others) == round_.book.world else name_ranks(desync.others)
    elsewhere = "the network, hardware, or a rank whose log is missing"
    if len(desync.others) == 1:
        elsewhere = "which rank it waited for is in the logs of the others"
    made = finding(
        desync.kind,
        witnesses=Witnesses(ranks=desync.others),
        evidence=tuple(line[:_QUOTE] for line in desync.evidence),
        group=desync.group,
        who=_ranks(desync.ranks, round_.book) if desync.ranks else "",
        what=desync.what,
        others=name_ranks(desync.others),
        last=desync.last_called or "",
        none="" if desync.last_called else "it called none there",
        everyone=everyone,
        elsewhere=elsewhere,
    )
    if made.level is Level.FAIL:
        return replace(made, where=Where(ranks=desync.ranks))
    return made if first else replace(made, level=Level.INFO)


def nothing(any_lines: bool, like: Sequence[Failure] = ()) -> Finding:
    """Report that no known failure was found; `like`: the last lines that resemble one."""
    if not like or like[-1].job_went_on or not any_lines:
        return finding("no-failure" if any_lines else "empty")
    last = list(reversed(like))[:3]
    several = len(last) > 1
    return finding(
        "unknown-failure",
        evidence=_evidence(last),
        these="these lines look" if several else "this line looks",
        order=", the last first" if several else "",
        line=last[0].what,
    )


def warnings(lines: Sequence[Failure], book: Book) -> list[Finding]:
    """Return one finding per kind of warning line."""
    first: dict[str, Failure] = {}
    for line in lines:
        first.setdefault(line.known, line)
    return [
        Finding(
            id=RowId(f"logs.{line.known}"),
            level=Level.INFO if line.known == "xid" else Level.WARN,
            title=f"{_ranks((line.rank,), book)}: {line.what}" if line.rank is not None else line.what,
            detail=_sentence(line.means),
            witnesses=Witnesses(ranks=() if line.rank is None else (line.rank,)),
            evidence=_evidence([line]),
            fix=Fix(text=line.fix, commands=line.commands) if line.fix and line.known != "xid" else None,
        )
        for line in first.values()
    ]


def unreadable(broken: Sequence[tuple[str, LogFile]], *, all_: bool) -> Finding:
    """Report files not read, or not to their end."""
    (host, file), more = broken[0], len(broken) - 1
    return finding(
        "unreadable",
        level=Level.UNKNOWN if all_ else Level.WARN,
        where=Where(hosts=tuple(dict.fromkeys(host for host, _ in broken))),
        evidence=tuple(f"{host}: {file.path}: {file.error}" for host, file in broken[:_NAMED]),
        path=file.path,
        host=host,
        error=file.error,
        more=counted(more, "more file") if more else "",
    )


def _evidence(group: Iterable[Failure]) -> tuple[str, ...]:
    lines = by_key((_SHAPE.sub("#", failure.what), failure) for failure in group if failure.line)
    shown = []
    for same in list(lines.values())[:_NAMED]:
        failure = same[0]
        ranks = fold_ranks(one.rank for one in same if one.rank is not None)
        who = f"[ranks {ranks}] " if len(same) > 1 and ranks else ""
        shown.append(f"{failure.file}:{failure.line}: {who}{failure.what[:_QUOTE]}")
    return tuple(shown)


def _ranks(ranks: Sequence[int], book: Book) -> str:
    hosts = sorted({book.hosts.get(rank, "") for rank in ranks} - {""})
    return name_ranks(ranks) + (f" ({hosts[0]})" if len(hosts) == 1 else "")
