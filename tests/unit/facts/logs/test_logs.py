"""What logs makes of a job's output: every case of the table, and streams that launchers tore."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from logs_cases import RECORDED, Case, cases
from loops import each

from distdiag.cluster.targets import Cluster
from distdiag.diagnosis.job_logs.diagnose import diagnose
from distdiag.diagnosis.job_logs.types import Logs, Request
from distdiag.facts.logs.collect import Reader
from distdiag.facts.logs.demux import Demux
from distdiag.knowledge.known_lines import for_nodes, known_lines
from distdiag.knowledge.logs import known_exception
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.report import Report


def judged(*paths: Path) -> Report[Logs]:
    reader = Reader(for_nodes())
    for path in paths:
        reader.read(str(path))
    return diagnose(Request(program="distdiag", cluster=Cluster()), Gathered(facts=[reader.found()]))


@each("case", cases())
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
    _check_line_numbers(case.text, found.evidence)


def _check_line_numbers(text: bytes, evidence: tuple[str, ...]) -> None:
    """Each line that is quoted has its own number; "the log ends in a traceback" is no quote."""
    lines = text.decode("utf-8", "replace").split("\n")
    for quoted in evidence:
        match = re.match(r"\S+/job\.log:(\d+): (?:\[ranks [\d,-]+\] )?(.{1,30})", quoted)
        if match and not match[2].startswith("the log ends"):
            assert match[2] in lines[int(match[1]) - 1], quoted


@each("case", [case for case in cases() if case.ranks == (2,)])
def test_a_log_that_breaks_off_blames_no_innocent_rank(case: Case, tmp_path: Path) -> None:
    lines = case.text.splitlines(keepends=True)
    for tenths in (3, 6, 9):
        path = tmp_path / f"{tenths}.log"
        path.write_bytes(b"".join(lines[: len(lines) * tenths // 10]))
        found = judged(path).findings[0]
        assert found.where.ranks in ((), (2,)), (tenths, found.title)


@pytest.mark.parametrize(
    "cut",
    [
        "Runtim",
        "RuntimeError: [/pytorch/third_party/gl",
        "RuntimeError: [/p/gloo/transport/tcp/pair.cc:547] Connection cl",
    ],
)
def test_an_exception_whose_end_is_missing_blames_no_rank(cut: str, tmp_path: Path) -> None:
    lines = ["Traceback (most recent call last):", '  File "/app/train.py", line 9, in main', "    step()", cut]
    path = tmp_path / "job.log"
    path.write_text("".join(f"[rank3]: {line}\n" for line in lines).rstrip("\n"))
    report = judged(path)
    assert (report.exit_code(), report.findings[0].where.ranks) == (3, ())
    whole = tmp_path / "pasted.log"
    whole.write_text(path.read_text().replace(cut, "RuntimeError: shape [8] is invalid"))
    assert judged(whole).findings[0].where.ranks == (3,)


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


def test_ranks_that_the_launcher_ended_are_consequences_and_an_error_says_what_to_check(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(_ENDED_BY_TORCHRUN)
    report = judged(path)
    assert report.findings[0].title.endswith("2 other ranks ended because of it")
    assert [(end.rank, end.role, end.what) for end in report.data.ranks] == [
        (0, "consequence", "ended by the launcher"),
        (1, "cause", "IndexError: index out of range in self"),
        (2, "consequence", "ended by the launcher"),
    ]
    assert report.findings[0].fix is not None
    assert "num_embeddings" in report.findings[0].fix.text
    path.write_bytes(_ENDED_BY_TORCHRUN.replace(b"index out of range in self", b"sample 7"))
    assert judged(path).findings[0].fix is None


_ENDED_BY_TORCHRUN = b"""\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 13, in forward
[rank1]: IndexError: index out of range in self
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-24_12:25:09
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 30521)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 30521
[2]:
  time      : 2026-11-24_12:25:09
  host      : localhost
  rank      : 2 (local_rank: 2)
  exitcode  : -15 (pid: 30523)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 30523
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-24_12:25:09
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 30522)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


_SPAWNED = b"""\
Traceback (most recent call last):
  File "/job/train.py", line 60, in <module>
    torch.multiprocessing.spawn(main, nprocs=2)
  File "/venv/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 215, in join
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/job/train.py", line 41, in main
    load(state)
KeyError: 'block.7.weight'
"""


def test_the_exception_of_a_spawned_process_is_the_cause(tmp_path: Path) -> None:
    """torch.multiprocessing.spawn raises one of its own around it."""
    path = tmp_path / "job.log"
    path.write_bytes(_SPAWNED)
    report = judged(path)
    assert report.exit_code() == 1
    assert "KeyError: 'block.7.weight', at /job/train.py:41 in main" in report.summary


