"""distdiag run around real jobs under torchrun: the job's behaviour is unchanged, and the first failure is named."""

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
from support import PROGRAM, need_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PROGRAMS = Path(__file__).parents[2] / "programs"
_TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node"]
_ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
_LATE_S = 180.0
pytestmark = pytest.mark.timeout(400)


def _launch(options: Sequence[str], job: Sequence[str], ranks: int = 3) -> subprocess.Popen[bytes]:
    command = [PROGRAM, "run", *options, "--", *_TORCHRUN, str(ranks), *job]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_ENV, cwd=_PROGRAMS, start_new_session=True
    )


def _writes(folder: Path) -> list[str]:
    """Return a job whose ranks only write; they meet in `folder`."""
    (folder / "meet").mkdir()
    return ["ranks_without_torch.py", str(folder / "meet")]


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
def test_the_rank_that_failed_first_is_named_and_where_the_others_were(
    tmp_path: Path, kind: str, statuses: set[int], words: str
) -> None:
    job = _launch(["--save", str(tmp_path)], ["fails_in_many_ways.py", kind])
    _, err = job.communicate(timeout=_LATE_S)
    assert job.returncode == 1
    report = _report(tmp_path)
    finding = report["findings"][0]
    assert (finding["level"], finding["where"]["ranks"]) == ("fail", [2])
    assert words in finding["title"]
    names_another = [line for line in finding["evidence"] if line.startswith("the launcher names rank")]
    assert names_another or re.search(rb"Root Cause.*?\n  rank +: 2 ", err, re.DOTALL)
    assert [line for line in finding["evidence"] if line.startswith("where the others were: rank")]
    (stacks,) = report["data"]["stacks"]
    assert [stack["rank"] for stack in stacks["ranks"]] == [0, 1]
    assert report["data"]["ranks"][0]["pid"]
    assert {rank["rank"]: rank["status"] for rank in report["data"]["ranks"]}[2] in statuses
    assert finding["title"].split(":")[0].encode() in b" ".join(err.split())
    again = subprocess.run([PROGRAM, "run", "--from", tmp_path, "--json"], capture_output=True, check=False)
    assert again.returncode == 1
    assert json.loads(again.stdout)["findings"] == report["findings"]


_LAUNCHER = """
import os, subprocess, sys, time
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[1]],
         env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
         for rank in range(2)]
while ranks[1].poll() is None: time.sleep(0.1)
ranks[0].terminate()
sys.exit(ranks[1].returncode if ranks[0].wait(60) == 0 else 99)
"""
_SAVES_ON_SIGTERM = """
import os, signal, sys, threading, time
if os.environ["RANK"] == "1":
    while not os.path.exists(os.environ["READY"]): time.sleep(0.05)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(0)))
for _ in range(8): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
open(os.environ["READY"], "w").close()
time.sleep(300)
"""


