"""Jobs of real Gloo ranks that go wrong in every way that a flight recorder shows: FOLDER CASE...

torch is imported once; the ranks of each case are forked from there, write into FOLDER/CASE, and are killed when all
that will write have written. Prints the name of each case that is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distdiag import dump_flight_recorder

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(sys.argv[1])
STEPS = 6
FAULT_AT = 3
AT_A_TIME = 4
TIMED = ("late",)
"""Run with nothing beside them: they are about times."""


class Rank:
    """What the cases use: this rank, its groups, and how it writes its dump."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        store = dist.FileStore(str(folder / ".store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        (folder / f".called_{rank}").touch()
        dump_flight_recorder(str(folder), when_stuck_s=0.4)

    @property
    def data(self) -> torch.Tensor:
        """What the next call works on; the call is noted."""
        return self.of(torch.float32)

    def of(self, dtype: torch.dtype, elements: int = 4) -> torch.Tensor:
        self.call_after(time.time())
        return torch.ones(elements, dtype=dtype)

    def dump(self) -> None:
        self.call_after(0.0)
        dump_flight_recorder(str(self.folder))

    def call_after(self, when: float) -> None:
        """Note when the last call began: a dump that is older does not have it."""
        os.utime(self.folder / f".called_{self.rank}", (when, when))

    def stay_away(self) -> None:
        """Do something else for ever: the dump of a rank that waits for nothing is written when it is asked for."""
        self.dump()
        threading.Event().wait()

    def step(self) -> None:
        dist.all_reduce(self.data)
        dist.broadcast(self.data, 0)


def skip(me: Rank, by: int = 2) -> None:
    for step in range(STEPS):
        if me.rank == by and step == FAULT_AT:
            me.stay_away()
        me.step()


def left_out(me: Rank) -> None:
    """Rank 1 skips one all_reduce, and calls the broadcast."""
    for step in range(STEPS):
        if not (me.rank == 1 and step == FAULT_AT):
            dist.all_reduce(me.data)
        dist.broadcast(me.data, 0)


def size(me: Rank) -> None:
    for step in range(STEPS):
        dist.all_reduce(me.of(torch.float32, 8) if me.rank == 2 and step == FAULT_AT else me.data)


def dtype(me: Rank) -> None:
    """As many bytes, so that Gloo does not notice."""
    for step in range(STEPS):
        dist.all_reduce(me.of(torch.int32) if me.rank == 1 and step == FAULT_AT else me.data)
    me.stay_away()


def other_op(me: Rank) -> None:
    for step in range(STEPS):
        if me.rank == 3 and step == FAULT_AT:
            dist.broadcast(me.data, 3)
        else:
            dist.all_reduce(me.data)


def tie(me: Rank) -> None:
    dist.all_reduce(me.data)
    dist.all_reduce(me.of(torch.int32) if me.rank > 1 else me.data)
    me.stay_away()


def order(me: Rank, by: tuple[int, ...] = (2,)) -> None:
    groups = [dist.new_group(list(range(me.size)), group_desc=name) for name in ("tp", "dp")]
    for step in range(STEPS):
        for group in reversed(groups) if me.rank in by and step == FAULT_AT else groups:
            dist.all_reduce(me.data, group=group)


def ring_of_groups(me: Rank) -> None:
    """Three groups of two; each rank calls first the one with its right neighbour."""
    groups = [dist.new_group(sorted((rank, (rank + 1) % 3)), group_desc=f"pair{rank}") for rank in range(3)]
    dist.all_reduce(me.data)
    if me.rank == 3:
        me.stay_away()
    for group in (groups[me.rank], groups[me.rank - 1]):
        dist.all_reduce(me.data, group=group)


