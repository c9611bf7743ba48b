"""What run makes of recorded ends: the first failure, the order, where the others were, and how it is drawn."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from distdiag.cluster.targets import Cluster
from distdiag.commands.run.diagnose import diagnose
from distdiag.commands.run.types import TIME_LIMIT, NodeRun, Picture, RankRun, RankStack, Request, Run, Stacks
from distdiag.commands.run.view import run_view
from distdiag.facts.logs.collect import NodeLogs, Reader
from distdiag.facts.stacks.stack_types import Frame
from distdiag.knowledge.known_lines import for_nodes
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.report import Report

_TRACEBACK = (
    'Traceback (most recent call last):\n  File "/job/train.py", line 13, in forward\n'
    "IndexError: index out of range in self\n"
)
_FOLDER = "/tmp/distdiag-run-1000/abc"
_ENDS = ((1, 1, 6.94), (0, 1, 7.67), (2, -15, 8.08))
_STACKS = Stacks(
    at_s=6.94,
    ranks=(
        RankStack(rank=0, pid=11, frames=(Frame("<module>", "/job/train.py", 16),)),
        RankStack(rank=2, pid=13),
    ),
)


def node(folder: Path, ends: tuple[tuple[int, int, float], ...] = _ENDS) -> NodeRun:
    log = folder / "rank1.g0.stderr.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/job/train.py", line 13\nIndexError: index out of range in self\n'
    )
    reader = Reader(for_nodes())
    reader.read_output(str(log), str(log), 1)
    ranks = tuple(
        RankRun(
            rank=rank,
            local=rank,
            generation=0,
            host="vm",
            pid=11 + rank,
            started_s=0.1,
            world=3,
            ended_s=at_s,
            status=status,
        )
        for rank, status, at_s in ends
    )
    return NodeRun(host="vm", argv=("torchrun",), began_at=0.0, took_s=9.1, status=1, ranks=ranks, logs=reader.found())


def report(*nodes: NodeRun) -> Report[Run]:
    return diagnose(Request(program="distdiag", cluster=Cluster(), folder=_FOLDER), Gathered(facts=list(nodes)))


def drawn(made: Report[Run]) -> list[str]:
    written = io.StringIO()
    console = Console(width=100, file=written)
    for part in run_view(made.data, "distdiag"):
        console.print(part)
    return [line.rstrip() for line in written.getvalue().splitlines()]


def test_the_first_failure_the_order_and_where_the_others_were(tmp_path: Path) -> None:
    recorded = node(tmp_path)
    first = replace(recorded.ranks[0], last_line="rank 1 step 5 loss 0.73")
    made = report(replace(recorded, stacks=_STACKS, ranks=(first, *recorded.ranks[1:])))
    found = made.findings[0]
    assert (found.id, found.where.ranks) == ("logs.first-failure", (1,))
    assert "IndexError: index out of range in self" in found.title
    assert found.evidence[0].endswith("rank1.g0.stderr.log:3: IndexError: index out of range in self")
    assert found.evidence[1:] == (
        "last line of its output: rank 1 step 5 loss 0.73",
        "ranks ended in this order: rank 1 (exit status 1) at 6.94 s, rank 0 (exit status 1) at 7.67 s",
        "where the others were: rank 0 at train.py:16; rank 2 exiting (no Python frames left)",
    )
    assert found.fix is not None
    assert "num_embeddings" in found.fix.text


def test_nothing_is_said_of_an_order_of_one_and_all_is_said_of_no_stacks(tmp_path: Path) -> None:
    made = report(replace(node(tmp_path, ((1, 1, 6.94), (0, -15, 7.2), (2, -15, 7.2))), stacks=Stacks(at_s=6.94)))
    evidence = made.findings[0].evidence
    assert not [line for line in evidence if "order" in line]
    assert evidence[-1] == "where the others were: not recorded, they had ended"
    assert not [line for line in report(node(tmp_path)).findings[0].evidence if "where the others" in line]


def test_the_cause_is_the_first_row_and_paths_paste(tmp_path: Path) -> None:
    lines = drawn(report(node(tmp_path)))
    rows = [" ".join(line.split()) for line in lines]
    assert rows[2:6] == [
        "ranks hosts ended with at",
        "1 vm exit status 1 <- failed first 6.94 s",
        "0 vm exit status 1 7.67 s",
        "2 vm SIGTERM 8.08 s",
    ]
    assert f"output of each rank: {_FOLDER}/output.vm" in lines
    assert f"read again: distdiag run --from {_FOLDER}" in lines


def test_a_rank_that_hung_did_not_fail(tmp_path: Path) -> None:
    picture = Picture(reason="stall", at_s=5.0, took_s=2.0, verdict="fail", summary="rank 1 sleeps", ranks=(1,))
    hung = replace(node(tmp_path, ((0, -15, 9.0), (1, -15, 9.0))), pictures=(picture,), killed=True)
    made = report(hung)
    assert (made.findings[0].id, made.data.first) == ("run.stalled", ())
    assert not [line for line in drawn(made) if "failed first" in line]


def test_restarts_have_a_column_and_nodes_one_clock(tmp_path: Path) -> None:
    first = node(tmp_path)
    again = tuple(replace(rank, generation=1, ended_s=20.0, status=0) for rank in first.ranks)
    later = replace(
        first, host="vm2", began_at=2.0, ranks=tuple(replace(rank, host="vm2", rank=rank.rank + 3) for rank in again)
    )
    made = report(replace(first, ranks=(*first.ranks, *again)), later)
    lines = drawn(made)
    assert any("restart 1" in line and "22.00 s" in line for line in lines)
    assert f"output of each rank: {_FOLDER}" in lines


def test_a_job_that_hung_before_it_was_ended_from_outside_says_so(tmp_path: Path) -> None:
    made = replace(
        node(tmp_path, ((0, -15, 70.4), (1, -15, 70.4))), logs=NodeLogs(host="vm"), signals=(("SIGTERM", 70.3),)
    )
    late = Picture(reason="SIGTERM", at_s=70.3, took_s=0.6, verdict="unknown", summary="no rank was found on vm")
    fine = Picture(reason=TIME_LIMIT, at_s=44.1, took_s=3.8, verdict="ok", summary="not hung", ranks_seen=2)
    (first,) = report(replace(made, pictures=(fine, late))).findings
    assert (first.level, first.where.ranks) == ("unknown", ())
    assert first.title.endswith("after 70 s; no rank had failed")
    assert first.fix is None
    assert first.evidence == (
        "hang at 44.1 s (before the time limit): not hung",
        "vm: the ranks got the signal too, and had ended before they could be looked at",
    )
    in_slurm = replace(made, pictures=(fine, late), slurm_job="4711")
    (fix,) = (finding.fix for finding in report(in_slurm).findings)
    assert fix is not None
    assert fix.commands == ("sacct -j 4711 --format=State,Elapsed,Timelimit",)
    hung = replace(fine, verdict="fail", summary="rank 1 is not in the collective", ranks=(1,))
    (first,) = report(replace(made, pictures=(hung, late))).findings
    assert (first.level, first.where.ranks) == ("fail", (1,))
    assert first.title.endswith("after 70 s; at 44 s it hung: rank 1 is not in the collective")
    went_on = replace(late, verdict="ok", summary="not hung", ranks_seen=2)
    (first,) = report(replace(made, pictures=(hung, went_on))).findings
    assert (first.level, first.where.ranks) == ("unknown", ())


def test_a_thousand_ranks_are_three_rows(tmp_path: Path) -> None:
    hosts = [f"gpu-node-{n:03d}-rack-{n // 8:02d}-row-b-hall-2-datacenter-frankfurt-west-eu" for n in range(125)]
    first = node(tmp_path)
    nodes = []
    for number, host in enumerate(hosts):
        ranks = tuple(
            replace(first.ranks[0], rank=8 * number + i, host=host, world=1000, status=1, ended_s=7.5) for i in range(8)
        )
        nodes.append(replace(first, host=host, ranks=ranks, logs=NodeLogs(host=host)))
    lines = drawn(report(*nodes))
    table = lines[lines.index("") + 1 :]
    table = table[: table.index("")]
    assert len(table) <= 8, table
    assert any("125 hosts" in line for line in table), table


def test_each_of_these_ends_has_its_id(tmp_path: Path) -> None:
    recorded = node(tmp_path)
    silent = Reader(for_nodes()).found()
    table = {
        ("run.died-first", "unknown"): replace(recorded, logs=silent, ranks=recorded.ranks[:1]),
        ("run.launcher-failed", "unknown"): replace(recorded, logs=silent, ranks=()),
        ("run.recovered", "warn"): replace(recorded, status=0),
        ("run.terminated", "unknown"): replace(recorded, logs=silent, ranks=(), signals=(("SIGTERM", 3.0),)),
    }
    made = {key: {(one.id, str(one.level)) for one in report(own).findings} for key, own in table.items()}
    assert {key: ids for key, ids in made.items() if key not in ids} == {}
