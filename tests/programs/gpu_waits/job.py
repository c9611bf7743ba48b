"""A rank on the GPUs of cuda.c: it trains by the function JOB until the ranks in BAD (default 2) run FAULT.

Each rank writes FOLDER/ready-RANK once it is set up, and a bad rank FOLDER/bad-RANK at its fault. Only jobs that need
torch's own frames import torch.
"""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Protocol

    class Tensor(Protocol):
        def item(self) -> float: ...
        def cpu(self) -> float: ...
        def __float__(self) -> float: ...


FOLDER = Path(os.environ["JOB_FOLDER"])
JOB = os.environ["JOB"]
FAULT = os.environ.get("FAULT", "")
BAD = {int(word) for word in os.environ.get("BAD", "2").split(",")}
STEP_US = float(os.environ.get("STEP_US", "20000"))
FAULT_AT = 3
RANK, SIZE = -1, 0
gpu: Any = None


def set_up(rank: int, size: int) -> None:
    """Load the libraries, open the GPU, and make the group of all ranks."""
    global gpu, RANK, SIZE
    RANK, SIZE = rank, size
    os.environ["GPU_RANK"] = str(rank)
    path = os.environ["GPU_LIBRARIES"] + "/libtorch_python.so"
    loader = importlib.machinery.ExtensionFileLoader("libtorch_python", path)
    spec = importlib.util.spec_from_loader("libtorch_python", loader)
    assert spec is not None
    gpu = importlib.util.module_from_spec(spec)
    loader.exec_module(gpu)
    gpu.init()
    device = os.environ.get("GPU_DEVICE", "/dev/nvidia{}").format(rank)
    if os.path.exists(device):
        os.set_inheritable(os.open(device, os.O_RDONLY), False)
    gpu.members(0, (1 << size) - 1)
    gpu.members(1, (1 << size // 2) - 1)
    (FOLDER / f"ready-{rank}").touch()
    if not JOB.startswith("init"):
        gpu.comm_init(0, size)


def at_fault() -> None:
    (FOLDER / f"bad-{RANK}").write_text(str(os.getpid()))


# Faults, run by the ranks in BAD at step FAULT_AT.


def sleeps() -> None:
    time.sleep(3600)


def reads_a_pipe() -> None:
    """Read a shard as WebDataset's "pipe:curl ..." does, from a download that has stalled."""
    argv = ["bash", "-c", "exec -a curl sleep 3600"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=plain()) as download:
        assert download.stdout is not None
        download.stdout.read(1 << 20)


def opens_a_fifo() -> None:
    path = FOLDER / f"shard-{RANK:05d}.tar"
    os.mkfifo(path)
    path.read_bytes()


def waits_for_a_marker() -> None:
    marker = FOLDER / "tokenized.done"
    while not marker.exists():
        pass


def waits_for_a_lock() -> None:
    lock, held, work = threading.Lock(), threading.Event(), queue.Queue[bytes]()

    def prefetch() -> None:
        with lock:
            held.set()
            work.get()

    threading.Thread(target=prefetch, name="prefetch", daemon=True).start()
    held.wait()
    with lock:
        pass


def waits_for_a_file_lock() -> None:
    path = FOLDER / "tokenizer.lock"
    holder = "import fcntl,sys,time; fcntl.flock(sys.stdin, fcntl.LOCK_EX); print(flush=True); time.sleep(3600)"
    with path.open("w") as other:
        held = subprocess.Popen([sys.executable, "-c", holder], stdin=other, stdout=subprocess.PIPE, env=plain())
    assert held.stdout is not None
    held.stdout.readline()
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exits() -> None:
    os._exit(0)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plain() -> dict[str, str]:
    """Return an environment without rank variables, for helper programs."""
    return {name: text for name, text in os.environ.items() if "RANK" not in name and "WORLD" not in name}


def runs_a_child_that_sleeps() -> None:
    os.mkfifo(FOLDER / "answer")
    subprocess.run(["sh", "-c", f"read answer < {FOLDER}/answer"], check=True, env=plain())


def runs_a_child_that_works() -> None:
    program = "for number in range(10**12): sum(range(number % 1000))"
    subprocess.run([sys.executable, "-c", program], check=True, env=plain())


def matches_forever() -> None:
    """Backtrack: the C code of `re` computes with the GIL held, and no line changes."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def tokenizes() -> None:
    done = 0
    while True:
        done += 1
        sum(number * number for number in range(20_000))
        sys.stderr.write(f"\rtokenize: {done}/900000")


def evaluates() -> None:
    correct = 0
    for batch in range(1_000_000):
        gpu.launch(STEP_US)
        correct += int(gpu.Tensor().item() > batch % 2)


def saves() -> None:
    with (FOLDER / "checkpoint.pt").open("wb") as file:
        while True:
            file.write(os.urandom(1 << 16))
            file.flush()
            time.sleep(0.02)
            if file.tell() > 32 << 20:
                file.seek(0)


def compiles_for_the_gpu() -> None:
    gpu.jit(3600.0)


def loads_modules() -> None:
    gpu.module_load(3600.0)


def takes_another_branch() -> None:
    gpu.all_reduce(0, 7)
    found = gpu.Tensor().item()
    print("skip this batch", found)


def loses_a_copy() -> None:
    gpu.launch(-1)


def breaks_the_network() -> None:
    gpu.network_down()


def skips_in_subgroup() -> None:
    """Do nothing here: reduce_gradients leaves out one collective of the subgroup."""


def kernel_never_ends() -> None:
    gpu.launch(3600e6)


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        *(
            sleeps,
            reads_a_pipe,
            opens_a_fifo,
            waits_for_a_marker,
            waits_for_a_lock,
            waits_for_a_file_lock,
            is_stopped,
            exits,
        ),
        *(is_killed, runs_a_child_that_sleeps, runs_a_child_that_works, matches_forever, tokenizes, evaluates, saves),
        *(compiles_for_the_gpu, loads_modules, takes_another_branch, loses_a_copy, breaks_the_network),
        *(skips_in_subgroup, kernel_never_ends),
    )
}


def fault_of(step: int) -> bool:
    return RANK in BAD and step == FAULT_AT and FAULT in FAULTS


# Jobs


def load_batch(step: int) -> list[int]:
    if fault_of(step):
        at_fault()
        FAULTS[FAULT]()
    return [step * SIZE + RANK]


def forward(batch: list[int]) -> Tensor:
    for _ in batch:
        gpu.launch(STEP_US / 2)
    loss: Tensor = gpu.Tensor()
    return loss


def reduce_gradients(step: int) -> None:
    gpu.launch(STEP_US / 2)
    if SIZE // 2 > RANK and not (fault_of(step) and FAULT == "skips-in-subgroup"):
        gpu.all_reduce(1)
    gpu.all_reduce(0)


def train() -> None:
    total = 0.0
    for step in range(1_000_000):
        loss = forward(load_batch(step))
        reduce_gradients(step)
        total += loss.item()


def keep(metrics: dict[str, float], loss: Tensor) -> None:
    metrics["sum"] = metrics.get("sum", 0.0) + float(loss)


def train_with_plain_words() -> None:
    """Read the loss on a line that names no function of torch."""
    metrics: dict[str, float] = {}
    for step in range(1_000_000):
        loss = forward(load_batch(step))
        reduce_gradients(step)
        keep(metrics, loss)


def train_with_odd_names() -> None:
    samples_seen, loss_ema = 0, 0.0
    while samples_seen < 10**12:
        x = load_batch(samples_seen // 8)
        y = forward(x)
        reduce_gradients(0)
        loss_ema = 0.9 * loss_ema + 0.1 * y.cpu()
        samples_seen += 8


def attention(layer: int) -> None:
    gpu.launch(STEP_US / 24)


def mlp(layer: int) -> None:
    gpu.launch(STEP_US / 24)


def run_ahead() -> None:
    """Read no result: each rank blocks at the launch that overfills its queue, which differs between ranks."""
    for step in range(1_000_000):
        load_batch(step)
        for layer in range(3 + RANK % 3):
            attention(layer)
            mlp(layer)
        gpu.all_reduce(0)
        gpu.launch(STEP_US / 8)


def log_on_rank_0() -> None:
    """Only rank 0 reads the loss; the others run ahead."""
    for step in range(1_000_000):
        loss = forward(load_batch(step))
        reduce_gradients(step)
        if RANK == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def launch_bound() -> None:
    step = 0
    while True:
        for layer in range(200):
            sum(range(3000))  # Python is slower than the GPU
            attention(layer)
        gpu.all_reduce(0)
        step += 1
        if step % 50 == 0:
            gpu.synchronize()


def preprocess(rows: int) -> float:
    until, total = time.monotonic() + 3.0, 0.0
    while time.monotonic() < until:
        total += sum(math.sqrt(row) for row in range(rows))
    return total


def straggle() -> None:
    for step in range(1_000_000):
        if RANK in BAD:
            preprocess(1000 + step)
        forward([step])
        gpu.all_reduce(0)
        gpu.event_synchronize()


def init() -> None:
    if RANK in BAD:
        at_fault()
        FAULTS[FAULT]()
    gpu.comm_init(0, SIZE)


def init_of_more_ranks() -> None:
    """Wait in the bootstrap with all other ranks: one more is expected than there are."""
    gpu.comm_init(0, SIZE + 1)


def aborts() -> None:
    """Give up after a timeout: the communicator is destroyed, which waits for its stream."""
    gpu.network_down()
    gpu.all_reduce(0)
    at_fault()
    gpu.comm_abort()


def write_metrics(stop: threading.Event) -> None:
    with (FOLDER / f"metrics-{RANK}.jsonl").open("a") as file:
        while not stop.wait(0.3):
            print({"time": time.time(), "sum": sum(range(200_000))}, file=file, flush=True)


def train_with_metrics() -> None:
    """Train with a thread on rank 0 that keeps writing even if the main thread hangs."""
    if RANK == 0:
        threading.Thread(target=write_metrics, args=(threading.Event(),), name="metrics", daemon=True).start()
    train()


def first_steps_compile() -> None:
    at_fault()
    for kernel in range(1000):
        gpu.module_load(0.6 + kernel % 3 / 10)
        gpu.launch(STEP_US)
    train()


def train_backward() -> None:
    """Go backward with torch's own frames: the main thread sleeps, pt_autograd_0 waits for the GPU."""
    import torch
    from torch.autograd import graph

    weight = torch.ones(1, requires_grad=True)
    # A C function replaces torch's C++ engine, whose device threads do the work.
    graph.Variable._execution_engine = gpu
    for step in range(1_000_000):
        load_batch(step)
        loss = (weight * 2).sum()
        loss.backward()


def train_to_barriers() -> None:
    """Meet at torch's own barrier(), whose process group waits for the stream."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    c10d._get_default_group = lambda: gpu
    c10d._rank_not_in_group = lambda group: False
    for step in range(1_000_000):
        forward(load_batch(step))
        dist.barrier()


class Shards:
    """A dataset whose worker process is the fault."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index == 0 and RANK in BAD:
            at_fault()
            FAULTS[FAULT]()
        return index


def train_on_loader() -> None:
    """Train with torch's DataLoader and a worker process."""
    from torch.utils.data import DataLoader

    def forever() -> Iterator[Any]:
        while True:
            yield from DataLoader(Shards(), batch_size=8, num_workers=1)  # type: ignore[arg-type]

    for batch in forever():
        loss = forward([len(batch)])
        gpu.all_reduce(0)
        loss.item()


JOBS: dict[str, Callable[[], None]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        *(
            train,
            train_with_odd_names,
            train_with_plain_words,
            run_ahead,
            log_on_rank_0,
            launch_bound,
            straggle,
            init,
            init_of_more_ranks,
            aborts,
        ),
        *(train_with_metrics, first_steps_compile, train_backward, train_to_barriers, train_on_loader),
    )
}


def _spawned(local_rank: int, size: int) -> None:
    os.environ.update(RANK=str(local_rank), WORLD_SIZE=str(size))
    import torch.distributed as dist

    dist.init_process_group("gloo")
    run(local_rank, size)


def run(rank: int, size: int) -> None:
    if JOB in ("train-backward", "train-to-barriers", "train-on-loader"):
        import torch.distributed  # noqa: F401 - a slow import must not delay the first step of a ready rank
    set_up(rank, size)
    JOBS[JOB]()


def main() -> None:
    os.nice(10)  # polling ranks would otherwise starve the command under test
    if "SPAWN" in os.environ:
        import torch.multiprocessing as mp

        mp.spawn(_spawned, args=(int(os.environ["SPAWN"]),), nprocs=int(os.environ["SPAWN"]))
        return
    for rank, size in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ:
            run(int(os.environ[rank]), int(os.environ[size]))
            return


if __name__ == "__main__":
    main()
