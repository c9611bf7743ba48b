"""Record the output of jobs that fail: record_logs.py LAUNCHER-KIND ... writes recorded/logs/LAUNCHER-KIND.log.gz.
Those of srun are recorded apart from the others.

The program is programs/fails_in_many_ways.py, where rank 2 of 4 is at fault, or fails_in_rarer_ways.py. What each
recording must be judged is in logs_cases.py, written before anything reads the recording. Needs root: cgroups, tmpfs,
network namespaces for SLURM. DeepSpeed and accelerate are looked for beside this Python.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_slurm import Slurm
from logs_cases import RECORDED

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).parent / "programs" / "fails_in_many_ways.py"
RARER = PROGRAM.with_name("fails_in_rarer_ways.py")
RARER_KINDS = (
    *("worker", "healthy", "telemetry-segv", "telemetry-exit", "recursion", "sysexit", "service", "service-text"),
    *("group", "noted", "restart-segv"),
)
_TIMEOUT_S = 240
_CGROUPS = Path("/sys/fs/cgroup/memory")


def main() -> None:
    cases = [case.partition("-")[::2] for case in sys.argv[1:]]
    slurm = Slurm(nodes=2) if any(launcher == "srun" for launcher, _ in cases) else contextlib.nullcontext()
    # The disk comes first: a node of SLURM has the mounts of when it was made.
    with tempfile.TemporaryDirectory() as name, _full_disk() as disk, _small_cgroup() as cgroup, slurm as network:
        program = Path(name, "fail.py")
        env = {
            **os.environ,
            "FULL_DISK": str(disk),
            "MEMORY_CGROUP": str(cgroup),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        for launcher, kind in cases:
            program.write_text((RARER if kind in RARER_KINDS else PROGRAM).read_text())
            text = _srun(network, program, kind, env) if network else _here(launcher, program, kind, env)
            if kind == "memory":
                text += _kernel_log()
            (RECORDED / f"{launcher}-{kind}.log.gz").write_bytes(gzip.compress(_shortened(text, name), mtime=0))


def _here(launcher: str, program: Path, kind: str, env: dict[str, str]) -> bytes:
    port, bin_ = _free_port(), Path(sys.executable).parent
    local = ["--nnodes=1", "--nproc-per-node=4", f"--master-port={port}"]
    restarts = ["--max-restarts=1"] * kind.startswith("restart")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *local, *restarts]
    python = [sys.executable, "-u", str(program), kind]
    commands = {
        "torchrun": [*torchrun, "--tee", "3", str(program), kind],
        "plain": [*torchrun, str(program), kind],
        "accelerate": [
            *(str(bin_ / "accelerate"), "launch", "--multi_gpu", "--num_machines=1", "--num_processes=4"),
            *(f"--main_process_port={port}", "--mixed_precision=no", "--dynamo_backend=no"),
            *(["--max_restarts=1"] * (kind == "restart")),
            *(str(program), kind),
        ],
        "deepspeed": [str(bin_ / "deepspeed"), "--num_gpus=4", f"--master_port={port}", str(program), kind],
        "ompi": ["mpirun", "--allow-run-as-root", "--oversubscribe", "--tag-output", "-n", "4", *python],
        "hydra": ["mpiexec.hydra", "-l", "-n", "4", *python],
    }
    env = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PATH": f"{bin_}:{env['PATH']}"}
    with tempfile.TemporaryFile() as output:
        job = subprocess.Popen(
            commands[launcher],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            process_group=0,
        )
        _wait(job)
        output.seek(0)
        return output.read()


def _srun(slurm: Slurm, program: Path, kind: str, env: dict[str, str]) -> bytes:
    """Run two tasks on each of two nodes."""
    with tempfile.TemporaryFile("w+") as output:
        master = slurm.nodes[0].address
        passed = [f"{name}={env[name]}" for name in ("FULL_DISK", "MEMORY_CGROUP", "OMP_NUM_THREADS")]
        passed += [f"MASTER_ADDR={master}", "MASTER_PORT=29500", "GLOO_SOCKET_IFNAME=eth0"]
        command = ["srun", "-l", "-N2", "-n4", "--input=none", "env", *passed, sys.executable, "-u", str(program), kind]
        job = slurm.client.start(*command, env=slurm.env(), output=output)
        _wait(job)
        output.seek(0)
        return output.read().encode()


def _wait(job: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Wait for the end of a job; a hung job is ended, as by its user."""
    try:
        job.wait(90)
    except subprocess.TimeoutExpired:
        job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(_TIMEOUT_S)
    job.kill()


def _shortened(text: bytes, folder: str) -> bytes:
    for path, short in (
        (folder, b"/home/user"),
        (sys.prefix, b"/opt/venv"),
        (sys.base_prefix, b"/usr"),
    ):
        text = text.replace(str(path).encode(), short)
    text = re.sub(rb"[^ \"']*/lib/python3\.11/site-packages/", b"/opt/venv/lib/python3.11/site-packages/", text)
    return text.replace(os.uname().nodename.encode() + b" ", b"vm ")


def _kernel_log() -> bytes:
    """Return what the kernel reports of the last process that it killed, as `dmesg` prints it."""
    lines = subprocess.run(["dmesg"], capture_output=True, check=True).stdout.splitlines(keepends=True)
    return [line for line in lines if b"Killed process" in line][-1]


@contextlib.contextmanager
def _full_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def _small_cgroup() -> Iterator[Path]:
    """A cgroup (version 1) of 400 MB beside that of this process."""
    own = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    group = _CGROUPS / own.strip("/") / f"distdiag{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("400M")
        yield group
    finally:
        group.rmdir()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    main()
