"""The program of every rank of allreduce-bench: checks and times each collective at each size.

Only the collective is inside the timed region. For sums its data are zeros, which stay zeros however often summed;
before, untimed, a pattern is sent whose every element is verified.
"""

from __future__ import annotations

import os
import signal
import time

from distdiag.commands.allreduce_bench.formulas import NO_PEER, is_in_place, needed_bytes, shape_of
from distdiag.facts import machine
from distdiag.launch.rank import Pauses, first_lines, is_out_of_memory, run_rank
from distdiag.launch.rank import Rank as AnyRank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch
    import torch.distributed as dist

    from distdiag.cluster.records import RowMessage, TroubleMessage
    from distdiag.commands.allreduce_bench.formulas import Shape
    from distdiag.launch.rank import Config

_PERIOD = {"int8": 113, "uint8": 113, "bfloat16": 251}
_USUAL_PERIOD = 2039
"""Values are 1 to PERIOD: primes, exact in the dtype. One rank alone contributes to an element, so sums stay exact."""
_RANK_SHIFT, _PEER_SHIFT = 31, 17
_SUMMED = ("all_reduce", "reduce_scatter", "reduce")
_MEMORY_SHARE = 0.8
_BATCH_S = 0.5
"""Approximate time of a batch of iterations; a rank reports that it is alive between batches."""
_MAX_ITERATIONS, _FEW, _USUAL, _LONG_S = 1000, 5, 20, 5.0


class _Unfit(Exception):
    """This row cannot be measured here; all ranks agree on that."""


class _Unsupported(_Unfit):
    """The backend lacks this collective, or lacks it for this dtype."""


def main(config: Config) -> None:
    """Run the stages of one rank, then exit."""
    run_rank(config, Rank)


