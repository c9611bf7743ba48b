"""trace sys with the real strace: attached to real processes, and on logs that it wrote of jobs from their start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from jobs import Job, states
from support import Running, need, wait_until
from support_warm import distdiag

from distdiag.facts.process import procs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support import Result

HOST = os.uname().nodename.partition(".")[0]


@pytest.fixture(scope="module")
def pair() -> Iterator[Job]:
    """Rank 0 waits in recv() for rank 1, which sleeps."""
    need("strace")
    with Job("waits_on_another_rank", 2, env={"HOW": "sleep"}) as job:
        job.wait_still()
        yield job


@pytest.fixture(scope="module")
def counter() -> Iterator[Job]:
    need("strace")
    with Job("counts_on", 1) as job:
        job.wait_ready()
        yield job


@pytest.fixture
def counting(counter: Job) -> Iterator[Job]:
    yield counter
    os.kill(counter.pid(0), signal.SIGCONT)


def last_lines(logs: Path) -> list[str]:
    return [path.read_text(errors="replace").rpartition("\n")[2] for path in logs.iterdir()]


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
    assert (threads[0]["call"], threads[0]["ranks"]) == ("recvfrom", [1])
    assert threads[0]["log"]["last"]["target"].startswith("TCP:[127.0.0.1:")
    assert threads[0]["blocked_s"] > 1.0
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_all_sleep_are_not_ok_though_their_calls_do_not_tell_why() -> None:
    need("strace")
    with Job("trains_on_a_stack", 3, env={"STACK": "module", "FAULT": "event"}, forked=True) as job:
        job.wait_still()
        time.sleep(5.2)  # a shorter wait is no hang
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
    assert row["state"] == "runs" or row["call"] == "clock_nanosleep"
    calls = {one["name"]: one for one in row["log"]["calls"]}
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
    before = count(counting)
    wait_until(lambda: count(counting) > before + 50, 30, lambda: f"at {count(counting)}, from {before}")
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
    assert "not-attached" in result.findings, result.out
    finding = result.findings["not-attached"]
    assert "strace is not installed" in finding["title"]
    assert "apt-get install strace" in finding["fix"]["commands"][0]
    assert "trace blocked --pid" in finding["fix"]["commands"][1]


def test_ranks_that_were_asked_for_and_not_found_are_named(counting: Job) -> None:
    result = trace(counting, "--rank", "0,7", "--for", "100ms")
    assert (result.code, result.findings["unseen"]["where"]["ranks"]) == (3, [7])
    assert "rank 7 of 1 not found" in result.findings["unseen"]["title"]


def test_who_has_exited_was_not_traced() -> None:
    ended = subprocess.Popen(["true"])
    wait_until(lambda: states([ended.pid]) == {ended.pid: "Z"}, 10, lambda: f"{states([ended.pid])}")
    result = distdiag("trace", "sys", "--json", "-p", str(ended.pid))
    ended.wait(10)
    assert (result.code, result.report["verdict"]) == (3, "unknown")
    assert result.findings["not-attached"]["title"] == f"pid {ended.pid} was not traced: exited"


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
    assert "not-attached" in result.findings, result.out
    finding = result.findings["not-attached"]
    assert "permission denied (" in finding["title"]
    assert "Operation not permitted" in finding["title"]
    assert "--cap-add SYS_PTRACE" in finding["fix"]["text"]
    assert finding["fix"]["commands"][-1].endswith(f"trace blocked --pid {theirs.pid}")


def test_ranks_that_run_under_strace_are_judged_together(tmp_path: Path) -> None:
    need("strace")
    # As docs/commands/trace.md has it: a log for each rank and thread.
    script = 'exec strace -f -ff -ttt -T -yy -o "$0/rank-$RANK" -- "$@"'
    with Job("waits_on_another_rank", 2, env={"HOW": "sleep"}, wrap=("sh", "-c", script, str(tmp_path))) as started:
        started.wait_ready()
        # The last line of a blocked thread has no result yet.
        calls = ("recvfrom(", "clock_nanosleep(")
        wait_until(
            lambda: all(any(call in last and " = " not in last for last in last_lines(tmp_path)) for call in calls),
            20,
            lambda: f"not blocked: {last_lines(tmp_path)}",
        )
        result = distdiag("trace", "sys", "--json", str(tmp_path))
    threads = {one["rank"]: one for one in result.report["data"]["threads"] if one["main"]}
    assert threads[0]["state"] == "blocked"
    assert (threads[0]["call"], threads[0]["ranks"]) == ("recvfrom", [1])
    assert threads[1]["call"] == "clock_nanosleep"


def test_logs_are_kept_by_rank_when_attached(pair: Job, tmp_path: Path) -> None:
    result = trace(pair, "--for", "300ms", "--keep-logs", str(tmp_path))
    assert [path.name.partition(".")[0] for path in sorted(tmp_path.iterdir())] == ["rank-0", "rank-1"]
    paths = {one["log"]["path"] for one in result.report["data"]["threads"] if one["log"]}
    assert paths == set(map(str, tmp_path.iterdir()))
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


def test_what_a_job_reads_and_sends_is_in_no_report(tmp_path: Path) -> None:
    need("strace")
    logs, code = tmp_path / "logs", TALKS.replace("FOLDER", str(tmp_path))
    logs.mkdir()
    traced = ["strace", "-f", "-ff", "-ttt", "-T", "-yy", "-s", "64", "-o", str(logs / "trace"), "--"]
    subprocess.run([*traced, sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert any(SECRET in log.read_text(errors="replace") for log in logs.iterdir())
    judged = distdiag("trace", "sys", "--json", str(logs))
    assert SECRET not in judged.out + judged.err
    # The basis of the verdicts is still there.
    titles = {one["id"]: one["title"] for one in judged.report["findings"]}
    assert "got ENOSPC 2 times: write on /dev/full" in titles["trace.error-enospc"]
    assert "got ECONNREFUSED 4 times: connect on 127.0.0.1:1" in titles["trace.error-econnrefused"]
    assert "pt_worker" in {one["comm"] for one in judged.report["data"]["threads"]}


def test_what_a_process_that_is_attached_to_sends_is_in_no_log(tmp_path: Path) -> None:
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
        arguments = (str(process.pid), "--for", "300ms", "--keep-logs", str(tmp_path / "logs"))
        result = distdiag("trace", "sys", "--json", *arguments)
        process.kill()
    (log,) = (tmp_path / "logs").iterdir()
    assert "write(" in log.read_text()
    assert SECRET not in log.read_text() + result.out


def test_a_log_of_one_s_own_is_judged_without_quoting_what_was_sent(tmp_path: Path) -> None:
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
    command = ["strace", "-f", "-s", "200", "-yy", "-ttt", "-T", "-o", str(log), sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as strace:
        assert strace.stdout is not None
        assert strace.stdout.readline() == b"ready\n"
        # The last argument is its length: a line may arrive in two pieces.
        end = f", {20 * (len(SECRET) + 1)}"
        wait_until(lambda: end in log.read_text().rpartition("\n")[2], 30, lambda: log.read_text()[-80:])
        os.killpg(strace.pid, signal.SIGKILL)
    for arguments in ((), ("--json",)):
        result = distdiag("trace", "sys", *arguments, str(log))
        assert SECRET not in result.out + result.err
    assert SECRET in log.read_text()
    (row,) = result.report["data"]["threads"]
    assert (row["state"], row["call"]) == ("blocked", "write")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no process selected"),
        (("--for", "5x", "-p", "1"), "'5x' is not a time"),
        (("--for", "2h", "-p", "1"), "2h is too long"),
        (("--for", "20m", "-p", "1"), "at most 10m"),
        (("/dev/null/logs",), "no such file"),
        ((__file__, "-p", "1"), "existing logs are only read"),
        (("--", "no-such-program"), "to trace a job: strace -f -ff -ttt -T -yy -o DIR/trace -- COMMAND"),
    ],
)
def test_wrong_usage_is_told_and_nothing_is_traced(arguments: tuple[str, ...], says: str) -> None:
    done = distdiag("trace", "sys", *arguments)
    assert done.code == 2
    assert says in " ".join((done.err + done.out).replace("\u2502", " ").split())
