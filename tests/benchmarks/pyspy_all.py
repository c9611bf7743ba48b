"""pyspy-all beside what people do by hand: `pgrep | xargs -P4 py-spy dump`, and ClusterShell's `clubak -b` for folding.

Whole commands, start to exit, interleaved; medians and their ratio. `make bench` prints the table of the README.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from jobs import Job, wait_for_state  # noqa: E402

from distdiag.facts.stacks import stack_sampler  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "5"))
BIN = Path(sys.executable).parent
PROGRAM, PY_SPY = str(BIN / "distdiag"), str(BIN / "py-spy")
LIGHT = 64
FRAMES, CLASSES = 25, 40


def timed(command: list[str], *, limit: float = 300) -> tuple[float, int, int | None]:
    """Run a command; return its seconds, its peak memory in KiB, and its status (None: it did not end)."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        took = time.perf_counter() - began
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return took, usage.ru_maxrss, child.returncode
        if took > limit:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return took, 0, None
        time.sleep(0.001)


def median(commands: dict[str, list[str]], rounds: int = ROUNDS) -> dict[str, float]:
    """Time commands in turn, and give the median of each."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            times[name].append(timed(command)[0])
    return {name: statistics.median(own) for name, own in times.items()}


def light_ranks() -> None:
    """Sample and report 64 light ranks; then with one stopped and one blocked in the kernel."""
    with Job("stands_still", LIGHT, rank_env={17: {"HOW": "vfork", "LATER": "1"}}) as job:
        job.wait_ready()
        ours = [PROGRAM, "pyspy-all", "--job", job.name, "--samples", "1"]
        recipe = f"pgrep -f programs/stands_still.py | xargs -P4 -I{{}} {PY_SPY} dump --pid {{}}"
        reported = median({"ours": ours, "recipe": ["sh", "-c", recipe]})
        print(f"| {LIGHT} light ranks, captured and reported | xargs -P4 py-spy, captured | {reported['recipe']:.2f} s "
              f"| {reported['ours']:.2f} s | {reported['ours'] / reported['recipe']:.2f} |", flush=True)  # fmt: skip
        os.kill(job.pid(42), signal.SIGSTOP)
        (job.folder / "go").touch()
        wait_for_state(job.pid(42), "T")
        wait_for_state(job.pid(17), "D")
        took = statistics.median(timed(ours)[0] for _ in range(ROUNDS))
        hangs = timed(["sh", "-c", recipe], limit=20)
        words = "does not return" if hangs[2] is None else f"{hangs[0]:.2f} s"
        print(f"| the same, one stopped and one in D state | xargs -P4 py-spy | {words} | {took:.2f} s | |", flush=True)


def write_dump(file: TextIO, ranks: int) -> None:
    """Write what `clush … py-spy dump` prints: a label before each line, 40 different stacks of 25 frames."""
    stacks = [_stack(number) for number in range(CLASSES)]
    for rank in range(ranks):
        label, pid = f"rank{rank}: ", 10_000 + rank
        head = (f"Process {pid}: python -u train.py", "Python v3.11.7 (/usr/bin/python3.11)", "")
        stack = stacks[0 if rank % 50 else rank // 50 % CLASSES]
        lines = (*head, f'Thread {pid} (idle): "MainThread"', *stack)
        file.write("".join(f"{label}{line}\n" for line in lines))


def _stack(number: int) -> list[str]:
    c10d = ["    {} (torch/distributed/distributed_c10d.py:{})", "    wrapper (torch/distributed/c10d_logger.py:83)"]
    if number == 1:
        inner = ["    load_batch (train.py:26)"]
    elif number == 0:
        inner = [c10d[0].format("all_reduce", 3252), c10d[1]]
    else:
        inner = [c10d[0].format("recv", 2799), c10d[1], f"    stage_{number} (pipeline.py:{number})"]
    outer = [
        "    train_step (train.py:25)",
        "    train (train.py:40)",
        "    main (train.py:80)",
        "    <module> (train.py:90)",
    ]
    middle = [f"    layer_{n} (model.py:{10 + n})" for n in range(FRAMES - len(inner) - len(outer))]
    return inner + middle + outer


def folding() -> None:
    """Fold the same dumps as clubak -b, with the verdict."""
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1_024, 4_096, 16_384, 65_536):
            path = Path(folder, f"{ranks}.txt")
            with path.open("w") as file:
                write_dump(file, ranks)
            ours = [PROGRAM, "pyspy-all", "--from", str(path)]
            commands = {"ours": ours}
            if shutil.which("clubak") and ranks <= 16_384:
                commands["clubak"] = ["sh", "-c", f"exec clubak -b <{path}"]
            reported = median(commands, rounds=3)
            memory = timed(ours)[1] / 1024
            peer = f"{reported['clubak']:.2f} s" if "clubak" in reported else "-"
            ratio = f"{reported['ours'] / reported['clubak']:.3f}" if "clubak" in reported else "-"
            print(f"| folding {ranks} ranks x {FRAMES} frames | clubak -b | {peer} "
                  f"| {reported['ours']:.2f} s, {memory:.0f} MiB | {ratio} |", flush=True)  # fmt: skip
            path.unlink()


def no_harm() -> None:
    """Look 200 times at a training job: its losses and its steps are as without."""
    steps, looks = 4000, 200
    reported: dict[str, tuple[str, float]] = {}
    for name in ("alone", "looked at"):
        with Job("trains_well", 2, env={"STEPS": str(steps)}) as job:
            job.wait_ready()
            seen = read = 0
            while any(process.poll() is None for process in job.processes):
                if name == "looked at" and seen < looks:
                    seen += 1
                    found = stack_sampler.take_samples(
                        [job.pid(rank) for rank in range(2)], stack_sampler.SampleOptions(timeout_s=5)
                    )
                    read += sum(one.status == "ok" for one in found.values())
                else:
                    time.sleep(0.01)
            assert name == "alone" or seen == looks, f"only {seen} looks: more steps are needed"
            reported[name] = ((job.folder / "losses-0").read_text(), float((job.folder / "seconds").read_text()))
    same = reported["alone"][0] == reported["looked at"][0] and reported["alone"][0].count("\n") == steps
    print(
        f"\n{looks} looks at each rank of a job of {steps} steps, {read} with a stack: losses "
        f"{'equal' if same else 'DIFFERENT'}; {reported['alone'][1]:.1f} s without, "
        f"{reported['looked at'][1]:.1f} s with"
    )
    if not same:
        sys.exit("the looks changed the job")


def main() -> None:
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, medians of interleaved runs\n")
    print("| | peer | peer's time | distdiag pyspy-all | ratio |\n|---|---|---|---|---|")
    light_ranks()
    folding()
    no_harm()


if __name__ == "__main__":
    main()
