"""trace blocked and trace fds on real processes: each is blocked in one named way, and the right one is named."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import support_torch
from cluster import Network, need_network
from cluster_ssh import SSHD, serve_ssh
from jobs import PROGRAMS, Job, free_port, states, wait_for_state
from support import need, wait_until
from support_warm import distdiag

from distdiag.facts import machine
from distdiag.facts.process.blocked_threads import blocked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


CALLS = {"fifo": "read", "flock": "flock", "recv": "recvfrom"} | dict.fromkeys(
    ("sleep", "pin", "turns"), "clock_nanosleep"
)
HOST = os.uname().nodename.partition(".")[0]


def pair(how: str) -> Job:
    return Job("waits_on_another_rank", 2, env={"HOW": how})


def wait_blocked(job: Job, how: str, *, long: bool) -> None:
    """Wait until both stand where they are meant to; `long`: for as long as is taken as stuck."""
    job.wait_ready()

    def there() -> bool:
        calls = {rank: main(job.pid(rank)) for rank in range(2)}
        left_s = 5.2 - min(since for _, since in calls.values()) if long else 0.0
        if (calls[0][0], calls[1][0]) != ("futex" if how == "pin" else "recvfrom", CALLS[how]):
            return False
        time.sleep(max(0.0, left_s))
        return left_s <= 0.1

    wait_until(there, 20, lambda: f"{[blocked(job.pid(rank)) for rank in range(2)]}")


def main(pid: int) -> tuple[str, float]:
    found = [(one.syscall, one.since_s or 0.0) for one in blocked(pid) if one.tid == pid]
    return found[0] if found else ("", 0.0)


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[str, Job]]:
    """Several jobs that grow old at the same time."""
    kinds = ("sleep", "stop", "fifo", "flock", "recv", "pin", "turns")
    started = {kind: pair(kind.replace("stop", "sleep")) for kind in kinds}
    started["gloo"] = Job("hangs_in_load_batch", 3, forked=True)
    with contextlib.ExitStack() as stack:
        for job in started.values():
            stack.enter_context(job)
        wait_blocked(started["stop"], "sleep", long=False)
        os.kill(started["stop"].pid(1), signal.SIGSTOP)
        wait_for_state(started["stop"].pid(1), "T")
        for kind in kinds:
            if kind != "stop":
                wait_blocked(started[kind], kind, long=kind != "turns")
        started["gloo"].wait_ready()
        pids = [started["gloo"].pid(rank) for rank in range(3)]
        wait_until(lambda: all(main(pid)[1] > 5.1 for pid in pids), 30, lambda: f"{[main(pid) for pid in pids]}")
        yield started


@dataclass
class Seen:
    """The report of one run about one of several jobs."""

    findings: list[dict[str, Any]]
    threads: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """The only finding's title, without the name of the job."""
        (found,) = self.findings
        return str(found["title"].partition(": ")[2])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def seen(jobs: dict[str, Job], saved: Path) -> dict[str, Seen]:
    """Sample all jobs of this machine once, and check that their states are unchanged."""
    pids = [job.pid(rank) for job in jobs.values() for rank in range(2)]
    before = states(pids)
    result = distdiag("trace", "blocked", "--json", "--save", str(saved))
    assert states(pids) == before
    assert (result.code, result.report["command"]) == (1, "trace blocked")
    return {
        kind: Seen(
            [one for one in result.report["findings"] if one["title"].startswith(f"job {job.name}: ")],
            [one for one in result.report["data"]["threads"] if one["job"] == job.name],
        )
        for kind, job in jobs.items()
    }


def test_the_rank_that_sleeps_is_named(jobs: dict[str, Job], seen: dict[str, Seen]) -> None:
    pids, one = [jobs["sleep"].pid(0), jobs["sleep"].pid(1)], seen["sleep"]
    assert one.title.startswith(f"rank 1 ({HOST}, pid {pids[1]}) sleeps (clock_nanosleep, ")
    assert "; rank 0 waits for its data: recvfrom on 127.0.0.1:" in one.title
    assert (one.findings[0]["id"], one.findings[0]["level"]) == ("hang.not-in-collective", "fail")
    assert one.findings[0]["where"] == {"hosts": [HOST], "ranks": [1], "pids": [pids[1]]}
    first, second = one.threads
    assert (first["rank"], first["pid"], first["state"], first["kind"]) == (0, pids[0], "S", "peer")
    last = first["last"]
    assert (last["call"], last["peer_rank"], len(last["args"])) == ("recvfrom", 1, 6)
    assert last["fd_target"].startswith("socket:[")
    assert last["blocked_s"] > 5
    assert (second["rank"], second["kind"]) == (1, "sleep")


