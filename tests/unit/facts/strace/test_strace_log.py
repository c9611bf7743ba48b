"""Logs of `strace -ttt -T -yy`: recorded by four versions, and written here where a defect is to be placed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.facts.strace import log
from distdiag.facts.strace.log import read_logs

if TYPE_CHECKING:
    from distdiag.facts.strace.types import Logs, ThreadLog

RECORDED = Path(__file__).parents[3] / "recorded" / "strace"
VERSIONS = ["5.10", "6.1", "6.13", "7.2"]


def read(text: str | bytes, tmp_path: Path, name: str = "log") -> Logs:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_logs([str(path)])


def only(logs: Logs) -> ThreadLog:
    (thread,) = logs.threads
    assert logs.errors == ()
    return thread


def recorded(version: str, name: str) -> tuple[ThreadLog, ...]:
    path = RECORDED / f"{version}_{name}"
    logs = read_logs([str(path if path.exists() else path.with_name(path.name + ".txt"))])
    assert logs.errors == ()
    assert sum(one.n_unread for one in logs.threads) == 0
    return logs.threads


def timed(version: str, name: str, tmp_path: Path) -> ThreadLog:
    """Read a log recorded with -tt, its times turned into those of -ttt."""
    path = RECORDED / f"{version}_{name}"
    (file,) = path.iterdir() if path.is_dir() else [path.with_name(path.name + ".txt")]
    times = re.compile(rb"^((?:\d+ +)?)(\d\d):(\d\d):(\d\d)", re.MULTILINE)

    def since_1970(found: re.Match[bytes]) -> bytes:
        pid, hours, minutes, seconds = found[1], *map(int, found.groups()[1:])
        return b"%s%d" % (pid, 1_700_000_000 + 3600 * hours + 60 * minutes + seconds)

    return only(read(times.sub(since_1970, file.read_bytes()), tmp_path))


@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_not_found_is_folded_and_what_was_found_elsewhere_is_no_trouble(version: str) -> None:
    (thread,) = recorded(version, "files")
    assert [(one.error, one.target, one.places, one.weight) for one in thread.errors] == [
        ("ENOENT", "libmissing.so.1", 2, 6),
        ("ENOENT", "train.yaml", 2, 4),
    ]
    assert (thread.state, thread.comm) == ("exited 3", "demo")
    counts = {one.name: (one.count, one.errors) for one in thread.calls}
    assert counts["openat"] == (9, 5)
    assert counts["write"] == (2, 0)
    assert counts["read"] == (2, 0)
    assert sum(count for count, _ in counts.values()) == thread.n_calls
    # read(3, ...) of three different files, by the target of 3 at the time.
    places = {one.name: one.count for one in thread.places}
    assert places["/etc"] == 4
    assert places["/dev"] == 3
    assert places["/tmp/demo"] >= 9


@pytest.mark.parametrize("version", VERSIONS)
def test_the_slowest_call_on_a_folder_has_its_target(version: str) -> None:
    (thread,) = recorded(version, "files")
    slowest = [one for one in thread.places if one.name == "/tmp/demo"]
    assert slowest[0].slowest.split(" ")[1].startswith("/tmp/demo/")
    assert 0 < slowest[0].slowest_s <= slowest[0].time_s


def test_interleaved_threads_are_told_apart_and_their_halves_joined(tmp_path: Path) -> None:
    text = """\
