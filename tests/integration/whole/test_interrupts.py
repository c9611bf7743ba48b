"""Ctrl-C and SIGTERM, once and twice, at any moment: a partial report, status 130, and no process left."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCH = ("allreduce-bench", "--nproc", "2", "--device", "cpu", "--sizes", "1K:64K", "--iters", "100000", "--json")
PAIRS = [(signal.SIGINT, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)]


@pytest.fixture
def begun() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def start(begun: list[subprocess.Popen[str]], *argv: str) -> subprocess.Popen[str]:
    """Start it, and wait until it takes signals itself: before that they are Python's."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun.append(process)
    deadline = time.monotonic() + 30
    while not takes(process.pid, signal.SIGTERM) and time.monotonic() < deadline:
        time.sleep(0.001)
    return process


def takes(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> number - 1 & 1)


def check(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=30)
    assert "Traceback" not in err, err
    assert "ignored" not in err, err
    assert process.returncode == 130, err
    assert json.loads(out)["exit_code"] == 130


@pytest.mark.parametrize(
    ("after_s", "pair"),
    [
        *itertools.product((0.0, 0.03, 0.1), PAIRS),
        *zip((0.3, 1.0, 2.5), PAIRS, strict=True),  # by then torch is being imported, which takes longest
    ],
    ids=lambda value: "-".join(one.name for one in value) if isinstance(value, tuple) else str(value),
)
def test_interrupted_twice_it_says_what_it_knows(
    after_s: float, pair: tuple[signal.Signals, signal.Signals], begun: list[subprocess.Popen[str]]
) -> None:
    process = start(begun, sys.executable, "-m", "distdiag", *BENCH)
    time.sleep(after_s)
    for number in pair:
        process.send_signal(number)
    check(process)


_SWALLOWS = """
import os, signal, sys, weakref
from distdiag import interrupts
class Held:
    pass
interrupts.handle()
def gone(_):
    print("ready", flush=True)
    while True:
        pass
held = Held()
reference = weakref.ref(held, gone)
try:
    del held  # an interrupt in here is one that Python lets nobody see
    while True:
        pass
except KeyboardInterrupt:
    os._exit(130)
"""


def test_an_interrupt_that_python_would_swallow_comes_again() -> None:
    """As in the callbacks that each import leaves behind: it was printed, and the whole run went on to its end."""
    with subprocess.Popen(
        [sys.executable, "-c", _SWALLOWS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


_IN_SET_NAME = """
import dataclasses, os, signal
from distdiag.__main__ import main
def interrupted(field, owner, name):
    if owner.__name__ == "PathTest":
        os.kill(os.getpid(), signal.SIGINT)
dataclasses.Field.__set_name__ = interrupted
main()
"""


def test_an_interrupt_that_python_makes_an_error_of_is_one(begun: list[subprocess.Popen[str]]) -> None:
    """Python 3.11 raises a RuntimeError if it comes while a dataclass gets its fields; it was called our bug."""
    check(start(begun, sys.executable, "-c", _IN_SET_NAME, *BENCH))


def test_a_report_that_nobody_reads_is_no_reason_to_stay(begun: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """Its pipe is full: the interrupt ends it, also where Python would write the rest at its end."""
    (tmp_path / "many").mkdir()
    for number in range(400):
        (tmp_path / "many" / f"x.{number + 1}").write_text("1700000000.1 getpid() = 3 <0.000010>\n" * 3)
    argv = (sys.executable, "-m", "distdiag", "trace", "sys", "--json", "--from", str(tmp_path / "many"))
    process = start(begun, *argv)
    deadline = time.monotonic() + 60
    while "pipe_write" not in Path(f"/proc/{process.pid}/wchan").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130


LIMITED = 'ulimit -Sn 9; "$@"'


def test_the_fix_of_too_few_open_files_works() -> None:
    argv = ["bash", "-c", LIMITED, "bash", sys.executable, "-m", "distdiag", "gpu-test", "--nproc", "1", "--no-compute"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3, done
    assert "Too many open files" in done.stderr
    (fix,) = (line.removeprefix("hint: ") for line in done.stderr.splitlines() if line.startswith("hint: "))
    argv[2] = f'ulimit -Sn 9; {fix} && "$@"'
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (fix, done)


def test_a_hard_limit_is_not_to_be_raised_by_ulimit() -> None:
    code = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); os.setuid(65534);"
        "from distdiag.limits import hint_for; print(hint_for('Too many open files'));"
        "import sys; sys.stdout.flush(); resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
    )
    if os.geteuid():
        pytest.skip("only root can become another user")
    done = subprocess.run(
        [sys.executable, "-c", "import distdiag.limits;" + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "not allowed to raise maximum limit" in done.stderr  # what `ulimit -n 1024` would have met
    assert done.stdout.startswith("the hard limit is 9; raise it as root on the host: sudo prlimit --pid $$ --nofile=")
    assert not done.stdout.startswith("ulimit")