def test_a_stopped_rank_is_told_with_the_command_that_lets_it_go_on(
    jobs: dict[str, Job], seen: dict[str, Seen]
) -> None:
    pid, one = jobs["stop"].pid(1), seen["stop"]
    assert one.findings[0]["id"] == "hang.stopped"
    assert one.title.startswith(f"rank 1 ({HOST}, pid {pid}) is stopped (SIGSTOP or a suspended job), at `rank_1` ")
    (waits,) = [line for line in one.findings[0]["evidence"] if line.startswith("waits: ")]
    assert "; rank 0 waits for its data: recvfrom on 127.0.0.1:" in waits
    assert one.findings[0]["fix"]["commands"] == [f"kill -CONT {pid}"]
    assert one.threads[1]["kind"] == "stopped"


def test_a_fifo_that_nobody_writes(jobs: dict[str, Job], seen: dict[str, Seen]) -> None:
    assert f"reads {jobs['fifo'].folder}/fifo, which no other process has open for writing" in seen["fifo"].title


def test_the_holder_of_a_lock(jobs: dict[str, Job], seen: dict[str, Seen]) -> None:
    one = seen["flock"]
    assert [found["id"] for found in one.findings] == ["hang.lock"]
    assert one.title.startswith("process ")
    assert f"holds the lock on {jobs['flock'].folder}/lock, and sleeps (" in one.title
    assert "; rank 1 waits for it (flock, " in one.title
    assert "; rank 0 waits for rank 1: recvfrom on " in one.title


def test_ranks_that_wait_for_each_other(seen: dict[str, Seen]) -> None:
    assert seen["recv"].title.startswith("ranks 0-1 wait for each other: ")


def test_the_only_rank_that_is_not_inside_gloo_is_stuck(jobs: dict[str, Job], seen: dict[str, Seen]) -> None:
    job, one = jobs["gloo"], seen["gloo"]
    assert [(found["id"], found["level"]) for found in one.findings] == [("hang.not-in-collective", "fail")]
    assert one.title.startswith(f"rank 2 ({HOST}, pid {job.pid(2)}) is not in the collective: ")
    assert one.findings[0]["witnesses"]["ranks"] == [0, 1]
    waits = "\n".join(one.findings[0]["evidence"])
    assert f"waits: rank 2 ({HOST}, pid {job.pid(2)}) sleeps (clock_nanosleep, " in waits
    assert "; ranks 0-1 wait for another thread of the process (futex, " in waits


@pytest.mark.usefixtures("seen")
def test_a_main_thread_that_waits_for_the_thread_that_receives(jobs: dict[str, Job], saved: Path) -> None:
    result = distdiag("trace", "blocked", "--json", "--from", str(saved), "--threads", "all")
    assert result.code == 1
    job = jobs["pin"].name
    (finding,) = [one for one in result.report["findings"] if one["title"].startswith(f"job {job}: ")]
    assert (finding["id"], finding["where"]["ranks"]) == ("hang.not-in-collective", [1])
    rows = [row for row in result.report["data"]["threads"] if row["job"] == job]
    assert [row["last"]["call"] for row in rows][:2] == ["futex", "recvfrom"]


def test_only_one_rank_is_shown_to_people_and_all_are_judged(jobs: dict[str, Job], tmp_path: Path) -> None:
    job = jobs["stop"]
    result = distdiag("trace", "blocked", "--json", "-p", str(job.pid(0)), "--save", str(tmp_path))
    assert result.code == 1
    assert [row["rank"] for row in result.report["data"]["threads"]] == [0]
    assert result.findings["stopped"]["title"].startswith("rank 1 (")
    shown = distdiag("trace", "blocked", "--from", str(tmp_path), env={"NO_COLOR": "1"})
    lines = shown.out.splitlines()
    assert lines[0] == "distdiag trace blocked: FAIL"
    assert "\x1b" not in shown.out
    assert all(len(line.rstrip()) <= 80 for line in lines if not line.startswith("    waits: "))
    assert lines[1] == f"job {jobs['stop'].name}: 2 of 2 ranks on {HOST}"
    assert [line.split()[0] for line in lines[2:4]] == ["rank", "0"]
    assert lines[-1] == f"    kill -CONT {jobs['stop'].pid(1)}"


