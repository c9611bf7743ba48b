"""distdiag run around real jobs below torchrun: what is the job's stays so, and the first failure is named."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import PROGRAM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PROGRAMS = Path(__file__).parent.parent / "programs"
_TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node"]
_ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
_LATE_S = 60.0


def _launch(options: Sequence[str], job: Sequence[str], ranks: int = 3) -> subprocess.Popen[bytes]:
    command = [PROGRAM, "run", *options, "--", *_TORCHRUN, str(ranks), *job]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_ENV, cwd=_PROGRAMS, start_new_session=True
    )


def _report(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("report.*.json")
    document = json.loads(path.read_text())
    assert isinstance(document, dict)
    return document


def _events(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    for file in folder.glob("output.*/events.jsonl"):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == kind:
                yield event


def _wait_for(happened: Any) -> None:  # noqa: ANN401 - a callable
    deadline = time.monotonic() + _LATE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("kind", "statuses", "words"),
    [("raise", {1, -6}, "ValueError: label 1000"), ("kill", {-9}, "SIGKILL")],  # -6: Gloo's threads at the exit, rarely
)
def test_the_rank_that_failed_first_is_named(tmp_path: Path, kind: str, statuses: set[int], words: str) -> None:
    job = _launch(["--save", str(tmp_path)], ["fails_in_many_ways.py", kind])
    _, err = job.communicate(timeout=_LATE_S)
    assert job.returncode == 1
    report = _report(tmp_path)
    finding = report["findings"][0]
    assert (finding["level"], finding["where"]["ranks"]) == ("fail", [2])
    assert words in finding["title"]
    assert [line for line in finding["evidence"] if line.startswith("order of deaths: rank 2 ")]
    assert report["data"]["ranks"][0]["pid"]
    assert {rank["rank"]: rank["status"] for rank in report["data"]["ranks"]}[2] in statuses
    assert finding["title"].split(":")[0].encode() in b" ".join(err.split())
    again = subprocess.run([PROGRAM, "run", "--from", tmp_path, "--json"], capture_output=True, check=False)
    assert again.returncode == 1
    assert json.loads(again.stdout)["findings"] == report["findings"]


def test_a_healthy_job_writes_the_same_and_ends_the_same(tmp_path: Path) -> None:
    job = ["recorded_healthy.py"]
    plain = subprocess.run([*_TORCHRUN, "3", *job], capture_output=True, env=_ENV, cwd=_PROGRAMS, check=False)
    under = _launch([], job)
    out, err = under.communicate(timeout=_LATE_S)
    assert (under.returncode, out, err) == (plain.returncode, plain.stdout, plain.stderr)
    assert out.count(b"\n") == 6


def test_stdout_and_stderr_that_are_one_file_keep_their_order() -> None:
    code = "import os\nfor i in range(2000): os.write(1, b'o%d\\n' % i); os.write(2, b'e%d\\n' % i)"
    job = [PROGRAM, "run", "--", sys.executable, "-c", code]
    done = subprocess.run(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    assert done.stdout == b"".join(b"o%d\ne%d\n" % (i, i) for i in range(2000))


@pytest.mark.parametrize(("code", "status"), [("exit 7", 7), ("kill -9 $$", -9)])
def test_the_exit_status_is_the_jobs(code: str, status: int) -> None:
    done = subprocess.run([PROGRAM, "run", "--", "sh", "-c", code], capture_output=True, check=False)
    assert done.returncode == status


def test_stdin_is_the_jobs_and_a_terminal_stays_one() -> None:
    done = subprocess.run([PROGRAM, "run", "--", "cat"], input=b"words", capture_output=True, check=True)
    assert done.stdout == b"words"
    code = "import os; print(os.isatty(0), os.isatty(1), os.isatty(2))"
    line = f"{PROGRAM} run -- {sys.executable} -c '{code}'"
    typed = subprocess.run(["script", "-qec", line, "/dev/null"], capture_output=True, check=True)
    assert b"True True True" in typed.stdout


def test_a_stalled_job_is_diagnosed_and_ended(tmp_path: Path) -> None:
    options = ["--stall", "5", "--on-stall", "kill", "--save", str(tmp_path)]
    job = _launch(options, ["recorded_healthy.py", "stall"])
    job.communicate(timeout=2 * _LATE_S)
    assert job.returncode == 1
    report = _report(tmp_path)
    assert report["findings"][0]["id"] == "run.stalled"
    assert report["findings"][0]["where"]["ranks"] == [2]
    assert "--on-stall kill" in report["summary"]
    # While the ranks still import torch, a busy machine may make them silent for so long: that is no hang.
    *early, picture = report["data"]["pictures"]
    assert (picture["reason"], picture["verdict"]) == ("stall", "fail")
    assert not [picture for picture in early if picture["verdict"] == "fail"]


def test_the_job_and_its_record_outlive_distdiag(tmp_path: Path) -> None:
    job = _launch(["--save", str(tmp_path)], ["recorded_healthy.py", "waits", str(tmp_path / "go")])
    _wait_for(lambda: len(list(_events(tmp_path, "start"))) == 3)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    (tmp_path / "go").touch()
    out, _ = job.communicate(timeout=_LATE_S)
    assert out.count(b"\n") == 6
    _wait_for(lambda: len(list(_events(tmp_path, "end"))) == 3)
    assert [event["status"] for event in _events(tmp_path, "end")] == [0, 0, 0]
    assert _kept(tmp_path, 0) == out


def test_sigterm_reaches_the_job_after_the_picture(tmp_path: Path) -> None:
    job = _launch(["--save", str(tmp_path)], ["recorded_healthy.py", "stall"])
    _wait_for(lambda: b"step 4" in _kept(tmp_path, 0))
    job.terminate()
    job.communicate(timeout=_LATE_S)
    assert job.returncode
    report = _report(tmp_path)
    assert report["findings"][0]["id"] == "run.terminated"
    (picture,) = report["data"]["pictures"]
    assert picture["reason"] == "SIGTERM"
    assert picture["summary"]
    assert {rank["status"] for rank in report["data"]["ranks"]} == {-15}


def _kept(folder: Path, rank: int) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob(f"output.*/rank{rank}.g0.stdout.log"))


def test_switches_are_printed_and_reach_the_ranks_that_are_named() -> None:
    switches = ["--sync", "--gpus", "none", "--check-collectives", "--recorder", "--nccl-debug", "init"]
    printed = subprocess.run([PROGRAM, "run", *switches, "--print-env"], capture_output=True, text=True, check=True)
    values = dict(re.findall(r"^export (\w+)=(\S+)", printed.stdout, re.MULTILINE))
    assert values["CUDA_LAUNCH_BLOCKING"] == "1"
    assert values["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert values["NCCL_DEBUG_SUBSYS"] == "INIT"
    job = _launch(["--sync", "--ranks", "1"], ["recorded_healthy.py", "environment"])
    out, _ = job.communicate(timeout=_LATE_S)
    assert sorted(re.findall(rb"sync \d (?:None|1)", out)) == [b"sync 0 None", b"sync 1 1", b"sync 2 None"]
