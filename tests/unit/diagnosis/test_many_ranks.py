"""What people read of 1,000 ranks on 125 hosts with names of 64 characters: a page, not a list."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from pyspy_facts import REQUEST, frames, judge, loads, node, process, twice, waits
from rich.console import Console
from trace_facts import BOTH, judge_nodes, reads_pipe

from distdiag.cluster.targets import Cluster
from distdiag.commands.flight_recorder.view import flight_recorder_view
from distdiag.commands.hang.diagnose import diagnose as diagnose_hang
from distdiag.commands.hang.types import Request as HangRequest
from distdiag.commands.hang.view import hang_view
from distdiag.commands.pyspy_all.view import pyspy_all_view
from distdiag.commands.sync_check import diagnose as diagnose_sync
from distdiag.commands.trace.blocked.view import trace_blocked_view
from distdiag.diagnosis.flight_recorder.types import CallRow, FlightRecorder, RankRow
from distdiag.diagnosis.wording import format_members, format_ranks, shorten_hosts
from distdiag.facts.network.socket_owners import Network
from distdiag.facts.process.blocked_threads import Blocked
from distdiag.facts.process.procs import Standstill
from distdiag.jobs.part import SourceEnd
from distdiag.jobs.types import NodePicture
from distdiag.output import as_page
from distdiag.saved_facts import Gathered
from distdiag.training.sync_check import Entry, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from rich.console import RenderableType

    from distdiag.facts.stacks.stack_types import Sample
    from distdiag.report import Report

RANKS, EACH = 1000, 8
LONG = Standstill(1, "S", "futex_wait", "futex", "", 214.0)
ASLEEP = Standstill(1, "S", "hrtimer_nanosleep", "clock_nanosleep", "", 214.0)
SEVENTH = frozenset(range(3, RANKS, 7))


def host(number: int) -> str:
    return f"pod-{number * 7919 % 99991:05}-".ljust(64, "abcdefghij"[number % 10])


def nodes(stack: Callable[[int], tuple[Sample, ...]], gone: Collection[int] = ()) -> list[NodePicture]:
    found = []
    for number in range(RANKS // EACH):
        ranks = [rank for rank in range(number * EACH, (number + 1) * EACH) if rank not in gone]
        processes = [process(4000 + rank, rank, RANKS) for rank in ranks]
        placed = [
            replace(each, place=replace(each.place, local_rank=rank % EACH, local_world_size=EACH))
            for each, rank in zip(processes, ranks, strict=True)
            if each.place is not None
        ]
        found.append(node(placed, {4000 + rank: stack(rank) for rank in ranks}, host(number)))
    return found


def waiting(_: int) -> tuple[Sample, ...]:
    return twice(waits(), still=LONG, groups=1)


def stuck(rank: int) -> tuple[Sample, ...]:
    return twice(loads(), still=ASLEEP) if rank in SEVENTH else waiting(rank)


def shown(parts: Iterable[RenderableType]) -> list[str]:
    page = io.StringIO()
    console = Console(file=page, width=80, markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(part, crop=False)
    return page.getvalue().splitlines()


def page_of(report: Report[Any]) -> list[str]:
    return as_page(report, lambda _: (), findings_in_view=False).splitlines()


def assert_is_short(report: Report[Any], view: Sequence[str], *, lines: int = 30) -> None:
    text = page_of(report)
    assert len(text) + len(view) <= lines, "\n".join([*view, *text])
    assert max(map(len, [*text, *view])) < 250


@pytest.mark.parametrize("gone", [(), SEVENTH])
def test_stacks(gone: Collection[int]) -> None:
    report = judge(*nodes(stuck, gone))
    view = shown(pyspy_all_view(report, REQUEST))
    assert_is_short(report, view, lines=38)
    assert report.findings[0].title.startswith("143 ranks (3,10,17,")
    what = ": no process found: exited or never started" if gone else " are not in the collective: `load_batch` "
    assert f" on 125 hosts ({host(0)},...){what}" in report.findings[0].title
    assert "143 ranks (3,10," in "\n".join(view)


def test_each_stack_finding_says_what_to_do_next() -> None:
    assert "`load_batch` train.py:26, sleeping" in judge(*nodes(stuck)).findings[0].title  # the line to look at
    for stack in (waiting, lambda _: twice(waits(), later=waits(line=9))):
        fix = judge(*nodes(stack)).findings[0].fix
        assert fix is not None
        assert fix.commands


def hang(stack: Callable[[int], tuple[Sample, ...]], gone: Collection[int] = ()) -> Report[Any]:
    ended = tuple(SourceEnd(name, 1.0) for name in ("stacks", "kernel", "ras"))
    facts = [
        NodePicture(host=each.host, processes=each.processes, watched=each.watched, ended=ended)
        for each in nodes(stack, gone)
    ]
    return diagnose_hang(HangRequest(program="distdiag", cluster=Cluster()), Gathered(facts=facts))


@pytest.mark.parametrize("gone", [(), SEVENTH])
def test_hang(gone: Collection[int]) -> None:
    report = hang(stuck, gone)
    request = HangRequest(program="distdiag", cluster=Cluster())
    assert_is_short(report, shown(hang_view(report, request)), lines=34)
    (finding,) = report.findings
    assert finding.evidence == ()  # the title has said it
    assert len(finding.where.ranks) == len(SEVENTH)
    if gone:
        fix = finding.fix
        assert fix is not None
        assert f"check whether the kernel killed them on 125 hosts ({host(0)},...)" in fix.text


def test_processes_that_block_others_on_every_node_fold() -> None:
    read = []
    for each in nodes(waiting):
        processes = [replace(one, network="net:[1]") for one in each.processes.processes]
        blocked = tuple(Blocked(one.pid, "S", None, (reads_pipe(one.pid, 99),), ()) for one in processes)
        networks = (Network("net:[1]", (), ()),)
        read.append(replace(node(processes, {}, each.host), blocked=blocked, networks=networks, ended=BOTH))
    report = judge_nodes(read)
    (found,) = report.findings
    assert found.title.startswith(f"pid 99 on {host(0)} has exited; ranks 0-7 wait for its data: read on a pipe")
    assert found.title.endswith(f"; 124 more such processes, with ranks 8-999 on 124 hosts ({host(1)},...)")
    assert len(found.where.ranks) == RANKS
    assert {row.kind for row in report.data.threads} == {"peer"}
    assert len(shown(trace_blocked_view(report.data))) < 10


def test_a_table_of_dumps() -> None:
    call = CallRow(group="default_pg", operation="all_reduce", number=4, state="started", created_ns=0)
    row = RankRow(
        rank=0,
        host=host(0),
        path="/fr/rank_0",
        form="pickle",
        backends=("nccl",),
        entries=9,
        truncated=False,
        status="waits",
        accused=False,
        error="",
        waiting=call,
        last=call,
    )
    rows = tuple(replace(row, rank=rank, accused=rank in SEVENTH) for rank in range(RANKS))
    data = FlightRecorder(world_size=RANKS, ranks=rows)
    view = shown(flight_recorder_view(data, verbose=False))
    assert len(view) < 8
    assert len(shown(flight_recorder_view(data, verbose=True))) > RANKS


def sums(*values: int) -> dict[int, list[Entry]]:
    return {rank: [Entry("parameter", "weight", "(1,)", value)] for rank, value in enumerate(values)}


def test_values_that_differ() -> None:
    (difference,) = compare(sums(*(rank in SEVENTH for rank in range(RANKS))))
    assert str(difference).startswith("parameter weight: 143 ranks (3,10,17,")
    assert len(str(difference)) < 200
    (difference,) = compare(sums(*range(RANKS)))
    assert (
        str(difference)
        == "parameter weight: rank 0 and rank 1 and rank 2 and rank 3 and 996 more ranks differ (values)"
    )
    report = diagnose_sync({rank: entries for rank, entries in sums(*[7] * RANKS).items() if rank != 5}, RANKS)
    assert report.summary == "files of 1 of 1000 ranks are missing; given: ranks 0-4,6-999"


def test_names_in_sentences_and_in_tables() -> None:
    assert format_ranks([2], ["node07"], 4711) == "rank 2 (node07, pid 4711)"
    assert format_ranks(range(1, 999, 2), ["node07"]).endswith(",...) on node07")
    assert format_members([(rank, 9, host(rank)) for rank in range(9)]) == f"ranks 0-8 on 9 hosts ({host(0)},...)"
    assert shorten_hosts(["node07"]) == "node07"
    assert shorten_hosts(["node07", "node08"]) == "node[07-08]"
    assert shorten_hosts(map(host, range(9))) == "9 hosts"
    assert shorten_hosts(["h100-rack06-node054.train.us-east-1.internal"]) == "h100-rack06-node054"
    assert shorten_hosts([host(3)]) == "pod-23757-...ddddddddddd"


def test_ranks_at_many_lines() -> None:
    report = judge(*nodes(lambda rank: twice(frames(("step", "/job/train.py", rank)), still=ASLEEP)))
    assert_is_short(report, shown(pyspy_all_view(report, REQUEST)), lines=66)
