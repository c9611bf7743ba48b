"""Facts that were saved and are damaged: each reader of --from, --compare and of files of frames keeps the contract.

Where several files are given, a damaged one costs its own row; the good one is judged.
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fuzz import PER_READER, assert_survived, damaged, misleading, run_calls, run_each
from pyspy_facts import REQUEST, job, loads, twice, waits
from support_warm import distdiag, enough_of_torch

from distdiag.commands.allreduce_bench import earlier as baselines
from distdiag.errors import DistdiagError
from distdiag.output import emit
from distdiag.saved_facts import Gathered, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(max(300, PER_READER))
NCCL_TESTS = Path(__file__).parents[2] / "recorded/nccl_tests"
DUMP = """\
Process {pid}: python -u train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    train (train.py:40)
        Arguments:
            step: 7
    <module> (train.py:90)
Thread {other} (active+gil): "pin_memory (1)"
    run (threading.py:982)
"""


def stacks() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save(folder, "pyspy-all", REQUEST, Gathered(facts=[job(twice(waits()), twice(loads()))]))
        (file,) = Path(folder).iterdir()
        return file.read_bytes()


def py_spy_json() -> bytes:
    frame = {"name": "all_reduce", "filename": "c10d.py", "module": None, "short_filename": None, "line": 3252}
    local = {"name": "step", "addr": 1, "arg": True, "repr": "7"}
    thread = {"pid": 5, "thread_id": 139, "thread_name": "MainThread", "os_thread_id": 5, "active": True}
    frames = [{**frame, "locals": [local]}, {**frame, "name": "train", "locals": None}]
    return json.dumps([{**thread, "owns_gil": False, "frames": frames}]).encode()


def results() -> bytes:
    row = {"op": "all_reduce", "size_bytes": 1024, "dtype": "float32", "in_place": True, "wrong": 0}
    times = {"p50": 0.001, "p99": 0.002, "min": 0.001, "max": 0.002, "mean": 0.001, "iqr": 0.0001}
    rows = [{**row, "size_bytes": size, "time_s": times, "busbw_bytes_per_s": 1e9} for size in (1024, 2048, 4096)]
    data = {"results": rows, "world_size": 4, "device": "cpu", "device_name": "cpu", "stat": "p50"}
    head = {"schema": "distdiag/1", "version": "0.1.0", "command": "allreduce-bench", "verdict": "ok"}
    return json.dumps({**head, "data": data}).encode()


def lies(original: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield damaged bytes and, for JSON, alternately well-formed false facts."""
    dice = random.Random(20)
    for number, (how, data) in enumerate(damaged(original)):
        if number % 2 and original.startswith((b"{", b"[")) and b"\n" not in original.strip():
            yield f"{number}: misleading", misleading(original, dice)
        else:
            yield how, data


def files(
    folder: Path, name: str, original: bytes, *command: str
) -> Iterator[tuple[str, list[str], Callable[[], None]]]:
    """Give each damaged file to a command."""
    for how, data in lies(original):
        yield how, [*command, str(folder / name)], partial(write, folder / name, data)


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


STACKS = {
    "n2.json": stacks,
    "hang_rank1.txt": lambda: DUMP.format(pid=11, other=12).encode(),
    "labelled.out": lambda: b"".join(b"1: %s\n" % line for line in DUMP.format(pid=11, other=12).encode().splitlines()),
    "dump.json": py_spy_json,
}


@pytest.mark.parametrize("name", STACKS)
def test_a_damaged_file_of_stacks_is_its_own_row(name: str, tmp_path: Path) -> None:
    (tmp_path / "n1.json").write_bytes(stacks())
    command = ("pyspy-all", "--verbose", "--from", str(tmp_path / "n1.json"), "--from")
    outcomes = run_each(files(tmp_path, name, STACKS[name](), *command))
    assert_survived(outcomes)
    assert 2 not in {one.code for one in outcomes}, "the good file was not judged"


@pytest.fixture(scope="module")
def cuda_facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("facts")
    distdiag("cuda-env", "--save", str(folder))
    (file,) = folder.iterdir()
    return file


def test_a_damaged_file_of_cuda_facts_is_its_own_row(cuda_facts: Path, tmp_path: Path) -> None:
    command = ("cuda-env", "--verbose", "--from", str(cuda_facts), "--from")
    outcomes = run_each(files(tmp_path, "other.json", cuda_facts.read_bytes(), *command))
    assert_survived(outcomes)
    assert 2 not in {one.code for one in outcomes}, "the good file was not judged"


