"""Blocked threads and their waits: real processes, read while blocked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import need, need_mounts, wait_until

from distdiag.facts.process.blocked_threads import Lock, Thread, blocked, locks_before
from distdiag.facts.process.descriptors import End, Look, descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS = Path(__file__).parents[2] / "programs"
CALLS = {
    **{"recv": {"recvfrom"}, "pipe": {"read"}, "fifo": {"openat"}, "flock": {"flock"}, "poll": {"poll", "ppoll"}},
    **{"select": {"select", "pselect6"}, "epoll": {"epoll_wait", "epoll_pwait"}, "lock": {"futex"}, "mutex": {"futex"}},
    **{"same lock": {"futex"}, "sleep": {"clock_nanosleep"}, "accept": {"accept4"}, "wait": {"wait4"}},
    **{"unmapped": {"poll"}, "timed lock": {"futex"}, "long sleep": {"clock_nanosleep", "nanosleep"}},
}


@dataclass
class Target:
    """A blocked program, and its own description of its set-up."""

    pid: int
    setup: dict[str, Any]

    def thread(self, way: str, look: Look | None = None) -> Thread:
        """Read the thread that is blocked in this way."""
        return next(one for one in blocked(self.pid, look) if one.tid == self.setup["tids"][way])


@contextlib.contextmanager
def running(
    program: str, *arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()
) -> Iterator[Target]:
    """Start it, read its line of readiness, and end it with all its children."""
    process = subprocess.Popen(
        [*wrap, sys.executable, str(PROGRAMS / f"{program}.py"), *arguments],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield Target(process.pid, json.loads(process.stdout.readline()))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        process.stdout.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running("blocked_in_many_ways", str(tmp_path_factory.mktemp("blocked"))) as target:
        ways = {tid: way for way, tid in target.setup["tids"].items()}

        def astray() -> list[Thread]:
            return [one for one in blocked(target.pid) if one.syscall not in CALLS[ways[one.tid]] or one.state != "S"]

        wait_until(lambda: not astray(), 20, lambda: f"not blocked as they should be: {astray()}")
        yield target


def test_every_thread_is_told_with_how_long_it_has_not_run(many: Target) -> None:
    at = [time.monotonic()]
    first = {one.tid: one for one in blocked(many.pid)}
    at.append(time.monotonic())
    time.sleep(0.1)
    at.append(time.monotonic())
    later = {one.tid: one for one in blocked(many.pid)}
    at.append(time.monotonic())
    assert first.keys() == later.keys() == set(many.setup["tids"].values())
    for tid, one in first.items():
        assert not one.hidden
        assert one.unread == ("unmapped" if tid == many.setup["tids"]["unmapped"] else "")
        assert one.wait_channel
        assert one.comm
        assert one.since_s is not None
        # The scheduler notes the time at its ticks, and each look takes a while.
        assert at[2] - at[1] - 0.02 < (later[tid].since_s or 0) - one.since_s < at[3] - at[0] + 0.02
    # They stopped together, on several processors, whose clocks may be far apart.
    assert max(one.since_s or 0 for one in later.values()) - min(one.since_s or 0 for one in later.values()) < 5


def test_recv_on_a_connection_to_another_process(many: Target) -> None:
    (target,) = many.thread("recv").targets
    assert (target.fd, target.wants) == (many.setup["fds"]["connection"], "r")
    assert target.descriptor is not None
    found = target.descriptor.socket
    assert found is not None
    assert (found.protocol, found.state, found.local) == ("tcp", "ESTABLISHED", f"127.0.0.1:{many.setup['port']}")
    assert (found.send_queue_bytes, found.receive_queue_bytes, found.retransmits) == (0, 0, 0)
    child = descriptors(many.setup["child"]).descriptors
    assert found.remote in [one.socket.local for one in child if one.socket]


def test_read_of_an_empty_pipe_whose_writer_lives(many: Target) -> None:
    (target,) = many.thread("pipe").targets
    assert target.descriptor is not None
    (end,) = target.descriptor.ends
    assert (end.pid, end.mode) == (many.setup["child"], "w")


def test_open_of_a_fifo_without_a_reader(many: Target) -> None:
    one = many.thread("fifo")
    assert one.path == os.path.join(os.readlink(f"/proc/{many.pid}/cwd"), "fifo")


def test_a_lock_on_a_file_is_held_by(many: Target) -> None:
    one = many.thread("flock")
    comm = Path(f"/proc/{many.setup['child']}/comm").read_text().strip()
    assert one.locks == (Lock("FLOCK", "WRITE", many.setup["child"], comm),)
    assert one.targets[0].descriptor is not None
    assert one.targets[0].descriptor.target.endswith("/lock")


def test_poll_on_three_descriptors(many: Target) -> None:
    fds = many.setup["fds"]
    watched = [(target.fd, target.wants) for target in many.thread("poll").targets]
    assert watched == [(fds["pipe"], "r"), (fds["connection"], "r"), (fds["server"], "r")]
    assert all(target.descriptor is not None for target in many.thread("poll").targets)


def test_what_poll_was_asked_is_not_there_any_more(many: Target) -> None:
    one = many.thread("unmapped")
    assert (one.unread, one.targets) == ("unmapped", ())
    assert one.arguments[1:3] == (1, 0xFFFFFFFF)


def test_select(many: Target) -> None:
    assert [(one.fd, one.wants) for one in many.thread("select").targets] == [(many.setup["fds"]["pipe"], "r")]


def test_epoll_on_a_connection(many: Target) -> None:
    (target,) = many.thread("epoll").targets
    assert (target.fd, target.wants) == (many.setup["fds"]["connection"], "r")


def test_a_lock_of_python_that_two_threads_wait_for(many: Target) -> None:
    futex = many.thread("lock").futex
    assert futex is not None
    assert set(futex.waiters) == {many.setup["tids"]["lock"], many.setup["tids"]["same lock"]}
    assert futex.owner is None, "a semaphore has no owner"


def test_a_wait_with_a_timeout_ends_in(many: Target) -> None:
    left_s = many.thread("timed lock").wakes_in_s
    assert left_s is not None
    assert 0 < left_s < 600
    assert many.thread("lock").wakes_in_s is None


def test_a_mutex_is_held_by(many: Target) -> None:
    futex = many.thread("mutex").futex
    assert futex is not None
    assert futex.waiters == (many.setup["tids"]["mutex"],)
    assert futex.owner == many.pid


def test_sleep(many: Target) -> None:
    one = many.thread("sleep")
    assert one.wakes_in_s == pytest.approx(600 - (one.since_s or 0), abs=1)


def test_a_sleep_without_end_has_no_rest(many: Target) -> None:
    assert many.thread("long sleep").wakes_in_s is None


def test_what_a_thread_writes_between_two_sleeps_is_no_argument_of_either(tmp_path: Path) -> None:
    (tmp_path / "naps.py").write_text(
        "import ctypes, json, os, struct\n"
        "libc, sleeps = ctypes.CDLL(None), ctypes.create_string_buffer(16)\n"
        "libc.prctl(29, 1)  # PR_SET_TIMERSLACK: short sleeps are short\n"
        "print(json.dumps({'tids': {'naps': os.getpid()}}), flush=True)\n"
        "while True:\n"
        "    sleeps.raw = struct.pack('=qq', 0, 100_000)\n"
        "    libc.nanosleep(sleeps, None)\n"
        "    sleeps.raw = struct.pack('=qq', 5_000, 0)\n"
        "    for _ in range(2000):\n"
        "        pass\n"
    )
    with running(str(tmp_path / "naps")) as target:
        read = [one.wakes_in_s for _ in range(300) for one in blocked(target.pid) if one.wakes_in_s is not None]
    assert max(read, default=0) < 1


def test_wait_for_a_child(many: Target) -> None:
    (child,) = many.thread("wait").children
    assert (child.pid, child.state) == (many.setup["child"], "S")


def test_accept(many: Target) -> None:
    (target,) = many.thread("accept").targets
    assert target.descriptor is not None
    assert target.descriptor.socket is not None
    assert (target.descriptor.socket.state, target.descriptor.socket.backlog) == ("LISTEN", 0)


def test_a_deleted_file_of_another_process(many: Target) -> None:
    found = {one.fd: one for one in descriptors(many.pid).descriptors}
    gone = found[many.setup["fds"]["gone"]]
    assert (gone.kind, gone.size_bytes, gone.position, gone.mode) == ("deleted file", 5, 5, "w")


def test_several_processes_share_a_look(many: Target) -> None:
    look = Look()
    assert many.thread("pipe", look).targets == many.thread("pipe", look).targets
    child = {one.target: one for one in descriptors(many.setup["child"], look).descriptors}
    ours = many.thread("pipe", look).targets[0].descriptor
    assert ours is not None
    assert child[ours.target].ends == (End(many.pid, ours.fd, "r"),)


_READ = (
    "import dataclasses, json, sys; from distdiag.facts.process import blocked_threads, descriptors;"
    "pid = int(sys.argv[1]);"
    "print(json.dumps([[dataclasses.asdict(thread) for thread in blocked_threads.blocked(pid)],"
    "descriptors.descriptors(pid).unread]))"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop a right that others lack from the start")
def test_without_the_right_what_everybody_may_read_is_told(tmp_path: Path) -> None:
    need("setpriv")
    with running("blocked_in_many_ways", str(tmp_path), env={"HOW": "other-user"}) as target:
        done = subprocess.run(
            ["setpriv", "--bounding-set", "-sys_ptrace", sys.executable, "-c", _READ, str(target.pid)],
            capture_output=True,
            check=True,
            timeout=20,
        )
        threads, unread = json.loads(done.stdout)
        assert unread == "denied"
        assert {one["tid"] for one in threads} == set(target.setup["tids"].values())
        for one in threads:
            assert one["hidden"]
            assert (one["syscall"], one["arguments"], one["targets"]) == ("", [], [])
            assert one["state"] in ("S", "R")
            assert one["comm"]
            assert one["since_s"] is not None


def test_a_thread_that_runs_is_not_blocked() -> None:
    process = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        wait_until(lambda: [one.state for one in blocked(process.pid)] == ["R"], 5, lambda: "it does not run")
        (one,) = blocked(process.pid)
        assert (one.syscall, one.arguments, one.targets, one.wait_channel) == ("", (), (), "")
    finally:
        process.kill()
        process.wait(10)


def test_a_process_that_is_gone() -> None:
    assert blocked(2**22 + 1) == ()


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse")
def test_a_file_system_that_does_not_answer_costs_its_patience_and_is_told(tmp_path: Path) -> None:
    need_mounts()
    with running("blocked_on_dead_disk", str(tmp_path), wrap=("unshare", "-m")) as target:
        wait_until(lambda: bool(target.thread("stat").path), 5, lambda: f"{blocked(target.pid)}")
        one = target.thread("stat")
        assert one.path == f"{tmp_path}/data"
        assert one.wait_channel.startswith(("request_wait_answer", "fuse_"))
        began = time.monotonic()
        found = {one.fd: one for one in descriptors(target.pid, patience_s=0.2).descriptors}
        assert time.monotonic() - began < 10, "without patience it waits for ever"
        folder, file = found[target.setup["fds"]["dead"]], found[target.setup["fds"]["alive"]]
        assert (folder.kind, folder.target, folder.silent) == ("unknown", str(tmp_path), True)
        assert (file.kind, file.size_bytes, file.silent) == ("file", 5, False)


LOCKS = """\
1: POSIX  ADVISORY  READ 100 fe:00:7 0 EOF
1: -> POSIX  ADVISORY  WRITE 200 fe:00:7 0 EOF
1:  -> POSIX  ADVISORY  WRITE 201 fe:00:7 0 EOF
2: FLOCK  ADVISORY  WRITE 101 fe:00:8 0 EOF
2: -> FLOCK  ADVISORY  WRITE 200 fe:00:8 0 EOF
3: OFDLCK ADVISORY  WRITE -1 fe:00:9 0 EOF
3: -> OFDLCK ADVISORY  WRITE -1 fe:00:9 0 EOF
4: FLOCK  ADVISORY  WRITE 102 fe:00:10 0 EOF
5: LEASE  ACTIVE    READ 103 fe:00:11 0 EOF
"""


@pytest.mark.parametrize(
    ("pid", "kind", "inode", "held_by"),
    [
        (200, "POSIX", 7, [100]),
        (201, "POSIX", None, [100]),
        (200, "FLOCK", 8, [101]),
        (200, "FLOCK", 7, []),
        (300, "FLOCK", 10, []),
        (200, "OFDLCK", 9, [None]),
    ],
)
def test_who_holds_a_lock(pid: int, kind: str, inode: int | None, held_by: list[int | None]) -> None:
    assert [lock.pid for lock in locks_before(LOCKS, pid, kind, inode)] == held_by
