# ruff: noqa: E501 - lines of logs are as long as they are
"""The value of `distdiag logs` beside torchrun's root cause, and the cost of a log of a gigabyte.

`logs.py` prints the table of right, unknown and wrong over tests/logs_cases.py; `logs.py --cost` writes 1 GB of mixed log
and measures CPU seconds and peak memory beside `grep` and a plain Python loop.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from logs_cases import Case, cases  # noqa: E402

from distdiag.cluster.targets import Cluster  # noqa: E402
from distdiag.diagnosis.job_logs.diagnose import diagnose  # noqa: E402
from distdiag.diagnosis.job_logs.types import Request  # noqa: E402
from distdiag.facts.logs.collect import Reader  # noqa: E402
from distdiag.knowledge.known_lines import for_nodes  # noqa: E402
from distdiag.saved_facts import Gathered  # noqa: E402

PROGRAM = str(Path(sys.executable).with_name("distdiag"))
_ROOT = re.compile(rb"Root Cause \(first observed failure\).*?rank\s+: (\d+)", re.DOTALL)
_WORDS = r"rror|raceback|xception|illed|atchdog|imed out|exitcode"
_LOOP = (
    "import re, sys; form = re.compile(rb'%s'); print(sum(1 for line in open(sys.argv[1], 'rb') if form.search(line)))"
)


def main() -> None:
    if "--cost" in sys.argv:
        cost()
    else:
        score()


def score() -> None:
    """Print a row for each case, then the sums."""
    sums: dict[str, Counter[str]] = {"distdiag logs": Counter(), "torchrun's root cause": Counter()}
    for case in cases():
        own, torchrun = _own(case), _torchruns(case)
        sums["distdiag logs"][own] += 1
        sums["torchrun's root cause"][torchrun] += 1
        print(f"{case.name:28} {own:8} {torchrun}")
    for who, counts in sums.items():
        print(who, dict(counts))


def _own(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.log")
        path.write_bytes(case.text)
        reader = Reader(for_nodes())
        reader.read(str(path))
    report = diagnose(Request(program="distdiag", cluster=Cluster()), Gathered(facts=[reader.found()]))
    finding = report.findings[0]
    known = report.exit_code() != 3
    if case.id == "unknown":
        return "wrong" if known else "right"
    if not known or not case.forced:
        return "wrong" if finding.where.ranks else "unknown"
    right = (finding.id, finding.where.ranks) == (f"logs.{case.id}", case.ranks)
    return "right" if right and case.also in finding.title + finding.detail else "wrong"


def _torchruns(case: Case) -> str:
    """Judge the rank in the first summary of torchrun, ignoring its reason."""
    match = _ROOT.search(case.text)
    if match is None:
        return "silent"
    return "right" if int(match[1]) in case.ranks else "wrong"


def cost() -> None:
    """Measure on a log of 1 GB: half of it progress, a third NCCL_DEBUG=INFO, the rest failures of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.log")
        write(path, 1 << 30)
        for name, command in {
            "grep -c": ["grep", "-cE", _WORDS, str(path)],
            "plain loop": [sys.executable, "-c", _LOOP % _WORDS, str(path)],
            "distdiag logs": [PROGRAM, "logs", str(path), "--json"],
        }.items():
            cpu_s, peak_kib, answer = _measure(command)
            print(f"{name:14} {cpu_s:6.1f} s CPU, {peak_kib / 1024:6.1f} MiB: {answer[:100]}")


def write(path: Path, size: int) -> None:
    """Write a mixed log of this size in bytes, of 512 ranks; rank 300 fails first."""
    info = "[default{1}]:node{2}:{0}:{0} [{1}] NCCL INFO Channel {3:02}/0 : {0}[{1}] -> {0}[{1}] [send] via NET/IB/0/GDRDMA\n"
    line = (
        "[default{1}]:[rank{0}]: 2026-11-23 10:00:00 step {3} loss 2.{0} grad_norm 1.{3} tokens/s 31{2}.7 lr 0.0003\n"
    )
    parts = []
    for number in range(20_000):
        rank = number * 7 % 512
        form = info if number % 3 == 0 else line
        parts.append(form.format(rank, rank % 8, rank // 8, number % 32))
    block = "".join(parts).encode()
    last = "".join(
        f"[default{rank % 8}]:[rank{rank}]:[E1123 10:20:30.100000000 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran "
        "for 600060 milliseconds before timing out.\n"
        for rank in range(512)
        if rank != 300
    )
    trace = 'Traceback (most recent call last):\n  File "/app/train.py", line 9, in main\n    step()\nValueError: label 1000'
    last += "".join(f"[default4]:[rank300]: {part}\n" for part in trace.splitlines())
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(block)
        file.write(last.encode())


def _measure(command: list[str]) -> tuple[float, int, str]:
    code = (
        "import json, resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True);"
        "u = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(json.dumps([u.ru_utime + u.ru_stime, u.ru_maxrss, done.stdout]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    cpu_s, peak_kib, out = json.loads(done.stdout)
    answer = json.loads(out)["summary"] if out.startswith("{") else out.strip()
    return cpu_s, peak_kib, answer


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
