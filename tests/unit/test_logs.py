"""What logs makes of a job's output: every case of the table, and streams that launchers tore."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from logs_cases import RECORDED, Case, cases

from distdiag.cluster.targets import Cluster
from distdiag.diagnosis.job_logs.diagnose import diagnose
from distdiag.diagnosis.job_logs.types import Logs, Request
from distdiag.facts.job_logs.collect import Reader
from distdiag.facts.job_logs.demux import Demux
from distdiag.gathered import Gathered
from distdiag.knowledge.job_logs import for_nodes, known_lines

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.report import Report


def judged(*paths: Path) -> Report[Logs]:
    reader = Reader({"patterns": for_nodes()})
    for path in paths:
        reader.read(str(path))
    return diagnose(Request(program="distdiag", cluster=Cluster()), Gathered(facts=[reader.found()]))


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(case.text)
    report = judged(path)
    found = report.findings[0]
    text = json.dumps([report.summary, found.title, found.detail])
    if not case.forced:
        assert not found.where.ranks, text
    elif case.id == "unknown":
        assert report.exit_code() == 3, text
        assert not found.where.ranks
    else:
        assert (found.id, found.where.ranks) == (f"logs.{case.id}", case.ranks), text
    assert not case.forced or case.also in found.title + found.detail


@pytest.mark.parametrize("case", [case for case in cases() if case.ranks == (2,)], ids=lambda case: case.name)
def test_a_log_that_breaks_off_blames_no_innocent_rank(case: Case, tmp_path: Path) -> None:
    lines = case.text.splitlines(keepends=True)
    for tenths in (2, 4, 6, 8, 9):
        path = tmp_path / f"{tenths}.log"
        path.write_bytes(b"".join(lines[: len(lines) * tenths // 10]))
        found = judged(path).findings[0]
        assert found.where.ranks in ((), (2,)), (tenths, found.title)


def test_a_tree_of_torchrun_has_ranks_by_its_folders() -> None:
    report = judged(RECORDED / "tree")
    assert report.findings[0].where.ranks == (2,)
    assert "ValueError: label 1000" in report.summary


def test_equal_tracebacks_are_one_and_their_differences_shown(tmp_path: Path) -> None:
    (text,) = (case.text for case in cases() if case.name == "torchrun-all")
    path = tmp_path / "log"
    path.write_bytes(
        text.replace(b"[rank3]: ValueError: optimizer got an empty", b"[rank3]: ValueError: optimizer got no")
    )
    found = judged(path).findings[0]
    assert found.where.ranks == (0, 1, 2, 3)
    assert "rank 3: ValueError: optimizer got no parameter list" in found.detail


def streams(text: bytes) -> dict[str, bytes]:
    demux, found = Demux(), dict[str, bytes]()
    demux.detect(text)
    lines = text.split(b"\n")
    whole = [(line, True) for line in lines[:-1]] + ([(lines[-1], False)] if lines[-1] else [])
    for line, ended in whole:
        for label, piece in demux.lines(line, ended):
            found[label.decode()] = found.get(label.decode(), b"") + piece + b"\n"
    for label, piece in demux.finish():
        found[label.decode()] = found.get(label.decode(), b"") + piece
    return found


@pytest.mark.parametrize(
    ("text", "label", "stream"),
    [
        (b"[default0]:begin [default1]:x\n[default0]:end\n", "[default0]:", b"begin end\n"),
        (b"[vm:0]:a[vm:1]:b[vm:0]:c\n[vm:1]:d\n", "[vm:0]:", b"ac\n"),
        (b"[1,0]<stdout>:a[1,1]<stdout>:b\n[1,0]<stdout>:c\n", "[1,0]<stdout>:", b"ac\n"),
        (b"0: a\n1: b\n0: c: d\n", "0: ", b"a\nc: d\n"),
        (b"[0] a\n[1] b\n", "[1] ", b"b\n"),
        (b"node1: a\nnode2: b\nnode1: c\nnode2: d\nnode1: e\nnode2: f\n", "node2: ", b"b\nd\nf\n"),
        (b"[pod/train-0/main] a\n[pod/train-1/main] b\n", "[pod/train-1/main] ", b"b\n"),
        (b"(Worker pid=9, ip=10.0.0.1) a\n(Worker pid=8) b\n", "(Worker pid=9, ip=10.0.0.1) ", b"a\n"),
    ],
)
def test_demux(text: bytes, label: str, stream: bytes) -> None:
    assert streams(text)[label] == stream


def test_knowledge_says_where_each_line_comes_from() -> None:
    rows = known_lines().values()
    assert all(row.source and row.means for row in rows)
    assert all(row.fix for row in rows if row.role == "cause")
