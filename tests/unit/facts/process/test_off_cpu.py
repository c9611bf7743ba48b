"""Time since a thread last ran: independent of its last processor and of the reader's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from jobs import wait_for_state

from distdiag.facts.process import off_cpu, procs

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


def test_the_clocks_are_read_once_for_a_look() -> None:
    clocks: dict[int, float] = {}
    off_cpu.seconds(os.getpid(), [threading.get_native_id()], clocks)
    known = dict(clocks)
    assert set(known) <= os.sched_getaffinity(0)
    off_cpu.seconds(os.getpid(), [threading.get_native_id()], clocks)
    assert {processor: clocks[processor] for processor in known} == known


def test_a_thread_that_is_gone_is_left_out() -> None:
    assert off_cpu.seconds(2**22 + 1, [2**22 + 1], {}) == {}
