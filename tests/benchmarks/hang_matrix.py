"""Which faults hang names: real Gloo jobs of 4 ranks, a fault each, under torchrun, srun and mpirun.

    python tests/benchmarks/hang_matrix.py [--launchers torchrun,srun,mpirun] [--faults sleeps,exits] [--out FILE]

Scored are hang, which is not told of the recorder, hang --recorder, and beside them pyspy-all alone, the log alone and
the recorder alone: right (the rank, and one of the classes that fit), unknown (it accuses nobody), wrong (it accuses
another rank, or calls a hung job fine). distdiag must see no other job: where there may be some, run it below
`unshare --pid --fork --mount-proc --kill-child`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
from cluster_slurm import Slurm  # noqa: E402 - the tests are no package

PROGRAMS = TESTS / "programs"
SETTLE_S = 12.0
READY_S = 90.0
FAULTS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "sleeps": ((2,), ("not-in-collective",)),
    "load-batch": ((2,), ("not-in-collective",)),
    "worker": ((2,), ("data-loading",)),
    "stopped": ((2,), ("stopped",)),
    "exits": ((2,), ("exited",)),
    "killed": ((2,), ("exited",)),
    "exits-early": ((2,), ("exited",)),
    "d-state": ((2,), ("storage", "not-in-collective")),
    "dead-file": ((2,), ("storage", "not-in-collective", "busy-rank")),
    "tokenizes": ((2,), ("busy-rank",)),
    "downloads": ((2,), ("busy-rank", "not-in-collective")),
    "saves": ((2,), ("not-in-collective", "storage")),
    "compiles": ((2,), ("not-in-collective", "compile")),
    "own-lock": ((2,), ("lock",)),
    "file-lock": ((2,), ("lock",)),
    "gil": ((2,), ("lock", "not-in-collective")),
    "debugger": ((2,), ("debugger",)),
    "other-collective": ((2,), ("different-collectives",)),
    "left-out": ((2,), ("behind", "different-collectives", "not-in-collective")),
    "never-joins": ((2,), ("not-in-collective",)),
    "two-groups": ((2,), ("deadlock",)),
    "recv-cycle": ((0, 1), ("deadlock",)),
    "slow": ((2,), ("slow", "not-hung", "busy-rank")),
    "healthy": ((), ("not-hung", "slow", "busy-rank")),
}
WORKS = (
    *("evaluates", "checkpoints", "first-compile", "slow-loader", "accumulates", "pipeline", "pauses", "restarts"),
    *("two-jobs", "notebook", "trickles", "evaluator"),
)
"""Jobs that work, and look hung at a glance: none of them may be called hung."""
FINE = ("slow", "healthy", *WORKS)


def program(fault: str) -> str:
    """Return the program of the job."""
    return str(PROGRAMS / ("works_in_odd_ways.py" if fault in WORKS else "hangs_in_every_way.py"))


class Slurms:
    """A SLURM of two nodes, made for the first job that needs it."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def start(self, folder: Path, fault: str) -> subprocess.Popen[Any]:
        """Start a step of 4 tasks whose ends do not end the others."""
        if not hasattr(self, "slurm"):
            self.slurm = self._undo.enter_context(Slurm(2, cpus=2))
        self.slurm.wait_for_idle(2)
        self.job = self.slurm.allocate(2)
        names = {**environment(folder, fault), "GLOO_SOCKET_IFNAME": "eth0"}
        argv = ["env", *(f"{name}={value}" for name, value in names.items()), sys.executable, program(fault)]
        options = ("-N", "2", "-n", "4", "--wait=0", "--kill-on-bad-exit=0", f"--output={folder}/log")
        return self.slurm.start_step(self.job, *argv, options=options)

    def cancel(self) -> None:
        """End the job: its nodes are free again when all of its tasks are gone."""
        self.slurm.cancel(self.job)

    def around(self) -> tuple[list[str], dict[str, str], list[str]]:
        """Return the command and environment in which distdiag runs, and which hosts it is to ask."""
        env = {**os.environ, **self.slurm.network.client_env(), **self.slurm.env()}
        return list(self.slurm.client.command()), env, ["--slurm-job", str(self.job)]

    def close(self) -> None:
        """End it."""
        self._undo.close()


SLURMS = Slurms()


def environment(folder: Path, fault: str) -> dict[str, str]:
    """Return what the program reads. Each rank writes its flight recorder to a folder once it is stuck."""
    dumps = folder / "dumps"
    dumps.mkdir(parents=True)
    record = {"RECORD": str(dumps), "TORCH_FR_BUFFER_SIZE": "200"}
    return {"JOB_FOLDER": str(folder), "HOW": fault, "OMP_NUM_THREADS": "1", **record}


