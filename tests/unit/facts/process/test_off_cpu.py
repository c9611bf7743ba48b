"""Time since a thread last ran: independent of its last processor and of the reader's."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from jobs import wait_for_state

from distdiag.facts.process import off_cpu, procs

if TYPE_CHECKING:
    from pathlib import Path

_SLEEPER = (
    "import os, sys, time\n"
    "os.sched_setaffinity(0, {int(sys.argv[1])}); print(time.monotonic(), flush=True); time.sleep(600)"
)


def test_a_thread_that_ran_on_any_processor_has_slept_as_long_as_it_has() -> None:
    """Asked from each processor in turn: their clocks may be many seconds apart."""
    ours = sorted(os.sched_getaffinity(0))
    sleepers = []
    for processor in ours[:4]:
        process = subprocess.Popen([sys.executable, "-c", _SLEEPER, str(processor)], stdout=subprocess.PIPE)
        sleepers.append(process)
    try:
        asleep_since = []
        for process in sleepers:
            assert process.stdout is not None
            said_at = float(process.stdout.readline())
            wait_for_state(process.pid, "S")
            asleep_since.append((said_at, time.monotonic()))
        time.sleep(1)
        for processor in ours[:4]:
            os.sched_setaffinity(0, {processor})
            for process, (earliest, latest) in zip(sleepers, asleep_since, strict=True):
                before = time.monotonic()
                standing = procs.standstill(process.pid, process.pid, {}).since_s
                slept = off_cpu.seconds(process.pid, [process.pid], {})
                after = time.monotonic()
                assert standing is not None
                for found in (standing, slept[process.pid]):
                    assert before - latest - 0.4 <= found <= after - earliest + 0.4
    finally:
        os.sched_setaffinity(0, ours)
        for process in sleepers:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize(
    ("readings", "found"),
    [
        pytest.param(["7000.5", "7000.5"], (1, 7.0005), id="sleeps"),
        pytest.param(["7000.5", "9001.0", "9001.0"], (1, 9.001), id="ran-elsewhere"),
        pytest.param(["7000.5", "0.0", "0.0"], None, id="about-to-run-elsewhere"),
        pytest.param(["7000.5", "9001.0", "9001.5", "9002.0"], (1, math.inf), id="runs"),
    ],
)
def test_the_time_is_of_the_clock_of_the_processor_named_with_it(
    readings: list[str], found: tuple[int, float] | None, tmp_path: Path
) -> None:
    """A thread may run, and move, between the reading of the kernel's two files: `readings` of one around the other."""
    sched, stat = tmp_path / "sched", tmp_path / "stat"

    def show(reading: str) -> None:
        sched.write_text(f"python (1, #threads: 1)\nse.exec_start : {reading}\n")

    def move() -> None:
        for reading in readings[1:]:
            with stat.open("w") as asked:  # once it is opened to be read
                show(reading)
                stat.unlink()
                os.mkfifo(stat)
                asked.write(f"1 (python) S {' '.join('0' * 35)} 1 0 0\n")

    show(readings[0])
    os.mkfifo(stat)
    kernel = threading.Thread(target=move, daemon=True)
    kernel.start()
    assert off_cpu.last_ran(str(tmp_path)) == found
    kernel.join()


def test_the_clocks_are_read_once_for_a_look() -> None:
    clocks: dict[int, float] = {}
    off_cpu.seconds(os.getpid(), [threading.get_native_id()], clocks)
    known = dict(clocks)
    assert set(known) <= os.sched_getaffinity(0)
    off_cpu.seconds(os.getpid(), [threading.get_native_id()], clocks)
    assert {processor: clocks[processor] for processor in known} == known


def test_a_thread_that_is_gone_is_left_out() -> None:
    assert off_cpu.seconds(2**22 + 1, [2**22 + 1], {}) == {}