7 1700000000.1 execve("./demo", ["./demo"], 0x7 /* 9 vars */) = 0 <0.000100>
7 1700000000.2 clone3({flags=CLONE_VM|CLONE_FILES|CLONE_THREAD} => {parent_tid=[8]}, 88) = 8 <0.000100>
8 1700000000.3 prctl(PR_SET_NAME, "worker") = 0 <0.000100>
8 1700000000.4 read(3<pipe:[9]>,  <unfinished ...>
7 1700000000.5 write(4<pipe:[9]>, "x", 1) = 1 <0.000100>
8 1700000000.6 <... read resumed>"x", 1) = 1 <0.2>
8 1700000000.7 exit(0) = ?
8 1700000000.7 +++ exited with 0 +++
7 1700000000.8 exit_group(3) = ?
7 1700000000.8 +++ exited with 3 +++
"""
    main, worker = read(text, tmp_path).threads
    assert (main.comm, main.state, worker.comm, worker.state) == ("demo", "exited 3", "worker", "exited 0")
    assert (main.pid, worker.pid, main.tid, worker.tid) == (7, 7, 7, 8)
    assert {one.name: (one.count, one.time_s) for one in worker.calls}["read"] == (1, 0.2)
    assert {one.name: one.count for one in worker.places} == {"pipe": 1}
    assert main.ends == worker.ends == ("pipe:[9",)
    assert worker.last is not None
    assert (worker.last.name, worker.last.result) == ("exit", "?")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_child_is_a_process_of_its_own(version: str) -> None:
    parent, child = recorded(version, "forks")
    assert (parent.pid, child.pid) == (parent.tid, child.tid)
    assert (child.comm, child.state) == ("true", "exited 0")
    assert {one.name: one.errors for one in child.calls}["execve"] == 1
    assert {one.name: one.count for one in child.places}["/etc"] >= 2


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "state"), [("blocked", "detached"), ("live", "blocked")])
def test_a_thread_that_waits_is_seen_to_wait_for_its_peer(version: str, name: str, state: str, tmp_path: Path) -> None:
    thread = recorded(version, name)[0] if name == "live" else timed(version, name, tmp_path)
    assert (thread.state, thread.blocked_s) == (state, 0.0)
    assert thread.last is not None
    assert (thread.last.name, thread.last.fd, thread.last.result) == ("recvfrom", 5, "")
    assert re.fullmatch(r"TCP:\[127\.0\.0\.1:\d+->127\.0\.0\.1:\d+\]", thread.last.target)


@pytest.mark.parametrize("version", VERSIONS)
def test_how_it_ended_and_what_was_refused(version: str, tmp_path: Path) -> None:
    killed, crashed, refused = (timed(version, name, tmp_path) for name in ("killed", "segv", "refused"))
    assert (killed.state, crashed.state) == ("killed SIGUSR1", "killed SIGSEGV")
    assert killed.last is not None
    assert killed.last.name == "tgkill"
    (error,) = refused.errors
    assert (error.name, error.error, error.target) == ("connect", "ECONNREFUSED", "127.0.0.1:9")
    assert "->127.0.0.1:9" in refused.ends


def test_how_long_a_thread_is_blocked_is_told_by_the_newest_time_of_all_logs(tmp_path: Path) -> None:
    (tmp_path / "F.1").write_text("1700000000.5 futex(0x7f00, FUTEX_WAIT, 0, NULL <detached ...>\n")
    (tmp_path / "F.2").write_text('1700000003.5 read(3</x>, "", 9) = 0 <0.1>\n1700000004.5 close(3</x>) = 0 <0.1>\n')
    (tmp_path / "notes.md").write_text("strace -ff -tt -T\n")
    blocked, other = read_logs([str(tmp_path)]).threads
    assert blocked.tid == 1
    assert blocked.blocked_s == pytest.approx(4.0)
    assert (other.tid, other.state, other.blocked_s) == (2, "returned", None)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ('1.000003 read(3</x>, "abc', "cut"),
        ('1.000003 read(3</x>, "abc", 3) = ', "cut"),
        ("1.0000", "cut"),
        ("1.000003 read(3</x>, ", "blocked"),
        ("1.000003 read(3</x>", "blocked"),
        ('1.000003 read(3</x>, "abc", 3) = 3 <0.000009>', "returned"),
        ("1.000003 +++ exited with 9 +++", "exited 9"),
    ],
)
def test_how_a_log_ends_inside_a_line(end: str, state: str, tmp_path: Path) -> None:
    end = end.replace("1.", "1700000000.", 1)
    thread = only(read(f'1700000000.000001 read(3</x>, "a", 3) = 1 <0.000009>\n{end}', tmp_path))
    assert thread.state == state


def test_errors_that_are_usual_are_no_troubles_and_grave_ones_come_first(tmp_path: Path) -> None:
    said = [
        ('write(3</data/x>, "a", 1)', "ENOSPC"),
        ('openat(AT_FDCWD</w>, "/etc/shadow", O_RDONLY)', "EACCES"),
        ("futex(0x7f00, FUTEX_WAIT, 1, {tv_sec=1})", "ETIMEDOUT"),
        ("read(3</data/x>, 0x7f00, 1)", "EAGAIN"),
        ("ioctl(3</data/x>, TCGETS, 0x7f00)", "ENOTTY"),
        (
            'connect(4<TCP:[9]>, {sa_family=AF_INET, sin_port=htons(1), sin_addr=inet_addr("10.0.0.2")}, 16)',
            "ETIMEDOUT",
        ),
    ]
    text = "".join(f"1700000000.{at:06d} {call} = -1 {error} (So) <0.1>\n" for at, (call, error) in enumerate(said * 2))
    thread = only(read(text, tmp_path))
    assert [(one.error, one.target, one.count, one.weight) for one in thread.errors] == [
        ("ENOSPC", "/data/x", 2, 10),
        ("ETIMEDOUT", "10.0.0.2:1", 2, 8),
        ("EACCES", "/etc/shadow", 2, 7),
    ]


@pytest.mark.parametrize(
    ("call", "step_us", "count", "spins"),
    [
        ("poll([{fd=3<pipe:[9]>, events=POLLIN}], 1, 0) = 0 (Timeout)", 100, 2000, [("poll", "pipe:[9]")]),
        ("sched_yield() = 0", 100, 2000, [("sched_yield", "")]),
        ('stat("/tmp/ready", 0x7f00) = -1 ENOENT (No such file or directory)', 100, 2000, [("stat", "/tmp/ready")]),
        ("recvfrom(3<TCP:[9]>, 0x7, 1, 0, NULL, NULL) = -1 EAGAIN (Again)", 100, 2000, [("recvfrom", "TCP:[9]")]),
        ("poll([{fd=3<pipe:[9]>, events=POLLIN}], 1, 0) = 0 (Timeout)", 2000, 2000, []),
        ("poll([{fd=3<pipe:[9]>, events=POLLIN}], 1, 0) = 1 ([{fd=3}])", 100, 2000, []),
        ("sched_yield() = 0", 100, 900, []),
        ('read(3</data/x>, "a", 1) = 1', 100, 2000, []),
    ],
)
def test_a_spin_is_fast_and_gets_nothing_done(
    call: str, step_us: int, count: int, spins: list[tuple[str, str]], tmp_path: Path
) -> None:
    text = "".join(f"17000000{at * step_us / 1e6:09.6f} {call} <0.000005>\n" for at in range(count))
    thread = only(read(text, tmp_path))
    assert [(one.name, one.target) for one in thread.spins] == spins
    for spin in thread.spins:
        assert spin.count == count
        assert spin.span_s == pytest.approx(count * step_us / 1e6, rel=0.01)
        assert spin.per_s == pytest.approx(1e6 / step_us, rel=0.01)


_SLEEP = "clock_nanosleep(CLOCK_REALTIME, 0, {tv_sec=1}, NULL) = 0 <1.0>"
_OLD_SLEEP = "select(0, NULL, NULL, NULL, {tv_sec=1}) = 0 (Timeout) <1.0>"


@pytest.mark.parametrize(
    ("tries", "between", "polls"),
    [
        (["/data/READY ENOENT"] * 3, _SLEEP, [("/data/READY", False, 3, 2.0)]),
        (["/data/READY ENOENT"] * 3, _OLD_SLEEP, [("/data/READY", False, 3, 2.0)]),
        (["/data/READY ENOENT"] * 2, _SLEEP, []),
        (["/data/READY ENOENT"] * 9, 'read(3</x>, "a", 1) = 1 <1.0>', []),
        ([f"/lib/{at}/train.yaml ENOENT" for at in range(9)], _SLEEP, []),
        (["/usr/lib/python312.zip ENOENT"] * 9, _SLEEP, []),
        ([*["/data/READY ENOENT"] * 5, "/data/READY"], _SLEEP, []),
        (["/data/config.yaml"] * 5, _SLEEP, []),
        (["/cache/fused/lock"] * 5, _SLEEP, [("/cache/fused/lock", True, 5, 4.0)]),
        (["/cache/x.lock EEXIST"] * 5, _SLEEP, [("/cache/x.lock", True, 5, 4.0)]),
        ([*["/cache/fused/lock"] * 5, "/cache/fused/lock ENOENT"], _SLEEP, []),
    ],
)
def test_a_poll_is_one_path_and_sleeps_in_between(
    tries: list[str], between: str, polls: list[tuple[str, bool, int, float]], tmp_path: Path
) -> None:
    calls = []
    for path, _, error in (one.partition(" ") for one in tries):
        result = f"-1 {error} (So)" if error else "0"
        # Two calls of one try: as where stat is followed by open.
        calls += [f'stat("{path}", 0x7f00) = {result} <0.1>', f'access("{path}", F_OK) = {result} <0.1>', between]
    text = "".join(f"170000{at:04d}.000000 {call}\n" for at, call in enumerate(calls[:-1]))
    thread = only(read(text, tmp_path))
    assert [(one.target, one.exists, one.tries, one.slept_s) for one in thread.polls] == polls


@pytest.mark.parametrize("block_bytes", [1, 300, 1000, 4096])
def test_a_file_says_the_same_in_blocks_of_any_size(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (RECORDED / "6.1_files.txt").read_bytes() + b"".join(
        b"%d 1795306300.%06d %b" % (7 + at % 3, at, half)
        for at in range(400)
        for half in [(b"read(3</data/x>,  <unfinished ...>\n", b'<... read resumed>"a", 9) = 1 <0.01>\n')[at // 3 % 2]]
    )
    whole = read(text, tmp_path)
    monkeypatch.setattr(log, "_BLOCK_BYTES", block_bytes)
    blocks = log.LogFile(str(tmp_path / "log"))
    with open(tmp_path / "log", "rb") as file:
        blocks.read(file.read(block_bytes), file)
    assert [counted(thread) for thread in log.threads([blocks])] == [counted(thread) for thread in whole.threads]
    assert [thread.n_calls for thread in whole.threads] == [35, 67, 66, 66]


def counted(thread: ThreadLog) -> tuple[object, ...]:
    counts = {one.name: (one.count, one.errors, round(one.time_s or 0, 6)) for one in thread.calls}
    last = thread.last and (thread.last.name, thread.last.at_s, thread.last.result, thread.last.target)
    ends = (thread.first_at_s, thread.last_at_s, thread.state, last)
    return thread.tid, counts, ends, thread.errors, {one.name: one.count for one in thread.places}


@each("cut", range(0, 3000, 61))
def test_garbage_and_cuts_are_borne(cut: int, tmp_path: Path) -> None:
    data = (RECORDED / "6.1_files.txt").read_bytes()
    noisy = data[:cut] + bytes(range(256)) + b"\n" + data[cut:]
    logs = read(noisy, tmp_path)
    assert logs.errors == ()
    assert sum(one.n_calls for one in logs.threads if one.tid == 10757) in (34, 35, 36)
    assert read(data[:cut], tmp_path).threads or cut < 100


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("Epoch 1: loss 0.3\n")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    names = ["empty", "text", "pipe", "folder", "missing"]
    assert [why for _, why in read_logs([str(tmp_path / name) for name in names]).errors] == [
        "the file is empty",
        "not a strace log",
        "not a regular file",
        "contains no strace log",
        "No such file or directory",
    ]


def test_a_connection_that_fails_after_connect_came_back_is_refused_all_the_same(tmp_path: Path) -> None:
    text = "".join(
        f"17954301{n}.0 connect(4<TCP:[{n}]>, {{sa_family=AF_INET, sin_port=htons(29500), "
        f'sin_addr=inet_addr("10.0.0.{n}")}}, 16) = -1 EINPROGRESS (Operation now in progress) <0.000068>\n'
        f"17954301{n}.1 getsockopt(4<TCP:[{n}]>, SOL_SOCKET, SO_ERROR, [{reported}], [4]) = 0 <0.000037>\n"
        for n, reported in ((10, "ECONNREFUSED"), (11, "0"), (12, "ECONNREFUSED"))
    )
    found = [(one.name, one.error, one.target, one.count) for one in only(read(text, tmp_path)).errors]
    assert sorted(found) == [
        ("connect", "ECONNREFUSED", "10.0.0.10:29500", 1),
        ("connect", "ECONNREFUSED", "10.0.0.12:29500", 1),
    ]


def test_the_slowest_calls_of_many_threads_are_found_beside_lines_that_are_no_calls(tmp_path: Path) -> None:
    calls = "".join(
        f'{100 + n % 20} 17954301{n}.0 openat(AT_FDCWD</>, "/data/{n}", O_RDONLY) = 3</data/{n}> <0.{n}>\n'
        for n in range(10, 99)
    )
    ends = "".join(f"{100 + n} 1795430200.1 +++ exited with 0 +++\n" for n in range(20))
    slowest = [thread.places[0].slowest for thread in read(calls + ends, tmp_path).threads]
    assert sorted(slowest) == [f"openat /data/{n}" for n in range(79, 99)]


def test_the_end_of_a_call_whose_beginning_is_in_no_log_shows_no_data(tmp_path: Path) -> None:
    text = '7 1795306300.1 <... read resumed>"Bearer sesame", 13) = 13 <0.5>\n7 1795306300.2 getpid() = 7 <0.1>\n'
    thread = only(read(text, tmp_path))
    assert {row.name: row.count for row in thread.calls} == {"read": 1, "getpid": 1}
    assert "sesame" not in repr(thread)
