"""distdiag.printflock with several real processes on one pipe: no torn lines, no endless wait."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import signal
import stat
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from support import unread, wait_until

import distdiag.training.printflock as module
from distdiag import printflock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WRITERS, MESSAGES, LENGTH = 4, 100, 60_000
WRITES = f"""
import sys
from distdiag import printflock
print("ready", file=sys.stderr, flush=True)
sys.stdin.read()
me = sys.argv[2]
show = printflock if sys.argv[1] == "printflock" else lambda text: print(f"[{{me}}] {{text}}")
for _ in range({MESSAGES}):
    show(me * {LENGTH})
"""
HOLDS = """
import sys
from distdiag.training import printflock
with printflock._lock.held():
    print("holds", flush=True)
    sys.stdin.read()
"""
PRINTS = """
import sys, time
from distdiag import printflock
import distdiag.training.printflock as module
for turn in range(2):
    module.PATIENCE_S = (2, 30)[turn]
    began = time.monotonic()
    printflock("turn", turn)
    print(time.monotonic() - began, file=sys.stderr)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a Python program as a rank of one job; its lock is of this test alone."""
    started = []

    def run(
        code: str, *arguments: str, rank: int | None = None, pass_fds: tuple[int, ...] = (), **env: str
    ) -> subprocess.Popen[bytes]:
        ranks = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "8"}
        pipe = subprocess.PIPE
        argv = [sys.executable, "-c", code, *arguments]
        everywhere = {**os.environ, "TMPDIR": str(tmp_path), **ranks, **env}
        process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, env=everywhere, cwd=tmp_path, pass_fds=pass_fds
        )
        started.append(process)
        return process

    yield run
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.parametrize("how", ["printflock", "print", "printflock -u"])
def test_many_long_lines_on_one_pipe(how: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    environ = {**os.environ, "TMPDIR": str(tmp_path), **({"PYTHONUNBUFFERED": "1"} if how.endswith("-u") else {})}
    argv = [sys.executable, "-c", WRITES, how.split()[0]]
    waiting, go = os.pipe()  # all wait for its end: who is alone tears nothing
    writers = [
        subprocess.Popen([*argv, str(me)], stdin=waiting, stdout=writing, stderr=subprocess.PIPE, env=environ)
        for me in range(WRITERS)
    ]
    os.close(writing)
    os.close(waiting)
    assert [one.stderr.readline() for one in writers if one.stderr] == [b"ready\n"] * WRITERS
    os.close(go)
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    assert [one.communicate(timeout=10)[1] for one in writers] == [b""] * WRITERS
    assert [one.returncode for one in writers] == [0] * WRITERS
    whole = re.compile(rb"\[[^\]]*\] (?:0+|1+|2+|3+)")
    torn = [line for line in lines if not whole.fullmatch(line) or len(line.partition(b"] ")[2]) != LENGTH]
    if how == "print":
        assert torn, "what is measured here can go wrong"
    else:
        assert (len(torn), len(lines)) == (0, WRITERS * MESSAGES)


def test_a_lock_that_goes_round_is_waited_for(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Four writers want more than the reader takes: each waits for longer than for one holder, and nothing is torn."""
    reading, writing = os.pipe()
    code = f"""
import sys
from distdiag import printflock
import distdiag.training.printflock as module
module.PATIENCE_S, module._LOOK_S = 3, 0.25
with open({writing}, "w") as pipe:
    for _ in range(30):
        printflock(sys.argv[1] * {LENGTH}, file=pipe, prefix=False)
"""
    writers = [start(code, str(me), pass_fds=(writing,)) for me in range(WRITERS)]
    os.close(writing)
    lines = b""
    while part := os.read(reading, 1 << 16):
        lines += part
        time.sleep(0.05)
    os.close(reading)
    assert [one.communicate(timeout=10)[1] for one in writers] == [b""] * WRITERS
    assert sorted(lines.split()) == sorted(b"%d" % me * LENGTH for me in range(WRITERS) for _ in range(30))


