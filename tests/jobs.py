"""Small jobs of real processes that hang in one named way; they end with the test in any case."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import support_torch
from support import wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from support import Result

PROGRAMS = Path(__file__).with_name("programs")


_STARTER = {"JOB_STARTER": str(os.getpid())}
"""The parent of a program, which ends with it."""
_ports = itertools.count(step=2)  # waits_on_another_rank takes the port after its own, too


def free_port() -> int:
    """Return a port that stays free until its use.

    It is below the kernel's ephemeral ports, and in a range private to this checkout and this worker: a job is
    chosen by its port, so a job of others at the same port would be looked at, too.
    """
    first = 12_000 + 4000 * (zlib.crc32(str(PROGRAMS).encode()) % 5)
    first += 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    while True:
        port = first + next(_ports) % 1000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Job:
    """A program of tests/programs as `size` ranks, with the environment that a plain launcher gives them.

    `warm`: each is forked from a process that has torch, instead of started.
    `forked`: by one process, itself forked from one that has torch; only for programs that import `job` after it.
    `server`: forks that process, too; "shared": the one of this program that serves all tests, see `close_servers`.
    Distdiag, which reads /proc, sees no variable of `env` in ranks of a server.
    """

    def __init__(
        self,
        program: str,
        size: int,
        *,
        env: Mapping[str, str] | None = None,
        rank_env: Mapping[int, Mapping[str, str]] | None = None,
        wrap: Sequence[str] = (),
        arguments: Sequence[str] = (),
        run_id: str = "",
        warm: bool = False,
        forked: bool = False,
        server: JobServer | Literal["shared"] | None = None,
    ) -> None:
        if server == "shared":
            server = _shared_server(program)
        forked = forked or server is not None
        assert not forked or (size < 10 and not rank_env), "only one digit is another in each rank"
        self.size = size
        self._warm, self._forked, self._server = warm or forked, forked, server
        self._argv = [*wrap, sys.executable, str(PROGRAMS / f"{program}.py"), *arguments]
        self._env = dict(env or {})
        self._starter = {} if wrap else _STARTER
        self._rank_env = rank_env or {}
        self._run_id = run_id
        self.processes: list[subprocess.Popen[Any]] = []
        self._launchers: list[Launcher] = []
        self._folder = tempfile.TemporaryDirectory(prefix="distdiag-job-")
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o777)

    def __enter__(self) -> Self:
        self.port = free_port()
        for rank in range(1 if self._forked else self.size):
            self._start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_ranks()
        for process in self._started():
            if self._forked:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)  # it leaves when its ranks have
            _end_group(process.pid)
        self._end_ranks()  # again, for processes being created
        for process in self._started():
            process.wait(20)
        self._folder.cleanup()

    @property
    def name(self) -> str:
        """What distdiag calls it."""
        return f"127.0.0.1:{self.port}"

    def pid(self, rank: int) -> int:
        """Give the process id of a rank."""
        return int((self.folder / f"pid-{rank}").read_text()) if self._forked else self.processes[rank].pid

    def wait_ended(self, rank: int) -> None:
        """Wait until a rank has ended and its parent has reaped it."""
        if self._forked:
            pid = self.pid(rank)
            wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 20, lambda: f"rank {rank} lives on")
        else:
            self.processes[rank].wait(20)

    def wait_ready(self, names: Iterable[object] | None = None, timeout: float = 60) -> None:
        """Wait until these (all ranks) have reported readiness."""
        wanted = set(map(str, range(self.size) if names is None else names))
        wait_until(
            lambda: not wanted - self._ready(),
            timeout,
            lambda: f"not ready: {wanted - self._ready()}; they said: {self._said()}",
        )

    def wait_still(self, names: Iterable[object] | None = None) -> None:
        """Wait until a job that is to hang does: that they are there, its ranks say a moment before they are stuck."""
        self.wait_ready(names)
        wait_still(self.folder)

    def look(self, *arguments: str, wrap: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Result:
        """Run pyspy-all on this job alone."""
        return distdiag("pyspy-all", "--json", "--job", self.name, *arguments, wrap=wrap, env=dict(env or {}))

    def native_stacks(self) -> str:
        """Return the C stacks of all threads of all ranks, for the message of a failure that is not understood."""
        all_threads = ("-batch", "-ex", "thread apply all backtrace 16")
        return "\n".join(
            subprocess.run(
                ["gdb", *all_threads, "-p", str(self.pid(rank))],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            ).stdout
            for rank in range(self.size)
        )

    def _started(self) -> list[subprocess.Popen[bytes] | Launcher]:
        return [*self.processes, *self._launchers]

    def _end_ranks(self) -> None:
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(OSError, ValueError):  # without its number: the others are to end all the same
                _end_group(int(path.read_text()))
                path.unlink()

    def _said(self) -> dict[str, str]:
        return {path.name: path.read_text(errors="replace")[-2000:] for path in self.folder.glob("stderr-*")}

    def _ready(self) -> set[str]:
        return {path.name.partition("-")[2] for path in self.folder.glob("ready-*")}

    def _start(self, rank: int) -> None:
        place = {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **{"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "OMP_NUM_THREADS": "1"},
        }
        if self._forked:
            hidden = {name.replace("RANK", "rANK").replace("MASTER", "mASTER"): its for name, its in place.items()}
            place = {"JOB_FORKS": str(self.size), **hidden}
        if self._server is not None:
            self._launchers.append(self._server.launch({**place, "JOB_FOLDER": str(self.folder), **self._env}))
            return
        if self._run_id:
            place["TORCHELASTIC_RUN_ID"] = self._run_id
        with (self.folder / f"stderr-{rank}").open("wb") as log:
            env = {
                **os.environ,
                **place,
                **self._starter,
                "JOB_FOLDER": str(self.folder),
                **self._env,
                **self._rank_env.get(rank, {}),
            }
            launcher = support_torch.start(self._argv, env, errors=log) if self._warm else None
            process = launcher or subprocess.Popen(
                self._argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)


@dataclass(frozen=True)
class Launcher:
    """The process of a `JobServer` that forks the ranks of one job."""

    pid: int

    def wait(self, timeout: float) -> None:
        """Wait until it has left."""
        try:
            wait_until(lambda: not os.path.exists(f"/proc/{self.pid}"), timeout, lambda: f"{self.pid} lives on")
        except AssertionError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout) from None


class JobServer:
    """Starts jobs of one program, one after another, which pay for one import of torch."""

    def __init__(self, program: str, python: str = sys.executable) -> None:
        place = {
            **{"JOB_SERVES": "1", "JOB_FORKS": "0", "rANK": "0", "LOCAL_rANK": "0"},
            **{"WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "0"},
            **{"mASTER_ADDR": "127.0.0.1", "mASTER_PORT": "00000", "OMP_NUM_THREADS": "1"},
            "JOB_FOLDER": "/".join([tempfile.gettempdir(), "distdiag-job-" + "0" * 8]),
        }
        self._process = subprocess.Popen(
            [python, str(PROGRAMS / f"{program}.py")],
            env={**os.environ, **place, **_STARTER},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)

    def launch(self, environment: Mapping[str, str]) -> Launcher:
        """Start one job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(environment).encode() + b"\n")
        self._process.stdin.flush()
        return Launcher(int(self._process.stdout.readline()))


