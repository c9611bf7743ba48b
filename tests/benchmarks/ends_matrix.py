"""How ranks end, as judged by `run` and `logs`: each end in three consoles, Gloo jobs of 3 ranks below torchrun.

    python tests/benchmarks/ends_matrix.py [--ends value-error,sigkill] [--consoles bar,plain,json] [--keep DIR]

Scored are `run`; `logs` on the console of the same job without `run`; and torchrun's own "Root Cause (first observed
failure)" there. right: the rank, and all words that name why; unknown: it accuses no rank; wrong: another rank is
accused, or the reason is another. torchrun is asked for the rank alone.
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
LATE_S = 120.0
LIMIT_BYTES = 2000 << 20
CGROUP = Path("/sys/fs/cgroup")
CONSOLES = ("bar", "plain", "json")


@dataclass(frozen=True)
class Truth:
    """Written before the first run. `words`: the finding has all of them; `logs`: instead, where a log has less.

    `ranks`: none where all failed by the command line that they share. `never`: no finding has it.
    """

    words: tuple[str, ...]
    ranks: tuple[int, ...] = (1,)
    logs: tuple[str, ...] | None = None
    never: str = ""


TRUTHS = {
    "value-error": Truth(("ValueError", "label 1000")),
    "chained": Truth(("KeyError", "warmup", "RuntimeError", "schedule")),
    "during": Truth(("ValueError", "seven")),
    "group": Truth(("shard 3 is empty", "/data/absent/9.bin")),
    "assert": Truth(("AssertionError", "loss is not finite")),
    "sys-exit-words": Truth(("config not found: conf/large.yaml",)),
    "sys-exit-3": Truth(("exit status 3",)),
    "argparse": Truth(("--lr-decay 3",), ranks=()),
    "os-exit": Truth(("exit status 7",)),
    "leaves-with-0": Truth(("left",)),
    "sigkill": Truth(("SIGKILL",)),
    "sigsegv": Truth(("SIGSEGV",)),
    "sigsegv-faulthandler": Truth(("Segmentation fault",)),
    "sigabrt": Truth(("SIGABRT",)),
    "sigterm": Truth(("SIGTERM",)),
    "interrupt": Truth(("KeyboardInterrupt",)),
    "memory-cgroup": Truth(("out of memory",), logs=("SIGKILL",)),
    "memory-limit": Truth(("MemoryError",)),
    "survived-then-killed": Truth(("SIGKILL",)),
    "c-assert": Truth(("rows % 8 == 0",)),
    "cpp-terminate": Truth(("pool is empty",)),
    "stack-overflow": Truth(("SIGSEGV",)),
    "recursion": Truth(("RecursionError",)),
    "import": Truth(("flash_attn_that_is_not_here",)),
    "worker-killed": Truth(("DataLoader worker", "illed")),
    "worker-raises": Truth(("ValueError", "sample 0 is empty")),
    "worker-unpicklable": Truth(("ShardError", "checksum mismatch")),
    "unpicklable": Truth(("ickle",)),
    "cuda-library": Truth(("libcudart.so.12",)),
    "timeout": Truth(("never arrived",)),
    "two": Truth(("KeyError",)),
    "thread": Truth(("ZeroDivisionError",)),
    "at-exit": Truth(("Input/output error",)),
    "warns-then-dies": Truth(("exit status 9",), never="lr_scheduler"),
}


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Path]:
    """Make a cgroup of little memory."""
    v1 = CGROUP / "memory"
    is_v1 = v1.is_dir()
    group = (v1 if is_v1 else CGROUP) / f"ends-matrix-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(LIMIT_BYTES))
    try:
        yield group
    finally:
        time.sleep(0.5)
        group.rmdir()


def start(end: str, console: str, log: Path, before: list[str]) -> None:
    """Run one job to its end, with `before` before its command."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack, log.open("wb") as file:
        words = list(before)
        if end == "memory-cgroup":
            group = stack.enter_context(memory_cgroup())
            words += ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$0" "$@"']
        argv = [*words, *torchrun, str(TESTS / "programs" / "ends_in_many_ways.py"), end, console]
        job = subprocess.Popen(argv, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            job.wait(LATE_S)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)


def judge(truth: Truth, words: tuple[str, ...], document: dict[str, Any]) -> tuple[str, str]:
    """Compare a report with the truth; return the score and the reported text."""
    findings = document["findings"]
    first = findings[0] if findings else {"level": "", "where": {}, "title": document.get("summary", ""), "detail": ""}
    text = f"{first['title']} {first.get('detail', '')}"
    shown = f"{first.get('id', '')}: {text}"
    accused = tuple(first["where"].get("ranks", ())) if first["level"] == "fail" else ()
    if truth.never and truth.never in text:
        return "wrong", shown
    if first["level"] != "fail":
        return "unknown", shown
    return ("right" if accused == truth.ranks and all(word in text for word in words) else "wrong"), shown


def row(end: str, console: str, folder: Path) -> dict[str, Any]:
    """Run a job bare and below run, and score what each makes of it."""
    truth = TRUTHS[end]
    bare, ours, kept = folder / "bare.log", folder / "ours.log", folder / "kept"
    start(end, console, bare, [])
    start(end, console, ours, [sys.executable, "-m", "distdiag", "run", "--save", str(kept), "--"])
    said = subprocess.run(
        [sys.executable, "-m", "distdiag", "logs", "--json", str(bare)], stdout=subprocess.PIPE, check=False
    )
    reports = list(kept.glob("report.*.json"))
    by_run = json.loads(reports[0].read_text()) if reports else {"findings": [], "summary": "no report"}
    run, run_shown = judge(truth, truth.words, by_run)
    logs, logs_shown = judge(truth, truth.words if truth.logs is None else truth.logs, json.loads(said.stdout))
    cause = re.search(
        r"Root Cause \(first observed failure\):.*?rank\s*: (\d+)", bare.read_text(errors="replace"), re.DOTALL
    )
    torchrun = (
        "unknown" if cause is None or not truth.ranks else "right" if (int(cause[1]),) == truth.ranks else "wrong"
    )
    return {
        **{"end": end, "console": console, "run": run, "logs": logs, "torchrun": torchrun},
        **{"run reports": run_shown, "logs reports": logs_shown},
    }


def main() -> None:
    """Run them all, and print a line for each, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ends", default=",".join(TRUTHS))
    parser.add_argument("--consoles", default=",".join(CONSOLES))
    parser.add_argument("--keep", default="")
    options = parser.parse_args()
    rows = []
    for end in options.ends.split(","):
        for console in options.consoles.split(","):
            with tempfile.TemporaryDirectory(prefix="ends-matrix-") as place:
                folder = Path(options.keep, f"{end}.{console}") if options.keep else Path(place)
                folder.mkdir(parents=True, exist_ok=True)
                rows.append(row(end, console, folder))
            print(json.dumps(rows[-1]), flush=True)
    for column in ("run", "logs", "torchrun"):
        print(column, dict(Counter(row[column] for row in rows)), "of", len(rows))


if __name__ == "__main__":
    main()
