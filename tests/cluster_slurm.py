"""A SLURM of one's own: controller and compute nodes on a test network, and its commands on the client."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import TYPE_CHECKING, Self

from cluster import Network, need_network
from support import need, wait_until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

_HEAD = "head"
# Daemons change their directory, so every path is absolute. The short timeouts are for the waits of a launch; the
# controller itself gives a silent node 300 s, as on a real site: its jobs live on until then. It looks for jobs to
# begin every second, not every 30 or 60.
_CONF = """\
ClusterName=distdiag
SlurmctldHost={head}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/spool/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
MessageTimeout=5
TCPTimeout=2
KillWait=3
SchedulerParameters=sched_interval=1,batch_sched_delay=1,bf_interval=1
{nodes}
PartitionName=debug Nodes=ALL Default=YES State=UP
"""


def need_slurm() -> None:
    """Skip where a mini SLURM cannot run; fail where it is promised."""
    need_network()
    need("slurmctld", "slurmd", "munged", "srun", "salloc", "sinfo")


class Slurm:
    """Compute nodes mn1, mn2, ..., each a machine of its own with `cpus` CPUs, and a controller beside them."""

    def __init__(self, nodes: int = 4, *, cpus: int = 2) -> None:
        self._names = [f"mn{i + 1}" for i in range(nodes)]
        self._cpus = cpus
        self._daemons: dict[str, subprocess.Popen[str]] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            self.network = undo.enter_context(Network([*self._names, _HEAD]))
            self.client = self.network.client
            self.head = self.network[_HEAD]
            self.nodes = [self.network[name] for name in self._names]
            self.folder = self.network.folder / "slurm"
            self._configure()
            self._start_controller()
            for node in self.nodes:
                self.start_slurmd(node.name)
            self.wait_for_idle(len(self.nodes))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def env(self) -> dict[str, str]:
        """Give what a user of this SLURM has in the environment."""
        return {**self.network.client_env(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *argv: str, timeout: float = 30, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands on the client."""
        return self.client.run(*argv, timeout=timeout, check=check, env=self.env())

    def allocate(self, nodes: int | str, *options: str) -> int:
        """Hold this many whole nodes, or these ("mn[1-2]"), with no step in them; return the job's id."""
        where = f"--nodes={nodes}" if isinstance(nodes, int) else f"--nodelist={nodes}"
        reported = self.run("salloc", "--no-shell", "--immediate=10", "--exclusive", where, *options).stderr
        return _job_in(reported)

    def submit(self, script: Path, *options: str) -> int:
        """Submit a batch script and wait until it runs; gives the job's id."""
        job = _job_in(self.run("sbatch", "--output=/dev/null", *options, str(script)).stdout)
        wait_until(lambda: self.state(job) == "RUNNING", 20, lambda: f"job {job} is {self.state(job)}")
        return job

    def start_step(self, job: int, *argv: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start a step in the job, like its user: it holds the CPUs of its tasks. Returns once it runs."""
        before = self.steps(job)
        log = self.folder / f"job-{job}-step-{len(before)}.log"
        command = ("srun", f"--jobid={job}", "--input=none", *options, *argv)
        with log.open("w") as output:
            step = self.client.start(*command, env=self.env(), output=output)
        wait_until(lambda: self.steps(job) > before, 20, lambda: f"no step began: {log.read_text()}")
        return step

    def steps(self, job: int) -> set[str]:
        """List the steps that run in the job."""
        listed = self.run("squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i", check=False).stdout
        return set(listed.split())

    def state(self, job: int) -> str:
        """Give the job's state, empty where it is forgotten."""
        return self.run("squeue", f"--jobs={job}", "--noheader", "--format=%T", check=False).stdout.strip()

    def cancel(self, job: int) -> None:
        """End a job."""
        self.run("scancel", str(job))

    def start_slurmd(self, name: str) -> None:
        """Start the daemon of a compute node."""
        command = ("slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", name)
        self._daemons[name] = self.network[name].start(*command)

    def kill_slurmd(self, name: str) -> None:
        """Kill the daemon of a compute node; its children live on."""
        self._signal_slurmd(name, signal.SIGKILL)

    def freeze_slurmd(self, name: str) -> None:
        """Stop the daemon: it takes connections, and never answers."""
        self._signal_slurmd(name, signal.SIGSTOP)

    def thaw_slurmd(self, name: str) -> None:
        """Let a frozen daemon go on."""
        self._signal_slurmd(name, signal.SIGCONT)

    def wait_for_idle(self, count: int, timeout: float = 60) -> None:
        """Wait until this many free nodes are registered with the controller."""

        def idle() -> int:
            listed = self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N %t", check=False).stdout
            return sum(line.endswith(" idle") for line in listed.splitlines())

        wait_until(lambda: idle() >= count, timeout, lambda: f"only {idle()} idle; {self._logs()}")

    def _configure(self) -> None:
        for folder in (self.folder, self.folder / "state", self.folder / "spool"):
            folder.mkdir()
        nodes = "\n".join(
            f"NodeName={node.name} NodeAddr={node.address} CPUs={self._cpus} RealMemory=1000 State=UNKNOWN"
            for node in self.nodes
        )
        text = _CONF.format(head=_HEAD, address=self.head.address, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))

    def _start_controller(self) -> None:
        socket = self.folder / "munge.socket"
        kinds = ("key", "pid", "log", "seed")
        paths = [f"--socket={socket}", *(f"--{kind}-file={self.folder}/munge.{kind}" for kind in kinds)]
        self.head.start("munged", "--force", "--foreground", *paths)
        wait_until(socket.exists, 10, lambda: "munged does not start")
        self.head.start("slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf"))
        self.head.wait_for_port(6817)

    def _signal_slurmd(self, name: str, number: signal.Signals) -> None:
        node = self.network[name]
        pids = [pid for pid, line in node.processes().items() if line.startswith("slurmd -D")]
        assert pids, f"no slurmd on {name}: {node.processes()}"
        for pid in pids:
            os.kill(pid, number)

    def _logs(self) -> str:
        logs = [self.folder / "slurmctld.log", *sorted((self.folder / "spool").glob("*.log"))]
        return "\n".join(f"{log.name}: {log.read_text()[-600:]}" for log in logs if log.exists())


def _job_in(text: str) -> int:
    match = re.search(r"job(?: allocation)? (\d+)", text)
    assert match is not None, text
    return int(match[1])
