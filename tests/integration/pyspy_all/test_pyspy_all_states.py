"""pyspy-all on processes that py-spy alone hangs on or fails at: each has its own reason, and is left as found."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import support_torch
from jobs import Job, free_port, states, wait_for_state
from json_schema import check
from support import PROGRAM, need, need_mounts, need_root, wait_until
from support_warm import WarmRunning, distdiag

from distdiag.facts.process import procs

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 3.0


def test_stopped_blocked_traced_dead_and_foreign_ranks_are_reported_in_time_and_left_alone(tmp_path: Path) -> None:
    need("strace")
    how = {1: {"HOW": "vfork"}, 5: {"HOW": "not-python"}}
    log = tmp_path / "log"
    with Job("stands_still", 6, rank_env=how, wrap=("sh", "-c", _MAYBE_PYTHON, "sh")) as job:
        job.wait_still()
        os.kill(job.pid(0), signal.SIGSTOP)
        os.kill(job.pid(3), signal.SIGKILL)
        with subprocess.Popen(["strace", "-o", log, "-p", str(job.pid(2))], stderr=subprocess.DEVNULL) as strace:
            try:
                # It is traced before it may go on; and then it is back in its call, which strace notes.
                wait_until(lambda: log.exists() and log.stat().st_size > 0, 20, lambda: "strace does not attach")
                for rank, letter in ((0, "T"), (1, "D"), (2, "S"), (3, "Z")):
                    wait_for_state(job.pid(rank), letter)
                assert _tracer(job.pid(2)) == strace.pid
                pids = [job.pid(rank) for rank in range(6)]
                before = states(pids)
                began = time.monotonic()
                result = job.look("--sample-timeout", str(TIMEOUT_S), "--interval", "0.1")
                assert time.monotonic() - began < TIMEOUT_S + 10
                assert states(pids) == before
            finally:
                strace.kill()
    rows = {row["rank"]: row for row in result.report["data"]["processes"] if row["role"] == "rank"}
    status = {rank: row["status"] for rank, row in rows.items()}
    assert status == {0: "stopped", 1: "kernel", 2: "traced", 3: "gone", 4: "ok", 5: "not-python"}
    assert [rows[rank]["state"] for rank in range(6)] == ["T", "D", "S", "Z", "S", "S"]
    assert "strace" in rows[2]["reason"]
    assert all(rows[rank]["threads"][0]["frames"] for rank in (0, 1, 2, 4))
    assert {tuple(one["ranks"]) for one in result.report["data"]["outliers"]} == {(0,), (3,)}
    assert result.findings["stopped"]["fix"]["commands"] == [f"kill -CONT {job.pid(0)}"]
    assert f"Also: rank 3 ({rows[3]['host']}, pid {job.pid(3)}) " in result.findings["stopped"]["detail"]
    assert result.findings["unreadable"]["where"]["ranks"] == [5]


_MAYBE_PYTHON = 'if [ "$HOW" = not-python ]; then touch "$JOB_FOLDER/ready-$RANK"; exec sleep 600; fi; exec "$@"'


def _tracer(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("TracerPid"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop a right that others lack from the start")
def test_without_the_right_to_read_it_is_said_which_and_how_to_get_it() -> None:
    need("setpriv")
    without = ("setpriv", "--bounding-set", "-sys_ptrace")
    with Job("stands_still", 3, rank_env={1: {"HOW": "other-user"}}, wrap=without) as job:
        job.wait_still()
        result = job.look("--interval", "0.1", wrap=without)
    assert result.code == 3
    found = result.findings["unreadable"]
    assert found["where"]["ranks"] == [1]
    assert "uid 65534" in found["title"]
    assert "SYS_PTRACE" in found["fix"]["text"]
    rows = result.report["data"]["processes"]
    assert [row["status"] for row in rows] == ["ok", "denied", "ok"]


def test_a_wrapper_around_python_is_seen_through() -> None:
    with Job("stands_still", 2, wrap=("sh", "-c", 'sleep 600 & "$@" & wait', "sh")) as job:
        job.wait_still()
        result = job.look("--samples", "1")
    frames = [row["threads"][0]["frames"][0]["function"] for row in result.report["data"]["processes"]]
    assert frames == ["load_batch"] * 2


def test_pids_that_are_asked_for(tmp_path: object) -> None:
    with Job("stands_still", 3) as job:
        job.wait_ready()
        one = distdiag("pyspy-all", "--json", "--samples", "1", "--pid", str(job.pid(1)))
        # The other ranks were not asked for; that does not make them missing.
        assert [row["rank"] for row in one.report["data"]["processes"]] == [1]
        assert "exited" not in one.findings
    gone = distdiag("pyspy-all", "--json", "--pid", str(job.pid(1)))
    assert gone.code == 3
    assert f"process {job.pid(1)} not found on " in gone.report["summary"]


@pytest.mark.parametrize("command", ["pyspy-all", "hang"])
def test_where_there_is_no_such_job_it_lists_those_that_are_there_and_samples_none(command: str) -> None:
    with Job("stands_still", 1) as job:
        job.wait_still()
        result = distdiag(command, "--json", "--job", "10.9.8.7:1")
        assert "sampling" not in result.err
    assert (result.code, list(result.findings)) == (3, ["no-job"])
    assert "Jobs found: " in result.findings["no-job"]["detail"]
    check(result.out, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "/nowhere"), "no such file or folder"),
        (("--from", "/etc/hostname"), "no facts from pyspy-all in /etc/hostname (hostname contains no py-spy dump)"),
        (("--from", "/etc/hostname", "--hosts", "a"), "cannot be combined"),
        (("--html", "/nowhere/page.html"), "cannot write this file"),
        (("--pid", "0"), "is not in the range x>=1"),
        (("--samples", "0"), "is not in the range 1<=x<=100"),
    ],
)
def test_wrong_input_is_a_usage_error(arguments: tuple[str, ...], words: str) -> None:
    result = distdiag("pyspy-all", "--json", *arguments)
    error = result.report["error"]
    assert result.code == 2
    assert words in error["message"] + error["hint"]


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A freezer cgroup of version 1 or 2; thawed and removed in the end."""
    need_root()
    first, second = Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")
    above = first if first.is_dir() else second if (second / "cgroup.controllers").exists() else None
    if above is None and os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
        pytest.fail("required here: a freezer cgroup")
    if above is None:
        pytest.skip("no freezer cgroup is mounted")
    folder = above / f"distdiag-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    _freeze(folder, is_frozen=False)
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), 20, lambda: "there are processes in it")
    folder.rmdir()


