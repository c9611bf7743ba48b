"""A training loop as people write it.

STACK=fsdp2, tensor-parallel, thread, asyncio, checkpoint, mesh, pairs, module or pause. With FAULT, rank 2 does in step
3 what it says: sleep, event, extra-forward, compile, debugger, barrier; or, in pairs, it and rank 3 both receive before
they send (circle). Else the job goes on; with FAULT=slow rank 2 takes 3 s for each step.
"""

from __future__ import annotations

import asyncio
import os
import pdb
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch._dynamo  # which optimizers would import in each rank
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

# isort: split
from job import RANK, WORLD_SIZE, join, ready  # the ranks are forked here, and import nothing more

if TYPE_CHECKING:
    from collections.abc import Callable

STACK, FAULT = os.environ["STACK"], os.environ.get("FAULT", "")
FAULTY, AT_STEP, READY_AT = 2, 3, 8
WIDTH = 32


def slow_backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
    time.sleep(600)
    return graph.forward


def sleep_in_step() -> None:
    time.sleep(600)


def wait_for_event() -> None:
    threading.Event().wait()


def compile_model() -> None:
    torch.compile(lambda numbers: numbers * 2, backend=slow_backend)(torch.ones(4))


def stop_in_debugger() -> None:
    reading, _ = os.pipe()
    sys.stdin = os.fdopen(reading)
    pdb.set_trace()


def next_batch(step: int) -> torch.Tensor:
    if step == (AT_STEP if FAULT else READY_AT):
        ready()
    if FAULT == "slow" and RANK == FAULTY:
        time.sleep(3)
    if not FAULT and step % WORLD_SIZE == RANK:
        time.sleep(0.1)
    if RANK == FAULTY and step == AT_STEP and FAULT in FAULTS:
        FAULTS[FAULT]()
    return torch.randn(8, WIDTH)


FAULTS = {
    **{"sleep": sleep_in_step, "event": wait_for_event, "compile": compile_model, "debugger": stop_in_debugger},
    "barrier": dist.barrier,
}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def fsdp2() -> NoReturn:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    while True:
        batch = next_batch(step)
        if FAULT == "extra-forward" and RANK == FAULTY and step == AT_STEP:
            model(batch)
        model(batch).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1


def tensor_parallel() -> NoReturn:
    model = network()
    parallelize_module(model, init_device_mesh("cpu", (WORLD_SIZE,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    step = 0
    while True:
        next_batch(step)
        torch.manual_seed(step)
        model(torch.randn(8, WIDTH)).sum().backward()
        step += 1


def mesh() -> NoReturn:
    two = init_device_mesh("cpu", (2, WORLD_SIZE // 2), mesh_dim_names=("data", "tensor"))
    data, tensor = two["data"].get_group(), two["tensor"].get_group()
    step = 0
    while True:
        numbers = torch.ones(4)
        next_batch(step)
        if FAULT == "barrier-of-one-group" and RANK == FAULTY and step == AT_STEP:
            dist.barrier(group=data)
        dist.all_reduce(numbers, group=tensor)
        dist.all_reduce(numbers, group=data)
        step += 1


def pairs() -> NoReturn:
    numbers = torch.ones(4)
    step = 0
    while True:
        next_batch(step)
        first = RANK % 2 and not (FAULT == "circle" and step == AT_STEP and RANK >= FAULTY)
        for call in (dist.send, dist.recv) if first else (dist.recv, dist.send):
            call(numbers, RANK ^ 1)
        dist.all_reduce(numbers)
        step += 1


def data_parallel() -> NoReturn:
    model = DistributedDataParallel(network())
    step = 0
    while True:
        model(next_batch(step)).sum().backward()
        step += 1


def in_thread() -> None:
    thread = threading.Thread(target=data_parallel, name="trainer", daemon=True)
    thread.start()
    thread.join()


async def serve() -> NoReturn:
    threading.Thread(target=data_parallel, name="trainer", daemon=True).start()
    while True:
        await asyncio.sleep(3600)


class SlowWriter(checkpoint.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:  # noqa: ANN401 - torch's own types
        if RANK == FAULTY:
            write_shard()
        return super().write_data(plan, planner)


def write_shard() -> None:
    time.sleep(600)


def save() -> None:
    model = network()
    fully_shard(model)
    ready()
    checkpoint.save({"model": model.state_dict()}, storage_writer=SlowWriter(os.environ["JOB_FOLDER"] + "/saved"))


torch.set_num_threads(1)
join()
if STACK in ("module", "pause"):
    module = DistributedDataParallel(network())
    for number in range(10**9):
        module(next_batch(number)).sum().backward()
        if STACK == "pause":
            time.sleep(0.3)
elif STACK == "asyncio":
    asyncio.run(serve())
else:
    stacks = {"fsdp2": fsdp2, "tensor-parallel": tensor_parallel, "thread": in_thread, "mesh": mesh, "pairs": pairs}
    {**stacks, "checkpoint": save}[STACK]()
dist.destroy_process_group()
