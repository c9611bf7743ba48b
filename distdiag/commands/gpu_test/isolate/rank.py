"""What every rank of `gpu-test --isolate` runs: rounds of pairs, each pair a process group of its own.

There is no group of all ranks: one dead link would keep it from being made. The ranks meet in torch's store alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
import time
from dataclasses import asdict
from datetime import timedelta

from distdiag.commands.gpu_test import compute
from distdiag.commands.gpu_test.isolate.coordinator import Coordinator
from distdiag.launch.rank import Pauses, first_lines, load_torch, run_rank
from distdiag.launch.rank import Rank as AnyRank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    import torch
    import torch.distributed as dist

_PERIOD = 2039
"""As in gpu-test: rank a of a pair sends i mod this, and rank b adds 1: integers, exact in float32."""
_SO_ATTACH_FILTER = 26  # include/uapi/asm-generic/socket.h


def main(config: dict[str, Any]) -> None:
    """Run the stages of one rank, then exit."""
    run_rank(config, Rank)


class Rank(AnyRank):
    """One rank on its way through the pairs."""

    def import_torch(self) -> None:
        """Import torch, and have it raise where a collective takes too long."""
        # So that a collective of NCCL that takes too long raises here, and its watchdog does not end the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        load_torch(sys.modules[__name__], compute)

    def join_group(self, patience: timedelta) -> None:
        """Create none: each pair creates its own."""
        self.progress.step("store ready")

    def work(self) -> None:
        """Compute, then measure pairs in the rounds that rank 0 plans; a rank that computes badly is in none."""
        left_out: set[int] = set()
        if self.config["compute_s"]:
            self.enter("compute", "preparing matrices")
            stage = compute.Compute(self, self.config["compute_s"])
            self.progress.step("computed", computed=asdict(stage.run()))
            left_out = stage.bad
        self.enter("pairs", "allocating the buffer")
        count = self.config["size_bytes"] // 4
        tile = torch.arange(_PERIOD, dtype=torch.float32, device=self.device)
        self.pattern = tile.repeat(count // _PERIOD + 1)[:count]
        self.due = 2 * self.pattern + 1
        self.buffer = torch.empty_like(self.pattern)
        pauses = Pauses()
        pauses.start()
        pauses.begin()
        if self.rank == 0:
            self.lead(left_out)
        else:
            self.follow()
        self.progress.step("pairs measured", paused=pauses.since_begin())

    def lead(self, left_out: set[int]) -> None:
        """As rank 0, plan each round, take part in it, and report its results."""
        coordinator = Coordinator(
            self.config["nodes"],
            self.config["at_once"],
            (self.config["least_timeout_s"], self.config["pair_timeout_s"]),
            self.config["pause_s"],
            left_out,
        )
        number = 0
        for number, (words, pairs) in enumerate(coordinator.plan()):
            timeout_s = coordinator.patience_s()
            self.store.set(f"round/{number}", json.dumps([words, pairs, timeout_s]))
            self.take_part(number, words, pairs, timeout_s)
            self.progress.step(f"waiting for the ranks of {words}", waiting=True)
            for pair in pairs:  # rank 0 waits for both ends
                coordinator.note(pair, json.loads(self.store.get(f"result/{number}/{pair[0]}")))
                self.store.get(f"result/{number}/{pair[1]}")
            self.progress.step(f"{words} done", pairs=coordinator.all_results())
        self.store.set(f"round/{number + 1}", json.dumps(None))
        self.progress.step("all pairs measured", pairs=coordinator.all_results())

    def follow(self) -> None:
        """As any other rank, follow the plan of rank 0."""
        number = 0
        while True:
            self.progress.step("waiting for rank 0", waiting=True)
            plan = json.loads(self.store.get(f"round/{number}"))
            if plan is None:
                return
            self.take_part(number, *plan)
            self.progress.step(f"{plan[0]} done")
            number += 1

    def take_part(self, number: int, words: str, pairs: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Measure this rank's pair, if it has one in this round; both ranks report their result."""
        mine = next((pair for pair in pairs if self.rank in pair), None)
        self.progress.step(f"{words}: {'idle' if mine is None else f'ranks {mine[0]} and {mine[1]}'}")
        if mine is not None:
            result = self.measure_safely(number, (mine[0], mine[1]), timeout_s)
            self.store.set(f"result/{number}/{self.rank}", json.dumps(result))
            # Not before: it takes as long as the measurement, and others can have theirs meanwhile.
            if dist.is_initialized():
                dist.destroy_process_group()

    def measure_safely(self, number: int, pair: tuple[int, int], timeout_s: float) -> dict[str, Any]:
        """Measure a pair; an error is a result, too."""
        began = time.monotonic()
        failed = {"bytes_per_s": None, "failed": True, "wrong": 0, "iterations": 0}
        try:
            result = self.measure(number, pair, timeout_s)
            return {**result, "took_s": time.monotonic() - began}
        except (RuntimeError, ValueError, OSError) as error:
            return {**failed, "error": first_lines(error)}

    def measure(self, number: int, pair: tuple[int, int], timeout_s: float) -> dict[str, Any]:
        """All-reduce between two ranks: the bandwidth of a good time of the slower one, and wrong elements."""
        a, b = pair
        before = _sockets()
        dist.init_process_group(
            self.config["backend"],
            store=dist.PrefixStore(f"pair/{number}/{a}-{b}", self.store),
            rank=int(self.rank == b),
            world_size=2,
            timeout=timedelta(seconds=timeout_s),
        )
        fault = {"dropped": [], "slow": [], **(self.config["fault"] or {})}
        if [a, b] in fault["dropped"] and self.rank == a:
            fresh = (fd for made, fd in _sockets().items() if made not in before)
            _drop_what_comes_in(fresh, spared_port=self.store.port)
        wrong = self.check(b)
        self.buffer.zero_()
        lag_s = fault["lag_s"] if [a, b] in fault["slow"] and self.rank in fault["slow_ranks"] else 0.0
        taken = []
        for _ in range(self.config["iterations"]):
            begin = time.perf_counter()
            time.sleep(lag_s)
            dist.all_reduce(self.buffer)
            self.synchronize()
            taken.append(time.perf_counter() - begin)
        times = torch.tensor(taken, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        # Two ranks: busbw is algbw, the factor 2(n - 1)/n of nccl-tests is 1.
        # The second best: a machine that does something else now and then is no slow link.
        best = sorted(times.tolist())[min(1, len(times) - 1)]
        speed = self.buffer.numel() * self.buffer.element_size() / best
        return {"bytes_per_s": speed, "failed": False, "wrong": wrong, "error": "", "iterations": len(times)}

    def check(self, b: int) -> int:
        """All-reduce a pattern and count the wrong elements, of both ranks."""
        self.buffer.copy_(self.pattern)
        if self.rank == b:
            self.buffer += 1
        dist.all_reduce(self.buffer)
        self.synchronize()
        wrong = (self.buffer != self.due).sum().to(torch.float32).reshape(1)
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        return int(wrong.item())

    def done(self) -> None:
        """Meet the others once more, in the store: rank 0 serves it and leaves last."""
        self.enter("done", "finishing")
        self.store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self.progress.step("waiting for the others to finish", waiting=True)
            self.store.wait([f"left/{rank}" for rank in range(self.world_size)])


def _sockets() -> dict[str, int]:
    """List this process's sockets by what never comes twice, as descriptors do: those of the last pair close late."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            made = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if made.startswith("socket:"):
            found[made] = int(name)
    return found


def _drop_what_comes_in(sockets: Iterable[int], *, spared_port: int) -> None:
    """Make the kernel drop every packet that comes in for these sockets, as a firewall would: see socket(7), bpf.

    Connections to or from `spared_port` are left alone: torch opens more of them to its store for each group.
    """

    class Instruction(ctypes.Structure):
        _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction)))

    accept_nothing = Instruction(0x06, 0, 0, 0)  # BPF_RET of 0 bytes, include/uapi/linux/bpf_common.h
    program = Program(1, ctypes.pointer(accept_nothing))
    for fd in sockets:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ends = [connection.getsockname()]
            with contextlib.suppress(OSError):  # a listening socket has no peer
                ends.append(connection.getpeername())
            if all(port != spared_port for _, port, *_ in ends):
                connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
