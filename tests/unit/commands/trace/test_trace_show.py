"""Who is stuck by the last lines of a run, and which files are one run. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from distdiag.cluster.targets import Cluster
from distdiag.commands.trace.show.classify import find_runs
from distdiag.commands.trace.show.collect import Line, NodeLines, Process, Thread
from distdiag.commands.trace.show.diagnose import diagnose
from distdiag.commands.trace.show.types import Request
from distdiag.commands.trace.show.view import trace_show_view
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from distdiag.commands.trace.show.types import TraceShow
    from distdiag.report import Report

REDUCE = ("dist.all_reduce(tensor)", 21)
SLEEP = ("time.sleep(60)", 20)
COMPUTE = ("loss = model(batch)", 18)
BARRIER = ("dist.barrier()", 30)
LOADER = ("for batch in loader:", 12)


def line(source: str, number: int, *, kind: str = "user", function: str = "step", file: str = "/w/train.py") -> Line:
    return Line(100.0, file, number, function, kind, source, returned=False, changed=False)


def process(rank: int | None, at: tuple[str, int], *more: Line, **changes: object) -> Process:
    own = line(*at)
    last = (own, *more)
    given: dict[str, Any] = {
        "path": f"/t/{rank}.lines",
        "host": "node1",
        "boot": "b",
        "started": 5,
        "monotonic_s": 0.5,
        "rings": 32,
        "ancestors": (),
        "raised_at": (),
        "pid": 1000 + (rank or 0),
        "parent": 1,
        "rank": rank,
        "world_size": 4,
        "launcher": "torchrun",
        "job": {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "lines": 1000,
        "state": "died",
        "error": "",
        "error_at": None,
        "began_s": 10.0,
        "ended_s": None,
        "age_s": 60.0,
        "threads": (Thread(1000, "MainThread", True, False, 5, last, own, 0),),
        "untold": 0,
    }
    return Process(**{**given, **changes})


def judged(*processes: Process) -> Report[TraceShow]:
    request = Request(program="distdiag", cluster=Cluster(), paths=("/t",))
    return diagnose(request, Gathered(facts=[NodeLines("node1", processes)]))


def ranks(at: dict[int, tuple[str, int]], **changes: object) -> list[Process]:
    return [process(rank, place, **changes) for rank, place in at.items()]


@pytest.mark.parametrize("state", ["died", "running"])
def test_the_rank_that_is_not_in_the_collective(state: str) -> None:
    report = judged(*ranks({0: REDUCE, 1: SLEEP, 2: REDUCE, 3: REDUCE}, state=state))
    assert (report.exit_code(), report.data.outliers) == (1, (1,))
    (finding,) = report.findings
    assert finding.id == "trace.stuck-rank"
    assert (
        "rank 1 (node1, pid 1001) is not in the collective: at `step` train.py:20 (`time.sleep(60)`)" in finding.title
    )
    assert "ranks 0,2-3 wait in `all_reduce` called from `step` train.py:21" in finding.title


def test_a_line_that_is_young_may_only_be_slow_and_a_job_whose_lines_are_all_young_goes_on() -> None:
    slow = judged(*ranks({0: REDUCE, 1: COMPUTE, 2: REDUCE, 3: REDUCE}, state="running", age_s=4.0))
    assert (slow.exit_code(), slow.data.outliers) == (0, (1,))
    assert slow.findings[0].id == "trace.straggler"
    assert "may only be slower" in slow.findings[0].detail
    goes_on = judged(*ranks({0: REDUCE, 1: COMPUTE, 2: REDUCE, 3: REDUCE}, state="running", age_s=0.1))
    assert (goes_on.exit_code(), goes_on.findings, goes_on.data.outliers) == (0, (), ())


def test_where_all_are_at_the_same_line_nothing_is_guessed() -> None:
    report = judged(*ranks(dict.fromkeys(range(4), REDUCE)))
    assert (report.exit_code(), report.data.outliers) == (3, ())
    assert "the last lines cannot decide" in report.summary


def test_another_collective_is_the_minority_and_half_and_half_is_nobody() -> None:
    few = judged(*ranks({0: REDUCE, 1: REDUCE, 2: BARRIER, 3: REDUCE}))
    assert (few.exit_code(), few.data.outliers) == (1, (2,))
    half = judged(*ranks({0: REDUCE, 1: REDUCE, 2: BARRIER, 3: BARRIER}))
    assert (half.exit_code(), half.data.outliers) == (3, ())


def test_who_died_while_the_others_live() -> None:
    alive = ranks({0: REDUCE, 1: REDUCE, 2: REDUCE}, state="running")
    report = judged(*alive, process(3, COMPUTE))
    assert (report.exit_code(), report.data.outliers) == (1, (3,))
    assert "was killed or crashed, last at `step` train.py:18" in report.findings[0].title


def test_of_those_that_ended_the_first_is_named_and_an_error_in_a_collective_is_a_consequence() -> None:
    killed = judged(process(0, REDUCE, state="raised", error="RuntimeError: closed", ended_s=80.0), process(1, REDUCE))
    assert (killed.exit_code(), killed.data.outliers) == (1, (1,))
    assert killed.summary.startswith("rank 1 (node1, pid 1001) was killed or crashed first, last at `step` train.py:21")
    raised = judged(
        process(0, REDUCE, state="raised", error="RuntimeError: closed", ended_s=80.0),
        process(1, COMPUTE, state="raised", error="ValueError: no", ended_s=79.0),
        process(2, REDUCE),
    )
    assert raised.data.outliers == (1,)
    assert "was the first to exit: it raised ValueError: no" in raised.summary
    left = judged(
        process(0, REDUCE, state="raised", error="RuntimeError: closed", ended_s=80.0),
        process(1, COMPUTE, state="ended", ended_s=70.0),
    )
    assert left.data.outliers == (1,)
    alone = judged(process(0, COMPUTE, state="raised", error="ValueError: no", ended_s=1.0, world_size=1))
    assert (alone.exit_code(), "raised ValueError: no" in alone.summary) == (1, True)


def test_an_older_run_that_still_runs_is_shown_beside_the_newest() -> None:
    hung = [
        process(rank, at, state="running", began_s=5.0, job={"MASTER_PORT": "9"})
        for rank, at in ((0, REDUCE), (1, SLEEP))
    ]
    fine = ranks(dict.fromkeys(range(4), COMPUTE), state="ended", began_s=50.0)
    report = judged(*hung, *fine)
    assert (report.exit_code(), report.data.outliers, report.data.older_runs) == (1, (1,), 0)


def test_all_that_came_to_their_end_are_fine() -> None:
    report = judged(*ranks(dict.fromkeys(range(4), COMPUTE), state="ended"))
    assert (report.exit_code(), report.findings) == (0, ())


def test_library_lines_tell_what_the_source_does_not() -> None:
    inside = line(
        "work.wait()",
        9,
        kind="library",
        function="all_reduce",
        file="/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    )
    waiting = [process(rank, ("sync(tensor)", 40), inside) for rank in (0, 1, 3)]
    report = judged(*waiting, process(2, COMPUTE))
    assert report.data.outliers == (2,)
    assert "in `all_reduce` called from `step` train.py:40" in report.summary


def test_a_rank_that_waits_for_its_worker_says_where_that_is() -> None:
    worker = process(1, ("image = read(path)", 55), pid=2001, parent=1001, began_s=11.0, age_s=90.0)
    idle = process(1, ("return batch", 57), pid=2002, parent=1001, began_s=11.0, age_s=1.0)
    others = ranks({0: REDUCE, 2: REDUCE, 3: REDUCE})
    report = judged(*others, process(1, LOADER), worker, idle)
    assert report.data.outliers == (1,)
    assert "its worker, pid 2001, is at `step` train.py:55 (`image = read(path)`)" in report.summary


def test_what_to_do_next_is_a_command_that_can_help() -> None:
    all_alike = judged(*ranks(dict.fromkeys(range(4), REDUCE), state="running")).findings[0].fix
    assert all_alike is not None
    assert all_alike.commands[0] == "distdiag trace show --count all_reduce"
    raised = [
        process(1, SLEEP, state="raised", error="ValueError: no"),
        *ranks({0: REDUCE, 2: REDUCE}, state="running"),
    ]
    fix = judged(*raised).findings[0].fix
    assert fix is not None
    assert fix.commands == ()  # a Python error leaves no core
    died = [process(1, SLEEP, state="died"), *ranks({0: REDUCE, 2: REDUCE}, state="running")]
    fix = judged(*died).findings[0].fix
    assert fix is not None
    assert fix.commands == ("distdiag core-bt",)


def test_of_many_places_the_first_are_shown() -> None:
    many = [process(rank, ("dist.barrier()", rank), world_size=40) for rank in range(40)]
    lines = [NodeLines("node1", tuple(many))]
    request = Request(program="distdiag", cluster=Cluster(), paths=("/t",))
    view = [getattr(part, "_text", part) for part in trace_show_view(request, lines)]
    assert view[-1] == "  ... and 28 more places, 28 ranks (-v shows all)"
    assert sum("running" in str(text) or "killed" in str(text) for text in view) == 12
    assert len([*trace_show_view(replace(request, verbose=True), lines)]) > 80


def test_ranks_that_are_absent_are_told() -> None:
    report = judged(*ranks({0: REDUCE, 1: SLEEP}))
    assert [finding.where.ranks for finding in report.findings if finding.id == "trace.unseen"] == [(2, 3)]


def test_the_same_name_again_is_another_run_and_a_worker_is_no_rank() -> None:
    first = ranks(dict.fromkeys(range(2), REDUCE), began_s=10.0)
    again = [process(rank, REDUCE, began_s=500.0, pid=3000 + rank) for rank in range(2)]
    child = process(0, REDUCE, pid=3100, parent=3000, began_s=501.0)
    runs = find_runs([NodeLines("node1", (*again, child, *first))])
    assert [[member.process.pid for member in run.members] for run in runs] == [[1000, 1001], [3000, 3001]]
    assert [helper.pid for helper in runs[1].members[0].helpers] == [3100]


def test_nothing_there_says_how_to_begin() -> None:
    report = judged()
    assert report.exit_code() == 3
    assert report.findings[0].fix is not None
    assert "distdiag trace py -- train.py" in report.findings[0].fix.commands


def test_each_outcome_has_its_id() -> None:
    silent = process(0, REDUCE, threads=())
    cases = {
        "trace.same-place": ranks(dict.fromkeys(range(4), REDUCE)),
        "trace.undecided": ranks({0: REDUCE, 1: REDUCE, 2: BARRIER, 3: BARRIER}),
        "trace.no-lines": [silent],
        "trace.exited-first": [process(0, REDUCE, state="raised", error="E", ended_s=80.0), process(1, REDUCE)],
        "trace.threads-not-recorded": ranks(dict.fromkeys(range(4), COMPUTE), state="ended", untold=3),
    }
    for id_, processes in cases.items():
        assert id_ in [one.id for one in judged(*processes).findings], id_
    request = Request(program="distdiag", cluster=Cluster())
    (late,) = diagnose(request, Gathered(facts=[], missing={"node2": "timed out"})).findings
    assert (late.id, late.level) == ("trace.no-answer", "unknown")