def test_stacks_are_read_and_then_a_handler_of_sigterm_runs(tmp_path: Path) -> None:
    job = [PROGRAM, "run", "--save", str(tmp_path), sys.executable, "-c", _LAUNCHER, _SAVES_ON_SIGTERM]
    env = {**os.environ, "READY": str(tmp_path / "ready")}
    done = subprocess.run(job, capture_output=True, timeout=_LATE_S, check=False, env=env)
    assert (done.returncode, done.stdout) == (3, b"saved\n")
    (stacks,) = _report(tmp_path)["data"]["stacks"]
    assert [(stack["rank"], stack["frames"][0]["function"]) for stack in stacks["ranks"]] == [(0, "<module>")]
    dumps = f"{tmp_path}/stacks.{os.uname().nodename}"
    shown = subprocess.run([PROGRAM, "pyspy-all", "--from", dumps], capture_output=True, check=False)
    assert b"rank 0" in shown.stdout


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ((), 2, "no command given"),
        (("--", "torchrn", "train.py"), 127, "torchrn: command not found"),
        (("--on-stall", "wait", "true"), 2, "--on-stall 'wait' is not known"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], status: int, message: str) -> None:
    done = subprocess.run([PROGRAM, "run", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(f"distdiag run: {message}")


def test_the_first_word_that_is_no_option_begins_the_job() -> None:
    code = "import sys; print(sys.argv[1:])"
    job = [PROGRAM, "run", "--stall", "0", sys.executable, "-c", code, "--save", "x", "--", "--json"]
    done = subprocess.run(job, capture_output=True, text=True, check=True)
    assert done.stdout == "['--save', 'x', '--', '--json']\n"


def test_a_healthy_job_writes_the_same_and_ends_the_same(tmp_path: Path) -> None:
    job = ["recorded_healthy.py"]
    plain = subprocess.run([*_TORCHRUN, "2", *job], capture_output=True, env=_ENV, cwd=_PROGRAMS, check=False)
    under = _launch([], job, ranks=2)
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


def test_what_a_rank_said_before_it_left_is_shown(tmp_path: Path) -> None:
    """sys.exit("words") leaves no traceback."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(\"config.yaml: key 'lr' is missing\")\n")
    job = ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    words = ["run", "--save", str(tmp_path / "run"), *job]
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    said = "".join(finding["title"] + finding["detail"] for finding in _report(tmp_path / "run")["findings"])
    assert "key 'lr' is missing" in said
    assert "no line of these logs" not in said


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
    job = _launch(["--save", str(tmp_path)], [*_writes(tmp_path), "waits"])
    _wait_for(lambda: len(list(_events(tmp_path, "start"))) == 3)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    (tmp_path / "meet" / "go").touch()
    out, _ = job.communicate(timeout=_LATE_S)
    assert out.count(b"\n") == 6
    _wait_for(lambda: len(list(_events(tmp_path, "end"))) == 3)
    assert [event["status"] for event in _events(tmp_path, "end")] == [0, 0, 0]
    assert _kept(tmp_path, 0) == out


@pytest.mark.alone  # the picture has 8 s: on a machine that is too busy it is empty, as it should be
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


def test_switches_are_printed_and_reach_the_ranks_that_are_named(tmp_path: Path) -> None:
    switches = ["--sync", "--gpus", "none", "--check-collectives", "--recorder", "--nccl-debug", "init"]
    printed = subprocess.run([PROGRAM, "run", *switches, "--print-env"], capture_output=True, text=True, check=True)
    values = dict(re.findall(r"^export (\w+)=(\S+)", printed.stdout, re.MULTILINE))
    assert values["CUDA_LAUNCH_BLOCKING"] == "1"
    assert values["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert values["NCCL_DEBUG_SUBSYS"] == "INIT"
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in values
    command = [PROGRAM, "run", "--sanitizer", "memcheck", "--print-env"]
    checked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # " in checked.stdout
    job = _launch(["--sync", "--rank", "1"], [*_writes(tmp_path), "environment"])
    out, _ = job.communicate(timeout=_LATE_S)
    assert sorted(re.findall(rb"sync \d (?:None|1)", out)) == [b"sync 0 None", b"sync 1 1", b"sync 2 None"]


def test_prefix_labels_whole_lines_and_the_copy_has_none(tmp_path: Path) -> None:
    job = _launch(["--prefix", "--save", str(tmp_path)], [*_writes(tmp_path), "halves"])
    out, _ = job.communicate(timeout=_LATE_S)
    host = os.uname().nodename
    lines = out.decode().splitlines()
    assert [line for line in lines if "half" in line and not re.fullmatch(rf"\[{host}:\d\] half half \d", line)] == []
    assert sorted(line[-1] for line in lines if "half half" in line) == ["0", "1", "2"]
    assert all(line.startswith(f"[{host}:") for line in lines)
    assert b"step 0" in _kept(tmp_path, 0).splitlines()


def test_trace_py_and_overflow_reach_only_the_ranks_that_are_named(tmp_path: Path) -> None:
    options = ["--trace-py", "--overflow", "--rank", "1", "--save", str(tmp_path)]
    job = _launch(options, ["recorded_healthy.py", "nan"], ranks=2)
    _, err = job.communicate(timeout=_LATE_S)
    traces = subprocess.run(
        [PROGRAM, "trace", "show", str(tmp_path / "lines"), "--json"], capture_output=True, check=False
    )
    assert {ring["rank"] for ring in json.loads(traces.stdout)["data"]["rings"]} == {1}
    assert f"trace show {tmp_path}/lines" in err.decode()
    watched = [json.loads(path.read_text()) for path in (tmp_path / "overflow").glob("watched-*.json")]
    assert {process["rank"] for process in watched} == {1}
    assert job.returncode == 1
    assert _report(tmp_path)["findings"][0]["where"]["ranks"] == [1]


_SANITIZER = """#!/bin/sh
for word; do case $word in --log-file=*) log=${word#--log-file=} ;; --*) ;; *) break ;; esac; shift; done
log=$(echo "$log" | sed "s/%p/$$/")
"$@"
status=$?
{ echo "========= COMPUTE-SANITIZER"; echo "========= Invalid __global__ write of size 4 bytes"
echo "========= ERROR SUMMARY: 1 error"; } > "$log"
exit $status
"""
"""As compute-sanitizer does: it runs the program as a child, and writes its log in the form of NVIDIA's manual."""


def test_the_sanitizer_is_below_the_ranks_that_are_named(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(_SANITIZER)
    tool.chmod(0o755)
    env = {**_ENV, "PATH": f"{tool.parent}:{_ENV['PATH']}"}
    options = ["--sanitizer", "memcheck", "--rank", "2", "--save", str(tmp_path / "kept")]
    command = [PROGRAM, "run", *options, "--", *_TORCHRUN, "3", *_writes(tmp_path)]
    done = subprocess.run(command, capture_output=True, env=env, cwd=_PROGRAMS, timeout=2 * _LATE_S, check=False)
    assert (done.returncode, done.stdout.count(b"\n")) == (0, 6)
    (finding,) = _report(tmp_path / "kept")["findings"]
    assert finding["id"] == "run.sanitizer"
    assert finding["where"]["ranks"] == [2]
    assert "Invalid __global__ write of size 4 bytes" in finding["title"]


def test_a_missing_sanitizer_is_said_before_the_start(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    job = [PROGRAM, "run", "--sanitizer", "memcheck", "--", "/bin/touch", str(tmp_path / "started")]
    done = subprocess.run(job, capture_output=True, env=env, check=False)
    assert done.returncode == 2
    assert b"compute-sanitizer is not installed here" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_subsystem_that_nccl_does_not_have_is_refused() -> None:
    done = subprocess.run([PROGRAM, "run", "--nccl-debug", "INIT,NETWORK", "--print-env"], capture_output=True)
    assert done.returncode == 2
    assert b"NETWORK" in done.stderr


def test_cores_are_allowed_and_it_is_said_where_they_go() -> None:
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_CORE))"
    command = [PROGRAM, "run", "--cores", "--", sys.executable, "-c", code]
    done = subprocess.run(["sh", "-c", 'ulimit -S -c 0; exec "$0" "$@"', *command], capture_output=True, check=True)
    soft, hard = done.stdout.split()
    assert soft == hard
    assert b"core dumps" in done.stderr


def test_a_full_disk_below_save_does_not_end_the_job(tmp_path: Path) -> None:
    need_root()
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
    try:
        code = "import sys\nfor i in range(20000): print('line', i, 'x' * 60)\nsys.exit(3)"
        job = [PROGRAM, "run", "--save", str(disk / "kept"), "--", sys.executable, "-c", code]
        done = subprocess.run(job, capture_output=True, check=False)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert (done.returncode, done.stdout.count(b"\n")) == (3, 20000)


def test_sigusr1_and_ctrl_c_reach_the_job() -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('usr1', flush=True))\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\nwhile True: signal.pause()"
    )
    job = subprocess.Popen([PROGRAM, "run", "--", sys.executable, "-c", code], stdout=subprocess.PIPE, bufsize=0)
    assert job.stdout is not None
    assert job.stdout.readline() == b"ready\n"
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == b"usr1\n"
    job.send_signal(signal.SIGINT)
    assert job.wait(_LATE_S) == 9
    job.stdout.close()
