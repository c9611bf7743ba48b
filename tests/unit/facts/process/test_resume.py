"""A process about to be stopped because its tracer was killed continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support import wait_until

from distdiag.facts.process import procs
from distdiag.facts.process.resume import resume

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELD_UP = """
import os, sys, time
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)])
time.sleep(60)
"""
"""Waits in D state, where no signal is taken, until somebody opens the named pipe."""


def state(pid: int) -> str:
    found = procs.read(pid)
    return found.state if found is not None else ""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


@pytest.fixture
def held_up(gate: Path) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", HELD_UP, str(gate)], start_new_session=True)
    wait_until(lambda: state(process.pid) == "D", 20, lambda: state(process.pid))
    yield process.pid
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("may_come", "then"), [(True, "S"), (False, "T")])
def test_a_stop_that_is_on_its_way_is_taken_back(held_up: int, gate: Path, may_come: bool, then: str) -> None:
    os.kill(held_up, signal.SIGSTOP)
    assert not resume(held_up, may_come=may_come)
    with open(gate, "wb"):
        wait_until(lambda: state(held_up) == then, 20, lambda: state(held_up))


def test_one_that_stands_still_runs_again(held_up: int, gate: Path) -> None:
    with open(gate, "wb"):
        wait_until(lambda: state(held_up) == "S", 20, lambda: state(held_up))
    os.kill(held_up, signal.SIGSTOP)
    wait_until(lambda: state(held_up) == "T", 20, lambda: state(held_up))
    assert resume(held_up, may_come=False)
    wait_until(lambda: state(held_up) == "S", 20, lambda: state(held_up))
    assert not resume(2**22, may_come=True)