def test_the_stream_of_a_gloo_address_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(
        b"RuntimeError: Gloo connectFullMesh failed with [/src/gloo/transport/tcp/pair.cc:152] timed out connecting: "
        b"SO_ERROR: Connection refused, remote=[10.0.0.7]:37772$1\n"
    )
    assert "remote=[10.0.0.7]:37772: a rank had exited" in judged(path).summary


@each(
    "text, words",
    [
        ("IndexError: Target 1000 is out of bounds.", "number of classes"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x2)", "in_features"),
        ("RuntimeError: stack expects each tensor to be equal size, but got [2] at entry 0", "collate_fn"),
        ("ValueError: Default process group has not been initialized, please make sure", "init_process_group"),
        ("RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central", "cut off"),
    ],
)
def test_texts_of_exceptions_are_known(text: str, words: str) -> None:
    found = known_exception(text)
    assert found is not None
    assert words in found.means + found.fix
    assert known_exception("ValueError: sample 7") is None


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


@each(
    "text, label, stream",
    [
        (b"[default0]:begin [default1]:x\n[default0]:end\n", "[default0]:", b"begin end\n"),
        (b"[vm:0]:a[vm:1]:b[vm:0]:c\n[vm:1]:d\n", "[vm:0]:", b"ac\n"),
        (b"[1,0]<stdout>:a[1,1]<stdout>:b\n[1,0]<stdout>:c\n", "[1,0]<stdout>:", b"ac\n"),
        (b"0: a\n1: b\n0: c: d\n", "0: ", b"a\nc: d\n"),
        (b"[0] a\n[1] b\n", "[1] ", b"b\n"),
        (b"node1: a\nnode2: b\nnode1: c\nnode2: d\nnode1: e\nnode2: f\n", "node2: ", b"b\nd\nf\n"),
        (
            b"n1:0: a\nn1:1: b\nn1:0: c\nn1:1: d: e\nn1:0: f\nn1:1: g\n",
            "n1:1: ",
            b"b\nd: e\ng\n",
        ),  # torch 2.14's template
        (
            b"train.py:8: W\nloss.py:9: W\ntrain.py:8: W\nloss.py:9: W\nx\ny\n",
            "",
            b"train.py:8: W\nloss.py:9: W\n" * 2 + b"x\ny\n",
        ),
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


def test_a_node_that_could_not_connect_explains_why_the_others_waited_in_vain(tmp_path: Path) -> None:
    first, second = tmp_path / "node1.log", tmp_path / "node2.log"
    first.write_text(
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.\n"
    )
    second.write_text(
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to "
        "(node1, 29501).\n"
    )
    report = judged(first, second)
    assert report.findings[0].id == "logs.connect-timeout"
    assert "node1:29501" in report.summary
    assert report.findings[0].fix is not None
    assert report.findings[0].fix.commands[0] == "distdiag ports node1:29501"


def test_a_rank_that_waits_for_more_ranks_explains_why_a_smaller_world_could_not_connect(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "node1.log", tmp_path / "node2.log"
    first.write_text("RuntimeError: Gloo connectFullMesh failed with [/p/gloo/pair.h:311] Connect timeout [none]\n")
    second.write_text("torch.distributed.DistStoreError: wait timeout after 20000ms, keys: /default_pg/0//cpu//0/2\n")
    report = judged(first, second)
    assert report.findings[0].id == "logs.rank-never-came"
    assert "WORLD_SIZE" in report.summary


_BAR = "\r 30%|███       | 60/200 [00:01<00:03, 44.1it/s]"
_RAISED = 'Traceback (most recent call last):\n  File "/app/train.py", line 9, in main\n    step()\n{}\n'
_FAILED = "E1123 10:20:30.1 77 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {}) local_rank: 1 (pid: 79) of binary: /usr/bin/python3\n"  # noqa: E501
_GROUPED = """\
[rank1]:   + Exception Group Traceback (most recent call last):
[rank1]:   |   File "/app/train.py", line 9, in main
[rank1]:   | ExceptionGroup: 2 loaders failed (2 sub-exceptions)
[rank1]:   +-+---------------- 1 ----------------
[rank1]:     | ValueError: shard 3 is empty
[rank1]:     +---------------- 2 ----------------
[rank1]:     | Traceback (most recent call last):
[rank1]:     |   File "/app/load.py", line 3, in load
[rank1]:     | torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[rank1]:     +------------------------------------
"""


def _as_json(level: str, raised: str) -> str:
    record = {"time": "2026-11-23T10:00:00", "level": level, "rank": 1, "msg": f"uncaught\n{_RAISED.format(raised)}"}
    return json.dumps(record) + "\n"


@pytest.mark.parametrize(
    ("text", "ranks", "says"),
    [
        (_BAR + _RAISED.format("ValueError: no label") + _FAILED.format(1), (1,), "ValueError: no label"),
        (_as_json("error", "ValueError: no label") + _FAILED.format(1), (1,), "ValueError: no label, at /app/train.py"),
        (_as_json("info", "ValueError: no label"), (), "no line reports a failure"),
        (
            json.dumps({"level": "ERROR", "rank": 1, "msg": _GROUPED.replace("[rank1]: ", "")})
            + "\n"
            + _FAILED.format(1),
            (1,),
            "ValueError: shard 3 is empty; torch.OutOfMemoryError",
        ),
        (_GROUPED, (1,), "ValueError: shard 3 is empty; torch.OutOfMemoryError: CUDA out of memory"),
        (
            _RAISED.format("KeyError: 'lr'")
            + "\nThe above exception was the direct cause of the following exception:\n\n"
            + _RAISED.format("RuntimeError: no schedule")
            + _FAILED.format(1),
            (1,),
            "RuntimeError: no schedule, raised from KeyError: 'lr'",
        ),
        (
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  pool is empty\n"
            + _FAILED.format(-6),
            (1,),
            "std::runtime_error': pool is empty",
        ),
        ("python: norm.cpp:8: void run(): Assertion `rows > 0' failed.\n" + _FAILED.format(-6), (1,), "rows > 0"),
        (_BAR + "config not found: large.yaml\n" + _FAILED.format(1), (), "reason: config not found: large.yaml"),
    ],
)
def test_how_a_rank_ended(tmp_path: Path, text: str, ranks: tuple[int, ...], says: str) -> None:
    log = tmp_path / "job.log"
    log.write_text("[rank0]: step 1\n[rank2]: step 1\n" + text)
    (found, *_) = judged(log).findings
    assert (found.where.ranks, says in found.title) == (ranks, True), found


def test_a_group_of_different_exceptions_has_the_advice_of_none(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(_GROUPED)
    assert (judged(log).findings[0].fix, judged(log).findings[0].detail) == (None, "")


def test_ranks_that_failed_on_different_things_did_not_fail_alike(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    for number, other, alike in ((9, "no label", True), (9, "label 4", True), (5, "no label", True), (5, "lr", False)):
        second = _RAISED.format(f"ValueError: {other}").replace("line 9", f"line {number}")
        one, two = _RAISED.format("ValueError: no label"), second
        log.write_text(
            "".join(f"[rank{rank}]: {line}\n" for rank, text in ((0, one), (1, two)) for line in text.split("\n"))
        )
        assert (judged(log).findings[0].id == "logs.same-failure") == alike


def test_a_rank_that_was_interrupted_alone_failed_and_a_job_that_was_did_not(tmp_path: Path) -> None:
    lost = "[rank0]: " + _RAISED.format("RuntimeError: Connection closed by peer [10.0.0.7]:43112").replace(
        "\n", "\n[rank0]: "
    )
    one = "".join(f"[rank1]: {line}\n" for line in _RAISED.format("KeyboardInterrupt").splitlines())
    log = tmp_path / "job.log"
    log.write_text(f"{one}{lost}\n")
    assert judged(log).findings[0].where.ranks == (1,)
    log.write_text(f"{one}{lost}\n" + one.replace("rank1", "rank2"))
    assert judged(log).findings[0].id == "logs.interrupted"


_STATIC = (
    "Traceback (most recent call last):\n"
    '  File "/opt/env/bin/torchrun", line 7, in <module>\n    sys.exit(main())\n'
    "torch.distributed.DistStoreError: wait timeout after 30000ms, keys: /{run}/torchelastic/assigned_ranks/1\n"
)
_DYNAMIC = (
    "Traceback (most recent call last):\n"
    '  File "/opt/env/bin/torchrun", line 7, in <module>\n    sys.exit(main())\n'
    '  File "/opt/env/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py", line 1250, in next_rendezvous\n'
    "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"
)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            _STATIC.format(run="none"),
            _STATIC.format(run="exp7"),
            "different --rdzv-id: exp7 and",
        ),
        (_DYNAMIC, _STATIC.format(run="none"), "different --rdzv-backend"),
        (_DYNAMIC, _DYNAMIC, "rendezvous timed out"),
        (_STATIC.format(run="none"), _STATIC.format(run="none"), "not all --nnodes"),
    ],
    ids=["ids", "backends", "both-dynamic", "both-static"],
)
def test_torchruns_that_waited_for_each_other_in_different_places(
    first: str, second: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "node1.log").write_text(first)
    (tmp_path / "node2.log").write_text(second)
    assert words in judged(tmp_path / "node1.log", tmp_path / "node2.log").summary
