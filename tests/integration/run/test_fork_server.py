"""A program that a test forks from a loaded process is the same as one started by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fork_server
from fork_server import ForkServer
from support import wait_until

SEES = """
import json, os, sys
from pathlib import Path
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
json.dump({
    "python": [__name__, __file__, sys.argv, sys.orig_argv, sys.path, dict(os.environ), os.getcwd()],
    "command line": Path("/proc/self/cmdline").read_text().split(chr(0)),
    "environment": sorted(Path("/proc/self/environ").read_text().split(chr(0))),
    "streams": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
    "number of files": len(os.listdir("/proc/self/fd")),
    "leads its session": os.getsid(0) == os.getpgrp() == os.getpid(),
    "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
}, sys.stdout)
sys.stdout.flush()
os.kill(os.getpid(), int(sys.argv[1])) if int(sys.argv[1]) else sys.exit(7)
"""

WORKER = """
import os, sys, subprocess
from fork_server import ForkServer
server = ForkServer(["json"], os.environ, shared="test")
program = server.fork([sys.executable, sys.argv[1]], os.environ, (sys.stdout, subprocess.STDOUT))
print("fork", program.pid, flush=True)
sys.stdin.readline()
"""


def ends(process: subprocess.Popen[Any] | None, path: Path) -> tuple[int, dict[str, Any]]:
    assert process is not None
    return process.wait(60), json.loads(path.read_text())


def test_a_fork_sees_and_shows_what_a_started_program_does(tmp_path: Path) -> None:
    program, out = tmp_path / "sees.py", tmp_path / "out"
    program.write_text(SEES)
    server = ForkServer(["json"], os.environ)
    env = {**os.environ, "RANK": "3", "LONG": "x" * 50_000}
    for number, status in ((0, 7), (signal.SIGKILL, -signal.SIGKILL)):
        command = [sys.executable, str(program), str(int(number))]
        with out.open("w") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            started = ends(subprocess.Popen(command, env=env, start_new_session=True, **streams), out)  # type: ignore[call-overload]
        with out.open("w") as file:
            forked = ends(server.fork(command, env, (file, subprocess.STDOUT)), out)
        assert forked == started
        assert forked[0] == status


def test_what_takes_effect_at_the_start_of_python_is_not_forked() -> None:
    server = ForkServer(["json"], os.environ)
    streams = (subprocess.DEVNULL, subprocess.STDOUT)
    assert server.fork([sys.executable, "program.py"], {**os.environ, "PYTHONHASHSEED": "7"}, streams) is None
    assert server.fork([sys.executable, "-c", "pass"], os.environ, streams) is None
    assert server.fork(["sh", "program.sh"], os.environ, streams) is None


def test_workers_share_a_server_that_ends_with_their_run_and_a_fork_with_its_worker(tmp_path: Path) -> None:
    program, worker = tmp_path / "sleeps.py", tmp_path / "worker.py"
    program.write_text("import os, time; print('parent', os.getppid(), flush=True); time.sleep(600)")
    worker.write_text(WORKER)
    run = subprocess.Popen(["sleep", "600"])
    env = {**os.environ, "DISTDIAG_TESTS_RUN": str(run.pid), "PYTHONPATH": str(Path(fork_server.__file__).parent)}
    with run, ExitStack() as ends:
        ends.callback(run.kill)
        workers = [
            subprocess.Popen(
                [sys.executable, worker, program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for each in workers:
            ends.callback(end, each)
        first, second = [dict(each.stdout.readline().split() for _ in range(2)) for each in workers if each.stdout]
        server = parent_of(first["parent"])
        assert server == parent_of(second["parent"])
        assert first["parent"] != second["parent"], "their programs would be ranks of one job"
        end(workers[0])
        ended(first["fork"])
        assert Path("/proc", second["fork"]).exists()
        end(workers[1])
        ended(second["fork"])
        assert Path("/proc", server).exists()
    ended(server)


def parent_of(pid: str) -> str:
    return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1]


def end(worker: subprocess.Popen[str]) -> None:
    """End a worker; the server of both holds the first one's output open."""
    for stream in (worker.stdin, worker.stdout):
        assert stream is not None
        stream.close()
    worker.wait(20)


def ended(pid: str) -> None:
    wait_until(lambda: not Path("/proc", pid).exists(), 20, lambda: f"{pid} has not ended")