def test_a_stopped_holder_stops_the_others_for_a_moment_only(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    holder = start(HOLDS, rank=3)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"holds\n"
    os.kill(holder.pid, signal.SIGSTOP)
    out, err = start(PRINTS, rank=5).communicate(timeout=40)
    assert re.fullmatch(rb"\[[\w-]+:5\] turn 0\n\[[\w-]+:5\] turn 1\n", out)
    why, first, second = err.decode().splitlines()
    assert f"waited 2 s for process {holder.pid} of rank 3, which holds the lock and is stopped" in why
    assert float(first) > 2
    assert float(second) < 15, "and then it does not wait for a while"


def test_a_dead_holder_stops_nobody(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    holder = start(HOLDS, rank=3)
    assert holder.stdout is not None
    holder.stdout.readline()
    holder.kill()
    holder.wait(10)
    out, err = start(PRINTS, rank=5).communicate(timeout=20)
    assert out.count(b"turn") == 2
    assert b"distdiag" not in err


def test_a_forked_child_has_a_lock_of_its_own(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    code = """
import os, time
from distdiag import printflock
import distdiag.training.printflock as module
printflock("parent")
module.PATIENCE_S = 0.2
with module._lock.held():
    if not os.fork():
        began = time.monotonic()
        printflock("child", time.monotonic() - began)
        os._exit(0)
    os.wait()
"""
    out, err = start(code, rank=0).communicate(timeout=20)
    assert out.count(b"\n") == 2
    assert b"waited 0.2 s for process" in err, "the parent's lock is not the child's"


def test_threads_and_signal_handlers_do_not_tear_or_wait(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    code = """
import os, signal, threading, time
from distdiag import printflock
import distdiag.training.printflock as module
module.PATIENCE_S = 30
signal.signal(signal.SIGUSR1, lambda *_: printflock("from the handler"))
with module._lock.held():
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert time.monotonic() - began < 15, 'it waited for its own lock'
threads = [threading.Thread(target=lambda me=me: [printflock(me * 30000) for _ in range(50)]) for me in "abcd"]
[one.start() for one in threads]
[one.join() for one in threads]
"""
    out, err = start(code, rank=0).communicate(timeout=60)
    lines = out.decode().splitlines()
    assert (len(lines), err) == (201, b"")
    assert {len(set(line.partition("] ")[2])) for line in lines[1:]} == {1}


def test_what_print_said_before_comes_before_and_every_line_has_a_prefix(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    code = """
import sys
from distdiag import printflock
print("by print")
printflock("a\\nb", 1, sep="-", end="!\\n", flush=True)
printflock("bare", prefix=False)
printflock("no end", end="")
printflock("\\u00e9 bytes", file=sys.stdout.buffer)
print("by print again")
printflock("error", file=sys.stderr)
"""
    out, err = start(code, rank=7).communicate(timeout=20)
    host = os.uname().nodename.partition(".")[0]
    me = f"[{host}:7] "
    expected = f"by print\n{me}a\n{me}b-1!\nbare\n{me}no end{me}\u00e9 bytes\nby print again\n"
    assert out.decode() == expected
    assert err.decode() == f"{me}error\n"


def test_the_lock_is_in_a_directory_of_the_user_s_own(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    start("from distdiag import printflock; printflock(1)", rank=0, SLURM_JOB_ID="12/3").communicate(timeout=20)
    folder = tmp_path / f"distdiag-printflock-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [one.name for one in folder.iterdir()] == ["12_3.lock"]
    assert [one.name for one in tmp_path.iterdir()] == [folder.name]


def test_a_directory_of_somebody_else_is_not_used(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / f"distdiag-printflock-{os.getuid()}"
    folder.symlink_to("/")
    code = """
import os
from distdiag.training import printflock
print(os.readlink(f"/proc/self/fd/{printflock._open_file()}"))
"""
    out, _ = start(code).communicate(timeout=20)
    assert out.endswith(b".lock\n")
    assert not out.startswith(bytes(tmp_path))


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_takes_little_at_a_time_gets_all(
    start: Callable[..., subprocess.Popen[bytes]], unbuffered: str
) -> None:
    code = """
import os, signal
from distdiag import printflock
os.set_blocking(1, False)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
printflock("x" * 3_000_000, prefix=False)
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    process = start(code, PYTHONUNBUFFERED=unbuffered)
    assert process.stdout is not None
    capacity = fcntl.fcntl(process.stdout, fcntl.F_GETPIPE_SZ)
    wait_until(lambda: unread(process.stdout) == capacity, 20, lambda: f"{unread(process.stdout)} of {capacity} bytes")
    assert len(process.stdout.read()) == 3_000_001
    assert process.wait(10) == 0


def test_streams_of_other_kinds_get_the_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    memory = io.StringIO()
    printflock("in memory", file=memory, prefix=False)
    with contextlib.redirect_stdout(memory):
        printflock("redirected", prefix=False)
    assert memory.getvalue() == "in memory\nredirected\n"
    printflock("captured", prefix=False)
    assert capsys.readouterr().out == "captured\n"
    for mode in ("w", "wb", "rb+"):
        with open(tmp_path / "file", mode, buffering=-1 if mode == "w" else 0) as file:
            printflock("in a file", file=file, prefix=False)
        assert (tmp_path / "file").read_text() == "in a file\n"


def test_closed_streams_are_told_as_by_print(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.raises(ValueError, match="closed file"):
        printflock("x", file=closed)
    printflock("the lock is free again", file=io.StringIO())
    assert not module._lock._is_held
    code = (
        "import sys; from distdiag import printflock; sys.stdin.read(1)\ntry: printflock('x')\nexcept {}: sys.exit(4)"
    )
    process = start(code.format("BrokenPipeError"))
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.close()
    process.stdin.close()
    process.stdout = process.stdin = None
    assert process.wait(10) == 4
    out, _ = start("import sys; from distdiag import printflock; sys.stdout = None; printflock('x')").communicate()
    assert out == b""