def launch(launcher: str, folder: Path, fault: str) -> subprocess.Popen[Any]:
    """Start the job; its output goes to a file, as usual for users."""
    if launcher == "srun":
        return SLURMS.start(folder, fault)
    port = str(20_000 + hash((launcher, str(folder), os.getpid())) % 9000)
    python = sys.executable
    torchrun = str(Path(python).with_name("torchrun"))
    number = "1" if fault == "notebook" else "4"
    restarts = "3" if fault == "restarts" else "0"
    argv = {
        "torchrun": [torchrun, "--nproc-per-node", number, "--max-restarts", restarts, "--master-port", port],
        "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", number, python],
    }[launcher]
    argv = [*argv, program(fault)]
    env = {**os.environ, **environment(folder, fault), "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def end(job: subprocess.Popen[Any], folder: Path) -> None:
    """End the job, and every process that has its folder in the environment: srun's tasks are no children of it."""
    mark = f"JOB_FOLDER={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGCONT)
                os.kill(int(process.name), signal.SIGKILL)
    if hasattr(SLURMS, "slurm"):
        SLURMS.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait(30)


def wait_ready(folder: Path, job: subprocess.Popen[Any], ranks: int = 4) -> None:
    """Wait until all ranks are there and the fault has happened."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until and job.poll() is None:
        if len(list(folder.glob("ready-*"))) == ranks and (folder / "bad").exists():
            return
        time.sleep(0.2)


def report(launcher: str, *arguments: str) -> dict[str, Any]:
    """Run distdiag."""
    wrap, env, hosts = SLURMS.around() if launcher == "srun" else ([], dict(os.environ), [])
    hosts = [] if arguments[0] in ("logs", "flight-recorder") else hosts
    argv = [*wrap, sys.executable, "-m", "distdiag", *arguments, *hosts, "--json"]
    done = subprocess.run(argv, capture_output=True, timeout=180, check=False, env=env)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def score(fault: str, ranks: list[int], class_name: str, verdict: str) -> str:
    """Score one answer."""
    if fault in WORKS:
        return "wrong" if verdict == "fail" else "unknown" if verdict == "unknown" else "right"
    truth, classes = FAULTS[fault]
    if fault in FINE:
        return "wrong" if verdict == "fail" else "right" if class_name in classes else "unknown"
    if verdict == "ok":
        return "wrong"
    if not ranks:
        return "unknown"
    if set(ranks) != set(truth):
        return "wrong"
    return "right" if class_name in classes or class_name == "" else "unknown"


def alone(launcher: str, fault: str, folder: Path) -> dict[str, str]:
    """Score pyspy-all alone, the log alone and the recorder alone."""
    stacks = report(launcher, "pyspy-all")
    accused = [rank for outlier in stacks["data"]["outliers"] for rank in outlier["ranks"]]
    by_stacks = score(fault, accused, "slow" if fault in FINE else "", stacks["verdict"])
    scores = {"pyspy-all": by_stacks}
    for name, command, path in (("log", "logs", folder / "log"), ("recorder", "flight-recorder", folder / "dumps")):
        found = report(launcher, command, str(path))
        first: dict[str, Any] = next(iter(found["findings"]), {"where": {"ranks": []}})
        # That no error is in a log, or no dump was written, is no statement about the job.
        verdict = "unknown" if found["verdict"] == "ok" else found["verdict"]
        scores[name] = score(fault, first["where"]["ranks"], "", verdict)
        if scores[name] == "wrong":
            scores[f"{name} said"] = first.get("title", "")
    return scores


def run(launcher: str, fault: str) -> dict[str, Any]:
    """Start one job, let it hang, ask all, and end it."""
    folder = Path(tempfile.mkdtemp(prefix="hang-matrix-"))
    job = launch(launcher, folder, fault)
    beside = launch(launcher, folder / "beside", fault) if fault == "two-jobs" else None
    try:
        wait_ready(folder, job, ranks=1 if fault == "notebook" else 4)
        time.sleep(SETTLE_S)
        if job.poll() is not None:
            return {"launcher": launcher, "fault": fault, "hang": "ended", "why": "the launcher ended the job"}
        began = time.monotonic()
        found = report(launcher, "hang")
        seconds = time.monotonic() - began
        data = found["data"]
        recorded = report(launcher, "hang", "--recorder", str(folder / "dumps"))
        with_recorder = recorded["data"]
        return {
            "launcher": launcher,
            "fault": fault,
            "hang": score(fault, data["ranks"], data["class_name"], found["verdict"]),
            "hang --recorder": score(fault, with_recorder["ranks"], with_recorder["class_name"], recorded["verdict"]),
            **alone(launcher, fault, folder),
            "class": data["class_name"],
            "ranks": data["ranks"],
            "with recorder": [with_recorder["class_name"], with_recorder["ranks"]],
            "seconds": round(seconds, 1),
            "title": found["findings"][0]["title"],
            "said": {row["source"]: row["says"] for row in recorded["data"]["sources"]},
        }
    except (subprocess.TimeoutExpired, ValueError, KeyError, AssertionError) as error:
        return {"launcher": launcher, "fault": fault, "hang": "unknown", "why": f"{type(error).__name__}: {error}"}
    finally:
        if beside is not None:
            end(beside, folder / "beside")
        end(job, folder)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Run all of it, and print a line for each, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launchers", default="torchrun,srun,mpirun")
    parser.add_argument("--faults", default=",".join([*FAULTS, *WORKS]))
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    rows = []
    for launcher in options.launchers.split(","):
        for fault in options.faults.split(","):
            row = run(launcher, fault)
            rows.append(row)
            shown = dict(row)
            if {row["hang"], row.get("hang --recorder", "right")} <= {"right", "ended"}:
                shown.pop("said", None)
            print(json.dumps(shown), flush=True)
    SLURMS.close()
    for column in ("hang", "hang --recorder", "pyspy-all", "log", "recorder"):
        asked = [row[column] for row in rows if row.get(column) and row["hang"] != "ended"]
        print(column, {each: asked.count(each) for each in ("right", "unknown", "wrong")}, "of", len(asked))
    if options.out:
        Path(options.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
