"""The program of every rank of gpu-test: the stages start, connect, init, agree, reduce, memory, compute, done.

Each step is reported before it starts, to locate a hanging rank. A rank reports only its own observations; the parent,
which has those of all ranks, identifies the faulty rank.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from distdiag.commands.gpu_test import compute
from distdiag.launch.rank import Pauses, is_out_of_memory, load_torch, memory_message, run_rank
from distdiag.launch.rank import Rank as AnyRank

TYPE_CHECKING = False
if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from distdiag.launch.rank import Config

# The reduced values are whole numbers below 2**24, so float32 sums are exact in any order.
PERIOD = 2039
"""Element i starts as i mod PERIOD: a prime, which exposes chunks moved by a power of two."""
MARK = 2048
"""Added by rank r at each i with i mod world_size == r, so each source rank leaves a distinct trace."""
MEMORY_CHUNK_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}


def main(config: Config) -> None:
    """Run the stages of one rank, then exit."""
    run_rank(config, Rank)


class Rank(AnyRank):
    """One rank, running all stages."""

    dtype: torch.dtype

    def import_torch(self) -> None:
        """Import torch for the stages of both modules."""
        load_torch(sys.modules[__name__], compute)

    def work(self) -> None:
        """Run gpu-test's own stages."""
        self.dtype = torch.float64 if self.is_faulty("dtype") else torch.float32
        planned = {"op": "all_reduce", "dtype": "float32", "size_bytes": str(self.config["size_bytes"])}
        self.agree(planned, {"dtype": str(self.dtype).replace("torch.", "")})
        self.reduce()
        self.memory()
        if self.config["compute_s"]:
            self.enter("compute", "preparing matrices")
            pauses = Pauses()
            pauses.start()
            pauses.begin()
            computed = compute.Compute(self, self.config["compute_s"]).run()
            self.progress.step("computed", computed=asdict(computed), paused=pauses.since_begin())

    def reduce(self) -> None:
        """All-reduce one element, then the whole buffer, and check every element of the result."""
        self.enter("reduce", "preparing one element")
        element = torch.full((1,), self.rank + 1, dtype=self.dtype, device=self.device)
        self.progress.step("all_reduce of 1 element", waiting=True)
        self.all_reduce(element)
        total = self.world_size * (self.world_size + 1) // 2
        if element.item() != total:
            self.wrong_result(torch.tensor([0]), element, float(total), "the sum of 1 element", None)
        self.progress.step("preparing the buffer")
        count = max(1, self.config["size_bytes"] // self.dtype.itemsize)
        sent = pattern(count, self.rank, self.world_size, self.dtype, self.device)
        if self.is_faulty("corrupt"):
            sent[count // 2] += (
                1  # one element, in this rank's own memory: every collective still returns without error
            )
        result = sent.clone()
        self.progress.step(f"all_reduce of {self.config['size_bytes']} bytes", waiting=True)
        self.all_reduce(result)
        self.progress.step("checking every element")
        wrong = wrong_elements(result, expected_tile(self.world_size, self.dtype, self.device))
        if len(wrong):
            expected = float(wrong[0] % PERIOD) * self.world_size + MARK
            own = sent != pattern(count, self.rank, self.world_size, self.dtype, self.device)
            how = explain(result, sent, wrong, self.world_size)
            self.wrong_result(wrong, result, expected, how, own.nonzero().flatten())
        self.progress.step("reduced")

    def wrong_result(
        self, wrong: torch.Tensor, result: torch.Tensor, expected: float, how: str, own: torch.Tensor | None
    ) -> None:
        """Report a wrong sum, and whether this rank's own data caused it."""
        first = int(wrong[0])
        self.trouble(
            "wrong-result",
            wrong=len(wrong),
            total=result.numel(),
            first_index=first,
            got=f"{float(result[first]):.10g}",
            expected=f"{expected:.10g}",
            how=how,
            own_wrong=0 if own is None else len(own),
            own_first_index=None if own is None or not len(own) else int(own[0]),
        )

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """Sum over the ranks in place, and wait for the device."""
        dist.all_reduce(buffer)
        self.synchronize()

    def memory(self) -> None:
        """Allocate in chunks, write a pattern of position and chunk everywhere, then read it all back."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            requested = int(torch.cuda.mem_get_info()[0] * self.config["memory_fraction"] / self.config["sharing"])
        else:
            requested = self.config["memory_bytes"]
        self.enter("memory", f"allocating {requested} bytes")
        chunk_bytes = min(MEMORY_CHUNK_BYTES[self.device.type], requested)
        chunks: list[torch.Tensor] = []
        try:
            # Position within the chunk plus the chunk's number: two chunks on the same memory cannot both be right.
            tile = torch.arange(chunk_bytes // 4, dtype=torch.int32, device=self.device)
            while (len(chunks) + 2) * chunk_bytes <= requested:
                chunks.append(tile + len(chunks))
                self.progress.still(f"{len(chunks)} chunks written")
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            got_bytes = len(chunks) * chunk_bytes
            chunks.clear()
            self.trouble(
                "out-of-memory",
                requested_bytes=requested,
                got_bytes=got_bytes,
                message=memory_message(error, self.device),
            )
        self.progress.step("reading the memory back")
        bad = []
        for number, chunk in enumerate(chunks):
            if not torch.equal(chunk.sub_(number), tile):
                bad.append(number)
            self.progress.still(f"{number + 1} chunks read back")
        if bad:
            self.trouble("memory-corrupt", chunks=bad, chunk_bytes=chunk_bytes)
        self.progress.step("memory verified", memory_bytes=(len(chunks) + 1) * chunk_bytes)


def pattern(count: int, rank: int, world_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a rank's data, shape (count,): element i is i mod PERIOD, plus MARK if i mod world_size is the rank."""
    tile = torch.arange(PERIOD, dtype=dtype, device=device)
    buffer = torch.empty(count, dtype=dtype, device=device)
    whole = count // PERIOD * PERIOD
    buffer[:whole].view(-1, PERIOD).copy_(tile)
    buffer[whole:] = tile[: count - whole]
    buffer[rank::world_size] += MARK
    return buffer


def expected_tile(world_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one period of the right sum, shape (PERIOD,): every position is marked by exactly one rank."""
    return torch.arange(PERIOD, dtype=dtype, device=device) * world_size + MARK


def wrong_elements(result: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """Return the indices, shape (k,), at which the result is not the repeated tile.

    Compares in blocks, to avoid a second large buffer.
    """
    block = tile.repeat(128)
    wrong = []
    for begin in range(0, result.numel(), block.numel()):
        part = result[begin : begin + block.numel()]
        if not torch.equal(part, block[: part.numel()]):
            wrong.append((part != block[: part.numel()]).nonzero().flatten() + begin)
    return torch.cat(wrong) if wrong else torch.empty(0, dtype=torch.int64)


def explain(result: torch.Tensor, sent: torch.Tensor, wrong: torch.Tensor, world_size: int) -> str:
    """Classify a wrong sum by the first wrong stretch of the buffer."""
    stretch = wrong[: 8 * world_size].cpu()
    got = result[stretch.to(result.device)].double().cpu()
    right = (stretch % PERIOD).double() * world_size + MARK
    error = got - right
    if torch.equal(got, sent[stretch.to(sent.device)].double().cpu()) and world_size > 1 and len(stretch) > 1:
        return "nothing was summed: the buffer still holds this rank's own values"
    for rank in range(world_size) if len(stretch) > 1 else ():
        part = (stretch % PERIOD).double() + (stretch % world_size == rank).double() * MARK
        if torch.equal(error, -part):
            return f"the contribution of rank {rank} is missing"
        if torch.equal(error, part):
            return f"the contribution of rank {rank} was counted twice"
    return "isolated values changed" if len(wrong) < 8 else "values changed"
