"""A training loop with wrong numbers: `overflows.py WRAP WHERE`.

WRAP: bare, ddp, fsdp-before, fsdp-after (the detector before or after fully_shard), ddp-compile, hsdp (4 ranks), tp,
pipeline; with "none:" before it, it has no detector of its own; with "goes-on:" the detector only reports; with
"by-hand:" there is no optimizer, whose import of torch._dynamo takes as long as that of torch; with "light:" a stand-in
spares that import. WHERE:
forward (rank 1, batch 1), forward-N (rank N), forward-all, backward (rank 0, batch 2), weights, weights-N (of rank N),
never; or all is well, and the ranks do not step together: join (uneven batches), apart (rank 0 has work of its own),
odd (the detector of rank 1 fails), or not at all: evaluation (rank 1, one of its more batches); or without steps, where
rank 1 has its batch 1: only-forward, no-optimizer, idle-optimizer, exits (at once, after more batches).

`overflows.py pairs FOLDER WRAP:WHERE...` runs two ranks for each, one case after the other, forked from one process
that has imported torch; FOLDER/WRAP:WHERE.N is what rank N wrote, FOLDER/statuses how each ended and when.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

# Imports make no garbage; to look for it, then and at the end, takes half of all their time.
gc.disable()
atexit.register(gc.freeze)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from distdiag import DebugUnderflowOverflow  # noqa: E402
from distdiag.facts import programs  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable


class Scale(nn.Module):
    def forward(self, x: Tensor, by: float) -> Tensor:
        return x * by


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The model's own come first of all parameters: fully_shard leaves them together until the backward.
        self.own = nn.Parameter(torch.ones(8))
        self.first, self.scale, self.last = nn.Linear(8, 8), Scale(), nn.Linear(8, 8)

    def forward(self, x: Tensor | dict[str, Tensor], by: float) -> Tensor:
        given = x["x"] if isinstance(x, dict) else x
        out: Tensor = self.last(self.scale(self.first(given * self.own), by))
        return out


def wrapped(model: nn.Module, how: str, watch: Callable[[nn.Module], object]) -> nn.Module:
    if how == "fsdp-before":
        watch(model)
    outer = model
    if how.startswith(("fsdp", "hsdp")):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")) if how == "hsdp" else None
        for one in (*model.children(), model):
            if list(one.parameters()):
                fully_shard(one, mesh=mesh)
    elif how == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan: Any = {"first": ColwiseParallel(), "last": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    elif how.startswith("ddp"):
        outer = nn.parallel.DistributedDataParallel(model)
        if how == "ddp-compile":
            outer = torch.compile(outer, backend="eager")  # type: ignore[assignment]
    if how != "fsdp-before":
        watch(outer)
    return outer


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), Scale()
        self.by = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale(self.linear(x), self.by)
        return out


def pipeline(where: str, rank: int, watch: Callable[[nn.Module], object]) -> None:
    """Train one stage a rank; each passes its wrong numbers on to the next."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.use_deterministic_algorithms(True)  # fills unwritten memory with nan, which may be there by chance
    model = Stage()
    watch(model)
    size = dist.get_world_size()
    stage = PipelineStage(model, rank, size, torch.device("cpu"), input_args=(torch.randn(2, 8),))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, wanted: (out - wanted).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(4):
        optimizer.zero_grad()
        model.by = float("inf") if is_bad(where, batch, rank) else 1.0
        given = (torch.randn(4, 8),) if rank == 0 else ()
        wanted: dict[str, Any] = {"target": torch.zeros(4, 8)} if rank == size - 1 else {}
        schedule.step(*given, **wanted)
        optimizer.step()
        print(f"batch {batch} done", flush=True)


def is_bad(where: str, batch: int, rank: int) -> bool:
    """Tell whether the forward of this batch is to go wrong here."""
    ranks = {"forward": rank == 1 or not dist.is_initialized(), f"forward-{rank}": True, "forward-all": True}
    return batch == 1 and ranks.get(where, False)