class Rank(AnyRank):
    """One rank, measuring all rows."""

    def work(self) -> None:
        """Run the stages of this command."""
        mine = self.config["dtype"]
        if self.is_faulty("dtype"):
            mine = "float32" if mine == "float64" else "float64"
        rows = ", ".join(f"{row['op']} {row['size_bytes']}" for row in self.config["rows"])
        self.agree({"collectives": rows, "dtype": self.config["dtype"]}, {"dtype": mine})
        self.enter("bench", "reading the free memory")
        self.free_bytes = self.least_free_bytes()
        self.progress.step("free memory known")
        self.pauses = Pauses()
        self.pauses.start()
        unsupported: dict[str, str] = {}
        for number, row in enumerate(self.config["rows"], 1):
            try:
                if row["op"] in unsupported:
                    raise _Unfit(unsupported[row["op"]])
                measured = self.measure(number, row["op"], row["size_bytes"])
            except _Unfit as unfit:
                if isinstance(unfit, _Unsupported):
                    unsupported[row["op"]] = str(unfit)
                measured = {"number": number, "skipped": str(unfit)}
            self.progress.step(f"row {number} measured", row=measured)

    def least_free_bytes(self) -> int:
        """Agree on the memory available to every rank for buffers."""
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0] // self.config["sharing"]
        else:
            free = (machine.available_memory_bytes() or 2**62) // self.config["local_world_size"]
        self.progress.step("gathering the free memory of all ranks", waiting=True)
        least = self.tensor([-int(free * _MEMORY_SHARE)], torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MAX)
        return -int(least.item())

    def tensor(self, values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Put values on this rank's device."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def meet(self) -> None:
        """Wait for all ranks."""
        dist.all_reduce(self.tensor([0.0], torch.float32))
        self.synchronize()

    def measure(self, number: int, op: str, size_bytes: int) -> RowMessage:
        """Check and time a collective at one size; return the measurements."""
        words = f"{op} of {size_bytes} bytes"
        shape = shape_of(op, size_bytes, self.config["dtype"], self.world_size)
        if self.world_size == 1 and op == "sendrecv":
            raise _Unfit(NO_PEER)
        self.progress.step(f"allocating the buffers for {words}")
        work = self.prepare(op, shape)
        wrong: TroubleMessage | None = None
        if self.config["check"]:
            self.progress.step(f"sending a pattern: {words}", waiting=True)
            wrong = self.check(work)
        self.progress.step(f"warming up: {words}", waiting=True)
        work.settle()
        iterations, typical_s = self.warm_up(work)
        fault = self.config["fault"]
        if fault is not None and fault["row"] == number and fault["kind"] in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault["kind"] == "kill" else signal.SIGSTOP)
        self.progress.step(f"timing {iterations} x {words}", waiting=True)
        self.pauses.begin()
        times = self.time(work, iterations, typical_s)
        paused = self.pauses.since_begin()
        if wrong is not None and not wrong["wrong"]:
            self.progress.step(f"checking: {words}")
            wrong = work.check(self.progress.still, after=True)
        trouble = {"trouble": wrong} if wrong is not None and wrong["wrong"] else {}
        self.progress.step(f"gathering the times of {words}", waiting=True, **trouble)
        row: RowMessage = {"number": number, "paused": paused, "wrong": None if wrong is None else wrong["wrong"]}
        return self.gather(times, row)

    def prepare(self, op: str, shape: Shape) -> _Work:
        """Allocate the buffers, if every rank can."""
        dtype = self.config["dtype"]
        in_place = is_in_place(op, self.config["in_place"])
        needed = needed_bytes(op, shape, dtype, in_place=in_place)
        if needed > self.free_bytes:
            raise _Unfit(f"needs {needed} bytes on each rank, but only {self.free_bytes} are free")
        work = None
        failed = self.tensor([0], torch.int32)
        try:
            work = _Work(self, op, shape, in_place=in_place)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed += 1
        self.progress.step("checking that all ranks have their buffers", waiting=True)
        dist.all_reduce(failed)
        if work is None or failed.item():
            raise _Unfit(f"{int(failed.item())} rank(s) could not allocate {needed} bytes")
        return work

    def check(self, work: _Work) -> TroubleMessage:
        """Run the collective once on a pattern, and check every element."""
        work.fill()
        if self.is_faulty("corrupt"):
            work.send[work.send.numel() // 2] += 1  # in this rank's own memory: the collective returns without error
        own_wrong, own_first, _, _ = _compare(work.send, work.sent(), lambda note: None)
        try:
            work.call()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if not _is_unsupported(error):
                raise
            raise _Unsupported(first_lines(error)) from error
        self.synchronize()
        found = work.check(self.progress.still, after=False)
        return {**found, "own_wrong": own_wrong, "own_first_index": own_first if own_wrong else None}

    def warm_up(self, work: _Work) -> tuple[int, float]:
        """Run it untimed; return the number of iterations to time, equal on all ranks, and the seconds of one."""
        self.meet()
        taken = []
        for _ in range(max(1, self.config["warmup"])):
            begin = time.perf_counter()
            work.call()
            self.synchronize()
            taken.append(time.perf_counter() - begin)
            self.progress.still("warming up", waiting=True)
        slowest = self.tensor([sorted(taken)[len(taken) // 2]], torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        typical = max(float(slowest.item()), 1e-6)
        usual = _USUAL if _USUAL * typical <= _LONG_S else max(_FEW, int(_LONG_S / typical))
        needed = max(usual, int(self.config["min_time_s"] / typical) + 1)
        return self.config["iterations"] or min(_MAX_ITERATIONS, needed), typical

    def time(self, work: _Work, iterations: int, typical_s: float) -> list[int]:
        """Time each iteration on this rank, in nanoseconds."""
        batch = max(1, min(iterations, int(_BATCH_S / typical_s)))
        lag = typical_s if self.is_faulty("slow") else 0.0
        times: list[int] = []
        while len(times) < iterations:
            self.meet()
            times += self.timed(work.call, min(batch, iterations - len(times)), lag)
            self.progress.still("timing", waiting=True)
        return times

    def timed(self, call: Callable[[], None], iterations: int, lag: float) -> list[int]:
        """Time calls in ns. On a GPU they only enqueue work: its own clock is read at the end."""
        if self.device.type == "cuda":
            marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iterations)]
            for begin, end in marks:
                self.lag(lag)
                begin.record()
                call()
                end.record()
            torch.cuda.synchronize()
            return [round(begin.elapsed_time(end) * 1e6) for begin, end in marks]
        times = []
        for _ in range(iterations):
            self.lag(lag)
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
        return times

    def lag(self, seconds: float) -> None:
        """Be late, for --inject slow."""
        if seconds:
            self.synchronize()
            time.sleep(seconds)

    def gather(self, times: list[int], row: RowMessage) -> RowMessage:
        """Add the slowest rank's time of each iteration, this rank's median, and its delay in entering."""
        own = self.tensor(times, torch.float64)
        slowest = own.clone()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        late = (slowest - own).median().item()
        row["inside_ns"], row["late_ns"], row["iterations"] = round(own.median().item()), round(late), len(times)
        if self.rank == 0:
            row["times_ns"] = [max(1, round(time_ns)) for time_ns in slowest.tolist()]
        return row


class _Work:
    """A collective at one size on one rank: its buffers, the data sent and the data expected."""

    def __init__(self, rank: Rank, op: str, shape: Shape, *, in_place: bool) -> None:
        self.op, self.shape, self.in_place = op, shape, in_place
        self.rank, self.world_size = rank.rank, rank.world_size
        self.dtype: torch.dtype = getattr(torch, rank.config["dtype"])
        self.device = rank.device
        self.period = _PERIOD.get(rank.config["dtype"], _USUAL_PERIOD)
        whole = torch.empty(max(shape.send, shape.receive), dtype=self.dtype, device=self.device)
        part = slice(self.rank * shape.count, (self.rank + 1) * shape.count)
        apart = not in_place
        self.send = whole[part] if in_place and op == "all_gather" else whole[: shape.send]
        self.receive = whole[: shape.receive]
        if in_place and op == "reduce_scatter":
            self.receive = whole[part]
        if apart and shape.send <= shape.receive:
            self.send = torch.empty(shape.send, dtype=self.dtype, device=self.device)
        elif apart:
            self.receive = torch.empty(shape.receive, dtype=self.dtype, device=self.device)
        # Unwritten pages would all map to one zero page, without memory traffic.
        whole.fill_(0)
        self.send.fill_(0)
        self.receive.fill_(0)
        self.call = _call(self)

    def tile(self, shift: int = 0) -> torch.Tensor:
        """Return one period of values, shape (period,): element i is 1 + (i + shift) mod period."""
        return torch.arange(1, self.period + 1, device=self.device).roll(-(shift % self.period)).to(self.dtype)

    def own_tile(self) -> torch.Tensor:
        """Return this rank's contribution to a sum, shape (period x world size,): the tile on this rank's turns, else
        0."""
        tile = self.tile().repeat(self.world_size)
        turn = torch.arange(len(tile), device=self.device) % self.world_size == self.rank
        return tile * turn.to(self.dtype)

    def sent(self) -> list[torch.Tensor]:
        """Return the data this rank sends: a tile for each equal part of its send buffer."""
        if self.op in _SUMMED:
            return [self.own_tile()]
        if self.op == "broadcast":
            return [self.tile() if self.rank == 0 else torch.zeros(1, dtype=self.dtype, device=self.device)]
        if self.op == "all_to_all":
            return [self.tile(_RANK_SHIFT * self.rank + _PEER_SHIFT * peer) for peer in range(self.world_size)]
        return [self.tile(_RANK_SHIFT * self.rank)]

    def due(self) -> list[torch.Tensor]:
        """Return the data it must receive, in the same form; empty if it receives none."""
        ranks = range(self.world_size)
        if self.op == "reduce" and self.rank != 0:
            return []
        if self.op == "all_gather":
            return [self.tile(_RANK_SHIFT * peer) for peer in ranks]
        if self.op == "all_to_all":
            return [self.tile(_RANK_SHIFT * peer + _PEER_SHIFT * self.rank) for peer in ranks]
        if self.op == "sendrecv":
            return [self.tile(_RANK_SHIFT * ((self.rank - 1) % self.world_size))]
        return [self.tile(self.rank * self.shape.count if self.op == "reduce_scatter" else 0)]

    def fill(self) -> None:
        tiles = self.sent()
        for part, tile in zip(self.send.chunk(len(tiles)), tiles, strict=True):
            whole = len(part) // len(tile) * len(tile)
            part[:whole].view(-1, len(tile)).copy_(tile)
            part[whole:] = tile[: len(part) - whole]

    def settle(self) -> None:
        """Prepare for repeated calls: zeros for sums, else keep the pattern."""
        if self.op in _SUMMED:
            self.send.fill_(0)
            self.receive.fill_(0)

    def check(self, still: Callable[[str], None], *, after: bool) -> TroubleMessage:
        """Check every element received; `after` the timed calls, which summed zeros."""
        due = self.due()
        if after and due and self.op in _SUMMED:
            due = [torch.zeros(self.period, dtype=self.dtype, device=self.device)]
        wrong, first, got, expected = _compare(self.receive, due, still) if due else (0, 0, 0.0, 0.0)
        how = "after the timed calls" if after else "values changed" if wrong >= 8 else "isolated values changed"
        return {
            "kind": "wrong-result",
            "op": self.op,
            "size_bytes": self.shape.size_bytes,
            "wrong": wrong,
            "total": self.receive.numel(),
            "first_index": first,
            "got": f"{got:.10g}",
            "expected": f"{expected:.10g}",
            "how": how,
        }


def _call(work: _Work) -> Callable[[], None]:
    """Bind the collective to its buffers. torch 2.13 renamed two of them, and warns of the old names at each call."""
    send, receive = work.send, work.receive
    gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(receive),
        "all_gather": lambda: gather(receive, send),
        "reduce_scatter": lambda: scatter(receive, send),
        "all_to_all": lambda: dist.all_to_all_single(receive, send),
        "broadcast": lambda: dist.broadcast(receive, 0),
        "reduce": lambda: dist.reduce(receive, 0),
        "sendrecv": lambda: _send_and_receive(work),
    }
    return calls[work.op]


def _send_and_receive(work: _Work) -> None:
    ahead, behind = (work.rank + 1) % work.world_size, (work.rank - 1) % work.world_size
    transfers = [dist.P2POp(dist.isend, work.send, ahead), dist.P2POp(dist.irecv, work.receive, behind)]
    for pending in dist.batch_isend_irecv(transfers):
        pending.wait()


def _compare(
    buffer: torch.Tensor, tiles: list[torch.Tensor], still: Callable[[str], None]
) -> tuple[int, int, float, float]:
    """Count elements that differ from the tiles, each repeated over its part; with index, value and expected value of
    the first.

    Compares in blocks, to avoid a second large buffer.
    """
    wrong, first, got, expected = 0, 0, 0.0, 0.0
    length = len(buffer) // len(tiles)
    for number, tile in enumerate(tiles):
        part = buffer[number * length : (number + 1) * length]
        block = tile.repeat(max(1, 2**18 // len(tile)))
        for begin in range(0, len(part), len(block)):
            piece = part[begin : begin + len(block)]
            if torch.equal(piece, block[: len(piece)]):
                continue
            at = (piece != block[: len(piece)]).nonzero().flatten()
            if not wrong:
                index = int(at[0])
                first, got, expected = number * length + begin + index, float(piece[index]), float(block[index])
            wrong += len(at)
        still("checking")
    return wrong, first, got, expected


def _is_unsupported(error: Exception) -> bool:
    words = str(error).lower()
    return any(sign in words for sign in ("not support", "unsupported", "not implement", "invalid scalar type"))
