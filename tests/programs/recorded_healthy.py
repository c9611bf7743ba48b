"""Five steps of some ranks for tests of run: recorded_healthy.py [stall|nan]."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
what = sys.argv[1] if len(sys.argv) > 1 else ""
for step in range(5):
    x = torch.ones(10)
    dist.all_reduce(x)
    if rank == 0:
        print("step", step, x.sum().item(), flush=True)
if what == "nan":
    torch.nn.Linear(2, 2)(torch.tensor([float("nan") if rank == 1 else 0.0, 0.0]))
if what == "stall" and rank == 2:
    time.sleep(300)
dist.barrier()
if rank == 0:
    print("all steps done", flush=True)
dist.destroy_process_group()
