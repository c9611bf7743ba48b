"""gpu-test beside the plain way: torchrun with a script that initialises and all-reduces one element twice.

Whole commands, start to exit, interleaved; medians and their ratio. `make bench` prints the table of the README.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", "7"))
MAX_RATIO = 0.8
PLAIN = Path(__file__).parents[1] / "programs" / "plain_allreduce.py"
PROGRAM = str(Path(sys.executable).with_name("distdiag"))


def seconds(command: list[str], said: str) -> float:
    """Time one command; it must succeed and report success."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    took = time.perf_counter() - began
    assert said in done.stdout, done.stdout
    return took


def compare(nproc: int) -> float:
    """Print one row; give the ratio of the medians."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(nproc), str(PLAIN)]
    ours = [PROGRAM, "gpu-test", "--nproc", str(nproc), "--device", "cpu"]
    pairs = [(seconds(torchrun, "OK"), seconds(ours, "gpu-test: OK")) for _ in range(ROUNDS)]
    plain, own = statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)
    spread = max(own_ for _, own_ in pairs) - min(own_ for _, own_ in pairs)
    print(f"| {nproc} ranks | {plain:.2f} s | {own:.2f} s (spread {spread:.2f}) | {own / plain:.2f} |", flush=True)
    return own / plain


def main() -> None:
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, median of {ROUNDS} interleaved runs\n")
    print("| | torchrun, 1 element, unchecked | distdiag gpu-test | ratio |\n|---|---|---|---|")
    ratios = [compare(nproc) for nproc in (2, 4)]
    tab = {"_DISTDIAG_COMPLETE": "complete_bash", "COMP_WORDS": "distdiag gpu-test --", "COMP_CWORD": "2"}
    calls: list[tuple[str, list[str], dict[str, str]]] = [("`distdiag --help`", ["--help"], {}), ("one TAB", [], tab)]
    for name, arguments, extra in calls:
        environment = {**os.environ, **extra}
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            subprocess.run([PROGRAM, *arguments], env=environment, capture_output=True, check=True, timeout=30)
            times.append(time.perf_counter() - began)
        print(f"\n{name}: {statistics.median(times):.2f} s")
    if max(ratios) > MAX_RATIO:
        sys.exit(f"slower than promised: ratio {max(ratios):.2f} > {MAX_RATIO}")


if __name__ == "__main__":
    main()
