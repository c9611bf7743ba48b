"""Which first cause `distdiag run` names: real Gloo jobs of 4 ranks below torchrun, a fault each.

    python tests/benchmarks/run_matrix.py [--faults raise,kill] [--out FILE]

Scored are run, and beside it torchrun's own "Root Cause (first observed failure)": right (the rank, and the word that
names why; nobody, where no rank is at fault), unknown (it accuses nobody), wrong (it accuses another rank).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).resolve().parents[1]
LATE_S = 180.0
GRACE_S = 30.0
LIMIT_BYTES = 2500 << 20
"""For four ranks and their launcher, which hold about 300 MiB each; the guilty rank takes the rest."""
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Fault:
    """`ranks`: at fault, none for a cause outside; `word`: required in the finding."""

    kind: str
    ranks: tuple[int, ...] = (2,)
    word: str = ""
    options: tuple[str, ...] = ()


FAULTS = {
    "raises": Fault("raise", word="ValueError"),
    "sigkill": Fault("kill", word="SIGKILL"),
    "segv": Fault("segv", word="SIGSEGV"),
    "exit-3": Fault("exit3", word="exit"),
    "oom-cgroup": Fault("memory", word="out of memory"),
    "enospc": Fault("save", word="full disk"),
    "sigstop": Fault("stop"),
    "sleeps": Fault("hang"),
    "never-comes": Fault("never"),
    "restart": Fault("restart", word="No space", options=("--max-restarts", "1")),
    "launcher-killed": Fault("hang", ranks=()),
    "slurm-term": Fault("hang", ranks=()),
}


@contextlib.contextmanager
def surroundings(fault: Fault, folder: Path) -> Iterator[dict[str, str]]:
    """Make what a fault needs: a full disk, a cgroup of little memory."""
    if fault.kind == "save":
        disk = folder / "full_disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
        try:
            yield {"FULL_DISK": str(disk)}
        finally:
            subprocess.run(["umount", "-l", disk], check=True)
    elif fault.kind == "memory":
        v1 = CGROUP / "memory"
        group = (v1 if v1.is_dir() else CGROUP) / f"run-matrix-{os.getpid()}"
        group.mkdir()
        limit = "memory.limit_in_bytes" if v1.is_dir() else "memory.max"
        (group / limit).write_text(str(LIMIT_BYTES))
        try:
            yield {"MEMORY_CGROUP": str(group)}
        finally:
            time.sleep(0.5)
            group.rmdir()
    else:
        yield {}


def run(name: str, *, plain: bool) -> dict[str, Any]:
    """Start one job, do to it what the fault is, and score the verdict; `plain`: that of torchrun without run."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory(prefix="run-matrix-") as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        env = {**os.environ, "OMP_NUM_THREADS": "1", **stack.enter_context(surroundings(fault, folder))}
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "4"]
        program = str(TESTS / "programs" / "fails_in_many_ways.py")
        words = [] if plain else [sys.executable, "-m", "distdiag", "run", "--save", str(folder / "kept"), "--"]
        with (folder / "log").open("wb") as log:
            if group := env.get("MEMORY_CGROUP"):  # from the start, as a job of SLURM or a pod is
                words += ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"']
            argv = [*words, *torchrun, *fault.options, program, fault.kind]
            job = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)
        began = time.monotonic()
        try:
            disturb(name, job, folder)
            job.wait(LATE_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
        finally:
            end(folder)
        return score(name, fault, folder, round(time.monotonic() - began, 1))


def disturb(name: str, job: subprocess.Popen[Any], folder: Path) -> None:
    """Kill the launcher, or end the job as SLURM does: SIGTERM, and SIGKILL after the grace."""
    if name not in ("launcher-killed", "slurm-term"):
        return
    until = time.monotonic() + LATE_S
    while b"rank 0 step 2" not in (folder / "log").read_bytes() and time.monotonic() < until:
        time.sleep(0.02)
    if name == "launcher-killed":
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        os.kill(int(next(pid for pid, line in named.items() if b"torchrun" in line)), signal.SIGKILL)
        return
    job.terminate()
    try:
        job.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)


def end(folder: Path) -> None:
    """End the remaining ranks."""
    for file in folder.glob("kept/output.*/events.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(OSError, ValueError):
                pid = json.loads(line)["pid"]
                if b"fails_in_many_ways" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)


def score(name: str, fault: Fault, folder: Path, took_s: float) -> dict[str, Any]:
    """Score run and torchrun."""
    log = (folder / "log").read_text(errors="replace")
    # A plain job's own opinion: below run, torchrun is stopped while hang looks, and sees the others die at once.
    cause = re.search(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+)", log, re.DOTALL)
    if not (folder / "kept").exists():
        return {"torchrun": judge(fault, [int(cause[1])] if cause else [], fault.word), "plain seconds": took_s}
    reports = list(folder.glob("kept/report.*.json"))
    if not reports:
        return {"fault": name, "run": "unknown", "title": "no report", "seconds": took_s}
    document = json.loads(reports[0].read_text())
    first: dict[str, Any] = (
        document["findings"][0] if document["findings"] else {"level": "", "where": {}, "title": "", "detail": ""}
    )
    accused = first["where"].get("ranks", []) if first["level"] == "fail" else []
    return {
        "fault": name,
        "run": judge(fault, accused, f"{first['title']} {first['detail']}"),
        "verdict": document["verdict"],
        "id": first.get("id", ""),
        "title": first["title"],
        "pictures": [f"{each['reason']} {each['at_s']}+{each['took_s']}" for each in document["data"]["pictures"]],
        "seconds": took_s,
    }


def judge(fault: Fault, accused: list[int], text: str) -> str:
    """Compare with the truth."""
    if not fault.ranks:
        return "wrong" if accused else "right"
    if not accused:
        return "unknown"
    return "right" if tuple(accused) == fault.ranks and fault.word in text else "wrong"


def main() -> None:
    """Run them all, and print a line for each, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows = []
    for name in options.faults.split(","):
        rows.append({**run(name, plain=True), **run(name, plain=False)})
        print(json.dumps(rows[-1]), flush=True)
    for column in ("run", "torchrun"):
        print(column, dict(Counter(row[column] for row in rows)), "of", len(rows))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