def test_what_they_have_open_leads_to_each_other(jobs: dict[str, Job]) -> None:
    job = jobs["sleep"]
    result = distdiag("trace", "fds", "--json", "--rank", "0-1", "--job", job.name)
    assert (result.code, result.report["command"]) == (0, "trace fds")
    ends = [
        {one["peer_rank"] for one in row["descriptors"] if one["socket"] and one["socket"]["state"] == "ESTABLISHED"}
        for row in result.report["data"]["processes"]
    ]
    assert ends == [{1}, {0}]
    shown = distdiag("trace", "fds", str(job.pid(0)))
    assert shown.code == 0
    assert "rank 1" in shown.out
    assert all(len(line.rstrip()) <= 80 for line in shown.out.splitlines())


def test_rank_0_that_started_the_others_has_not_ended(tmp_path: Path) -> None:
    rank = "import os, time; os.write(1, b'ready\\n'); time.sleep(600)"
    first = tmp_path / "first.py"
    first.write_text(
        "import os, subprocess, sys\n"
        "import torch\n"
        "for rank in '12':\n"
        "    env = {**os.environ, 'RANK': rank, 'WORLD_SIZE': '3'}\n"
        f"    own = subprocess.Popen([sys.executable, '-c', {rank!r}], env=env)\n"
        "own.wait()\n"
    )
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    reads, writes = os.pipe()
    process = support_torch.start([sys.executable, str(first)], env, output=writes)
    os.close(writes)
    assert process is not None
    with open(reads) as said:
        try:
            assert [said.readline() for _ in range(2)] == ["ready\n"] * 2
            blocked = distdiag("trace", "blocked", "--json", "--job", f"127.0.0.1:{port}")
            result = distdiag("pyspy-all", "--json", "--job", f"127.0.0.1:{port}")
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
    assert process.pid in [one["pid"] for one in blocked.report["data"]["threads"]]
    found = result.findings["unseen"]
    assert (found["level"], "exited, or on other hosts" in found["title"]) == ("unknown", True), result.out


def test_a_rank_that_goes_on_is_not_blamed(seen: dict[str, Seen]) -> None:
    # It sleeps at one line and looks again: progress, which is seen only if a sample meets it between two sleeps.
    (found,) = seen["turns"].findings
    assert found["level"] in ("unknown", "warn"), found
    assert found["level"] == "warn" or "rank 0 waits for its data" in seen["turns"].title, found