def skip_in_group(me: Rank) -> None:
    groups = [dist.new_group([0, 1], group_desc="left"), dist.new_group([2, 3], group_desc="right")]
    for step in range(STEPS):
        if me.rank == 1 and step == FAULT_AT:
            me.stay_away()
        dist.all_reduce(me.data, group=groups[me.rank // 2])
        dist.all_reduce(me.data)


def killed(me: Rank) -> None:
    for step in range(STEPS):
        if me.rank == 1 and step == FAULT_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        me.step()


def stopped(me: Rank) -> None:
    for step in range(STEPS):
        if me.rank == 2 and step == FAULT_AT:
            os.kill(os.getpid(), signal.SIGSTOP)
        me.step()


def late(me: Rank) -> None:
    for _ in range(2 * STEPS):
        if me.rank == 1:
            time.sleep(0.1)
        dist.all_reduce(me.data)
    me.stay_away()


def uneven(me: Rank) -> None:
    """Rank 3 has fewer batches than the others, and waits for its user."""
    for _ in range(STEPS - 2 * (me.rank == 3)):
        me.step()
    me.stay_away()


def one_more(me: Rank) -> None:
    """Rank 0 has more batches than all others."""
    for _ in range(STEPS + (me.rank == 0)):
        dist.all_reduce(me.data)
    me.stay_away()


def all_ended(me: Rank) -> None:
    for _ in range(STEPS):
        me.step()
    me.stay_away()


CASES: dict[str, Callable[[Rank], None]] = {
    "skip_2": skip,
    "skip_0": lambda me: skip(me, 0),
    "left_out": left_out,
    "size": size,
    "dtype": dtype,
    "other_op": other_op,
    "tie": tie,
    "order": order,
    "order_tie": lambda me: order(me, (2, 3)),
    "ring_of_groups": ring_of_groups,
    "skip_in_group": skip_in_group,
    "killed": killed,
    "stopped": stopped,
    "late": late,
    "uneven": uneven,
    "one_more": one_more,
    "all_ended": all_ended,
    "large": lambda me: skip(me, 13),
}
RANKS = {"large": 16}
"""The other cases have 4."""


def rank_main(folder: Path, rank: int, size: int, case: str) -> None:
    os.dup2(os.open(folder / f".log_{rank}", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    me = Rank(folder, rank, size)
    try:
        CASES[case](me)
    except RuntimeError:
        me.dump()
        threading.Event().wait()


def warm_up() -> None:
    """Load once what the first dump of every rank would load: torch's reader of stacks takes over a second."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):  # counted again in the groups of the cases, as where a job makes its groups anew
        dist.all_reduce(torch.ones(1))
    torch._C._distributed_c10d._dump_fr_trace(  # type: ignore[attr-defined]
        True, True, False
    )
    dist.destroy_process_group()


def run(case: str) -> None:
    folder, size = FOLDER / case, RANKS.get(case, 4)
    folder.mkdir(parents=True)
    pids: dict[int, int] = {}
    stopped_ranks: set[int] = set()
    for rank in range(size):
        pid = os.fork()
        if not pid:
            try:
                rank_main(folder, rank, size, case)
            finally:
                os._exit(1)
        pids[pid] = rank
    until = time.monotonic() + 90
    while time.monotonic() < until:
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if ended and os.WIFSTOPPED(status):
                stopped_ranks.add(pids[pid])
            elif ended:
                del pids[pid]
        if all(is_final(folder, rank) for rank in pids.values() if rank not in stopped_ranks):
            break
        time.sleep(0.02)
    else:
        print(f"{case}: not all ranks came to their end", flush=True)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for left in (*folder.glob(".log_*"), *folder.glob(".called_*"), *folder.glob("*.pipe")):
        left.unlink()
    (folder / ".store").unlink(missing_ok=True)


def is_final(folder: Path, rank: int) -> bool:
    """Return whether the dump of a rank includes its last call: the dump is young enough for that."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / f"rank_{rank}").stat().st_mtime > (folder / f".called_{rank}").stat().st_mtime + 0.3
    return False


def run_all(cases: list[str]) -> None:
    """Run some cases at a time, each below a process of its own: they mostly wait for their dumps to age."""
    waiting, running = sorted(cases, key=lambda name: name in TIMED), set[int]()
    while waiting or running:
        while waiting and len(running) < (1 if waiting[0] in TIMED else AT_A_TIME):
            name = waiting.pop(0)
            pid = os.fork()
            if not pid:
                run(name)
                os.write(1, f"{name}\n".encode())  # one write: the cases share this file
                os._exit(0)
            running.add(pid)
        ended, status = os.wait()
        running.remove(ended)
        assert not status, f"a case ended with {status}"


warm_up()
run_all(sys.argv[2:])
