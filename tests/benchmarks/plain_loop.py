"""all_reduce timed by allreduce-bench's own loop and by a straightforward one, in turn, on the same buffer and group.

Between two runs on a shared machine times differ by a fifth; in turn, what one of them meets the other meets too.
Arguments: SIZE_BYTES:ITERATIONS:TURNS ... Prints bytes, and both medians of the slower rank's time in microseconds.
"""

import sys
import time
from functools import partial

import torch
import torch.distributed as dist

from distdiag.commands.allreduce_bench.rank import Rank

dist.init_process_group("gloo")
ours = Rank.__new__(Rank)
for argument in sys.argv[1:]:
    size, iterations, turns = (int(word) for word in argument.split(":"))
    buffer = torch.empty(size // 4)
    buffer.fill_(0)
    for _ in range(5):
        dist.all_reduce(buffer)
    times: dict[str, list[float]] = {"loop": [], "ours": []}
    for turn in range(turns):
        for who in ("loop", "ours") if turn % 2 else ("ours", "loop"):
            dist.barrier()
            if who == "ours":
                times[who] += [one / 1e9 for one in ours.timed(partial(dist.all_reduce, buffer), iterations, 0.0)]
                continue
            for _ in range(iterations):
                begin = time.perf_counter()
                dist.all_reduce(buffer)
                times[who].append(time.perf_counter() - begin)
    medians = []
    for who in ("loop", "ours"):
        slowest = torch.tensor(times[who], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        medians.append(sorted(slowest.tolist())[len(slowest) // 2] * 1e6)
    if dist.get_rank() == 0:
        print(size, *medians, flush=True)
dist.destroy_process_group()
