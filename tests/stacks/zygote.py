"""Imports torch once, and forks from itself the ranks of jobs that a plain environment starts (score.py without --real).

Lines of JSON on stdin: {name, folder, world, feed, python, port, environment, inside}. Each job gets its own pid namespace
and /proc; its ranks have the same /proc/PID/environ and cmdline as if they had been started.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import traceback

import torch
import torch.distributed as dist  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.data  # noqa: F401

torch.set_num_threads(1)
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
LIBC = ctypes.CDLL(None, use_errno=True)
NEW_PIDS, NEW_MOUNTS, PRIVATE_ALL, DEATH_SIGNAL = 0x20000000, 0x00020000, 0x4000 | (1 << 18), 1


def must(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def show(start: int, size: int, raw: bytes) -> None:
    """Have /proc show this: it reads our memory."""
    assert len(raw) == size, (len(raw), size)
    ctypes.memmove(start, raw, size)


def appear(arguments: list[str], environment: dict[str, str]) -> None:
    """Show these as arguments and environment, filled up with slashes and PAD to the room that there is."""
    os.environ.clear()
    os.environ.update(environment)
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    short = arg_end - arg_start - len("\0".join([*arguments, ""]).encode())
    folder, _, name = arguments[1].rpartition("/")
    show(
        arg_start,
        arg_end - arg_start,
        "\0".join([arguments[0], folder + "/" * (short + 1) + name, *arguments[2:], ""]).encode(),
    )
    lines = [f"{key}={value}" for key, value in environment.items()]
    rest = env_end - env_start - len("\0".join([*lines, "PAD=", ""]).encode())
    show(env_start, env_end - env_start, "\0".join([*lines, "PAD=" + "x" * rest, ""]).encode())


def be_rank(job: dict, rank: int) -> None:
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job["world"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job["port"]),
    }
    path = f"{HERE}/jobs.py"
    appear([job["python"], path, job["name"]], {**job["environment"], **place})
    sys.argv = [path, job["name"]]
    main = sys.modules["__main__"]
    main.__file__ = path
    with open(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


def launch(job: dict) -> None:
    """As a shell does: starts the ranks, and waits for them all."""
    os.setsid()
    os.chdir(job["folder"])
    log = os.open(f"{job['folder']}/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    null = os.open("/dev/null", os.O_RDONLY)
    for target in (1, 2):
        os.dup2(log, target)
    os.dup2(null, 0)
    os.close(log)
    os.close(null)
    feeds = [os.pipe() for _ in range(job["world"])] if job["feed"] else []
    for rank in range(job["world"]):
        if os.fork() == 0:
            if feeds:
                os.dup2(feeds[rank][0], 0)
                for pair in feeds:
                    os.close(pair[0])
                    os.close(pair[1])
            sys.stdin = open(0, closefd=False)
            status = 1
            try:
                be_rank(job, rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
    # The launcher is no process that has torch: distdiag might take it for a rank.
    for pair in feeds:
        os.set_inheritable(pair[1], True)
    keep = "import os\nwhile True:\n  try: os.wait()\n  except ChildProcessError: break"
    os.execve(job["inside"][0], [job["inside"][0], "-S", "-c", keep], job["environment"])


def contain(job: dict) -> None:
    LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL)
    must(LIBC.unshare(NEW_PIDS | NEW_MOUNTS))
    init = os.fork()
    if init == 0:
        LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL)
        must(LIBC.mount(b"none", b"/", None, PRIVATE_ALL, None))
        must(LIBC.mount(b"proc", b"/proc", b"proc", 0, None))
        os.closerange(3, 256)
        launcher = os.fork()
        if launcher == 0:
            launch(job)
        os.execve(job["inside"][0], job["inside"], {**job["environment"], "STACKS_LAUNCHER": str(launcher)})
    with open(f"{job['folder']}/init", "w") as file:
        file.write(str(init))
    os.waitpid(init, 0)
    with open(f"{job['folder']}/ended", "w"):
        pass
    os._exit(0)


def main() -> None:
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no wait for the containers
    reading = os.fdopen(os.dup(0), "rb", buffering=0)
    while line := reading.readline():
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                contain(json.loads(line))
            except BaseException:
                traceback.print_exc()
            os._exit(1)


if __name__ == "__main__":
    main()
