"""Whether something moves for a rank is read from real processes that work in all ways, or wait."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import support_torch
from jobs import Job, wait_for_state
from support import wait_until

from distdiag.diagnosis.activity_wording import moves_in_words
from distdiag.facts.process import process_counters
from distdiag.facts.process.activity import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distdiag.facts.process.activity import Activity

PY_SPY = str(Path(sys.executable).with_name("py-spy"))
_SPIN = "while True: pass"
_SHELL_SPIN = "while :; do :; done"
_SHELL_COUNTS = "i=0; while [ $i -lt 9999 ]; do i=$((i+1)); done"
_PAIR = """
import socket, subprocess, sys, threading, time
listener = socket.create_server(("127.0.0.1", 0))
other = '''
import socket, sys, time
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
{other}
'''
# No child of the rank, as its parent ends at once; but of its group, which the test ends.
start = [sys.executable, "-c", other, str(listener.getsockname()[1])]
subprocess.run(["sh", "-c", '"$@" &', "sh", *start], check=True, stdout=subprocess.DEVNULL)
peer, _ = listener.accept()
{rank}
"""
_FIFO = """
import os, subprocess, sys, time
os.mkfifo(sys.argv[1] + ".fifo")
reads = "import sys, time\\nwith open(sys.argv[1], 'rb', 0) as file:\\n    while file.read(8192): {pause}"
start = [sys.executable, "-c", reads, sys.argv[1] + ".fifo"]
subprocess.run(["sh", "-c", '"$@" &', "sh", *start], check=True, stdout=subprocess.DEVNULL)
file = open(sys.argv[1] + ".fifo", "wb", 0)
print("ready", flush=True)
file.write(bytes(1 << 28))
"""
_READY = "print('ready', flush=True)\n"
WORKS = {
    "a thread computes": (
        "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()\n"
        f"{_READY}import time; time.sleep(600)",
        r"a thread of it uses \d+ % of a core",
    ),
    "a child computes": (
        f"import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', '{_SPIN}'])\n{_READY}p.wait()",
        r"its child python\S* \(pid \d+\) computes \(\d+ % of a core\)",
    ),
    "children of a child compute": (
        f"import subprocess\np = subprocess.Popen(['sh', '-c', '({_SHELL_SPIN}) & {_SHELL_SPIN}'])\n{_READY}p.wait()",
        r"its 2 children compute \(\d+ % of a core\)",
    ),
    "children start, compute and end": (
        f"import subprocess\n{_READY}while True: subprocess.run(['sh', '-c', '{_SHELL_COUNTS}'])",
        r"the children that python\S* starts compute and end \(\d+ % of a core\)|its child sh .* computes",
    ),
    "it reads a file": (
        "import sys, time\nfile = open(sys.argv[1], 'rb', 0)\n"
        f"{_READY}while True:\n    file.read(20000) or file.seek(0)\n    time.sleep(0.02)",
        r"reads /\S*/shard\.bin at \d.* [kM]B/s",
    ),
    "it writes a file": (
        "import sys, time\nfile = open(sys.argv[1] + '.out', 'wb', 0)\n"
        f"{_READY}while True:\n    file.write(bytes(2000))\n    time.sleep(0.02)",
        r"writes /\S*/shard\.bin\.out at \d.* kB/s",
    ),
    "a child copies a file": (
        "import subprocess, sys\n"
        "p = subprocess.Popen(['tail', '-f', '-c', '+1', sys.argv[1]], stdout=subprocess.DEVNULL)\n"
        f"{_READY}import time\nwhile True: open(sys.argv[1], 'ab').write(bytes(9999)); time.sleep(0.1)",
        r"its child tail \(pid \d+\) reads \d+ kB/s",
    ),
    "a slow download": (
        _PAIR.format(
            rank=f"{_READY}while True: peer.recv(9999)", other="while True: peer.send(bytes(300)); time.sleep(0.2)"
        ),
        r"receives 1\.\d kB/s from 127\.0\.0\.1:\d+",
    ),
    "an upload": (
        _PAIR.format(
            rank=f"{_READY}while True: peer.send(bytes(2000)); time.sleep(0.05)", other="while True: peer.recv(9999)"
        ),
        r"sends \d+ kB/s to 127\.0\.0\.1:\d+",
    ),
    "a child works between pauses": (
        "import multiprocessing, time\n"
        "def work():\n    while True: sum(range(100_000)); time.sleep(0.7)\n"
        f"p = multiprocessing.Process(target=work, daemon=True); p.start()\n{_READY}p.join()",
        r"its child \S+ \(pid \d+\) works briefly, \d\.\d times a second",
    ),
    "a FIFO is read slowly": (
        _FIFO.format(pause="time.sleep(0.1)"),
        r"python\S* \(pid \d+\), to which it is connected, reads \d+ kB/s",
    ),
    "a server computes for it": (
        _PAIR.format(rank=f"{_READY}peer.recv(1)", other=_SPIN),
        r"python\S* \(pid \d+\), to which it is connected, computes",
    ),
}
WAITS = {
    "sleeps": f"{_READY}import time; time.sleep(600)",
    "a heartbeat": _PAIR.format(
        rank="def beat():\n    while True: peer.send(bytes(50)); peer.recv(99); time.sleep(1)\n"
        f"threading.Thread(target=beat, daemon=True).start()\n{_READY}time.sleep(600)",
        other="while True: peer.send(peer.recv(99) or sys.exit())",
    ),
    "idle workers": "import multiprocessing, time\nq = multiprocessing.Queue()\n"
    f"[multiprocessing.Process(target=q.get, daemon=True).start() for _ in range(3)]\n{_READY}time.sleep(600)",
    "nobody reads the connection": _PAIR.format(
        rank=f"{_READY}time.sleep(600)", other="while True: peer.send(bytes(300)); time.sleep(0.2)"
    ),
    "an idle DataLoader worker": "import torch, time\n"
    "loader = iter(torch.utils.data.DataLoader(range(9), num_workers=1, persistent_workers=True))\n"
    f"next(loader)\n{_READY}time.sleep(600)",
    "nobody reads the FIFO": _FIFO.format(pause="time.sleep(600)"),
    "a log line every second": f"import sys, time\n{_READY}while True: print('wait', file=sys.stderr); time.sleep(1)",
}


@contextlib.contextmanager
def running(text: str, folder: Path, name: str = "rank.py") -> Iterator[int]:
    """Run a program until it is ready; end it and its children."""
    (folder / name).write_text(text)
    data = folder / "shard.bin"
    data.write_bytes(bytes(1_000_000))
    command = [sys.executable, str(folder / name), str(data)]
    reads, writes = os.pipe()
    with os.fdopen(reads) as says:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        forked = support_torch.start(command, env, output=writes, errors=subprocess.DEVNULL)
        process = forked or subprocess.Popen(
            command, stdout=writes, stderr=subprocess.DEVNULL, start_new_session=True, text=True
        )
        os.close(writes)
        try:
            assert says.readline() == "ready\n"
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


@pytest.mark.parametrize("how", WORKS)
def test_what_moves_is_named(how: str, tmp_path: Path) -> None:
    text, words = WORKS[how]
    seen: list[str] = []
    with running(text, tmp_path) as pid:
        meter = Meter([pid])

        def moves() -> bool:
            seen.append(moves_in_words(meter.read()[0]))
            return re.search(words, seen[-1]) is not None

        wait_until(moves, 90, lambda: str(seen[-5:]))


@pytest.mark.parametrize("how", WAITS)
def test_who_waits_does_not_move(how: str, tmp_path: Path) -> None:
    with running(WAITS[how], tmp_path) as pid:
        assert_still([pid])


def test_a_rank_that_py_spy_dumps_all_the_time_does_not_move(tmp_path: Path) -> None:
    with running(WAITS["sleeps"], tmp_path) as pid:
        loop = f"while {PY_SPY} dump --pid {pid} > dump; do echo; done"
        with subprocess.Popen(
            ["sh", "-c", loop], stdout=subprocess.PIPE, start_new_session=True, cwd=tmp_path
        ) as spies:
            try:
                assert spies.stdout is not None
                assert spies.stdout.readline() == b"\n"
                assert_still([pid])
                assert spies.poll() is None
            finally:
                os.killpg(spies.pid, signal.SIGKILL)


def test_ranks_that_wait_in_gloo_do_not_move() -> None:
    with Job("hangs_in_load_batch", 3, forked=True) as job:
        job.wait_still()
        assert_still([job.pid(rank) for rank in range(3)])


def test_what_ranks_send_each_other_is_no_movement(tmp_path: Path) -> None:
    chat = _PAIR.format(
        rank=f"import os\n{_READY}while True: peer.send(bytes(2000)); time.sleep(0.05)",
        other="while True: peer.recv(9999) or sys.exit()",
    )
    with running(chat, tmp_path) as pid:
        sent: list[Activity] = []

        def sends() -> bool:
            sent.append(window([pid])[0])
            return [moved.what for moved in sent[-1].moved] == ["sent"]

        wait_until(sends, 20, lambda: str(sent))
        assert_still([pid, *group(pid)])


def test_a_process_in_the_kernel_does_not_hold_up_the_reading() -> None:
    with Job("stands_still", 1, env={"HOW": "vfork"}) as job:
        job.wait_ready()
        wait_for_state(job.pid(0), "D")
        assert_still([job.pid(0)])


def test_what_ended_children_had_used_before_is_no_movement(tmp_path: Path) -> None:
    text = (
        "import os, signal, subprocess\n"
        f"p = subprocess.Popen(['sh', '-c', 'echo; {_SHELL_SPIN}'], stdout=subprocess.PIPE)\np.stdout.readline()\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n{_READY}signal.sigwait([signal.SIGUSR1])\n"
        "p.wait()\nprint('ended', flush=True)\nsignal.pause()"
    )
    with running(text, tmp_path) as pid:
        (child,) = group(pid)
        wait_until(lambda: process_counters.table()[child].cpu_s > 0.5, 60, lambda: "no processor for the child")
        os.kill(child, signal.SIGSTOP)
        wait_for_state(child, "T")
        meter = Meter([pid])
        os.kill(child, signal.SIGKILL)
        os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: process_counters.table()[pid].reaped_s > 0.5, 20, lambda: "not reaped")
        assert meter.read()[0].moved == ()


def window(pids: list[int]) -> list[Activity]:
    """What moves in about a second."""
    meter = Meter(pids)
    time.sleep(1)
    return meter.read()


def assert_still(pids: list[int]) -> None:
    """There is a second without any movement: constant movement would be seen in every sample."""
    seen: list[list[Activity]] = []

    def still() -> bool:
        seen.append(window(pids))
        return not any(activity.moved for activity in seen[-1])

    wait_until(still, 20, lambda: str(seen[-3:]))
    assert [activity.unread for activity in seen[-1]] == [""] * len(pids)


def group(leader: int) -> list[int]:
    """The other members of a process group."""
    found = []
    for pid in process_counters.table():
        with contextlib.suppress(ProcessLookupError):
            if pid != leader and os.getpgid(pid) == leader:
                found.append(pid)
    return found
