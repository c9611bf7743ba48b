"""allreduce-bench beside a plain loop of dist.all_reduce, on gloo with two ranks; its --compare; pairs of --isolate.

Whole commands, interleaved; medians and their ratio. PARAM's comms benchmark is in no package index, so it is not here.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from distdiag.commands.allreduce_bench.rank import Rank

ROUNDS = int(os.environ.get("ROUNDS", "7"))
PROGRAM = str(Path(sys.executable).with_name("distdiag"))
PLAIN = Path(__file__).with_name("plain_loop.py")
# Bytes -> iterations of a turn, and turns.
SIZES = {2**10: (50, 40), 2**14: (50, 40), 2**18: (50, 60), 2**20: (30, 30), 2**22: (10, 40), 2**24: (5, 20),
         2**26: (3, 12), 2**28: (2, 8)}  # fmt: skip
NAMES = {2**10: "1 KiB", 2**14: "16 KiB", 2**18: "256 KiB", 2**20: "1 MiB", 2**22: "4 MiB", 2**24: "16 MiB",
         2**26: "64 MiB", 2**28: "256 MiB"}  # fmt: skip
PORT = 29600


def in_turn(port: int, sizes: dict[int, tuple[int, int]] = SIZES) -> dict[int, tuple[float, float]]:
    """Time each size in microseconds by a plain loop and by ours, in the same two processes."""
    arguments = [f"{size}:{iterations}:{turns}" for size, (iterations, turns) in sizes.items()]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PLAIN), *arguments],
            env={**os.environ, **environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    out, _ = (rank.communicate(timeout=600)[0] for rank in ranks)
    lines = (line.split() for line in out.splitlines())
    return {int(size): (float(loop), float(own)) for size, loop, own in lines}


def report(*arguments: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Run distdiag, and read its document."""
    done = subprocess.run([PROGRAM, *arguments, "--json"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in codes, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def beside_the_loop() -> None:
    """Print the table: how long each takes, and the ratio of the bandwidths."""
    rounds = [in_turn(PORT + turn) for turn in range(ROUNDS)]
    print("| size | plain loop | allreduce-bench | busbw, ours / the loop's |\n|---|---|---|---|")
    for size in SIZES:
        loop_us, own_us = (statistics.median(one[size][who] for one in rounds) for who in (0, 1))
        ratio = statistics.median(one[size][0] / one[size][1] for one in rounds)
        print(f"| {NAMES[size]} | {loop_us:.0f} us | {own_us:.0f} us | {ratio:.2f} |", flush=True)


def beside_a_process_of_its_own() -> None:
    """Print how the whole command fares beside a plain loop in processes that distdiag has nothing to do with."""
    size, ratios = 2**25, []
    for turn in range(ROUNDS):
        loop_us, _ = in_turn(PORT + 100 + turn, {size: (5, 20)})[size]
        (row,) = report("allreduce-bench", "--nproc", "2", "--device", "cpu", "--sizes", "32MiB")["data"]["results"]
        ratios.append(loop_us / (row["time_s"]["p50"] * 1e6))
    print(
        f"all_reduce of 32 MiB, the whole command beside another program: busbw {statistics.median(ratios):.2f} of it"
    )


def harness() -> None:
    """Print what the timed loop itself costs."""
    import torch

    calls = 200_000
    rank = Rank.__new__(Rank)
    rank.device = torch.device("cpu")
    began = time.perf_counter()
    rank.timed(lambda: None, calls, 0.0)
    print(f"the timed loop around nothing: {(time.perf_counter() - began) / calls * 1e6:.2f} us an iteration")


def compared() -> None:
    """Print how often a run beside an earlier one passes, and how often one with a rank of half the speed fails."""
    arguments = ("allreduce-bench", "--nproc", "2", "--device", "cpu", "--sizes", "64KiB:16MiB:x4", "--min-time", "0.3")
    with tempfile.TemporaryDirectory() as folder:
        saved = f"{folder}/earlier"
        passed = failed = 0
        for _ in range(10):
            report(*arguments, "--save", saved)
            passed += report(*arguments, "--compare", saved, codes=(0, 1))["exit_code"] == 0
            failed += report(*arguments, "--compare", saved, "--inject", "slow:1", codes=(0, 1))["exit_code"] == 1
    print(f"--compare of two runs alike passed {passed} of 10 times; with a rank of half the speed it failed {failed}")


def pairs() -> None:
    """Print how long all pairs of eight ranks take."""
    took = [report("gpu-test", "--isolate", "--nproc", "8", "--device", "cpu", "--size", "4MiB", codes=(0, 1))
            for _ in range(ROUNDS)]  # fmt: skip
    measuring = [one["data"]["measuring_s"] for one in took]
    healthy = sum(one["data"]["classification"]["kind"] == "healthy" for one in took)
    print(
        f"--isolate, 8 ranks, 28 pairs at 4 MiB: {statistics.median(measuring):.2f} s of measuring "
        f"({min(measuring):.2f}-{max(measuring):.2f}), healthy {healthy} of {len(took)}"
    )


def situations() -> None:
    """Print the findings for real faults among six ranks."""
    faults = {
        "slow:2": "bad-rank",
        "block:1-4": "bad-link",
        "split:0-2": "split",
        "slow:all": "uniformly-slow",
    }
    asked = ("gpu-test", "--isolate", "--device", "cpu", "--size", "1MiB", "--expect", "0.05", "--inject")
    for fault, kind in faults.items():
        said = [report(*asked, fault, "--nproc", "6", codes=(0, 1, 3))["data"]["classification"]["kind"] for _ in "123"]
        print(f"six ranks, {fault}: {kind} {said.count(kind)} of 3 times")
    said = [report(*asked, "block:0-1", "--nproc", "2", codes=(1, 3))["data"]["classification"]["kind"] for _ in "123"]
    print(f"two ranks, block:0-1: undecidable {said.count('undecidable')} of 3 times")


def main() -> None:
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, median of {ROUNDS} interleaved runs\n")
    beside_the_loop()
    beside_a_process_of_its_own()
    harness()
    pairs()
    situations()
    compared()


if __name__ == "__main__":
    main()