def test_the_other_end_is_on_another_node(tmp_path: Path) -> None:
    need_network()
    need("ssh", SSHD)
    with Network(2) as network:
        serve_ssh(network)
        for rank, node in enumerate(network.nodes):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
            env = {**place, **meeting, "HOW": "sleep", "JOB_FOLDER": str(tmp_path)}
            node.start(sys.executable, str(PROGRAMS / "waits_on_another_rank.py"), env=env)
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 20, lambda: "not ready")
        since = time.monotonic()
        wait_until(lambda: time.monotonic() - since > 6, 20, lambda: "the clock did not advance")
        wrap, env = tuple(network.client.command()), network.client_env()
        saved = tmp_path / "saved"
        typed = ("--hosts", network.hosts, "--save", str(saved))
        result = distdiag("trace", "blocked", "--json", *typed, wrap=wrap, env=env)
        assert result.findings["not-in-collective"]["title"].startswith("rank 1 (node2, pid "), result.out
        assert [(row["host"], row["rank"]) for row in result.report["data"]["threads"]] == [("node1", 0), ("node2", 1)]
        assert result.report["data"]["threads"][0]["on"].endswith(" = rank 1 on node2")
        # Of one node alone it is not known who has the other end, nor whether that rank lives.
        (saved / "trace_blocked.node2.json").unlink()
        part = distdiag("trace", "blocked", "--json", "--from", str(saved))
        assert part.report["verdict"] == "unknown", part.out
        assert "whose other end was not found" in part.report["data"]["threads"][0]["on"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop a right that others lack from the start")
def test_processes_of_others_are_told_with_what_gives_the_right() -> None:
    need("setpriv")
    with subprocess.Popen(["setpriv", "--reuid", "65534", "--clear-groups", "sleep", "600"]) as other:
        try:
            wait_until(lambda: main(other.pid)[0] == "clock_nanosleep", 10, lambda: f"{blocked(other.pid)}")
            why = {"blocked": "lacks CAP_SYS_PTRACE", "fds": "cannot be read: permission denied"}
            for command in (("blocked", "--pid"), ("fds",)):
                arguments = ("trace", *command, str(other.pid), "--json")
                result = distdiag(*arguments, wrap=("setpriv", "--bounding-set", "-sys_ptrace"))
                assert result.code == 3
                assert "Traceback" not in result.err
                assert why[command[0]] in result.findings["unreadable"]["title"]
                assert "SYS_PTRACE" in result.findings["unreadable"]["fix"]["text"]
        finally:
            other.kill()


def test_a_process_that_is_not_there() -> None:
    gone = str(2**22 - 1)
    blocked = distdiag("trace", "blocked", "--pid", gone, "--json")
    assert (blocked.code, blocked.report["command"], blocked.report["verdict"]) == (3, "trace blocked", "unknown")
    assert blocked.findings["no-job"]["title"].startswith(f"process {gone} not found on ")
    assert "--hosts" in blocked.findings["no-job"]["fix"]["text"]
    fds = distdiag("trace", "fds", gone, "--json")
    assert (fds.code, fds.report["command"]) == (3, "trace fds")
    assert fds.report["error"]["message"].startswith(f"process {gone} not found on ")
    assert "--hosts" in fds.report["error"]["hint"]


@pytest.mark.parametrize("command", ["sys", "blocked", "fds"])
def test_a_process_that_is_not_there_beside_one_that_is(command: str) -> None:
    gone = str(2**22 - 1)
    other = subprocess.Popen(["sleep", "60"])
    try:
        options = ("--for", "100ms") if command == "sys" else ()
        result = distdiag("trace", command, "--json", "--pid", str(other.pid), "--pid", gone, *options)
    finally:
        other.kill()
        other.wait(10)
    assert result.code == 3
    assert result.findings["exited"]["title"].startswith(f"process {gone} not found on ")


def test_who_has_started_distdiag_has_not_exited() -> None:
    result = distdiag("trace", "blocked", "--json", "--pid", str(os.getpid()))
    assert result.report["data"]["threads"][0]["pid"] == os.getpid()
    assert "exited" not in result.report["summary"]


@pytest.mark.parametrize("command", ["sys", "fds"])
def test_a_kernel_thread_is_no_program(command: str) -> None:
    if machine.read_text("/proc/2/comm") != "kthreadd\n":
        pytest.skip("a container, which does not show the kernel's threads")
    result = distdiag("trace", command, "--json", "--pid", "2")
    assert result.code == 3
    assert "a kernel thread" in result.report["error"]["message"]


def test_a_job_that_is_not_there_has_a_report() -> None:
    result = distdiag("trace", "blocked", "--job", "10.9.8.7:1", "--json")
    assert (result.code, result.report["verdict"]) == (3, "unknown")
    assert "no rank of job 10.9.8.7:1 was found" in result.findings["no-job"]["title"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("blocked", "--rank", "x"), "is not a rank"),
        (("blocked", "--pid", "0"), "is not in the range x>=1"),
        (("blocked", "--pid", "1", "--rank", "0"), "pass one of them"),
        (("fds",), "no process selected"),
        (("bogus",), "bogus"),
    ],
)
def test_wrong_input_is_told_with_a_hint(arguments: tuple[str, ...], words: str) -> None:
    result = distdiag("trace", *arguments, "--json")
    error = result.report["error"]
    assert result.code == 2
    assert words in error["message"] + error["hint"]
    assert error["hint"]
    command = "trace" if arguments == ("bogus",) else f"trace {arguments[0]}"
    assert result.report["command"] == command
