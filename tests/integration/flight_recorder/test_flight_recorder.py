"""flight-recorder on dumps of real Gloo ranks that went wrong: exactly the ranks at fault, in any order of files."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import support_torch
from fuzz import assert_survived, damaged, run_each
from support import need, wait_until
from support_warm import distdiag
from torch_builds import BUILDS, PYTHONS, environment

from distdiag import output
from distdiag.cluster.targets import Cluster
from distdiag.diagnosis.flight_recorder.diagnose import diagnose
from distdiag.diagnosis.flight_recorder.types import Request
from distdiag.facts.recorder.collect import Ask, NodeDumps, Pipe, more
from distdiag.pages import make_page
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distdiag.diagnosis.flight_recorder.types import FlightRecorder
    from distdiag.report import Report

RECORDER = Path(__file__).parents[2] / "programs" / "records_collectives.py"
REQUEST = Request(program="distdiag", cluster=Cluster())

# By case: the kind of finding, its level, and the ranks at fault.
TRUTH: dict[str, tuple[str, str, set[int]]] = {
    "skip_2": ("never-called", "fail", {2}),
    "skip_0": ("never-called", "fail", {0}),
    "left_out": ("op-mismatch", "fail", {1}),
    "size": ("size-mismatch", "fail", {2}),
    "dtype": ("dtype-mismatch", "fail", {1}),
    "other_op": ("op-mismatch", "fail", {3}),
    "tie": ("dtype-mismatch", "fail", set()),
    "order": ("order-inversion", "fail", {2}),
    "order_tie": ("order-inversion", "fail", set()),
    "ring_of_groups": ("deadlock", "fail", {0, 1, 2}),
    "skip_in_group": ("never-called", "fail", {1}),
    "killed": ("no-dump", "unknown", {1}),
    "stopped": ("no-dump", "unknown", {2}),
    "late": ("late-rank", "warn", {1}),
    "uneven": ("never-called", "fail", {3}),
    "one_more": ("only-some-called", "unknown", set()),
    "all_ended": ("all-ended", "unknown", set()),
}


def record(folder: Path, *cases: str, python: str = sys.executable) -> None:
    command = [python, str(RECORDER), str(folder), *cases]
    env = environment() if python != sys.executable else {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("w+") as said:
        process = support_torch.start(command, env, output=said) or subprocess.Popen(command, stdout=said, env=env)
        try:
            assert process.wait() == 0
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        assert sorted(said.read().split()) == sorted(cases)


@pytest.fixture(scope="module", params=PYTHONS, ids=BUILDS)
def sets(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Run all jobs, once for each build of torch."""
    folder = tmp_path_factory.mktemp("sets")
    record(folder, *TRUTH, "large", python=request.param)
    return folder


def read(*paths: Path) -> NodeDumps:
    parts: list[NodeDumps] = []
    more(Ask(list(map(str, paths))), parts.append)
    import msgspec

    dumps = [vars(dump) for part in parts for dump in part.dumps]
    reported = msgspec.convert({"host": "node1", "dumps": dumps}, NodeDumps)
    return replace(reported, unread=parts[-1].unread)


def judge(node: NodeDumps) -> Report[FlightRecorder]:
    return diagnose(REQUEST, Gathered(facts=[node]))


def blamed(report: Report[FlightRecorder]) -> tuple[str, str, set[int]]:
    first = report.findings[0]
    ranks = {rank for finding in report.findings if finding.level == first.level for rank in finding.where.ranks}
    return first.id.partition(".")[2], report.verdict.value, ranks


def shuffled(node: NodeDumps, dice: random.Random) -> NodeDumps:
    """The same dumps under names in another order."""
    names = [f"/x/{number}" for number in dice.sample(range(10_000, 99_999), len(node.dumps))]
    dumps = [replace(dump, path=name) for dump, name in zip(node.dumps, names, strict=True)]
    dice.shuffle(dumps)
    return replace(node, dumps=tuple(dumps))


@pytest.mark.parametrize("case", TRUTH)
def test_exactly_the_ranks_at_fault_are_named_in_any_order_of_files(case: str, sets: Path) -> None:
    node = read(sets / case)
    assert blamed(judge(node)) == TRUTH[case]
    dice = random.Random(case)
    for _ in range(5):
        assert blamed(judge(shuffled(node, dice))) == TRUTH[case]