def uneven(model: nn.Module, rank: int) -> None:
    """Train with more batches on rank 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():  # type: ignore[operator]
        for _ in range(2 + 2 * rank):
            model(torch.randn(4, 8), 1.0).sum().backward()
            optimizer.step()


def apart(model: nn.Module, rank: int) -> None:
    """Let rank 0 train something and look at the model often, and then train all together."""
    if rank == 0:
        own = nn.Linear(8, 1)
        DebugUnderflowOverflow(own)
        steps = torch.optim.SGD(own.parameters(), lr=0.1)
        for _ in range(3):
            own(torch.randn(4, 8)).sum().backward()
            steps.step()
        for _ in range(20):
            model.module(torch.randn(4, 8), 1.0)  # type: ignore[operator]
    dist.barrier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 8), 1.0).sum().backward()
        if rank == 0:
            model.module(torch.randn(4, 8), 1.0)  # type: ignore[operator]
        optimizer.step()
    if rank == 0:
        for _ in range(2):  # a backward would be DistributedDataParallel's
            model.module(torch.randn(4, 8), 1.0)  # type: ignore[operator]
            optimizer.step()


def odd(model: nn.Module, rank: int) -> None:
    """Give the model of rank 1 something that the detector fails on, and train on."""

    class Odd(dict[str, Tensor]):
        def items(self) -> NoReturn:
            raise RuntimeError("not now")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for batch in range(20):
        given: Any = Odd(x=torch.randn(4, 8)) if rank == 1 and batch == 1 else {"x": torch.randn(4, 8)}
        model(given, 1.0).sum().backward()
        optimizer.step()


def evaluation(model: nn.Module, rank: int) -> None:
    """Let only rank 1 have a bad batch, in which rank 0 does not take part."""
    model.eval()
    with torch.no_grad():
        for batch in range(2 + rank):
            model(torch.randn(4, 8), float("inf") if batch == 2 else 1.0)


def stepless(model: nn.Module, rank: int, where: str) -> None:
    """Train without a step: in three batches, or in more where an optimizer may still come to its step."""
    idle = [torch.optim.SGD(model.parameters(), lr=0.1)] if where == "idle-optimizer" else []
    for batch in range(6 if idle or where == "exits" else 3):
        loss = model(torch.randn(4, 8), float("inf") if (rank, batch) == (1, 1) else 1.0).sum()
        if where != "only-forward":
            loss.backward()
    if where == "exits":
        os._exit(0)


OTHERS = {"join": uneven, "apart": apart, "odd": odd, "evaluation": evaluation}
STEPLESS = ("only-forward", "no-optimizer", "idle-optimizer", "exits")


class ByHand:
    """Steps without an optimizer of torch."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def zero_grad(self) -> None:
        self._model.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for one in self._model.parameters():
            if one.grad is not None:
                one.sub_(0.1 * one.grad)


def without_dynamo(how: str) -> str:
    """Put a stand-in in place of torch._dynamo, which DDP and optimizers import also where nothing is compiled."""
    if not how.startswith("light:"):
        return how
    names: dict[str, Any] = {
        "disable": lambda function, *_, **__: function,
        "graph_break": lambda: None,
        "set_stance": lambda *_, **__: contextlib.nullcontext(),
        "trace_rules": SimpleNamespace(clear_lru_cache=lambda: None),
        "utils": SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
    }
    sys.modules["torch._dynamo"] = torch._dynamo = SimpleNamespace(**names)  # type: ignore[assignment]
    return how.removeprefix("light:")


def train(how: str, where: str) -> object:
    """Train, and return what must live until the process ends.

    DDP holds the last reference to Gloo's process group, whose destructor joins a thread with the GIL held; that thread
    may be waiting for the GIL to free the last all_reduce (torch 2.13).
    """
    goes_on: Any = "report" if how.startswith("goes-on:") else "raise"
    watch: Callable[[nn.Module], object] = lambda model: DebugUnderflowOverflow(model, on_detect=goes_on)  # noqa: E731
    if how.startswith("none:"):
        watch = id
    how = how.removeprefix("none:").removeprefix("goes-on:")
    by_hand, how = how.startswith("by-hand:"), how.removeprefix("by-hand:")
    rank = 0
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        store = os.environ.get("STORE")  # else the launcher has set MASTER_PORT
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    how = without_dynamo(how)
    torch.manual_seed(0)
    if how == "pipeline":
        pipeline(where, rank, watch)
        dist.destroy_process_group()
        return None
    model = Model()
    outer = wrapped(model, how, watch)
    if where in STEPLESS:
        stepless(outer, rank, where)
        return outer
    if where in OTHERS:
        OTHERS[where](outer, rank)
        dist.destroy_process_group()
        return outer
    optimizer = ByHand(model) if by_hand else torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in range(4):
        optimizer.zero_grad()
        loss = outer(torch.randn(4, 8), float("inf") if is_bad(where, batch, rank) else 1.0).sum()
        if where == "backward" and rank == 0 and batch == 2:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        if where in ("weights", f"weights-{rank}") and batch == 1:
            with torch.no_grad():
                model.last.bias[0] = float("nan")
        print(f"batch {batch} done", flush=True)
    if dist.is_initialized():
        local = [getattr(one, "_local_tensor", one).double().nan_to_num(7, 8, 9).sum() for one in model.parameters()]
        print(f"weights {torch.stack(local).sum().item()!r}", flush=True)
        dist.destroy_process_group()
    return outer


def pairs(folder: Path, cases: list[str]) -> None:
    import torch._dynamo  # optimizers import it, which takes longer than all the rest

    if any("compile" in case for case in cases):
        torch.compile(Model(), backend="eager")(torch.ones(4, 8), 1.0)  # imports as much again
        torch._dynamo.reset()
    statuses = {}
    for case in cases:
        how, _, where = case.rpartition(":")
        size = 4 if "hsdp" in how else 2
        os.environ.update(WORLD_SIZE=str(size), STORE=f"file://{folder}/{case}.store")
        began = time.monotonic()
        ranks = [forked(folder / f"{case}.{rank}", rank, how, where) for rank in range(size)]
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        statuses[case] = {"exit": ends, "seconds": time.monotonic() - began}
    (folder / "statuses").write_text(json.dumps(statuses))


def forked(path: Path, rank: int, how: str, where: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    programs.die_with_parent()
    faulthandler.dump_traceback_later(200, exit=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        _alive = train(how, where)
        atexit._run_exitfuncs()  # to take all of torch down takes a second
    except BaseException:  # noqa: BLE001 - as the interpreter itself does
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    if sys.argv[1] == "pairs":
        pairs(Path(sys.argv[2]), sys.argv[3:])
    else:
        train(*sys.argv[1:3])


if __name__ == "__main__":
    main()