def test_a_damaged_file_of_doctor_s_facts_is_its_own_row(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    distdiag("doctor", "--save", str(kept))
    (file,) = kept.iterdir()
    outcomes = run_each(files(tmp_path, "other.json", file.read_bytes(), "doctor", "--from", str(file), "--from"))
    # A damaged file may claim that its run was interrupted: the status is then 130, as for that run.
    assert_survived([replace(outcome, code=3) if outcome.code == 130 else outcome for outcome in outcomes])
    assert 2 not in {outcome.code for outcome in outcomes}, "the good file was not judged"
    (tmp_path / "bad.json").write_bytes(b"")
    found = distdiag("doctor", "--json", "--from", str(file), "--from", str(tmp_path / "bad.json"))
    assert (found.code, [row["fit"] for row in found.report["data"]["nodes"]]) == (3, ["fit"])


def test_a_damaged_file_is_named_with_what_is_wrong(cuda_facts: Path, tmp_path: Path) -> None:
    for number, bad in enumerate((b"[" * 10**6, b'{"schema": "\xff"}', b"", b'{"schema": "\\ud800"}')):
        path = tmp_path / f"bad{number}.json"
        path.write_bytes(bad)
        found = distdiag("cuda-env", "--json", "--from", str(cuda_facts), "--from", str(path))
        (finding,) = [one for one in found.report["findings"] if path.name in one["title"]]
        assert (finding["level"], "was not written by --save" in finding["title"]) == ("unknown", True)
        assert found.report["data"]["nodes"] or found.report["data"]["host"], "the good one is judged"


def test_a_damaged_record_of_ranks_is_refused(tmp_path: Path) -> None:
    torch = enough_of_torch(tmp_path)
    ranks = ("--nproc", "2", "--device", "cpu", "--inject", "kill:1@connect")
    distdiag("gpu-test", *ranks, "--save", str(tmp_path / "kept"), env=torch)
    (file,) = (tmp_path / "kept").iterdir()
    assert_survived(run_each(files(tmp_path, "other.json", file.read_bytes(), "gpu-test", "--from")))


COMPARED = {
    "ours": results,
    **{path.name: path.read_bytes for path in sorted(NCCL_TESTS.glob("*.json"))[:1]},
    **{path.name: path.read_bytes for path in sorted(NCCL_TESTS.glob("*.txt"))[:2]},
}


def read_and_show(path: Path, data: bytes) -> None:
    """Read an earlier run as --compare does, and compare it with itself; no ranks are started for it."""
    from distdiag.commands.allreduce_bench.findings import compare, comparison_findings, differs
    from distdiag.commands.allreduce_bench.types import Request, SizeResult, Times

    path.write_bytes(data)
    try:
        earlier = baselines.read(str(path))
    except DistdiagError as error:
        emit(f"{error}\n")
        raise SystemExit(error.exit_code) from error
    rows = [
        SizeResult(
            op=row.op,
            size_bytes=row.size_bytes,
            count=1,
            dtype=row.dtype,
            in_place=bool(row.in_place),
            iterations=20,
            time_s=Times(p50=1e-3, p99=1e-3, min=1e-3, max=1e-3, mean=1e-3, iqr=1e-5),
            algbw_bytes_per_s=1e9,
            busbw_bytes_per_s=1e9,
            wrong=0,
            skipped="",
        )
        for row in earlier.rows
    ]
    found = comparison_findings(Request(), earlier, differs(earlier, 4, "cpu"), compare(earlier, rows))
    emit("".join(f"{one.title} {one.detail}\n" for one in found))
    raise SystemExit(0)


@pytest.mark.parametrize("name", COMPARED)
def test_a_damaged_earlier_run_is_refused_or_compared(name: str, tmp_path: Path) -> None:
    cases = ((how, partial(read_and_show, tmp_path / "earlier", data)) for how, data in lies(COMPARED[name]()))
    assert_survived(run_calls(cases))


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames of a real model, of which a batch grows and another overflows."""
    import torch
    from torch import nn

    from distdiag.training.overflow.detector import DebugUnderflowOverflow
    from distdiag.training.overflow.report import OverflowDetected

    path = tmp_path_factory.mktemp("frames") / "frames.jsonl"
    first = nn.Linear(8, 8)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 8)).half()
    with DebugUnderflowOverflow(model, save=str(path), trace_batch_nums=[0, 1]):
        model(torch.ones(2, 8).half())
        model(torch.ones(2, 8).half() * 1000)
        first.weight.data.mul_(60000)
        with pytest.raises(OverflowDetected):
            model(torch.ones(2, 8).half() * 100)
    return path


def test_damaged_frames_are_shown_as_far_as_they_go(frames: Path, tmp_path: Path) -> None:
    cases = files(tmp_path, "bad.jsonl", frames.read_bytes(), "overflow", "show", str(frames))
    assert_survived(run_each(cases))


@pytest.mark.parametrize("command", [("cuda-env", "--from"), ("overflow", "show"), ("floatcmp",)])
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_no_name_of_a_file_commands_the_terminal(
    command: tuple[str, ...], as_json: tuple[str, ...], tmp_path: Path
) -> None:
    bad = tmp_path / "a\x1b]0;owned\x07\x1b[8m\udcff.json"
    for exists in (False, True):
        if exists:
            bad.write_text("hello")
        result = distdiag(*command, str(bad), *([str(bad)] if command == ("floatcmp",) else []), *as_json)
        assert result.code in (2, 3)
        both = result.out + result.err
        assert "owned" in both
        assert not set(both) & {"\x1b", "\x07"}, both


def test_a_usage_error_commands_no_terminal() -> None:
    for arguments in (["ports", "--n\x1b[2J\udcff"], ["trace\x1b[2J"], ["gpu-test", "--nproc", "\x1b[2J\udc80"]):
        for as_json in ([], ["--json"]):
            result = distdiag(*arguments, *as_json)
            assert (result.code, "Traceback" in result.err) == (2, False)
            assert "\x1b" not in result.out + result.err
