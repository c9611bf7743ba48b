"""What `distdiag run` costs: a Gloo job of two ranks with and without it, interleaved, and a job that writes 10 MB/s.

    python tests/benchmarks/run_overhead.py [--rounds 3] [--steps 600]

Wall time from start to exit, and the CPU time of all processes of the job, distdiag and its recorder included.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(int(sys.argv[1])):
    x = torch.randn(256, 512)
    loss = (model(x) - x).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(step, loss.item().hex(), flush=True)
dist.destroy_process_group()
"""
WRITES = """
import os, time
line = b"x" * 99 + b"\\n"
began = time.monotonic()
for number in range(200):
    for _ in range(1000):
        os.write(1, line * 10)
    time.sleep(max(0.0, began + (number + 1) * 0.1 - time.monotonic()))
"""


def measure(argv: list[str], out: Path) -> tuple[float, float]:
    """Run it; return wall and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with out.open("wb") as file:
        subprocess.run(argv, stdout=file, stderr=subprocess.DEVNULL, check=True)
    wall_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(name: str, argv: list[str], rounds: int, folder: Path) -> None:
    """Measure it alone and below run, in turn, and print the medians and whether it wrote the same."""
    rows = []
    same = True
    for _ in range(rounds):
        plain = measure(argv, folder / "plain")
        under = measure([sys.executable, "-m", "distdiag", "run", "--", *argv], folder / "under")
        rows.append((*plain, *under))
        same &= (folder / "plain").read_bytes() == (folder / "under").read_bytes()
        print(name, " ".join(f"{value:.2f}" for value in rows[-1]), flush=True)
    wall, cpu = (statistics.median(row[2 + kind] / row[kind] for row in rows) for kind in (0, 1))
    more = [statistics.median(row[2 + kind] - row[kind] for row in rows) for kind in (0, 1)]
    print(f"{name}: wall x {wall:.3f} (+{more[0]:.2f} s), CPU x {cpu:.3f} (+{more[1]:.2f} s), same stdout: {same}")


def main() -> None:
    """Measure both jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, text in (("steps.py", STEPS), ("writes.py", WRITES)):
            (folder / name).write_text(text)
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
        compare("training", [*torchrun, str(folder / "steps.py"), str(options.steps)], options.rounds, folder)
        compare("10 MB/s", [sys.executable, str(folder / "writes.py")], options.rounds, folder)


if __name__ == "__main__":
    main()
