"""core-bt beside pystack and gdb on the same core of a program that had torch loaded, interleaved; medians.

Times are of whole commands; "first facts" is the time to read the notes inside core-bt. Peak memory is of the largest
process of each, from the kernel (wait4): pages of mapped files that anybody had read before count. Each command is
run in a memory cgroup (version 1) of 100 MB as well, with nothing of any file in memory before: what needs more ends by
the kernel's hand.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cores import make_core

from distdiag.facts.core import core_file, pystack, stacks, unwinder

ROUNDS = int(os.environ.get("ROUNDS", "5"))
PATIENCE_S = 30
BIN = Path(sys.executable).parent


MEASURE = """
import os, sys, time
nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
began = time.perf_counter()
_, _, usage = os.wait4(os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=nothing), 0)
print(time.perf_counter() - began, usage.ru_maxrss / 1000)
"""
"""Run from a small process: the kernel counts as a program's memory what it had before exec, its parent's."""


def run(command: list[str]) -> tuple[float, float]:
    """Run a command; its seconds, and the peak memory of its largest process in MB."""
    reported = subprocess.run(
        [sys.executable, "-S", "-c", MEASURE, *command], capture_output=True, text=True, check=True
    )
    seconds, memory = map(float, reported.stdout.split())
    return seconds, memory


def in_100_mb(command: list[str]) -> str:
    """Run a command where there is no more memory, page cache included; how that ended."""
    group = Path("/sys/fs/cgroup/memory") / f"distdiag-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("100M")
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        return f"not tried: {error}"
    try:
        script = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        began = time.perf_counter()
        process = subprocess.Popen(
            ["sh", "-c", script, "sh", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        late = threading.Timer(PATIENCE_S, process.kill)
        late.start()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        late.cancel()
        if process.returncode < 0:
            late_by = time.perf_counter() - began >= PATIENCE_S
            return f"not done after {PATIENCE_S} s" if late_by else f"killed, signal {-process.returncode}"
        return f"{time.perf_counter() - began:.1f} s, status {process.returncode}, peak {usage.ru_maxrss / 1000:.0f} MB"
    finally:
        group.rmdir()


def merged(core: str, executable: str) -> float:
    """Return the seconds of core-bt's parts: notes, then one stack from pystack and the unwinder."""
    began = time.perf_counter()
    notes = core_file.read(core)
    crashed = notes.threads[0].tid
    own = unwinder.CFrames(core, notes.files, ())
    by_pystack = pystack.of_core(core, executable, notes.files, own, timeout_s=60)
    assert stacks.crashed_first(by_pystack, crashed)[0].frames, by_pystack
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        core = str(make_core("dies_in_torch", Path(folder)))
        executable = os.path.realpath(sys.executable)
        commands = {
            "core-bt": [str(BIN / "distdiag"), "core-bt", core],
            "pystack core --native-all": [str(BIN / "pystack"), "core", "--native-all", core, executable],
            "gdb thread apply all bt": ["gdb", "-batch", "-nx", "-ex", "thread apply all bt", executable, core],
        }
        facts, inside = [], []
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            began = time.perf_counter()
            core_file.read(core)
            facts.append(time.perf_counter() - began)
            inside.append(merged(core, executable))
            for name, command in commands.items():
                found[name].append(run(command))
        print(
            f"load {os.getloadavg()[0]:.1f}, core of {os.stat(core).st_size / 1e6:.0f} MB, median of {ROUNDS} rounds\n"
        )
        print("| | seconds | peak memory | in 100 MB, nothing cached |\n|---|---|---|---|")
        print(f"| first facts (notes) | {statistics.median(facts):.4f} | | |")
        print(f"| merged stacks, inside core-bt | {statistics.median(inside):.2f} | | |")
        for name, rounds in found.items():
            took, memory = (statistics.median(one[which] for one in rounds) for which in (0, 1))
            print(f"| {name} | {took:.2f} | {memory:.0f} MB | {in_100_mb(commands[name])} |")


if __name__ == "__main__":
    main()
