"""Ranks that reach breakpoints, any number of jobs, all forked from this process with torch imported.

Each line of stdin is a job as JSON: `what` functions of this file, `size`, `store` (a file, or host:port that rank 0
then serves), the `terminal` that they run on, `as_terminal`: False if it only is to show what they say, `listen`,
`on_quit`, `env`, `exits`: see `end`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
from bdb import BdbQuit
from datetime import timedelta
from typing import Any

gc.disable()  # imports make no garbage, and to look for it takes a third of their time

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from distdiag import breakpoint, printflock  # noqa: E402
from distdiag.training.breakpoint import debug_barrier  # noqa: E402

JOB: dict[str, Any] = {}


def timeouts() -> list[float]:
    world = dist.distributed_c10d._world
    backends = [group._get_backend(torch.device("cpu")) for group in world.pg_map]
    store: Any = dist.distributed_c10d._get_default_store()
    return [one.total_seconds() for one in [*(backend.options._timeout for backend in backends), store.timeout]]


def total() -> float:
    mine = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(mine)
    return float(mine)


def steps() -> None:
    """Stop, go on, and add up what the ranks have."""
    before = timeouts()
    breakpoint(0, timeout_s=100, listen=JOB["listen"], on_quit=JOB["on_quit"])
    secret = dist.get_rank() * 10 + 7
    time.sleep(0)
    printflock("after line", secret)
    printflock("total", total(), "timeouts as before", timeouts() == before)


def waits_elsewhere() -> None:
    """Stop while another thread of rank 1 waits in the job's store for longer than silence is borne."""
    debug_barrier.SILENCE_S = 2.5
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        threading.Thread(target=store.wait, args=(["left"],)).start()
    breakpoint(0)
    store.set("left", "")


def ends_released() -> None:
    """Stop, and have nothing more to do: who is released ends, and an end that waits for it would be seen."""
    debug_barrier._LEAVE_S = 1000.0
    breakpoint(0)
    printflock("went on")


def sleeps() -> None:
    """Stop, and have a line that takes a second, and one after it."""
    breakpoint(0, listen=True)
    sleep()
    printflock("slept")


def sleep() -> None:
    printflock("sleeping")
    time.sleep(1)


def leaves() -> None:
    """Stop for a while; rank 0 ends right after it, before rank 2 reaches its breakpoint."""
    if dist.get_rank() == 2:
        time.sleep(1)
    breakpoint(0)


def releases() -> None:
    """Stop, and step over a collective."""
    before = timeouts()
    breakpoint(0, timeout_s=100)
    added = total()
    printflock("added", added, "with timeouts", timeouts())
    while dist.get_rank() == 1 and timeouts() != before:
        time.sleep(0.05)
    printflock("timeouts as before", timeouts() == before)


def quiet_twice() -> None:
    """Pass two places twice each, as often as both are to be skipped; then stop in the third call of one."""
    for turn in range(2):
        breakpoint(0, skip=2)
        printflock("first place", turn)
        breakpoint(0, skip=2)
        printflock("second place", turn)
    for turn in range(3):
        breakpoint(0, skip=2)
        printflock("third place", turn)


def impatient() -> None:
    """Stop for longer than the others wait; they come when rank 0, at its prompt, has told them to."""
    before = timeouts()
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().wait(["come"])
    try:
        breakpoint(0, timeout_s=1)
    except RuntimeError as error:
        printflock(type(error).__name__, error, timeouts() == before)


def some() -> None:
    """Stop one of a group of two, the third of the ranks goes on."""
    pair = dist.new_group([0, 2], timeout=timedelta(seconds=33))
    dist.barrier()  # rank 2 must not leave before rank 0 has connected
    breakpoint(2, group=pair)
    printflock("passed")


def far_away() -> None:
    """Stop where the others soon miss the process."""
    debug_barrier.SILENCE_S = 2.5
    steps()


def run_on_terminal() -> None:
    os.setsid()
    terminal = os.open(JOB["terminal"], os.O_RDWR | (0 if JOB["as_terminal"] else os.O_NOCTTY))
    os.dup2(terminal if JOB["as_terminal"] else os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    os.closerange(3, 20)


def be_rank(rank: int) -> None:
    dist.set_debug_level_from_env()
    where = f"file://{JOB['store']}" if JOB["store"].startswith("/") else f"tcp://{JOB['store']}"
    short = timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=JOB["size"], timeout=short)
    try:
        dist.barrier()  # a rank that leaves while others still connect makes their init fail
        printflock("pid", os.getpid())
        for what in JOB["what"]:
            globals()[what]()
        printflock("ended well")
    except (RuntimeError, BdbQuit) as error:
        printflock("ended by", type(error).__name__, error)
    finally:
        dist.destroy_process_group()


def run() -> None:
    run_on_terminal()
    os.environ.update(JOB["env"])
    print("job", os.getpid(), flush=True)
    for rank in range(JOB["size"]):
        if not os.fork():
            be_rank(rank)
            end()
    for _ in range(JOB["size"]):
        os.wait()
    end()


def end() -> None:
    """End as the job `exits`: to take all of torch down takes a second, and "atexit" only what Python runs before."""
    if JOB["exits"] == "atexit":
        atexit._run_exitfuncs()
    elif JOB["exits"]:
        sys.exit()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    gc.freeze()  # nor does an end look at them
    gc.enable()
    print("ready", flush=True)
    for line in sys.stdin:
        JOB = json.loads(line)
        if not os.fork():
            run()
