"""trace sys with the real strace: attached to real processes, below a job that is started, and on the logs it kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from jobs import Job, states
from support import PROGRAM, Running, distdiag, need, wait_until

from distdiag.facts import procs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support import Result

HOST = os.uname().nodename.partition(".")[0]
CONNECTS = """
import socket, sys
for _ in range(5):
    socket.socket().connect_ex(("127.0.0.1", 1))
print("out")
print("err", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[Job]:
    """Rank 0 waits in recv() for rank 1, which sleeps."""
    need("strace")
    with Job("waits_on_another_rank", 2, env={"HOW": "sleep"}) as job:
        job.wait_still()
        yield job


@pytest.fixture
def counting() -> Iterator[Job]:
    need("strace")
    with Job("counts_on", 1) as job:
        job.wait_ready()
        yield job


def trace(job: Job, *arguments: str, env: dict[str, str] | None = None) -> Result:
    return distdiag("trace", "sys", "--json", "--job", job.name, *arguments, env=env)


def count(job: Job) -> int:
    return int((job.folder / "count").read_bytes() or b"0")


def as_it_was(job: Job) -> list[tuple[str, int | None]]:
    pids = [one.pid for one in job.processes]
    return [(letter, procs.tracer(pid)) for pid, letter in states(pids).items()]


def test_who_is_blocked_on_whom_is_told_and_nobody_notices(pair: Job, tmp_path: Path) -> None:
    before = as_it_was(pair)
    result = trace(pair, "--for", "1s", env={"TMPDIR": str(tmp_path)})
    assert as_it_was(pair) == before == [("S", None), ("S", None)]
    (finding,) = [one for one in result.report["findings"] if one["id"] == "trace.blocked"]
    # WHEN it has lasted for less than 5 s it is a warning, later a fault.
    assert result.code == (1 if finding["level"] == "fail" else 0)
    assert f"rank 0 ({HOST}, pid {pair.pid(0)})" in finding["title"]
    assert "in recvfrom on 127.0.0.1:" in finding["title"]
    assert "= rank 1; rank 1 is not blocked on another rank: it sleeps (clock_nanosleep" in finding["title"]
    assert finding["fix"]["commands"][0].endswith(f" pyspy-all --pid {pair.pid(1)}")
    threads = {one["rank"]: one for one in result.report["data"]["threads"] if one["main"]}
    last = threads[0]["last"]
    assert (last["call"], last["peer_rank"]) == ("recvfrom", 1)
    assert last["fd_target"].startswith("TCP:[127.0.0.1:")
    assert last["blocked_s"] > 1.0
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_all_sleep_are_not_ok_though_their_calls_do_not_tell_why() -> None:
    need("strace")
    with Job("trains_on_a_stack", 3, env={"STACK": "module", "FAULT": "event"}, forked=True) as job:
        job.wait_still()

        def asleep_s() -> float:
            done = distdiag("trace", "blocked", "--json", "--job", job.name)
            return min((one["last"]["blocked_s"] or 0.0) for one in done.report["data"]["threads"])

        wait_until(lambda: asleep_s() > 5.0, 60, lambda: "a rank goes on")
        # strace makes the kernel start their calls again: the second time they have not been blocked for long.
        for result in (trace(job, "--rank", "0-2", "--for", "1s"), trace(job, "--for", "1s")):
            assert (result.code, result.report["verdict"]) == (3, "unknown"), result.out
            found = result.findings["all-blocked"]
            assert found["where"]["ranks"] == [0, 1, 2]
            assert found["title"].startswith("the main threads of all 3 ranks have been blocked for ")
            assert found["fix"]["commands"][0].endswith(" pyspy-all")


def test_a_process_that_counts_goes_on(counting: Job) -> None:
    before = count(counting)
    result = trace(counting, "--for", "500ms")
    assert result.code == 0, result.out
    after = count(counting)
    wait_until(lambda: count(counting) > after, 5, lambda: "it does not count any more")
    assert after > before
    (row,) = result.report["data"]["threads"]
    assert row["state"] == "runs" or row["last"]["call"] == "clock_nanosleep"
    calls = {one["name"]: one for one in row["calls"]}
    assert calls["pwrite64"]["count"] > 20
    assert calls["pwrite64"]["time_s"] > 0
    assert procs.tracer(counting.pid(0)) is None


def test_who_is_stopped_is_named_and_stays_so(counting: Job) -> None:
    os.kill(counting.pid(0), signal.SIGSTOP)
    wait_until(lambda: as_it_was(counting) == [("T", None)], 10, lambda: f"{as_it_was(counting)}")
    result = trace(counting, "--for", "300ms")
    assert as_it_was(counting) == [("T", None)]
    finding = result.findings["blocked"]
    assert finding["title"] == f"rank 0 ({HOST}, pid {counting.pid(0)}) is stopped"
    assert finding["fix"]["commands"] == [f"kill -CONT {counting.pid(0)}"]
    assert result.code == 1


def test_ctrl_c_detaches_and_tells_what_was_seen(counting: Job) -> None:
    running = Running("trace", "sys", "--json", "--job", counting.name, "--for", "60s")
    running.wait_for("tracing 1 process")
    wait_until(lambda: procs.tracer(counting.pid(0)) is not None, 30, lambda: "nobody traces it")
    time.sleep(0.3)
    os.killpg(running.process.pid, signal.SIGINT)
    result = running.finish(20)
    assert result.code == 130
    assert result.report["verdict"] == "unknown"
    (row,) = result.report["data"]["threads"]
    assert row["n_calls"] > 20
    assert procs.tracer(counting.pid(0)) is None
    after = count(counting)
    wait_until(lambda: count(counting) > after, 5, lambda: "it does not count any more")


def test_strace_ends_when_distdiag_is_killed(counting: Job) -> None:
    running = Running("trace", "sys", "--job", counting.name, "--for", "60s")
    wait_until(lambda: procs.tracer(counting.pid(0)) is not None, 20, lambda: "nobody traces it")
    running.process.kill()
    wait_until(lambda: procs.tracer(counting.pid(0)) is None, 10, lambda: "it is still traced")
    running.finish(20)
    after = count(counting)
    wait_until(lambda: count(counting) > after, 5, lambda: "it does not count any more")


def test_who_is_traced_already_is_left_alone(counting: Job, tmp_path: Path) -> None:
    other = subprocess.Popen(
        ["strace", "-o", str(tmp_path / "log"), "-p", str(counting.pid(0))], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: procs.tracer(counting.pid(0)) == other.pid, 10, lambda: "strace does not attach")
        result = trace(counting, "--for", "1s")
        assert result.code == 3
        finding = result.findings["not-attached"]
        assert f"another program is already tracing it: pid {other.pid} (strace" in finding["title"]
        assert finding["fix"]["commands"][-1].endswith(f"trace blocked --pid {counting.pid(0)}")
        assert procs.tracer(counting.pid(0)) == other.pid
    finally:
        other.send_signal(signal.SIGINT)
        other.wait(10)


def test_a_missing_strace_is_said_with_what_works_without(counting: Job, tmp_path: Path) -> None:
    path = {"PATH": str(tmp_path)}
    result = distdiag("trace", "sys", "--json", "-p", str(counting.pid(0)), env=path)
    assert result.code == 3
    finding = result.findings["not-attached"]
    assert "strace is not installed" in finding["title"]
    assert "apt-get install strace" in finding["fix"]["commands"][0]
    assert "trace blocked --pid" in finding["fix"]["commands"][1]
    # AND a job is not started without being traced.
    done = distdiag("trace", "sys", "--", sys.executable, "-c", "print('ran')", env=path)
    assert (done.code, done.out) == (3, "")
    assert "strace is not installed; the job was not started" in done.err
    assert "trace blocked" in done.err


def test_without_the_right_to_trace_it_is_said_what_gives_it() -> None:
    need("strace", "setpriv")
    if os.geteuid() != 0:
        pytest.skip("only root can start what another user owns")
    theirs = subprocess.Popen(["setpriv", "--reuid", "65534", "--clear-groups", "sleep", "60"])
    try:
        wait_until(lambda: procs.owner(theirs.pid) == 65534, 10, lambda: "it does not become another user's")
        result = distdiag(
            *("trace", "sys", "--json", "-p", str(theirs.pid)),
            wrap=("setpriv", "--inh-caps", "-sys_ptrace", "--bounding-set", "-sys_ptrace"),
        )
    finally:
        theirs.kill()
        theirs.wait(10)
    assert result.code == 3, result.err
    finding = result.findings["not-attached"]
    assert "permission denied (" in finding["title"]
    assert "Operation not permitted" in finding["title"]
    assert "--cap-add SYS_PTRACE" in finding["fix"]["text"]
    assert finding["fix"]["commands"][-1].endswith(f"trace blocked --pid {theirs.pid}")


def job(*options: str, code: str = CONNECTS, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    argv = [PROGRAM, "trace", "sys", *options, "--", sys.executable, "-c", code, *arguments]
    return subprocess.run(argv, capture_output=True, check=False, timeout=60, env={**os.environ, "COLUMNS": "80"})


def test_a_job_that_is_started_has_its_own_output_and_end(tmp_path: Path) -> None:
    need("strace")
    report = tmp_path / "report.json"
    done = job("--only", "network", "--report", str(report))
    assert (done.returncode, done.stdout) == (7, b"out\n")
    assert done.stderr.startswith(b"err\ndistdiag trace sys: warn: ")
    told: dict[str, Any] = json.loads(report.read_text())
    assert told["command"] == "trace sys"
    (finding,) = [one for one in told["findings"] if one["id"] == "trace.error-econnrefused"]
    assert "got ECONNREFUSED 5 times: connect on 127.0.0.1:1" in finding["title"]
    (row,) = told["data"]["threads"]
    assert row["state"] == "exited 7"
    assert {one["name"] for one in row["calls"]} <= {"execve", "socket", "connect", "getsockname", "getpeername"}


def test_without_a_file_the_report_follows_the_job_on_stderr() -> None:
    need("strace")
    done = job("--only", "network")
    assert (done.returncode, done.stdout) == (7, b"out\n")
    assert done.stderr.startswith(b"err\ndistdiag trace sys: WARN\n")
    assert b"WARN  trace.error-econnrefused" in done.stderr


@pytest.mark.parametrize("only", [(), ("--only", "network")])
def test_a_job_that_is_killed_is_so_to_those_who_wait_for_it(only: tuple[str, ...]) -> None:
    need("strace")
    done = job(*only, code="import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL
    assert b"killed SIGKILL" in done.stderr


def test_a_signal_for_the_job_reaches_it_and_it_ends_as_it_likes() -> None:
    need("strace")
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(5)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    argv = [PROGRAM, "trace", "sys", "--only", "network", "--", sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "saved\n"
        assert process.wait(20) == 5


def test_ranks_that_keep_their_logs_are_judged_together(tmp_path: Path) -> None:
    need("strace")
    wrap = (PROGRAM, "trace", "sys", "--logs", str(tmp_path / "logs"), "--")
    with Job("waits_on_another_rank", 2, env={"HOW": "sleep"}, wrap=wrap) as started:
        started.wait_ready()
        time.sleep(0.3)
        names = sorted(path.name for path in (tmp_path / "logs").iterdir())
        assert [name.partition(".")[0] for name in names] == ["rank-0", "rank-1"]
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir()} == {0o600}
        result = distdiag("trace", "sys", "--json", "--from", str(tmp_path / "logs"))
    threads = {one["rank"]: one for one in result.report["data"]["threads"] if one["main"]}
    assert threads[0]["state"] == "blocked"
    assert threads[0]["last"]["call"] == "recvfrom"
    assert threads[0]["last"]["peer_rank"] == 1
    assert threads[1]["last"]["call"] == "clock_nanosleep"


def test_logs_are_kept_by_rank_when_attached(pair: Job, tmp_path: Path) -> None:
    result = trace(pair, "--for", "300ms", "--logs", str(tmp_path))
    assert [path.name.partition(".")[0] for path in sorted(tmp_path.iterdir())] == ["rank-0", "rank-1"]
    assert sorted(one["path"] for one in result.report["data"]["logs"]) == sorted(map(str, tmp_path.iterdir()))
    assert b"recvfrom(" in min(tmp_path.iterdir()).read_bytes()


SECRET = "Bearer sesame"
TALKS = f"""
import ctypes, os, select, socket, threading
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
there, _ = server.accept()
client.sendmsg([b"{SECRET}", b"{SECRET}"]); there.recv(4096)
with open("FOLDER/token.txt", "w") as file: file.write("{SECRET}")
with open("FOLDER/token.txt") as file: file.read()
full = os.open("/dev/full", os.O_WRONLY)
try: os.write(full, b"{SECRET}")
except OSError: pass
for _ in range(4):
    try: socket.create_connection(("127.0.0.1", 1))
    except OSError: pass
os.system("true '{SECRET}'")
def worker():
    ctypes.CDLL(None).prctl(15, b"pt_worker", 0, 0, 0)
    os.stat("/")
    os.write(full, b"")
thread = threading.Thread(target=worker); thread.start(); thread.join()
print("ready", flush=True)
waits = select.poll(); waits.register(there, select.POLLIN); waits.poll(1)
"""


@pytest.mark.parametrize("payload", [(), ("--payload", "64")], ids=["by default", "payload"])
def test_what_a_job_reads_and_sends_is_in_its_log_only_if_asked_for(tmp_path: Path, payload: tuple[str, ...]) -> None:
    need("strace")
    logs, report, code = tmp_path / "logs", tmp_path / "report", TALKS.replace("FOLDER", str(tmp_path))
    done = job("--logs", str(logs), "--report", str(report), *payload, code=code)
    assert done.returncode == 0, done.stderr
    (log,) = logs.iterdir()
    assert (SECRET in log.read_text(errors="replace")) is bool(payload)
    assert (b"passwords and tokens" in done.stderr) is bool(payload)
    judged = distdiag("trace", "sys", "--from", str(logs))
    assert SECRET not in report.read_text() + judged.out + judged.err
    # What the verdicts rest on is there all the same.
    told = json.loads(report.read_text())
    titles = {one["id"]: one["title"] for one in told["findings"]}
    assert "got ENOSPC 2 times: write on /dev/full" in titles["trace.error-enospc"]
    assert "got ECONNREFUSED 4 times: connect on 127.0.0.1:1" in titles["trace.error-econnrefused"]
    assert "pt_worker" in {one["comm"] for one in told["data"]["threads"]}
    assert f'"{tmp_path}/token.txt"' in log.read_text(errors="replace")
    assert "poll([{fd=" in log.read_text(errors="replace")


@pytest.mark.parametrize("payload", [(), ("--payload", "64")], ids=["by default", "payload"])
def test_what_a_process_that_is_attached_to_sends_is_kept_only_if_asked_for(
    tmp_path: Path, payload: tuple[str, ...]
) -> None:
    need("strace")
    code = f"""
import os, time
print("ready", flush=True)
out = os.open("/dev/null", os.O_WRONLY)
while True: os.write(out, b"{SECRET}"); time.sleep(0.01)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        arguments = ("--pid", str(process.pid), "--for", "300ms", "--logs", str(tmp_path / "logs"), *payload)
        result = distdiag("trace", "sys", "--json", *arguments)
        process.kill()
    (log,) = (tmp_path / "logs").iterdir()
    assert "write(" in log.read_text()
    assert (SECRET in log.read_text()) is bool(payload)
    assert ("passwords and tokens" in result.err) is bool(payload)
    assert SECRET not in result.out


@pytest.mark.parametrize("options", [["-s", "200"], ["-s", "200", "-yy", "-ttt", "-T"]], ids=" ".join)
def test_a_log_of_one_s_own_is_judged_without_quoting_what_was_sent(tmp_path: Path, options: list[str]) -> None:
    need("strace")
    # It ends in a call that has all of it in its arguments: to a pipe that is full.
    code = f"""
import contextlib, os
reads, writes = os.pipe()
os.set_blocking(writes, False)
with contextlib.suppress(BlockingIOError):
    while True: os.write(writes, bytes(4096))
os.set_blocking(writes, True)
print("ready", flush=True)
os.write(writes, b"{SECRET} " * 20)
"""
    log = tmp_path / "log"
    command = ["strace", "-f", *options, "-o", str(log), sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as strace:
        assert strace.stdout is not None
        assert strace.stdout.readline() == b"ready\n"
        # The last argument is its length: a line may come in two pieces.
        end = f", {20 * (len(SECRET) + 1)}"
        wait_until(lambda: end in log.read_text().rpartition("\n")[2], 30, lambda: log.read_text()[-80:])
        os.killpg(strace.pid, signal.SIGKILL)
    for arguments in ((), ("--json",)):
        result = distdiag("trace", "sys", *arguments, "--from", str(log))
        assert SECRET not in result.out + result.err
    assert SECRET in log.read_text()
    (row,) = result.report["data"]["threads"]
    assert (row["state"], row["last"]["call"]) == ("blocked", "write")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--payload", "9", "-p", "1"), "--payload requires --logs"),
        (("--payload", "9", "--", "true"), "--payload requires --logs"),
        ((), "no process selected"),
        (("--for", "5x", "-p", "1"), "'5x' is not a time"),
        (("--for", "2h", "-p", "1"), "'2h' is not a time"),
        (("--for", "20m", "-p", "1"), "at most 10m"),
        (("--only", "net", "-p", "1"), "'net' is not a class of system calls"),
        (("--json", "--", "true"), "stdout belongs to the job"),
        (("--rank", "1", "--", "true"), "select running processes"),
        (("--report", "x", "-p", "1"), "--report requires -- COMMAND"),
        (("--from", "/nonexistent"), "no such file"),
        (("--from", "/tmp", "-p", "1"), "--from analyzes existing logs"),
        (("--", "no-such-program"), "no-such-program: command not found"),
    ],
)
def test_wrong_usage_is_told_and_nothing_is_traced(arguments: tuple[str, ...], says: str) -> None:
    done = distdiag("trace", "sys", *arguments)
    assert done.code == (127 if "no-such-program" in arguments else 2)
    assert says in " ".join((done.err + done.out).replace("\u2502", " ").split())
