"""Score hang, pyspy-all and trace blocked on jobs waiting for GPUs, and list their contradictions; needs no GPU.

    python tests/benchmarks/gpu_waits_matrix.py [--only sleeps,network] [--commands hang,pyspy-all] [--out FILE]
        [--at-once N] [--no-perf] [--no-ptrace] [--other-user] [--beside] [--smi] [--recorder]

Each situation of tests/gpu_jobs.py runs in separate namespaces, with device files of GPUs in /dev (as root). After the
commands the job itself is checked: its GPUs must be stuck or busy, and its ranks wait in the driver, as claimed.
Scores: right; soft (the right rank, but a warning about a dead job); unknown; wrong (an innocent rank is accused, a
hung job is fine, a job that works has failed). --no-perf and --no-ptrace deny distdiag these calls as a container does,
--other-user runs it as nobody, --beside starts a second, healthy job, --smi plays nvidia-smi, --recorder gives hang
flight recorder dumps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
from gpu_jobs import PROGRAMS, SITUATIONS, GpuJob, Situation, build, healthy  # noqa: E402 - the tests are no package

COMMANDS = {"hang": ("hang",), "pyspy-all": ("pyspy-all",), "trace blocked": ("trace", "blocked")}
MODIFIERS = ("no_perf", "no_ptrace", "other_user", "beside", "smi", "recorder")
SETTLE_S = 12.0
LIMIT_S = 240.0
DENIED = {"no_perf": (298,), "no_ptrace": (101, 310)}
"""x86-64: perf_event_open; ptrace and process_vm_readv."""
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
SCORES = ("right", "soft", "unknown", "wrong", "broken")


def accused_by(report: dict[str, Any]) -> set[int]:
    """Return the ranks accused by failures and warnings of a report."""
    blamed = [finding for finding in report["findings"] if finding["level"] in ("fail", "warn")]
    return {rank for finding in blamed for rank in finding["where"]["ranks"]}


def score(truth: Situation, verdict: str, accused: set[int]) -> str:
    """Score one answer."""
    if accused - set(truth.accused):
        return "wrong"
    if truth.state == "hidden":
        return "right" if verdict == "unknown" else "wrong"
    if truth.state == "healthy":
        return {"ok": "right", "fail": "wrong"}.get(verdict, "unknown")
    if truth.state == "busy":
        return "wrong" if verdict == "fail" else "right" if verdict == "warn" and accused else "unknown"
    if verdict == "ok":
        return "wrong"
    if not accused and truth.accused and not truth.blind:
        return "unknown"
    return "soft" if verdict == "warn" and not truth.works else "right"


def contradictions(answers: dict[str, dict[str, Any]]) -> list[str]:
    """Compare the answers of commands in pairs: ok against fail, or disjoint accused ranks."""
    found = []
    for (one, first), (other, second) in combinations(answers.items(), 2):
        ranks = set(first["accused"]), set(second["accused"])
        if {first["verdict"], second["verdict"]} == {"ok", "fail"} or (all(ranks) and ranks[0].isdisjoint(ranks[1])):
            found.append(
                f"{one}: {first['verdict']} {first['accused']}, {other}: {second['verdict']} {second['accused']}"
            )
    return found


def ask(arguments: Iterable[str], truth: Situation, wrap: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Run one command, and score its answer."""
    began = time.monotonic()
    argv = [*wrap, sys.executable, "-m", "distdiag", *arguments, "--json"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    seconds = round(time.monotonic() - began, 1)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        said = done.stdout[-200:] + done.stderr[-400:]
        return {"score": "broken", "verdict": "", "accused": [], "seconds": seconds, "titles": [said]}
    accused = accused_by(report)
    titles = [f"{finding['level']}: {finding['title']}" for finding in report["findings"]]
    scored = score(truth, report["verdict"], accused)
    if truth.state == "hidden" and any("no rank" in title for title in titles):
        scored = "wrong"  # the ranks exist, and their command lines are visible
    return {
        "score": scored,
        "verdict": report["verdict"],
        "accused": sorted(accused),
        "seconds": seconds,
        "titles": titles,
    }


def waits_of(job: GpuJob, rank: int) -> str:
    """Return gdb's stacks of all threads of a rank. Only after the commands: gdb stops the rank."""
    quick = ["-batch", "-nx", "-iex", "set debuginfod enabled off", "-iex", "set auto-solib-add off"]
    wanted = r"sharedlibrary lib(cuda|hsa|nccl|rccl|c\.so)"  # the symbols of torch would take minutes
    argv = ["gdb", *quick, "-p", job.gpus()[rank][0], "-ex", wanted, "-ex", "thread apply all bt 8"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False).stdout


def check_claim(job: GpuJob, before: dict[int, int]) -> str:
    """Return why the job differs from its situation; "" if it does not. `before`: earlier result of job.ended()."""
    truth, after = job.situation, job.ended()
    if truth.state == "hung" and before != after:
        return f"its GPUs go on: {before}, {after}"
    if truth.state == "healthy" and any(after.get(rank, 0) <= count for rank, count in before.items()):
        return f"its GPUs stand still: {before}, {after}"
    waiting = [rank for rank in after if rank not in truth.accused and rank not in job.expected_bad]
    if truth.state != "healthy" and truth.waits_in and truth.waits_in not in (found := waits_of(job, waiting[0])):
        return f"rank {waiting[0]} does not wait in {truth.waits_in}: {found[-1500:]}"
    return ""


def truth_of(name: str, options: argparse.Namespace) -> Situation:
    """Return the true diagnosis for the available evidence: GPUs and dumps add some, another user sees none."""
    truth = SITUATIONS[name]
    shown = (truth.by_gpus if options.smi else ()) or (truth.by_recorder if options.recorder else ())
    if options.other_user:
        return replace(truth, accused=(), state="hidden")
    return replace(truth, accused=shown, blind=False) if shown else truth


def run(name: str, libraries: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start one job, let it hang, run and score the commands, check the job, and end it."""
    truth = truth_of(name, options)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-waits-")))
        job = GpuJob(SITUATIONS[name], folder, libraries, 29_500)
        wrap, env = surroundings(job, options)
        stack.enter_context(job)
        if options.beside:
            (folder / "beside").mkdir()
            stack.enter_context(GpuJob(healthy(size=2), folder / "beside", libraries, 29_600)).wait_ready()
        job.wait_ready()
        if truth.state == "hung":
            job.wait_still()
        time.sleep(options.settle)
        job.reap()
        before = job.ended()
        if options.recorder:
            job.record()
        answers = {
            command: ask((*COMMANDS[command], *evidence(command, job, options)), truth, wrap, env)
            for command in options.commands.split(",")
            if command
        }
        if not answers:
            time.sleep(2 if truth.state == "hung" else 2 + 2 * float(job.env.get("STEP_US", 0)) / 1e6)
        return {
            "situation": name,
            "truth": [truth.state, list(truth.accused)],
            **answers,
            "contradictions": contradictions(answers),
            "not as claimed": check_claim(job, before),
        }


def evidence(command: str, job: GpuJob, options: argparse.Namespace) -> tuple[str, ...]:
    """Return the options that pass dumps to a command."""
    return ("--recorder", str(job.dumps)) if options.recorder and command == "hang" else ()


def surroundings(job: GpuJob, options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command prefix and the environment for distdiag."""
    env = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    wrap = []
    if options.smi:
        (tools := job.folder / "bin").mkdir()
        names = {name: job.env[name] for name in ("GPUS_FILE", "GPUS_PROGRAM")}
        words = ["exec", "env", *(f"{name}={text}" for name, text in names.items())]
        script = " ".join([*words, sys.executable, str(PROGRAMS / "nvidia_smi.py"), '"$@"'])
        (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tools / "nvidia-smi").chmod(0o755)
        env["PATH"] = f"{tools}:{env['PATH']}"
    denied = [str(number) for name, numbers in DENIED.items() if getattr(options, name) for number in numbers]
    if denied:
        wrap += [sys.executable, str(PROGRAMS / "deny.py"), ",".join(denied)]
    if options.other_user:
        wrap = [*NOBODY, *wrap]
        env["HOME"] = "/"
    return wrap, env


def make_devices(size: int) -> None:
    """Mount a /dev with GPU files in this namespace; make an interpreter below /root readable for other users."""
    script = """
        set -e
        new=$(mktemp -d); mount -t tmpfs -o mode=755 tmpfs $new
        cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/kmsg $new
        for each in fd stdin stdout stderr; do cp -a /dev/$each $new; done
        for each in pts shm; do mkdir $new/$each; mount --rbind /dev/$each $new/$each; done
        ln -s pts/ptmx $new/ptmx
        touch $new/nvidiactl $new/nvidia-uvm $new/kfd; for each in $(seq 0 $1); do touch $new/nvidia$each; done
        mount --move $new /dev
        case $2 in /root/*) base=$(mktemp -d); mount --bind "$2" $base; mount -t tmpfs -o mode=755 tmpfs /root
            mkdir -p "$2"; mount --move $base "$2";; esac
    """
    subprocess.run(["sh", "-c", script, "sh", str(size - 1), sys.base_prefix], check=True)


def apart(name: str, libraries: Path) -> dict[str, Any]:
    """Run one situation in new namespaces; the kernel kills all its processes at the end."""
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "--propagation=private"]
    argv = [*unshare, sys.executable, __file__, *sys.argv[1:], "--inside", name, "--libraries", str(libraries)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    try:
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"situation": name, "not as claimed": done.stdout[-500:] + done.stderr[-1500:]}
    return row


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the situations of --only."""
    with (
        tempfile.TemporaryDirectory(prefix="gpu-waits-libraries-") as folder,
        ThreadPoolExecutor(options.at_once) as pool,
    ):
        Path(folder).chmod(0o755)
        names = options.only.split(",")
        build(Path(folder), rocm=any(SITUATIONS[name].rocm for name in names))
        yield from pool.map(lambda name: apart(name, Path(folder)), names)


def main() -> None:
    """Print a line of JSON per situation, then the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SITUATIONS))
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--settle", type=float, default=SETTLE_S)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", default="")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--libraries", default="", help=argparse.SUPPRESS)
    for name in MODIFIERS:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    options = parser.parse_args()
    if options.inside:
        make_devices(SITUATIONS[options.inside].size)
        print(json.dumps(run(options.inside, Path(options.libraries), options)))
        return
    found = []
    for row in rows(options):
        found.append(row)
        print(json.dumps(row), flush=True)
    for command in COMMANDS:
        scores = [row[command]["score"] for row in found if command in row]
        print(command, {each: scores.count(each) for each in SCORES}, "of", len(scores))
    print("contradictions", sum(len(row.get("contradictions", ())) for row in found))
    print("not as claimed", [row["situation"] for row in found if row["not as claimed"]])
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
