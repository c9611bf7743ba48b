"""flight-recorder beside torchfrtrace on made-up NCCL dumps with one stuck rank: seconds and peak memory of both.

    python tests/benchmarks/flight_recorder.py RANKSxENTRIES...      default 256x200 128x2000 1024x2000
    python tests/benchmarks/flight_recorder.py --sets FOLDER         FOLDER/*: verdict, exit status, seconds on each set

The dumps have the keys of torch 2.13's, 10 frames an entry, shared as torch shares them; two thirds of the entries are
of groups of 8 ranks. Rank 37 never calls the last collective of the world. Memory: the largest sum of the resident
memory of all processes of the command, sampled ten times a second, so pages that processes share count several times.
TORCHFRTRACE_S limits a run of torchfrtrace (default 600 s).
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

STUCK = 37
TP = 8
LIMIT_S = float(os.environ.get("TORCHFRTRACE_S", "600"))
PROGRAM = str(Path(sys.executable).with_name("distdiag"))
TORCHFRTRACE = str(Path(sys.executable).with_name("torchfrtrace"))
_FRAMES = [
    *({"name": f"wrapper{n}", "filename": "/x/site-packages/torch/distributed/c10d.py", "line": n} for n in range(3)),
    *({"name": f"step{n}", "filename": f"/home/me/train/loop{n}.py", "line": 10 * n} for n in range(7)),
]


def dump_of(rank: int, ranks: int, entries: int) -> bytes:
    """Make the dump of a rank, as torch 2.13 writes it."""
    groups = [("0", "default_pg"), (str(1 + rank // TP), "TENSOR_MODEL_PARALLEL_GROUP")]
    first = rank // TP * TP
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))},
        groups[1][0]: {"name": groups[1][0], "desc": groups[1][1], "ranks": str(list(range(first, first + TP)))},
    }
    count = entries - (rank == STUCK)
    done = entries - 1
    sequence = [0, 0]
    found = []
    for number in range(count):
        kind = 0 if number % 3 == 2 or number == done else 1
        sequence[kind] += 1
        at = 10**18 + number * 10**6 + rank
        found.append(
            {
                "frames": list(_FRAMES),
                "record_id": number,
                "pg_id": kind,
                "process_group": groups[kind],
                "collective_seq_id": sequence[kind],
                "p2p_seq_id": 0,
                "op_id": sequence[kind],
                "profiling_name": "nccl:all_reduce",
                "time_created_ns": at,
                "input_sizes": [[1024, 1024]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[1024, 1024]],
                "output_dtypes": ["BFloat16"],
                "state": "completed" if number < done else "scheduled",
                "time_discovered_started_ns": at + 1000 if number < done else None,
                "time_discovered_completed_ns": at + 2000 if number < done else None,
                "retired": number < done,
                "timeout_ms": 600000,
                "is_p2p": False,
                "thread_id": "140000000000000",
                "thread_name": "pt_main_thread",
            }
        )
    status = {
        str(kind): {
            "last_enqueued_collective": sequence[kind],
            "last_started_collective": sequence[kind] - (kind == 0 and rank != STUCK),
            "last_completed_collective": sequence[kind] - (kind == 0 and rank != STUCK),
        }
        for kind in (0, 1)
    }
    return pickle.dumps(
        {
            "version": "2.10",
            "pg_config": config,
            "pg_status": status,
            "nccl_version": "2.29.3",
            "comm_lib_version": "2.29.3",
            "entries": found,
        },
        protocol=2,
    )


class Peak:
    """The resident memory of a process and all below it."""

    def __init__(self, pid: int) -> None:
        self.mib, self._over, self._pid = 0.0, threading.Event(), pid
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.mib = max(self.mib, sum(map(self._resident, self._below(self._pid))))

    def _below(self, pid: int) -> list[int]:
        try:
            own = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return [pid]
        return [pid, *(inner for child in own for inner in self._below(child))]

    @staticmethod
    def _resident(pid: int) -> float:
        try:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        except (OSError, IndexError):
            return 0.0

    def end(self) -> float:
        self._over.set()
        self._thread.join()
        return self.mib


def timed(*command: str, limit_s: float = 3600) -> tuple[int | None, str, str, float]:
    """Return exit status (None: it took too long), output, seconds and those of the processors, peak MiB."""
    before = os.times()
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    peak = Peak(process.pid)
    try:
        text, errors = process.communicate(timeout=limit_s)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        text, errors = process.communicate()
        code = None
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return code, f"{text}\n{errors}", f"{time.perf_counter() - began:.2f} s ({used:.2f} CPU)", peak.end()


def their_verdict(text: str) -> str:
    """Return the union of all "missing ranks" and "Culprit rank" lines of torchfrtrace, or its last line."""
    lines = re.findall(r"(?:missing ranks|Culprit ranks?|culprit ranks?)[^\n]*", text)
    ranks = sorted({int(number) for line in lines for number in re.findall(r"\d+", line.split(":", 1)[-1])})
    if lines:
        return f"ranks {','.join(map(str, ranks))} ({len(lines)} blocks)"
    last = [line for line in text.strip().splitlines() if line.strip()]
    return last[-1][:90] if last else "nothing"


def our_verdict(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")[:110]


def scale(size: str) -> None:
    ranks, entries = map(int, size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for rank in range(ranks):
            Path(folder, f"rank_{rank}").write_bytes(dump_of(rank, ranks, entries))
        total = sum(file.stat().st_size for file in Path(folder).iterdir()) / 2**20
        print(f"{size}: {total:.0f} MiB, made in {time.perf_counter() - began:.0f} s", flush=True)
        code, text, took, mib = timed(PROGRAM, "flight-recorder", folder)
        print(f"  flight-recorder  exit {code}  {took}  {mib:6.0f} MiB  {our_verdict(text)}", flush=True)
        code, text, took, mib = timed(TORCHFRTRACE, folder, "-p", "rank_", limit_s=LIMIT_S)
        print(f"  torchfrtrace     exit {code}  {took}  {mib:6.0f} MiB  {their_verdict(text)}", flush=True)


def compare(folder: Path) -> None:
    for each in sorted(path for path in folder.iterdir() if path.is_dir()):
        names = sorted(path.name for path in each.iterdir() if not path.name.startswith("."))
        prefix = names[0].rstrip("0123456789")
        code, text, took, _ = timed(PROGRAM, "flight-recorder", str(each))
        print(f"| {each.name} | {our_verdict(text)} | {code} | {took}", end=" | ", flush=True)
        code, text, took, _ = timed(TORCHFRTRACE, str(each), "-p", prefix, limit_s=LIMIT_S)
        print(f"{their_verdict(text)} | {code} | {took} |", flush=True)


if __name__ == "__main__":
    gc.disable()
    if sys.argv[1:2] == ["--sets"]:
        compare(Path(sys.argv[2]))
    else:
        for each in sys.argv[1:] or ["256x200", "128x2000", "1024x2000"]:
            scale(each)
