"""How honest hang, pyspy-all and trace blocked are: Gloo jobs that work beside a wait, hang, or train at odd paces.

    python tests/benchmarks/busy_matrix.py [--kinds busy,hung,paces,observed] [--only JOB,..] [--at 10,60,120]
                                           [--commands "hang,pyspy-all,trace blocked"] [--out FILE]

Prints a row per job, time (seconds since the phase to be judged began) and command. Accused are the ranks of all fail
and warn findings. The expected answers in this file were written before the first run of any command.

    busy      rank 2 works: right is a warning that accuses rank 2, or ok; wrong is a failure, or another rank accused
    hung      no wait ends: right is a failure that accuses exactly the ranks at fault; soft is a warning instead,
              partial a failure that accuses too few; wrong is ok, an innocent rank, or a warning without all of them.
              For a rank that polls or spins a warning is right too
    paces     all ranks train: right is ok; soft is a warning that accuses none; wrong is any rank accused
    observed  py-spy, gdb or strace attaches before or during hang: right is the verdict and exit status without it

Each job runs in a separate PID namespace, which hides other jobs from distdiag and ends all processes of the job. Needs
root or user namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Row = dict[str, Any]

TESTS = Path(__file__).resolve().parents[1]
READY_S = 120.0
MOVES_S = 3.0
"""Time between two readings of CPU time and I/O in /proc, before each question."""
COMMANDS = "hang,pyspy-all,trace blocked"

PROGRAMS = {"busy": "works_beside_a_wait.py", "hung": "hangs_in_more_ways.py", "paces": "trains_at_many_paces.py"}
JOBS: dict[str, tuple[str, ...]] = {
    "busy": (
        *("map-num-proc", "process-pool", "pool-downloads", "thread-downloads", "uploads", "copies", "tars", "gzips"),
        *("clones", "evaluates", "reads-pipe", "reads-direct", "loader-computes", "loader-reads", "sqlite"),
        *("tokenizes", "zlib-threads", "rollout", "page-faults", "slow-save", "unzips", "sorts", "regex"),
        *("file-grows", "compile-workers"),
    ),
    "hung": (
        *("s3", "push", "download", "dead-holder", "event", "dead-thread", "fifo", "fifo-stopped", "pipe-full"),
        *("polls-fast", "polls", "wait-for-file", "polls-http", "stdin", "input", "child-sleeps", "child-reads"),
        *("build-lock", "flock-outside", "flock-rank", "condition", "future", "three-places", "send", "loader-lock"),
        *("loader-read", "restart-loop", "spins", "finalizer", "exit-handler", "join", "two-flocks", "sigpause"),
        "debugger",
    ),
    "paces": (
        *("step-50ms", "step-1s", "step-5s", "step-20s", "odd-names", "generator", "nested", "trainer"),
        *("trainer-slow", "map", "no-counter", "async"),
    ),
    "observed": ("hung:event", "hung:child-reads", "hung:fifo-stopped", "paces:step-1s"),
}
TRUTHS: dict[str, tuple[set[int], ...]] = {
    "three-places": ({1, 2, 3},),
    "two-flocks": ({1, 2},),
    "flock-rank": ({2}, {1, 2}),
    "send": ({2}, {1, 2}),
    "restart-loop": ({1},),
}
"""Accepted sets of accused ranks per hang; the default is rank 2 alone."""
STILL_RUNS = ("polls-fast", "polls", "wait-for-file", "polls-http", "build-lock", "spins", "restart-loop")


def truths(job: str) -> tuple[set[int], ...]:
    return TRUTHS.get(job, ({2},))


def score_hung(job: str, verdict: str, accused: set[int]) -> str:
    right = truths(job)
    if verdict == "ok" or not any(accused <= each for each in right):
        return "wrong"
    if verdict == "unknown":
        return "unknown"
    if accused not in right:
        return "partial" if verdict == "fail" else "wrong"
    return "right" if verdict == "fail" or job in STILL_RUNS else "soft"


def score(kind: str, job: str, verdict: str, accused: set[int]) -> str:
    """Score one answer."""
    if kind == "hung":
        return score_hung(job, verdict, accused)
    allowed = {2} if kind == "busy" else set()
    if verdict == "fail" or not accused <= allowed:
        return "wrong"
    if verdict == "unknown":
        return "unknown"
    return "right" if verdict == "ok" or accused else "soft"


def ask(command: str) -> Row:
    """Ask one command; return its verdict, exit status, accused ranks and findings."""
    began = time.monotonic()
    argv = [sys.executable, "-m", "distdiag", *command.split(), "--json"]
    done = subprocess.run(
        argv, cwd=TESTS.parent, stdin=subprocess.DEVNULL, capture_output=True, timeout=180, check=False
    )
    report = json.loads(done.stdout)
    accused = {
        rank
        for finding in report["findings"]
        if finding["level"] in ("fail", "warn")
        for rank in finding["where"]["ranks"]
    }
    fixes = [finding["fix"] or {"text": "", "commands": []} for finding in report["findings"]]
    printed = " ".join(text for fix in fixes for text in (fix["text"], *fix["commands"]))
    return {
        "command": command,
        "verdict": report["verdict"],
        "exit": done.returncode,
        "accused": sorted(accused),
        "seconds": round(time.monotonic() - began, 1),
        "findings": [
            {"id": finding["id"], "level": finding["level"], "title": finding["title"], "fix": fix}
            for finding, fix in zip(report["findings"], fixes, strict=True)
        ],
        "recommends itself": f"distdiag {command}" in printed,
    }


@contextlib.contextmanager
def running(kind: str, job: str) -> Iterator[Path]:
    """Start a job below torchrun and wait until the phase to be judged has begun; give its folder.

    Its stdin is a pipe that stays open; its output is a file, as in a batch job. The job ends with the PID namespace,
    when this process exits.
    """
    with tempfile.TemporaryDirectory(prefix="busy-matrix-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        restarts = "1000" if job == "restart-loop" else "0"
        options = ["--standalone", "--nproc-per-node", "4", "--max-restarts", restarts]
        program = str(TESTS / "programs" / PROGRAMS[kind])
        env = {**os.environ, "JOB_FOLDER": name, "HOW": job, "OMP_NUM_THREADS": "1"}
        with (folder / "log").open("wb") as log:
            argv = [sys.executable, "-m", "torch.distributed.run", *options, program]
            launcher = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=name)
        until = time.monotonic() + READY_S
        while not ((folder / "bad").exists() and len(list(folder.glob("ready-*"))) == 4):
            if launcher.poll() is not None or time.monotonic() > until:
                raise RuntimeError((folder / "log").read_text()[-2000:] or "the job did not begin")
            time.sleep(0.05)
        yield folder


def processes(ranks: set[int], folder: Path) -> Iterator[Path]:
    """Give the processes of these ranks, their children, and every far_ends.py."""
    wanted = {f"RANK={rank}".encode() for rank in ranks}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            in_job = f"JOB_FOLDER={folder}".encode() in (environ := (process / "environ").read_bytes().split(b"\0"))
            if (in_job and wanted & set(environ)) or b"far_ends.py" in (process / "cmdline").read_bytes():
                yield process


def usage(process: Path) -> Counter[str]:
    """Return the CPU time (ms) and the bytes read and written of a process so far."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    io = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
    return Counter({"cpu_ms": ticks * 1000 // os.sysconf("SC_CLK_TCK"), "io": int(io["rchar"]) + int(io["wchar"])})


def moves(job: str, folder: Path) -> Row:
    """Return the work of the ranks at fault within MOVES_S, as the kernel counts it: proof that the job is as named."""
    ranks = set().union(*truths(job))
    before, seen = {}, {}
    for process in processes(ranks, folder):
        with contextlib.suppress(OSError):
            before[process] = usage(process)
    counted = {path: path.read_bytes() for path in folder.glob("steps-*")}
    time.sleep(MOVES_S)
    for process, old in before.items():
        with contextlib.suppress(OSError):
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            name = f"{process.name} {(process / 'comm').read_text().strip()}"
            seen[name] = f"{state} {(process / 'wchan').read_text()} {dict(usage(process) - old)}"
    moved = [path.name for path, old in counted.items() if path.exists() and path.read_bytes() != old]
    return {"command": "/proc", "counters that moved": moved, "processes": seen}


def contradictions(rows: list[Row]) -> list[str]:
    """Return which commands contradict each other on one job at one time, in the exit status or the accused ranks."""
    found = []
    for one, other in itertools.combinations(rows, 2):
        names = f"{one['command']} and {other['command']}"
        if {one["exit"], other["exit"]} == {0, 1}:
            found.append(f"{names}: {one['verdict']} and {other['verdict']}")
        if one["accused"] and other["accused"] and not set(one["accused"]) & set(other["accused"]):
            found.append(f"{names}: {one['accused']} and {other['accused']}")
    return found


def judge(kind: str, job: str, times: list[float], commands: list[str]) -> Iterator[Row]:
    """Ask all commands about one job at each time."""
    with running(kind, job) as folder:
        began = time.monotonic()
        for at in times:
            time.sleep(max(0.0, began + at - MOVES_S - time.monotonic()))
            same = {"kind": kind, "job": job, "at": at}
            yield {**same, **moves(job, folder)}
            rows = [ask(command) for command in commands]
            for row in rows:
                yield {**same, "score": score(kind, job, row["verdict"], set(row["accused"])), **row}
            if found := contradictions(rows):
                yield {**same, "command": "contradiction", "between": found}


def ranks_of(folder: Path) -> list[str]:
    """Return the pids of the ranks, without their children."""
    pids = []
    for rank in range(4):
        of_rank = (
            process for process in processes({rank}, folder) if b"far_ends" not in (process / "cmdline").read_bytes()
        )
        pids.append(min((process.name for process in of_rank), key=int))
    return pids


def run(*argv: str, seconds: float = 60) -> None:
    """Run an observer and end it after `seconds`; raise RuntimeError if it could not look."""
    output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(argv, **output)  # type: ignore[call-overload]
    try:
        if process.wait(seconds) != 0:
            raise RuntimeError(f"{argv[0]} ended with {process.returncode}")
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait(30)


PY_SPY = str(Path(sys.executable).with_name("py-spy"))
OBSERVERS: dict[str, Callable[[str], None]] = {
    "none": lambda pid: None,
    "py-spy": lambda pid: run(PY_SPY, "dump", "--pid", pid),
    "py-spy --native": lambda pid: run(PY_SPY, "dump", "--native", "--pid", pid),
    "gdb": lambda pid: run("gdb", "-batch", "-p", pid, "-ex", "bt"),
    "strace": lambda pid: run("strace", "-o", "/dev/null", "-p", pid, seconds=2),
}


@contextlib.contextmanager
def dumping_in_a_loop(pids: list[str]) -> Iterator[None]:
    """Dump all ranks with py-spy again and again, as a monitoring agent does."""
    loop = "while :; do for pid; do $0 dump --pid $pid; sleep 0.2; done; done"
    with subprocess.Popen(["sh", "-c", loop, PY_SPY, *pids], stdout=subprocess.DEVNULL) as looks:
        try:
            yield
        finally:
            looks.terminate()


def observe(job: str, settle_s: float, runs: int) -> Iterator[Row]:
    """Ask hang after and during each observer; every answer must equal that of the undisturbed job."""
    kind, _, how = job.partition(":")
    with running(kind, how) as folder:
        time.sleep(settle_s)
        pids = ranks_of(folder)
        undisturbed: tuple[str, int] | None = None
        for observer in (*OBSERVERS, "pyspy-all --native", "py-spy in a loop"):
            for number in range(runs):
                for pid in pids:
                    OBSERVERS.get(observer, OBSERVERS["none"])(pid)
                if observer == "pyspy-all --native":
                    ask(observer)
                loop = dumping_in_a_loop(pids) if observer == "py-spy in a loop" else contextlib.nullcontext()
                with loop:
                    row = ask("hang")
                answer = row["verdict"], row["exit"]
                undisturbed = undisturbed or answer
                same = {"kind": "observed", "job": job, "observer": observer, "run": number}
                yield {**same, "score": "right" if answer == undisturbed else "wrong", **row}


def inside(kind: str, job: str, options: argparse.Namespace) -> None:
    """Print the rows of one job, in the namespace that was made for it."""
    times = [float(at) for at in options.at.split(",")]
    rows = (
        observe(job, max(times), options.runs)
        if kind == "observed"
        else judge(kind, job, times, options.commands.split(","))
    )
    try:
        for row in rows:
            print(json.dumps(row), flush=True)
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        print(json.dumps({"kind": kind, "job": job, "command": "failed", "why": str(error)}), flush=True)


def rows_of(kind: str, job: str, options: argparse.Namespace) -> Iterator[Row]:
    """Run one job in a PID namespace of its own; give its rows as they are made."""
    user = () if os.geteuid() == 0 else ("--map-root-user",)
    apart = ["unshare", *user, "--pid", "--fork", "--mount-proc", "--kill-child"]
    asked = ["--at", options.at, "--commands", options.commands, "--runs", str(options.runs), "--inside", kind, job]
    argv = [*apart, sys.executable, __file__, *asked]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)


def print_sums(rows: list[Row]) -> None:
    for kind, command in sorted({(row["kind"], row["command"]) for row in rows if "score" in row}):
        scores = Counter(row.get("score") for row in rows if (row["kind"], row["command"]) == (kind, command))
        print(f"{kind}, {command}: {dict(scores)} of {scores.total()}")
    others = Counter(row["command"] for row in rows if row["command"] in ("contradiction", "failed"))
    print(f"contradictions: {others['contradiction']}, jobs that could not be asked: {others['failed']}")
    print(f"commands that recommend themselves: {sum(row.get('recommends itself', False) for row in rows)}")


def main() -> None:
    """Run all jobs, one at a time; print a JSON line per row, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="busy,hung,paces")
    parser.add_argument("--only", default="")
    parser.add_argument("--at", default="10,60,120", help="observed jobs are asked from the last of these times on")
    parser.add_argument("--commands", default=COMMANDS)
    parser.add_argument("--runs", type=int, default=5, help="how often each observer looks")
    parser.add_argument("--out", default="")
    parser.add_argument("--inside", nargs=2, metavar=("KIND", "JOB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        kind, job = options.inside
        inside(kind, job, options)
        return
    only = set(options.only.split(",")) - {""}
    rows = []
    for kind in options.kinds.split(","):
        for job in JOBS[kind]:
            if only and job not in only:
                continue
            for row in rows_of(kind, job, options):
                rows.append(row)
                print(json.dumps(row), flush=True)
    print_sums(rows)
    if options.out:
        Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
