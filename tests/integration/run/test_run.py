"""distdiag run around real jobs: their behaviour is unchanged, and the first failure is named.

The launcher is torchrun where its own words or its end matter, else a script without the import of torch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import support_torch
from jobs import free_port
from support import PROGRAM, need_root, wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PROGRAMS = Path(__file__).parents[2] / "programs"
_TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node"]
_ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
_LATE_S = 180.0
_LAUNCHER = """
import os, signal, subprocess, sys
size, *words = sys.argv[1:]
place = {**os.environ, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
ranks = [subprocess.Popen([sys.executable, *words], env={**place, "RANK": str(rank)}) for rank in range(int(size))]
signal.signal(signal.SIGTERM, lambda *_: [os.kill(rank.pid, signal.SIGTERM) for rank in ranks])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
failed = 0
for _ in ranks:
    pid, status = os.wait()
    ranks = [rank for rank in ranks if rank.pid != pid]
    if status and not failed:
        failed = os.waitstatus_to_exitcode(status)
        if "HELD_S" in os.environ and not signal.sigtimedwait({signal.SIGCONT}, float(os.environ["HELD_S"])):
            failed = 99
        for rank in ranks: os.kill(rank.pid, signal.SIGTERM)
sys.stdout.flush()
os._exit(failed % 256)
"""
"""As torchrun, it ends the others when one has failed, and with its status; with HELD_S after it was held meanwhile."""
pytestmark = pytest.mark.timeout(400)


def _by_hand(size: int, *words: str) -> list[str]:
    return [sys.executable, "-c", _LAUNCHER, str(size), *words]


def _launch(
    options: Sequence[str], job: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    place = {**_ENV, "MASTER_PORT": str(free_port()), **(env or {})}
    command, pipe = [PROGRAM, "run", *options, "--", *job], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, env=place, cwd=_PROGRAMS, start_new_session=True)


def _writes(folder: Path, *what: str) -> list[str]:
    """Return a job of three ranks that only write; they meet in `folder`."""
    (folder / "meet").mkdir()
    return _by_hand(3, "ranks_without_torch.py", str(folder / "meet"), *what)


def _launch_stuck(options: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start two ranks, of which rank 0 waits for data of rank 1, which sleeps; return when they do."""
    job = _launch(options, _by_hand(2, "waits_on_another_rank.py"), {"HOW": "sleep", "JOB_FOLDER": str(folder)})
    wait_until(lambda: len(list(folder.glob("ready-*"))) == 2, _LATE_S, lambda: "not ready")
    return job


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


def test_the_rank_that_failed_first_is_named_and_where_the_other_was(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    ranks = ["ranks_without_torch.py", str(tmp_path / "meet"), "raises"]
    job = _launch(["--save", str(tmp_path)], [*_TORCHRUN, "2", *ranks])
    _, err = job.communicate(timeout=_LATE_S)
    assert job.returncode == 1
    report = _report(tmp_path)
    finding = report["findings"][0]
    assert (finding["level"], finding["where"]["ranks"]) == ("fail", [1])
    assert "ValueError: label 1000" in finding["title"]
    names_another = [line for line in finding["evidence"] if line.startswith("the launcher names rank")]
    assert names_another or re.search(rb"Root Cause.*?\n  rank +: 1 ", err, re.DOTALL)
    # Where the machine is too busy to look at once, the other has ended as well.
    (stacks,) = report["data"]["stacks"]
    where = {True: "rank 0", False: "not recorded, they had ended"}[[stack["rank"] for stack in stacks["ranks"]] == [0]]
    assert [line for line in finding["evidence"] if line.startswith(f"where the others were: {where}")]
    assert report["data"]["ranks"][0]["pid"]
    statuses = {rank["rank"]: rank["status"] for rank in report["data"]["ranks"]}
    assert statuses[1] == 1
    assert finding["title"].split(":")[0].encode() in b" ".join(err.split())
    again = distdiag("run", "--from", str(tmp_path), "--json")
    assert (again.code, again.report["findings"]) == (1, report["findings"])


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
    ranks = _by_hand(2, "-c", _SAVES_ON_SIGTERM)
    job = _launch(["--save", str(tmp_path)], ranks, {"READY": str(tmp_path / "ready"), "HELD_S": str(_LATE_S / 2)})
    out, _ = job.communicate(timeout=_LATE_S)
    assert (job.returncode, out) == (3, b"saved\n")
    assert {rank["rank"]: rank["status"] for rank in _report(tmp_path)["data"]["ranks"]} == {0: 0, 1: 3}
    (stacks,) = _report(tmp_path)["data"]["stacks"]
    assert [(stack["rank"], stack["frames"][0]["function"]) for stack in stacks["ranks"]] == [(0, "<module>")]
    dumps = f"{tmp_path}/stacks.{os.uname().nodename}"
    assert "rank 0" in distdiag("pyspy-all", "--from", dumps).out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ((), 2, "no command given"),
        (("--", "torchrn", "train.py"), 127, "torchrn: command not found"),
        (("--on-stall", "wait", "true"), 2, "--on-stall 'wait' is not known"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], status: int, message: str) -> None:
    done = distdiag("run", *words)
    assert (done.code, done.out) == (status, "")
    assert done.err.startswith(f"distdiag run: {message}")


def test_the_first_word_that_is_no_option_begins_the_job() -> None:
    code = "import sys; print(sys.argv[1:])"
    done = distdiag("run", "--stall", "0", sys.executable, "-c", code, "--save", "x", "--", "--json")
    assert done.out == "['--save', 'x', '--', '--json']\n"


def test_a_healthy_job_writes_the_same_and_ends_the_same(tmp_path: Path) -> None:
    """Both at once; ranks that have torch are in test_run_nodes."""
    torchrun = [*_TORCHRUN, "2", str(_PROGRAMS / "ranks_without_torch.py")]
    for name in ("bare", "under"):
        (tmp_path / name).mkdir()
    under = _launch([], [*torchrun, str(tmp_path / "under")])
    with (tmp_path / "out").open("wb") as file, (tmp_path / "err").open("wb") as errors:
        bare = support_torch.start([*torchrun, str(tmp_path / "bare")], _ENV, output=file, errors=errors)
    assert bare is not None
    out, err = under.communicate(timeout=_LATE_S)
    status = bare.wait(_LATE_S)
    assert (under.returncode, out, err) == (status, (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes())
    assert (status, out.count(b"\n")) == (0, 6)


def test_stdout_and_stderr_that_are_one_file_keep_their_order() -> None:
    code = "import os\nfor i in range(2000): os.write(1, b'o%d\\n' % i); os.write(2, b'e%d\\n' % i)"
    job = [PROGRAM, "run", "--", sys.executable, "-c", code]
    done = subprocess.run(job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    assert done.stdout == b"".join(b"o%d\ne%d\n" % (i, i) for i in range(2000))


def test_what_a_rank_said_before_it_left_is_shown(tmp_path: Path) -> None:
    """sys.exit("words") leaves no traceback."""
    job = _by_hand(2, "-c", "import sys; sys.exit(\"config.yaml: key 'lr' is missing\")")
    assert distdiag("run", "--save", str(tmp_path / "run"), "--", *job).code == 1
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
    job = _launch_stuck(["--stall", "5", "--on-stall", "kill", "--save", str(tmp_path)], tmp_path)
    job.communicate(timeout=2 * _LATE_S)
    assert job.returncode == 256 - signal.SIGTERM
    report = _report(tmp_path)
    assert report["findings"][0]["id"] == "run.stalled"
    assert report["findings"][0]["where"]["ranks"] == [1]
    assert "--on-stall kill" in report["summary"]
    # A wait of less than 5 s is no hang yet; the next picture tells.
    *early, picture = report["data"]["pictures"]
    assert (picture["reason"], picture["verdict"]) == ("stall", "fail")
    assert not [picture for picture in early if picture["verdict"] == "fail"]


def test_the_job_and_its_record_outlive_distdiag(tmp_path: Path) -> None:
    job = _launch(["--save", str(tmp_path)], _writes(tmp_path, "waits"))
    wait_until(lambda: len(list(_events(tmp_path, "start"))) == 3, _LATE_S, lambda: "no ranks")
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    (tmp_path / "meet" / "go").touch()
    out, _ = job.communicate(timeout=_LATE_S)
    assert out.count(b"\n") == 6
    wait_until(lambda: len(list(_events(tmp_path, "end"))) == 3, _LATE_S, lambda: "no ends")
    assert [event["status"] for event in _events(tmp_path, "end")] == [0, 0, 0]
    assert _kept(tmp_path, 0) == out


@pytest.mark.timed  # the picture has 8 s: on a machine that is too busy it is empty, as it should be
def test_sigterm_reaches_the_job_after_the_picture(tmp_path: Path) -> None:
    job = _launch_stuck(["--save", str(tmp_path)], tmp_path)
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
    printed = distdiag("run", *switches, "--print-env").out
    values = dict(re.findall(r"^export (\w+)=(\S+)", printed, re.MULTILINE))
    assert values["CUDA_LAUNCH_BLOCKING"] == "1"
    assert values["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert values["NCCL_DEBUG_SUBSYS"] == "INIT"
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in values
    checked = distdiag("run", "--sanitizer", "memcheck", "--print-env").out
    assert "export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # " in checked
    options = ["--sync", "--trace-py", "--rank", "1", "--save", str(tmp_path)]
    job = _launch(options, _writes(tmp_path, "environment"))
    out, err = job.communicate(timeout=_LATE_S)
    assert sorted(re.findall(rb"sync \d (?:None|1)", out)) == [b"sync 0 None", b"sync 1 1", b"sync 2 None"]
    traces = distdiag("trace", "show", str(tmp_path / "lines"), "--json")
    assert {ring["rank"] for ring in traces.report["data"]["rings"]} == {1}
    assert f"trace show {tmp_path}/lines" in err.decode()


def test_prefix_labels_whole_lines_and_the_copy_has_none(tmp_path: Path) -> None:
    job = _launch(["--prefix", "--save", str(tmp_path)], _writes(tmp_path, "halves"))
    out, _ = job.communicate(timeout=_LATE_S)
    host = os.uname().nodename
    lines = out.decode().splitlines()
    assert [line for line in lines if "half" in line and not re.fullmatch(rf"\[{host}:\d\] half half \d", line)] == []
    assert sorted(line[-1] for line in lines if "half half" in line) == ["0", "1", "2"]
    assert all(line.startswith(f"[{host}:") for line in lines)
    assert b"step 0" in _kept(tmp_path, 0).splitlines()


_NAN = """
import os
os.write(1, b"rank %b %d\\n" % (os.environb[b"RANK"], "DISTDIAG_OVERFLOW" in os.environ))  # read when torch is imported
if os.environ["RANK"] == "1":
    import torch
    torch.nn.Linear(2, 2)(torch.tensor([float("nan"), 0.0]))
"""


def test_overflow_reaches_only_the_rank_that_is_named(tmp_path: Path) -> None:
    options = ["--overflow", "--rank", "1", "--save", str(tmp_path)]
    job = _launch(options, _by_hand(2, "-c", _NAN))
    out, _ = job.communicate(timeout=_LATE_S)
    assert sorted(line for line in out.splitlines() if line.startswith(b"rank")) == [b"rank 0 0", b"rank 1 1"]
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
    options = ["--sanitizer", "memcheck", "--rank", "2", "--save", str(tmp_path / "kept")]
    job = _launch(options, _writes(tmp_path), {"PATH": f"{tool.parent}:{_ENV['PATH']}"})
    out, _ = job.communicate(timeout=_LATE_S)
    assert (job.returncode, out.count(b"\n")) == (0, 6)
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
    done = distdiag("run", "--nccl-debug", "INIT,NETWORK", "--print-env")
    assert done.code == 2
    assert "NETWORK" in done.err


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
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'usr1\\n'))\n"  # print may be interrupted by it
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\nwhile True: time.sleep(0.1)"
    )
    job = subprocess.Popen([PROGRAM, "run", "--", sys.executable, "-c", code], stdout=subprocess.PIPE, bufsize=0)
    assert job.stdout is not None
    assert job.stdout.readline() == b"ready\n"
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == b"usr1\n"
    job.send_signal(signal.SIGINT)
    assert job.wait(_LATE_S) == 9
    job.stdout.close()
