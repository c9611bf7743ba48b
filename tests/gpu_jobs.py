"""CUDA and NCCL jobs that hang, work or crawl, without a GPU, each with its true diagnosis, written before any run."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAMS = Path(__file__).with_name("programs") / "gpu_waits"
READY_S = 120.0


@dataclass(frozen=True)
class Situation:
    """A job and its true diagnosis: `state` is hung, busy or healthy; the ranks `accused` hold it up.

    `bad`: ranks that run the fault, default: the accused. `blind`: stacks and /proc cannot show the culprit, so
    "unknown" is right as well. `works`: the accused rank looks as if it made progress, so a warning is right as well.
    `by_gpus`, `by_recorder`: ranks that GPU utilization or the flight recorder accuse in a blind situation.
    `waits_in`: library in which the innocent ranks wait; "" skips this check.
    """

    state: str
    accused: tuple[int, ...] = ()
    job: str = "train"
    fault: str = ""
    bad: tuple[int, ...] | None = None
    size: int = 4
    launcher: str = "env"
    rocm: bool = False
    blind: bool = False
    works: bool = False
    by_gpus: tuple[int, ...] = ()
    by_recorder: tuple[int, ...] = ()
    waits_in: str = "libcuda.so.1"
    env: Mapping[str, str] = field(default_factory=dict)


def hung(accused: int | None, fault: str, job: str = "train", **more: object) -> Situation:
    """Describe a job without progress; with accused=None, rank 1 triggers a fault of the network."""
    ranks = () if accused is None else (accused,)
    return Situation("hung", ranks, job, fault, bad=ranks or (1,), **more)  # type: ignore[arg-type]


def busy(accused: int, fault: str, job: str = "train", **more: object) -> Situation:
    """Describe a job whose ranks all wait for one working rank."""
    return Situation("busy", (accused,), job, fault, **more)  # type: ignore[arg-type]


def healthy(job: str = "train", **more: object) -> Situation:
    """Describe a job without a fault."""
    return Situation("healthy", (), job, "", bad=(), **more)  # type: ignore[arg-type]


HIP = {"rocm": True, "waits_in": "libhsa-runtime64.so.1"}
YIELD, BLOCK, NET = {"GPU_WAIT": "yield"}, {"GPU_WAIT": "block"}, {"NCCL_NET": "1"}
SITUATIONS: dict[str, Situation] = {
    # One rank is in Python or in a system call, the others wait for their GPUs: this rank holds up the job.
    "sleeps": hung(2, "sleeps"),
    "sleeps-first-rank": hung(0, "sleeps"),
    "sleeps-of-2": hung(1, "sleeps", size=2),
    "sleeps-of-8": hung(5, "sleeps", size=8, env=NET),
    "sleeps-of-64": hung(41, "sleeps", size=64, env=BLOCK),
    "sleeps-others-yield": hung(2, "sleeps", env=YIELD),
    "sleeps-others-block": hung(2, "sleeps", env=BLOCK),
    "sleeps-with-proxies": hung(2, "sleeps", env=NET),
    "sleeps-torchrun": hung(3, "sleeps", launcher="torchrun"),
    "sleeps-mpirun": hung(2, "sleeps", launcher="mpirun"),
    "sleeps-spawned": hung(2, "sleeps", launcher="spawn", size=3),
    "sleeps-metrics-thread": hung(2, "sleeps", "train-with-metrics"),
    "pipe": hung(2, "reads-a-pipe"),
    "plain-words-lock": hung(2, "waits-for-a-lock", "train-with-plain-words"),
    "fifo": hung(2, "opens-a-fifo"),
    "pipe-two-ranks": Situation("hung", (1, 2), "train", "reads-a-pipe"),
    "lock": hung(1, "waits-for-a-lock"),
    "file-lock": hung(2, "waits-for-a-file-lock"),
    "child-sleeps": hung(2, "runs-a-child-that-sleeps"),
    "marker": hung(2, "waits-for-a-marker", works=True),
    "regex": hung(2, "matches-forever", works=True),
    "stopped": hung(2, "is-stopped"),
    "exited": hung(2, "exits", launcher="torchrun"),
    "killed": hung(2, "is-killed"),
    "loader-sleeps": hung(2, "sleeps", "train-on-loader"),
    "barrier-pipe": hung(2, "reads-a-pipe", "train-to-barriers"),
    "backward-pipe": hung(2, "reads-a-pipe", "train-backward"),
    "init-sleeps": hung(3, "sleeps", "init", waits_in="libnccl.so.2"),
    "init-usleep-pipe": hung(1, "reads-a-pipe", "init", waits_in="libnccl.so.2", env={"NCCL_BOOTSTRAP": "usleep"}),
    "init-two-sleep": Situation("hung", (0, 3), "init", "sleeps", waits_in="libnccl.so.2"),
    "init-loads": busy(2, "tokenizes", "init", waits_in="libnccl.so.2"),
    "init-network": hung(None, "", "init-of-more-ranks", waits_in="libnccl.so.2"),
    "init-exited": hung(1, "exits", "init", waits_in="libnccl.so.2"),
    # The others ran ahead until their launch queues were full, and wait at different lines.
    "ahead-sleeps": hung(2, "sleeps", "run-ahead"),
    "ahead-pipe": hung(1, "reads-a-pipe", "run-ahead", size=3),
    "rank-0-logs-pipe": hung(3, "reads-a-pipe", "log-on-rank-0"),
    # All wait for their GPUs. Lines are no evidence: a minority may have run ahead, or be the rank that logs.
    "network": hung(None, "breaks-the-network"),
    "network-yield": hung(None, "breaks-the-network", env=YIELD),
    "network-of-8": hung(None, "breaks-the-network", size=8),
    "network-ahead": hung(None, "breaks-the-network", "run-ahead"),
    "network-rank-0-logs": hung(None, "breaks-the-network", "log-on-rank-0", size=3),
    "network-backward": hung(None, "breaks-the-network", "train-backward"),
    "network-barrier": hung(None, "breaks-the-network", "train-to-barriers"),
    "network-plain-words": hung(None, "breaks-the-network", "train-with-plain-words"),
    "network-torchrun": hung(None, "breaks-the-network", launcher="torchrun"),
    "abort": hung(None, "", "aborts", waits_in=""),
    "other-branch": hung(2, "takes-another-branch", blind=True, by_recorder=(2,)),
    "skips-in-subgroup": hung(1, "skips-in-subgroup", blind=True, by_recorder=(1,)),
    "kernel-never-ends": hung(2, "kernel-never-ends", blind=True),
    "copy-lost": hung(2, "loses-a-copy", blind=True, by_gpus=(2,)),
    # One rank works, the others wait for it: a warning, not a failure.
    "child-works": busy(2, "runs-a-child-that-works"),
    "tokenizes": busy(2, "tokenizes"),
    "evaluates": busy(0, "evaluates", size=3),
    "saves": busy(0, "saves", "train-to-barriers"),
    "compiles": busy(1, "compiles-for-the-gpu"),
    "loads-modules": busy(1, "loads-modules"),
    "loader-works": busy(2, "tokenizes", "train-on-loader"),
    "straggler": busy(1, "", "straggle"),
    # Healthy, but any single sample looks like a hang.
    "fast": healthy(),
    "fast-of-8": healthy(size=8, env=NET),
    "steps-of-5-s": healthy(size=2, env={"STEP_US": "5e6"}),
    "steps-of-20-s": healthy(env={"STEP_US": "20e6"}),
    "steps-of-5-s-odd-names": healthy("train-with-odd-names", env={"STEP_US": "5e6"}),
    "steps-of-5-s-plain-words": healthy("train-with-plain-words", env={"STEP_US": "5e6"}),
    "steps-of-5-s-torchrun": healthy(launcher="torchrun", env={"STEP_US": "5e6"}),
    "steps-of-3-s-ahead": healthy("run-ahead", env={"STEP_US": "12e6"}),
    "backward-of-4-s": healthy("train-backward", env={"STEP_US": "4e6"}),
    "launch-bound": healthy("launch-bound", env={"STEP_US": "0"}, waits_in=""),
    "first-steps-compile": healthy("first-steps-compile", waits_in=""),
    # The same with ROCm's libraries.
    "rocm-sleeps": hung(2, "sleeps", **HIP),  # type: ignore[arg-type]
    "rocm-network": hung(None, "breaks-the-network", **HIP),  # type: ignore[arg-type]
    "rocm-ahead-pipe": hung(1, "reads-a-pipe", "run-ahead", **HIP),
    "rocm-steps-of-5-s": healthy(env={"STEP_US": "5e6"}, **HIP),  # type: ignore[arg-type]
}


LIBRARIES = {
    "DRIVER": ("libcuda.so.1", "libhsa-runtime64.so.1"),
    "JIT": ("libnvidia-ptxjitcompiler.so.1", "libamd_comgr.so.2"),
    "RUNTIME": ("libcudart.so.12", "libamdhip64.so.6"),
    "NCCL": ("libnccl.so.2", "librccl.so.1"),
    "CUDA": ("libtorch_cuda.so", "libtorch_hip.so"),
    "PYTHON": ("libtorch_python.so", "libtorch_python.so"),
}
"""File names of each part of cuda.c for CUDA and ROCm; each library links to its predecessors."""


def build(folder: Path, *, rocm: bool = True) -> None:
    """Build the families of libraries into folder/cuda and folder/rocm, and the program that plays the GPUs."""
    source = str(PROGRAMS / "cuda.c")
    include = f"-I{sys.base_prefix}/include/python{sys.version_info.major}.{sys.version_info.minor}"
    options = ["-O1", "-Wall", "-pthread", "-fno-optimize-sibling-calls", "-s", include]
    subprocess.run(["gcc", *options, "-DGPUS", source, "-o", str(folder / "gpus")], check=True)
    for family, name in enumerate(("cuda", "rocm")[: 1 + rocm]):
        made: list[str] = []
        (folder / name).mkdir()
        for part, names in LIBRARIES.items():
            output = str(folder / name / names[family])
            linked = ["-shared", "-fPIC", "-Wl,-rpath,$ORIGIN", *made]
            if part != "PYTHON":  # an equal soname would hide torch's own library from jobs that import torch
                linked.append(f"-Wl,-soname,{names[family]}")
            hip = ["-DHIP"] if family else []
            subprocess.run(["gcc", *options, *hip, f"-D{part}", source, *linked, "-o", output], check=True)
            made.append(output)


NAMES = {1: "nccl:all_reduce", 2: "nccl:barrier", 7: "nccl:broadcast"}
"""Profiling name of each tag in a dump."""


def dump_of(rank: int, counts: list[list[int]], size: int) -> dict[str, object]:
    """Return a rank's dump. `counts`: launched, reached and ended collectives per group, and the tag of the last.

    A job that meets at barriers has no other collective.
    """
    calls = [
        (number, group, "completed" if number <= ended else "started" if number <= reached else "scheduled", tag)
        for group, (launched, reached, ended, tag) in enumerate(counts)
        for number in range(max(1, launched - 4), launched + 1)
    ]
    began = time.time_ns() - 60 * 10**9
    entries = [
        {
            "frames": [{"name": "reduce_gradients", "filename": "/job/train.py", "line": 71}],
            **{
                "record_id": at,
                "op_id": at,
                "pg_id": group,
                "process_group": (str(group), ("default_pg", "tp")[group]),
            },
            **{"collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "timeout_ms": 600000},
            "profiling_name": NAMES[tag if tag and (number == counts[group][0] or NAMES[tag] == "nccl:barrier") else 1],
            **{"time_created_ns": began + at * 10**6, "time_discovered_completed_ns": None},
            "time_discovered_started_ns": None if state == "scheduled" else began + at * 10**6 + 1000,
            **{
                "input_sizes": [[1024]],
                "input_dtypes": ["Float"],
                "output_sizes": [[1024]],
                "output_dtypes": ["Float"],
            },
            **{"state": state, "retired": state == "completed"},
        }
        for at, (number, group, state, tag) in enumerate(sorted(calls, key=lambda call: (call[0], -call[1])))
    ]
    ranks = {"0": ("default_pg", list(range(size))), "1": ("tp", list(range(size // 2)))}
    config = {
        name: {"name": name, "desc": desc, "ranks": str(members)}
        for name, (desc, members) in ranks.items()
        if rank in members
    }
    return {"version": "2.10", "pg_config": config, "nccl_version": "2.29.3", "entries": entries}


class GpuJob:
    """A running situation: the GPUs' program, the ranks and their launcher. `libraries`: folder made by `build`."""

    def __init__(self, situation: Situation, folder: Path, libraries: Path, port: int) -> None:
        self.situation, self.folder, self.libraries = situation, folder, libraries
        self.dumps = folder / "dumps"
        bad = situation.accused if situation.bad is None else situation.bad
        self.expected_bad = {rank for rank in bad if situation.fault}
        self.env = {
            **{"GPUS_FILE": str(folder / "gpus"), "GPUS_PROGRAM": str(libraries / "gpus")},
            **{"GPU_LIBRARIES": str(libraries / ("rocm" if situation.rocm else "cuda"))},
            **{"JOB_FOLDER": str(folder), "JOB": situation.job, "FAULT": situation.fault},
            **{"BAD": ",".join(map(str, bad)) or "-1", "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **({"GPU_DEVICE": "/dev/kfd"} if situation.rocm else {}),
            **situation.env,
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        environment = {**os.environ, **self.env}
        self._processes = [subprocess.Popen([str(self.libraries / "gpus")], env=environment)]
        for argv, more in self._commands():
            with (self.folder / f"log-{len(self._processes)}").open("wb") as log:
                # Low priority: spinning ranks must not starve distdiag on a small machine.
                started = subprocess.Popen(
                    ["nice", "-n", "10", *argv],
                    env={**environment, **more},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._processes.append(started)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait(20)

    def wait_ready(self) -> None:
        """Wait until all ranks are set up and the fault has happened."""

        def ready() -> bool:
            self.reap()
            names = {path.name for path in self.folder.iterdir()}
            wanted = {f"ready-{rank}" for rank in self._starting()} | {f"bad-{rank}" for rank in self.expected_bad}
            return not wanted - names

        wait_until(ready, READY_S, lambda: f"not ready; {self.said()}")
        for process in self._processes[1:]:  # where sessions share the processors, a nice process in its own is not
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/autogroup").write_text("15")

    def wait_still(self) -> None:
        """Wait until no GPU has finished an operation for 2 s."""

        def still() -> bool:
            before = self.ended()
            time.sleep(2)
            return before == self.ended()

        wait_until(still, READY_S, lambda: f"it goes on; {self.said()}")

    def reap(self) -> None:
        """Reap ended ranks, as a launcher does."""
        for process in self._processes:
            process.poll()

    def gpus(self) -> dict[int, list[str]]:
        """Return the fields of `gpus show` for each rank, see cuda.c."""
        argv, env = [str(self.libraries / "gpus"), "show"], {**os.environ, **self.env}
        shown = subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout
        return {int(rank): words for rank, *words in (line.split() for line in shown.splitlines())}

    def ended(self) -> dict[int, int]:
        """Return the number of finished operations of each GPU."""
        return {rank: int(words[2]) for rank, words in self.gpus().items()}

    def record(self) -> None:
        """Write to `dumps` the flight recorder dumps that NCCL's process groups would have written by now."""
        self.dumps.mkdir()
        for rank, words in self.gpus().items():
            counts = [list(map(int, words[at : at + 4])) for at in (5, 9)]
            (self.dumps / f"nccl_trace_rank_{rank}").write_bytes(
                pickle.dumps(dump_of(rank, counts, self.situation.size), 2)
            )

    def said(self) -> str:
        """Return the last output of the ranks and their launcher."""
        return "; ".join(path.read_text(errors="replace")[-500:] for path in self.folder.glob("log-*"))

    def _starting(self) -> range:
        return range(self.situation.size)

    def _commands(self) -> list[tuple[list[str], dict[str, str]]]:
        size, program = str(self.situation.size), [sys.executable, str(PROGRAMS / "job.py")]
        if self.situation.launcher == "torchrun":
            torchrun = str(Path(sys.executable).with_name("torchrun"))
            port = self.env["MASTER_PORT"]
            return [([torchrun, "--nproc-per-node", size, "--master-port", port, program[1]], {})]
        if self.situation.launcher == "mpirun":
            return [(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", size, *program], {})]
        if self.situation.launcher == "spawn":
            return [(program, {"SPAWN": size})]
        return [
            (program, {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
            for rank in range(self.situation.size)
        ]
