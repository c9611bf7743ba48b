"""The job of `distdiag demo`: started, watched, and ended with all that it left."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Self

from distdiag import child_job
from distdiag.errors import DistdiagError
from distdiag.facts.process import procs
from distdiag.output import Progress
from distdiag.users_python import users_python

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_RANKS = 4
_START_S = 120.0
_TURN_S = 0.1
_OTHER_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "MASTER_", "GROUP_RANK", "CUDA_VISIBLE_DEVICES")


class Demo:
    """The running job: its folder and processes, all removed on exit."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._folder = ""
        self._port = _free_port()
        self._ranks: list[int] = []
        self._running: set[int] = set()
        self._statuses: dict[int, int] = {}
        """Exit status of each ended process, negative for a signal."""

    def __enter__(self) -> Self:
        """Start the job. Raises DistdiagError."""
        self._folder = tempfile.mkdtemp(prefix="distdiag-demo-")
        try:
            for name in ("train.py", "prepare.py"):
                text = resources.files(__package__).joinpath(name).read_bytes()
                Path(self._folder, name).write_bytes(text)
            if self._fault == "hang":
                pid = self._start_python("prepare.py", {})
                self._wait_until(lambda: getattr(procs.read(pid), "state", "") == "T")
            job = {"WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
            job |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            for rank in map(str, range(_RANKS)):
                self._ranks.append(self._start_python("train.py", {**job, "RANK": rank, "LOCAL_RANK": rank}))
        except BaseException:  # Ctrl-C as well
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def log(self) -> str:
        """Path of the output of all ranks."""
        return os.path.join(self._folder, "job.log")

    def command(self) -> list[str]:
        """Return the words after `distdiag` that find the fault."""
        return {
            "hang": ["hang", str(self._ranks[0])],
            "crash": ["logs", self.log],
            "nan": ["overflow", "--nproc", "1", "--", os.path.join(self._folder, "train.py"), "nan"],
            "slow": ["pyspy-all", "--job", f"127.0.0.1:{self._port}", "--samples", "20", "--interval", "0.2"],
        }[self._fault]

    def wait_for_fault(self) -> None:
        """Wait until the job shows its fault. Raises DistdiagError if its ranks end before."""
        with Progress() as progress:
            progress.news(f"starting {_RANKS} ranks on the CPU; importing torch takes a few seconds")
            self._wait_until(lambda: all(os.path.exists(f"{self._folder}/ready-{rank}") for rank in range(_RANKS)))
            if self._fault in ("crash", "nan"):
                self._wait_until(lambda: not self._running)

    def wait_for_fix(self) -> None:
        """Wait until all ranks have finished; for ever where no fix of a running job exists."""
        while self._fault != "hang" or any(self._statuses.get(pid) != 0 for pid in self._ranks):
            time.sleep(_TURN_S)
            self._reap()

    def run(self, argv: Sequence[str]) -> int:
        """Run a command to its end; return its exit status. torch and torchrun leave files in TMPDIR."""
        pid = self._start(argv, {"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": self._folder})
        while pid in self._running:
            time.sleep(_TURN_S)
            self._reap()
        return self._statuses[pid]

    def _start_python(self, script: str, more: Mapping[str, str]) -> int:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OTHER_LAUNCHERS)}
        argv = [users_python()[0], os.path.join(self._folder, script), self._fault]
        with open(self.log, "ab") as log:
            return self._start(argv, {**kept, **more}, log.fileno())

    def _start(self, argv: Sequence[str], env: Mapping[str, str], output: int | None = None) -> int:
        pid = child_job.start(argv, set(), env=env, stdout=output, stderr=output)
        self._running.add(pid)
        return pid

    def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Raises DistdiagError if the job ends before, or after two minutes."""
        deadline = time.monotonic() + _START_S
        while not is_reached():
            self._reap()
            early = [pid for pid in self._ranks if pid in self._statuses]
            if time.monotonic() > deadline or (early and not os.path.exists(f"{self._folder}/ready-0")):
                raise self._not_started()
            time.sleep(_TURN_S)

    def _not_started(self) -> DistdiagError:
        text = Path(self.log).read_text(errors="replace").strip()
        python = shlex.quote(users_python()[0])
        if "No module named 'torch'" in text:
            return DistdiagError(f"{python} has no torch", hint=f"{python} -m pip install torch")
        last = text.rpartition("\n")[2] or f"no step within {_START_S:.0f} s"
        return DistdiagError(f"the job did not start: {last}", hint=f'{python} -c "import torch.distributed"')

    def _reap(self) -> None:
        for pid in list(self._running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._running.discard(pid)
                self._statuses[pid] = os.waitstatus_to_exitcode(status)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