def test_the_line_of_the_call_and_what_the_rank_did_last_are_shown(sets: Path) -> None:
    done = distdiag("flight-recorder", str(sets / "skip_2"))
    assert done.code == 1
    words = " ".join(done.out.split())
    assert "rank 2 never called all_reduce #7 of default_pg; ranks 0-1,3 wait in it at step (" in words
    assert "rank 2: last call broadcast #6 of default_pg, ended at step (" in words


def test_a_lost_dump_of_another_rank_changes_nothing(sets: Path) -> None:
    for lost in (0, 1, 3):
        files = [sets / "skip_2" / f"rank_{rank}" for rank in range(4) if rank != lost]
        assert blamed(judge(read(*files))) == ("never-called", "fail", {2})


def test_a_lost_dump_of_the_rank_itself_is_no_proof_and_the_rank_is_named(sets: Path) -> None:
    files = [sets / "skip_2" / f"rank_{rank}" for rank in (0, 1, 3)]
    assert blamed(judge(read(*files))) == ("no-dump", "unknown", {2})


@pytest.mark.parametrize("cut", [0, 2])
def test_a_dump_that_is_cut_short_is_read_as_far_as_it_goes(cut: int, sets: Path, tmp_path: Path) -> None:
    for rank in range(4):
        data = (sets / "skip_2" / f"rank_{rank}").read_bytes()
        (tmp_path / f"rank_{rank}").write_bytes(data[: len(data) * 2 // 3] if rank == cut else data)
    node = read(tmp_path)
    assert [dump.truncated for dump in sorted(node.dumps, key=lambda dump: dump.path)] == [
        rank == cut for rank in range(4)
    ]
    expected = ("never-called", "fail", {2}) if cut == 0 else ("no-dump", "unknown", {2})
    assert blamed(judge(node)) == expected


NAMES = ("rank{}", "trace_rank_node07_{}", "gpu{}.node3.pkl", "dump.{}.bak", "job_{}/trace", "nccl_trace_rank_{}.json")


@pytest.mark.parametrize("name", NAMES)
def test_the_rank_comes_from_the_name_where_the_content_does_not_tell(name: str, sets: Path, tmp_path: Path) -> None:
    for rank in range(4):
        document = pickle.loads((sets / "skip_2" / f"rank_{rank}").read_bytes())
        as_gloo_writes_it = {key: value for key, value in document.items() if not key.startswith("distdiag_")}
        as_gloo_writes_it["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
        file = tmp_path / name.format(rank)
        file.parent.mkdir(exist_ok=True)
        text = json.dumps(as_gloo_writes_it).encode()
        file.write_bytes(text if name.endswith("json") else pickle.dumps(as_gloo_writes_it, protocol=2))
    assert blamed(judge(read(tmp_path))) == ("never-called", "fail", {2})


def test_one_of_16_ranks_is_found(sets: Path) -> None:
    node = read(sets / "large")
    for number in range(5):
        assert blamed(judge(shuffled(node, random.Random(number)))) == ("never-called", "fail", {13})


class Evil:
    def __init__(self, action: Callable[..., object], *arguments: object) -> None:
        self.action, self.arguments = action, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.action, self.arguments


def hostile(folder: Path) -> Iterator[tuple[str, bytes, str]]:
    """Yield (name, bytes, expected text)."""
    touch = Evil(os.system, f"touch {folder}/ran")
    for protocol in range(5):
        yield f"code{protocol}_rank_1", pickle.dumps({"entries": [touch]}, protocol), "would run code: posix.system"
    yield "cut_code_rank_1", pickle.dumps({"entries": [1, 2, 3], "more": touch}, 2)[:-9], "would run code: posix.system"
    yield "extension_rank_1", b"\x80\x02\x82\x01.", "not a readable pickle"
    yield "persistent_rank_1", b"\x80\x02X\x01\x00\x00\x00aQ.", "refers to objects outside"
    yield "deep_rank_1", b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", ""
    yield "hashed_rank_1", b"\x80\x02}" + b")" + b"\x85" * 500_000 + b"Ns.", ""
    yield "itself_rank_1", b"\x80\x02}q\x00X\x07\x00\x00\x00entriesh\x00s.", "entries is not a list"
    yield "claims_text_rank_1", b"\x80\x04\x8d" + (2**31).to_bytes(8, "little") + b"a.", ""
    yield "claims_bytes_rank_1", b"\x80\x05\x96" + (2**33).to_bytes(8, "little") + b"a.", ""
    yield "claims_memo_rank_1", b"\x80\x02]r\xff\xff\xff\xff.", ""
    yield (
        "laughs_rank_1",
        b"\x80\x02]q\x000" + b"".join(b"]q%c(h%ch%ce0" % (n + 1, n, n) for n in range(60)) + b"h\x3c.",
        "",
    )
    yield "json_rank_1", b'{"entries":' + b"[" * 200_000, ""


def test_nothing_in_a_dump_is_executed(sets: Path, tmp_path: Path) -> None:
    for number, (name, data, said) in enumerate(hostile(tmp_path)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_bytes(data)
        (folder / "rank_0").write_bytes((sets / "skip_2" / "rank_0").read_bytes())
        node = read(folder)
        assert len(node.dumps) == 1, name
        (unread,) = node.unread
        assert said in unread.why, (name, unread)
    assert not (tmp_path / "ran").exists()
    done = distdiag("flight-recorder", str(tmp_path / "2"))
    assert "code2_rank_1 is refused: it would run code: posix.system" in " ".join(done.out.split())


def test_damaged_dumps_are_survived(sets: Path, tmp_path: Path) -> None:
    original = (sets / "order" / "rank_1").read_bytes()
    file = tmp_path / "rank_1"
    (tmp_path / "rank_0").write_bytes((sets / "order" / "rank_0").read_bytes())

    def cases() -> Iterator[tuple[str, list[str], Callable[[], None]]]:
        for name, data in damaged(original, 10):
            yield name, ["flight-recorder", str(tmp_path), "--json"], lambda data=data: file.write_bytes(data)  # type: ignore[misc]

    assert_survived(run_each(cases()), 10)


def test_many_damaged_dumps_are_read_and_judged_without_harm(sets: Path, tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes((sets / "order" / "rank_0").read_bytes())
    file = tmp_path / "rank_1"
    originals = [sets / "order" / "rank_1", sets / "ring_of_groups" / "rank_1"]
    for original in originals:
        for name, data in damaged(original.read_bytes(), seed=7):
            file.write_bytes(data)
            node = read(tmp_path)
            assert len(node.dumps) + len(node.unread) <= 2, (original, name)
            assert not [unread for unread in node.unread if "crashed" in unread.why], (original, name)
            judge(node)


OLDER = {
    "2.0": {"pg_status", "timeout_ms", "thread_id", "thread_name", "comm_lib_version"},
    "2.3": {"thread_id", "thread_name", "comm_lib_version"},
    "2.7": {"comm_lib_version"},
    "2.10": set[str](),
}
"""By version of the format: what dumps of that version do not have yet."""


def as_nccl(document: dict[str, Any], version: str, without: set[str]) -> dict[str, Any]:
    """What NCCL's recorder would have written of the same calls, in an older format."""
    entries = [
        {
            key: value
            for key, value in {
                **entry,
                "profiling_name": entry["profiling_name"].replace("gloo:", "nccl:"),
                "state": "completed" if entry["retired"] else "started",
            }.items()
            if key not in without
        }
        for entry in document["entries"]
    ]
    kept = ("pg_config", "pg_status", "comm_lib_version")
    return {
        "version": version,
        **{key: document[key] for key in kept if key in document and key not in without},
        "entries": entries,
    }


@pytest.mark.parametrize("version", OLDER)
def test_formats_of_torch_2_5_and_later_are_read(version: str, sets: Path, tmp_path: Path) -> None:
    for rank in range(4):
        document = pickle.loads((sets / "skip_2" / f"rank_{rank}").read_bytes())
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(as_nccl(document, version, OLDER[version]), protocol=2))
    assert blamed(judge(read(tmp_path))) == ("never-called", "fail", {2})


def test_dumps_of_torch_2_3_and_older_are_refused_and_blame_no_rank(sets: Path, tmp_path: Path) -> None:
    for rank in range(4):
        document = pickle.loads((sets / "skip_2" / f"rank_{rank}").read_bytes())
        entries = [
            {("seq_id" if key == "collective_seq_id" else key): value for key, value in entry.items()}
            for entry in document["entries"]
        ]
        old = {"version": "1.5", "pg_config": document["pg_config"], "entries": entries}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(old, protocol=2))
    node = read(tmp_path)
    assert not node.dumps
    assert "entries can be read (format 1.5; torch 2.5 and later write 2.x)" in node.unread[0].why
    assert judge(node).verdict == "unknown"


def test_a_rank_that_is_late_for_a_moment_only_is_not_blamed(sets: Path, tmp_path: Path) -> None:
    """The same rank in every call, but all calls within 50 ms: a busy machine does that."""
    for rank in range(4):
        document = pickle.loads((sets / "late" / f"rank_{rank}").read_bytes())
        for entry in document["entries"]:
            entry["time_created_ns"] = 10**18 + entry["time_created_ns"] // 40
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    assert blamed(judge(read(tmp_path))) == ("all-ended", "unknown", set())


def test_a_rank_with_unreadable_entries_is_not_blamed_for_what_they_may_hold(sets: Path, tmp_path: Path) -> None:
    for rank in range(4):
        document = pickle.loads((sets / "all_ended" / f"rank_{rank}").read_bytes())
        if rank == 1:
            for entry in document["entries"][-3:]:
                entry["profiling_name"] = None
        elif rank in (0, 2, 3):
            document["entries"][-1]["retired"] = False
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    report = judge(read(tmp_path))
    assert report.verdict == "unknown"
    assert "flight-recorder.unreadable" in {finding.id for finding in report.findings}


def test_what_nccl_retired_before_the_device_ended_it_has_not_ended(sets: Path, tmp_path: Path) -> None:
    """The watchdog of ranks 0 and 1 timed out and retired the call that rank 2 never made; rank 3 still waits in it."""
    for rank in range(4):
        document = as_nccl(pickle.loads((sets / "skip_2" / f"rank_{rank}").read_bytes()), "2.10", set())
        if rank in (0, 1):
            document["entries"][-1]["retired"] = True
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    assert blamed(judge(read(tmp_path))) == ("never-called", "fail", {2})


def test_entries_of_nccl2_which_reports_only_what_has_completed_are_read(sets: Path, tmp_path: Path) -> None:
    """torch 2.15 records its default nccl backend by a hook: "scheduled" until completed, "started" never."""
    for rank in range(4):
        document = as_nccl(pickle.loads((sets / "skip_2" / f"rank_{rank}").read_bytes()), "2.10", set())
        for entry in document["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("nccl:", "nccl2:")
            entry["state"] = "completed" if entry["retired"] else "scheduled"
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    assert blamed(judge(read(tmp_path))) == ("never-called", "fail", {2})


def calls_of(rank: int, ended: int, *waiting: str) -> dict[str, Any]:
    """A dump of NCCL: N all_reduces of the world have ended, then one of each of these groups has not."""
    groups = {"0": [0, 1, 2], "a": [0, 1], "b": [1, 2], "c": [0, 2]}
    called = [("0", "completed")] * ended + [(name, "started") for name in waiting]
    entries = [
        {
            "frames": [{"name": "step", "filename": "/job/train.py", "line": 7}],
            "record_id": number,
            "pg_id": 0,
            "process_group": (name, name),
            "collective_seq_id": number + 1 if name == "0" else 1,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": 10**18 + number,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[4]],
            "output_dtypes": ["Float"],
            "state": state,
            "retired": state == "completed",
            "timeout_ms": 600000,
            "is_p2p": False,
        }
        for number, (name, state) in enumerate(called)
    ]
    config = {name: {"name": name, "desc": name, "ranks": str(ranks)} for name, ranks in groups.items()}
    return {"version": "2.10", "pg_config": config, "entries": entries}


def with_p2p(document: dict[str, Any], **states: str) -> dict[str, Any]:
    """Add calls of send and recv, named send_FROM_TO and recv_TO_FROM, to a dump of NCCL."""
    for number, (name, state) in enumerate(states.items(), 1):
        operation, here, there = name.split("_")
        arrow = "->" if operation == "send" else "<-"
        last = document["entries"][-1]
        call = {"p2p_seq_id": number, "is_p2p": True, "profiling_name": f"nccl:{operation} {here}{arrow}{there}"}
        call |= {"record_id": last["record_id"] + 1, "state": state, "retired": state == "completed"}
        document["entries"].append({**last, **call})
    return document


def test_a_rank_that_sends_nothing_on_is_named(tmp_path: Path) -> None:
    report = judged(
        tmp_path,
        with_p2p(calls_of(0, 3), send_0_1="completed"),
        with_p2p(calls_of(1, 3), recv_1_0="completed"),
        with_p2p(calls_of(2, 3), recv_2_1="started"),
    )
    assert blamed(report) == ("no-counterpart", "fail", {1})


def test_each_receives_before_it_sends(tmp_path: Path) -> None:
    received = ({"recv_0_2": "started"}, {"recv_1_0": "started"}, {"recv_2_1": "started"})
    report = judged(tmp_path, *(with_p2p(calls_of(rank, 3), **calls) for rank, calls in enumerate(received)))
    assert blamed(report) == ("deadlock", "fail", {0, 1, 2})


def judged(folder: Path, *documents: dict[str, Any]) -> Report[FlightRecorder]:
    for rank, document in enumerate(documents):
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    return judge(read(folder))


def test_three_groups_called_in_a_round_are_a_deadlock(tmp_path: Path) -> None:
    """NCCL's calls return at once, so every rank has called both of its groups."""
    report = judged(tmp_path, calls_of(0, 3, "a", "c"), calls_of(1, 3, "b", "a"), calls_of(2, 3, "c", "b"))
    assert blamed(report) == ("deadlock", "fail", {0, 1, 2})


def test_a_dump_of_an_earlier_run_is_no_proof(tmp_path: Path) -> None:
    """The peers of rank 2 finished a collective that needs its call, and its dump ends before."""
    for ended, waiting in ((5, ("0",)), (5, ()), (60, ("0",))):
        report = judged(tmp_path, calls_of(0, 90, "0"), calls_of(1, 90, "0"), calls_of(2, ended, *waiting))
        assert blamed(report) == ("no-dump", "unknown", {2})
        assert "rank 2 left an outdated dump" in report.findings[0].title


def test_dumps_of_different_moments_blame_nobody_for_sure(tmp_path: Path) -> None:
    report = judged(tmp_path, *(calls_of(rank, 50 + rank, "0") for rank in range(3)))
    assert report.verdict == "unknown"


def test_a_device_that_did_not_finish_what_its_peers_finished_is_stuck(tmp_path: Path) -> None:
    report = judged(tmp_path, calls_of(0, 9, "0"), calls_of(1, 8, "0"), calls_of(2, 9, "0"))
    assert blamed(report) == ("device-stuck", "fail", {1})


def test_a_rank_that_exited_is_proven_by_the_pipe_that_it_no_longer_reads(sets: Path) -> None:
    node = read(*(sets / "skip_2" / f"rank_{rank}" for rank in (0, 1, 3)))
    for answer, verdict in (("no process reads it", "fail"), ("no dump arrived", "unknown")):
        asked = replace(node, pipes=(Pipe("/tmp/fr_2.pipe", 2, answer),))
        assert blamed(judge(asked))[1:] == (verdict, {2})


def test_a_rank_that_is_a_moment_late_in_a_running_job_is_not_blamed(sets: Path) -> None:
    node = read(sets / "skip_2")
    running = replace(REQUEST, trigger=True)
    assert blamed(diagnose(running, Gathered(facts=[node])))[:2] == ("never-called", "unknown")
    later = replace(node, dumps=tuple(replace(dump, dumped_s=dump.dumped_s + 60) for dump in node.dumps))
    assert blamed(diagnose(running, Gathered(facts=[later]))) == ("never-called", "fail", {2})


def test_the_same_report_comes_from_saved_facts(sets: Path, tmp_path: Path) -> None:
    first = distdiag("flight-recorder", str(sets / "order"), "--save", str(tmp_path), "--json")
    second = distdiag("flight-recorder", "--from", str(tmp_path), "--json")
    assert (second.code, second.out) == (first.code, first.out)
    assert first.report["verdict"] == "fail"


def test_how_names_the_variables_of_this_torch_first() -> None:
    done = distdiag("flight-recorder", "--how")
    assert done.code == 0
    assert done.out.index("TORCH_FR_BUFFER_SIZE") < done.out.index("TORCH_NCCL_TRACE_BUFFER_SIZE")


def test_no_dumps_is_wrong_usage_or_unknown_and_never_fine(tmp_path: Path) -> None:
    assert distdiag("flight-recorder").code == 2
    assert distdiag("flight-recorder", str(tmp_path)).code == 3
    assert distdiag("flight-recorder", str(tmp_path / "missing")).code == 2
    for rank in range(9):
        (tmp_path / f"rank_{rank}").write_bytes(b'{"entries": [' + b" " * rank)
    (only,) = judge(read(tmp_path)).findings
    assert (only.id, only.level, "8 more files likewise" in only.title) == (
        "flight-recorder.truncated",
        "unknown",
        True,
    )


_HANGS = """
import sys, threading
import torch
import torch.distributed as dist
import distdiag
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(folder + "/.store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
distdiag.dump_flight_recorder(folder, when_stuck_s=3600)
dist.all_reduce(torch.ones(1))
print("ready", flush=True)
dist.barrier() if rank else threading.Event().wait()
"""


def test_a_running_job_is_asked_for_its_dumps_by_pipes(tmp_path: Path) -> None:
    """The ranks hang, and have written nothing yet; each reads a pipe beside the place of its dump."""
    dumps, program = tmp_path / "dumps", tmp_path / "hangs.py"
    program.write_text(_HANGS)
    dumps.mkdir()
    env, jobs = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    for rank in range(2):
        command = [sys.executable, str(program), str(dumps), str(rank)]
        with (tmp_path / f"said-{rank}").open("w") as said:
            jobs.append(support_torch.start(command, env, output=said) or subprocess.Popen(command, stdout=said))
    try:
        said_by = [tmp_path / f"said-{rank}" for rank in range(2)]
        wait_until(lambda: all("ready" in path.read_text() for path in said_by), 110, lambda: said_by[0].read_text())
        assert not (dumps / "rank_0").exists()
        for _ in range(5):  # on a busy machine rank 1 may be on its way to the barrier
            done = distdiag("flight-recorder", "--trigger", str(dumps), "--json")
            found = done.report["findings"][0]
            if found["level"] == "fail":
                break
        assert (found["id"], found["where"]["ranks"]) == ("flight-recorder.never-called", [0]), done.out
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    again = distdiag("flight-recorder", "--trigger", str(dumps), "--json", "--wait", "1")
    assert {one["id"] for one in again.report["findings"]} >= {"flight-recorder.no-answer"}


def test_the_page_shows_the_stuck_rank_in_a_browser_and_asks_for_nothing(sets: Path, tmp_path: Path) -> None:
    from browser import chromium
    from selenium.webdriver.common.by import By

    need("chromium", "chromedriver")
    page = tmp_path / "page.html"
    assert distdiag("flight-recorder", str(sets / "skip_2"), "--html", str(page)).code == 1
    with chromium() as driver:
        driver.get(page.as_uri())
        assert driver.find_element(By.TAG_NAME, "h1").text.startswith("FAIL")
        assert "rank 2 never called all_reduce #7 of default_pg" in driver.find_element(By.TAG_NAME, "h1").text
        row = driver.find_element(By.CSS_SELECTOR, ".timeline tbody tr")  # the stuck rank comes first
        assert row.find_element(By.CSS_SELECTOR, "th .rank").text == "2"
        assert "idle, stuck" in row.text
        box = driver.find_element(By.CSS_SELECTOR, ".timeline")
        newest = row.find_elements(By.CSS_SELECTOR, ".call")[-1]
        assert newest.rect["x"] + newest.rect["width"] <= box.rect["x"] + box.rect["width"]
        waiting = driver.find_elements(By.CSS_SELECTOR, ".call.open")
        assert {call.text for call in waiting} == {"all_reduce #7 (scheduled)"}
        assert len(waiting) == 3
        assert waiting[0].value_of_css_property("border-top-style") == "dashed"
        log = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]  # type: ignore[no-untyped-call]
        asked = [one["params"]["request"]["url"] for one in log if one["method"] == "Network.requestWillBeSent"]
        assert asked == [page.as_uri()]
        assert driver.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_what_a_dump_says_is_text_on_the_page(sets: Path) -> None:
    node = read(sets / "skip_2")
    evil = [replace(dump, groups=((dump.groups[0][0], "<script>alert(1)</script>", "0-3"),)) for dump in node.dumps]
    page = make_page(output.document(judge(replace(node, dumps=tuple(evil))), strict=False))
    assert "<script>alert" not in page
    assert "\\u003cscript\\u003ealert(1)" in page