def _freeze(folder: Path, *, is_frozen: bool) -> None:
    state = folder / "freezer.state"
    if state.exists():
        state.write_text("FROZEN" if is_frozen else "THAWED")
    else:
        (folder / "cgroup.freeze").write_text(str(int(is_frozen)))


def test_a_rank_whose_cgroup_is_frozen_is_named_with_what_lets_it_go_on(freezer: Path) -> None:
    with Job("stands_still", 3) as job:
        job.wait_still()
        pid = job.pid(1)
        (freezer / "cgroup.procs").write_text(str(pid))
        _freeze(freezer, is_frozen=True)
        try:
            wait_until(lambda: procs.thaws_by(pid) != "", 20, lambda: "it does not freeze")
            result = job.look("--interval", "0.1")
            blocked = distdiag("trace", "blocked", "--json", "--job", job.name)
        finally:
            _freeze(freezer, is_frozen=False)
    found = result.findings["stopped"]
    assert (result.code, found["where"]["ranks"]) == (1, [1])
    assert "is frozen with its cgroup" in found["title"]
    assert "kill -CONT" not in str(found["fix"])
    assert str(freezer) in found["fix"]["commands"][0]
    assert (blocked.code, blocked.findings["stopped"]["where"]["ranks"]) == (1, [1])
    assert "is frozen with its cgroup" in blocked.findings["stopped"]["title"]
    assert blocked.findings["stopped"]["fix"]["commands"] == found["fix"]["commands"]


def test_a_rank_that_a_debugger_holds_is_not_sent_a_signal() -> None:
    need("gdb")
    with Job("stands_still", 3) as job:
        job.wait_still()
        argv = ["gdb", "-q", "-nx", "-p", str(job.pid(2))]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as gdb:
            try:
                wait_for_state(job.pid(2), "t", timeout=60)
                blocked = distdiag("trace", "blocked", "--json", "--job", job.name)
            finally:
                gdb.kill()
    found = blocked.findings["stopped"]
    assert (blocked.code, found["where"]["ranks"], found["fix"]["commands"]) == (1, [2], [])
    assert f"is stopped by its tracer, pid {gdb.pid} (gdb)" in found["title"]


def test_a_process_that_proc_does_not_show_is_alive_and_not_gone() -> None:
    need("setpriv", "unshare", "mount")
    need_root()
    need_mounts()
    with Job("stands_still", 1, rank_env={0: {"HOW": "other-user"}}) as job:
        job.wait_still()
        # As on a node whose /proc shows users only their own processes.
        without = "setpriv --regid 65534 --clear-groups --bounding-set -sys_ptrace"
        inside = f'mount -t proc -o hidepid=2 proc /proc && exec {without} "$@"'
        for command in (["pyspy-all"], ["trace", "blocked"]):
            words = [*command, "--pid", str(job.pid(0)), "--json"]
            result = distdiag(*words, wrap=("unshare", "-m", "sh", "-c", inside, "sh"))
            assert (result.code, result.report["verdict"]) == (3, "unknown"), result.out + result.err
            assert "alive" in result.report["summary"], result.report["summary"]


@pytest.fixture
def own_processes() -> Iterator[int]:
    """A process in a PID namespace of its own, so that no job of another test is found there."""
    need("unshare")
    need_root()
    need_mounts()
    own = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child", "sh", "-c", "echo; exec sleep 600")
    with subprocess.Popen(own, stdout=subprocess.PIPE) as above:
        assert above.stdout is not None
        assert above.stdout.readline()  # its /proc is mounted
        yield int(Path(f"/proc/{above.pid}/task/{above.pid}/children").read_text())
        above.kill()


def test_a_launcher_that_waits_for_another_node_has_started_no_rank(own_processes: int) -> None:
    torchrun, endpoint = str(Path(PROGRAM).with_name("torchrun")), f"127.0.0.1:{free_port()}"
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "x")
    argv = [torchrun, "--nnodes", "2", "--nproc-per-node", "1", *meeting, "none.py"]
    launcher = support_torch.start(argv, {**os.environ, "OMP_NUM_THREADS": "1"}, node=own_processes)
    assert launcher is not None
    try:
        name = Path(f"/proc/{launcher.pid}/comm")
        wait_until(lambda: name.read_text() == "pt_elastic\n", 60, name.read_text)
        inside = ("nsenter", "-t", str(own_processes), "-p", "-m", "--")
        asked = [WarmRunning(*command, "--json", wrap=inside) for command in (("pyspy-all",), ("trace", "blocked"))]
        results = [each.finish() for each in asked]
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(20)
    for result in results:
        assert (result.code, result.report["verdict"]) == (3, "unknown"), result.out
        (found,) = result.report["findings"]
        assert found["title"].startswith("torchrun (pid "), found
        assert "waits in its rendezvous until all nodes have joined" in found["title"] + found["detail"]