_servers: dict[str, JobServer] = {}


def _shared_server(program: str) -> JobServer:
    """Return the server of this program, which is started for the first job."""
    if program not in _servers:
        _servers[program] = JobServer(program)
    return _servers[program]


def close_servers() -> None:
    """End the shared servers; the end of this process would end them, too."""
    while _servers:
        with _servers.popitem()[1]:
            pass


def wait_still(folder: Path) -> None:
    """Wait until no thread of the job in this folder has run for 0.2 s, nor waits (in R) for a processor.

    For 2 s if one is in the kernel (D): it may wait for a disk, as in an import.
    All but Gloo's, which asks its sockets all the time: a job may train in any thread, and go backward in others.
    """

    def still() -> bool:
        before = _turns(folder)
        time.sleep(2 if any("State:\tD" in text for text in before.values()) else 0.2)
        return before == _turns(folder) and not any("State:\tR" in text for text in before.values())

    wait_until(still, 60, lambda: f"they go on: {_turns(folder)}")


def _turns(folder: Path) -> dict[str, str]:
    """Read the state of the threads of all processes of a job, and how often each has had its turn."""
    mark, found = f"JOB_FOLDER={folder}\0".encode(), {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                for thread in (process / "task").iterdir():
                    found[thread.name] = _turns_of(thread)
    return {name: turns for name, turns in found.items() if turns}


def _turns_of(thread: Path) -> str:
    with contextlib.suppress(OSError):
        reported = (thread / "status").read_text().splitlines()
        if reported[0] != "Name:\tgloo_tcp_loop":
            return "; ".join(line for line in reported if "ctxt_switches" in line or "State" in line)
    return ""


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        for number in (signal.SIGCONT, signal.SIGKILL):
            os.killpg(leader, number)


def outliers(result: Result) -> list[tuple[list[int], str]]:
    """Return the ranks of each outlier, and the function that they are in."""
    return [
        (one["ranks"], one["frame"]["function"] if one["frame"] else "") for one in result.report["data"]["outliers"]
    ]


def states(pids: Iterable[int]) -> dict[int, str]:
    """Read the states of processes; S includes running: sleepers wake up now and then."""
    found = {}
    for pid in pids:
        try:
            found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("R", "S")
        except OSError:
            found[pid] = ""
    return found


def wait_for_state(pid: int, letter: str, timeout: float = 20) -> None:
    """Wait until a process is in a state of proc(5)."""
    deadline = time.monotonic() + timeout
    while states([pid])[pid] != letter:
        assert time.monotonic() < deadline, f"{pid} is {states([pid])[pid]!r}, not {letter!r}"
        time.sleep(0.01)
