"""One rank (or the starter of all ranks) of a named job STACK-FAULT; see JOBS at the end of table.py.

    RANK=1 WORLD_SIZE=3 LOCAL_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29501 STACKS_DIR=/tmp/x python jobs.py ddp-sleep

It is a training program as people write it. In STACKS_DIR every rank keeps READY.<rank> (holding its pid; written once the
fault, or for the others the loop, is reached) and STEP.<rank> (its progress: 8 bytes, little endian).
The expected verdict and the culprit of each job are in table.py.
"""

from __future__ import annotations

import asyncio
import datetime
import fcntl
import logging
import os
import pdb
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from table import JOBS

JOB = JOBS[os.environ.get("STACKS_NAME") or sys.argv[1]]
DIR = os.environ["STACKS_DIR"]
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
WORLD = JOB.world
FAULT_AT, READY_AT = 3, 2
HOUR = datetime.timedelta(hours=1)
WIDTH = 32
torch.set_num_threads(1)

_step_file: int | None = None


# ---- what the scorer reads ----


def ready(pid: int | None = None) -> None:
    path = f"{DIR}/READY.{RANK}"
    if not os.path.exists(path):
        with open(path + ".tmp", "w") as file:
            file.write(str(pid or os.getpid()))
        os.rename(path + ".tmp", path)


def tick(count: int) -> None:
    global _step_file
    if _step_file is None:
        _step_file = os.open(f"{DIR}/STEP.{RANK}", os.O_CREAT | os.O_WRONLY)
    os.pwrite(_step_file, (count + 1).to_bytes(8, "little"), 0)


# ---- the faults: each never returns, or (collectives) is the mistake ----


def warm_up_service() -> None:
    time.sleep(1_000_000)


def wait_for_signal_from_evaluator() -> None:
    threading.Event().wait()


def join_prefetcher() -> None:
    worker = threading.Thread(target=threading.Event().wait, daemon=True, name="prefetcher")
    worker.start()
    worker.join()


def next_from_queue() -> None:
    batches: queue.Queue[object] = queue.Queue()
    batches.get()


def update_shared_cache() -> None:
    lock = threading.Lock()

    def refresher() -> None:
        with lock:
            left, _right = socket.socketpair()
            left.recv(1)

    threading.Thread(target=refresher, daemon=True, name="refresher").start()
    while not lock.locked():
        time.sleep(0.01)
    ready()
    with lock:
        pass


class FifoHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with open(f"{DIR}/log.fifo", "w") as file:  # no reader
            file.write(record.getMessage())


def log_metrics() -> None:
    os.mkfifo(f"{DIR}/log.fifo")
    log = logging.getLogger("metrics")
    log.addHandler(FifoHandler())
    threading.Thread(target=log.warning, args=("first",), daemon=True, name="metrics").start()
    time.sleep(0.5)
    ready()
    log.warning("loss")


def read_control_fifo() -> None:
    path = f"{DIR}/control-{RANK}-{os.getpid()}.fifo"
    os.mkfifo(path)
    with open(path) as file:
        file.read()


def read_pipe() -> None:
    reading, _writing = os.pipe()
    os.read(reading, 1)


def fetch_from_server() -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    client = socket.create_connection(server.getsockname())
    client.recv(4096)


def run_tokenizer() -> None:
    subprocess.run(["sleep", "1000000"], check=True)


def ask() -> None:
    input("continue? ")


def break_here() -> None:
    pdb.set_trace()


def drain() -> None:
    pending = [1]
    while pending:
        for one in list(pending):
            if one > 1:
                pending.remove(one)


def poll_flag() -> None:
    while not os.path.exists(f"{DIR}/never"):
        pass


def clean_text() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def hold_lock_file(path: str) -> None:
    child = "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f,2); print(1,flush=True); time.sleep(1e6)"
    clean = {key: value for key, value in os.environ.items() if "RANK" not in key and key != "WORLD_SIZE"}
    holder = subprocess.Popen([sys.executable, "-c", child, path], stdout=subprocess.PIPE, env=clean)
    holder.stdout.readline()


def build_index_under_filelock() -> None:
    from filelock import FileLock

    hold_lock_file(f"{DIR}/index.lock")
    ready()
    with FileLock(f"{DIR}/index.lock"):
        pass


def flock_blocking() -> None:
    hold_lock_file(f"{DIR}/cache.lock")
    ready()
    with open(f"{DIR}/cache.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def load_extension() -> None:
    from torch.utils.file_baton import FileBaton

    path = f"{DIR}/extension.lock"
    open(path, "w").close()  # left by a build that was killed
    FileBaton(path).wait()


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def get_config_from_store() -> None:
    own = store()
    own.set_timeout(HOUR)
    own.get("config-of-nobody")


def wait_for_store_key() -> None:
    store().wait(["nobody-sets-this"], HOUR)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_in_c_with_the_gil() -> None:
    import ctypes

    ctypes.PyDLL(None).sleep(1_000_000)


def wait_in_kernel() -> None:
    """State D: the parent of a vfork waits in the kernel until its child execs."""
    import ctypes

    libc = ctypes.CDLL(None)
    if libc.vfork() == 0:
        libc.sleep(1_000_000)


FAULTS = {
    "cgil": sleep_in_c_with_the_gil,
    "dstate": wait_in_kernel,
    "sleep": warm_up_service,
    "event": wait_for_signal_from_evaluator,
    "threadjoin": join_prefetcher,
    "queue": next_from_queue,
    "lock": update_shared_cache,
    "loglock": log_metrics,
    "fifo": read_control_fifo,
    "pipe": read_pipe,
    "socket": fetch_from_server,
    "child": run_tokenizer,
    "input": ask,
    "pdb": break_here,
    "spin": drain,
    "pollspin": poll_flag,
    "regex": clean_text,
    "filelock": build_index_under_filelock,
    "flock": flock_blocking,
    "filebaton": load_extension,
    "storeget": get_config_from_store,
    "storewait": wait_for_store_key,
    "sigstop": stop_self,
}
LATE_READY = {"lock", "loglock", "filelock", "flock"}  # these say ready themselves


def at_fault(step: int) -> bool:
    return JOB.hung and step == FAULT_AT and RANK == JOB.rank


def prepare(step: int) -> None:
    """The head of every step: progress, the pace, and the general faults."""
    tick(step)
    if not JOB.hung and step == READY_AT or JOB.hung and step == 0 and RANK != JOB.rank:
        ready()
    if at_fault(step) and JOB.fault in FAULTS:
        if JOB.fault not in LATE_READY:
            ready()
        FAULTS[JOB.fault]()
    if JOB.fault == "p03":
        time.sleep(0.3)
    elif JOB.fault == "p2":
        time.sleep(2)
    elif JOB.fault == "slowdata" and RANK == JOB.rank:
        for _ in range(30):
            time.sleep(0.1)
    elif JOB.fault == "slowdata1" and RANK == JOB.rank:
        time.sleep(3)


def init() -> None:
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD, timeout=HOUR)


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH)


# ---- the stacks ----


def train_ddp() -> None:
    init()
    model = DDP(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10**9):
        prepare(step)
        if at_fault(step) and JOB.fault == "extrabarrier":
            ready()
            dist.barrier()
        if at_fault(step) and JOB.fault == "uneven":
            break
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()
        if at_fault(step) and JOB.fault == "skipbarrier":
            ready()
            continue
        if JOB.fault == "skipbarrier":
            dist.barrier()
    ready()
    dist.barrier()


def train_buffers() -> None:
    init()
    model = DDP(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10**9):
        prepare(step)
        if at_fault(step):
            ready()
            sample = model(batch())
            print(sample.sum())
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()


def train_loader() -> None:
    init()

    class Corpus(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> torch.Tensor:
            if JOB.hung and RANK == JOB.rank and index >= FAULT_AT * 8:
                ready(os.getppid())
                FAULTS[JOB.fault]()
            if JOB.fault == "slow":
                time.sleep(0.1)
            return torch.randn(WIDTH)

    loader = torch.utils.data.DataLoader(Corpus(), batch_size=8, num_workers=JOB.workers)
    model = DDP(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, data in enumerate(loader):
        tick(step)
        if not JOB.hung and step == READY_AT or JOB.hung and step == 0 and RANK != JOB.rank:
            ready()
        optimizer.zero_grad()
        model(data).mean().backward()
        optimizer.step()


def train_accum() -> None:
    init()
    model = DDP(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10**9):
        for micro in range(4):
            if micro == 1:
                prepare(step)
            if micro < 3:
                with model.no_sync():
                    model(batch()).mean().backward()
            else:
                model(batch()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_join() -> None:
    init()
    model = DDP(nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # In the healthy job rank 1 has few batches, and shadows the others from then on.
    count = 5 if not JOB.hung and RANK == 1 else 10**9
    with model.join():
        for step in range(count):
            prepare(step)
            optimizer.zero_grad()
            model(batch()).mean().backward()
            optimizer.step()


def train_hf() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.linear(x) - labels) ** 2).mean()}

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**5

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"x": torch.randn(WIDTH), "labels": torch.zeros(1)}

    class Callback(TrainerCallback):
        def on_step_begin(self, args, state, control, **rest):
            prepare(state.global_step)

    arguments = TrainingArguments(
        output_dir=f"{DIR}/hf",
        max_steps=10**8,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        logging_steps=10**7,
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        dataloader_num_workers=JOB.workers,
    )
    Trainer(model=Net(), args=arguments, train_dataset=Data(), callbacks=[Callback()]).train()


def train_accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randn(4096, WIDTH), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    while True:
        for data in loader:
            prepare(step)
            with accelerator.accumulate(model):
                loss = model(data).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if step % 5 == 0:
                accelerator.gather(loss.detach().reshape(1))
            step += 1


def train_lightning() -> None:
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 1)

        def training_step(self, data, batch_idx):
            prepare(self.global_step)
            return self.linear(data).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    loader = torch.utils.data.DataLoader(torch.randn(40000, WIDTH), batch_size=4)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=WORLD,
        max_steps=10**8,
        max_epochs=10**6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def train_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    init()
    model = FSDP(mlp(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10**9):
        prepare(step)
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()


def sharded(mesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_fsdp2(hybrid: bool = False) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    init()
    if hybrid:
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
    model = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10**9):
        prepare(step)
        if at_fault(step) and JOB.fault == "extraforward":
            ready()
            model(batch())
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()


def train_hsdp() -> None:
    train_fsdp2(hybrid=True)


def train_tp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    init()
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(WIDTH, 12 * WORLD), nn.ReLU(), nn.Linear(12 * WORLD, WIDTH))
    model = parallelize_module(wide, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10**9):
        prepare(step)
        optimizer.zero_grad()
        model(batch()).mean().backward()
        optimizer.step()


def train_tpdp() -> None:
    """Hand-written, 2 x 2: a step is a TP all_reduce, a DP all_reduce, and a closing collective."""
    from torch.distributed.device_mesh import init_device_mesh

    init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")

    def reduce_activations(activations: torch.Tensor) -> None:
        dist.all_reduce(activations, group=tp)

    def reduce_gradients(gradients: torch.Tensor) -> None:
        dist.all_reduce(gradients, group=dp)

    def close_step(loss: torch.Tensor) -> None:
        if JOB.fault == "skipgather":
            dist.all_gather([torch.empty(1), torch.empty(1)], loss, group=tp)
        else:
            dist.barrier()

    for step in range(10**9):
        prepare(step)
        activations, gradients = torch.ones(64), torch.ones(64)
        if at_fault(step) and JOB.fault in ("skiptp", "skipgather"):
            ready()
        else:
            reduce_activations(activations)
        reduce_gradients(gradients)
        close_step(torch.ones(1))


def train_tpdp_dp_only() -> None:
    """As the brief has it: rank skips the TP all_reduce and hangs in the DP all_reduce, as its DP peer waits in TP too.

    Mesh 2 x 2 (dp, tp); the last TP collective of a step is over pairs that cross: tp of the *other* kind. Here the DP
    peer of the culprit does an extra exchange over the world first (a barrier), so that it does not reach the DP all_reduce.
    """
    from torch.distributed.device_mesh import init_device_mesh

    init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    for step in range(10**9):
        prepare(step)
        activations, gradients = torch.ones(64), torch.ones(64)
        if at_fault(step) and JOB.fault == "skipmiddle":
            ready()  # `if self.use_tp` is False by mistake: the TP all_reduce and the barrier behind it are left out
        else:
            dist.all_reduce(activations, group=tp)
            dist.barrier()
        dist.all_reduce(gradients, group=dp)


def train_pp() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    init()

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    kind = ScheduleGPipe if JOB.variant == "gpipe" else Schedule1F1B
    stage = PipelineStage(Stage(), RANK, WORLD, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=4, loss_fn=lambda out, target: ((out - target) ** 2).mean())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-3)
    for step in range(10**9):
        prepare(step)
        optimizer.zero_grad()
        if RANK == 0:
            schedule.step(batch())
        elif RANK == WORLD - 1:
            schedule.step(target=batch())
        else:
            schedule.step()
        optimizer.step()


def train_p2p() -> None:
    """Activations go from rank to rank, gradients back."""
    init()
    activations = torch.zeros(WIDTH)

    def forward() -> None:
        if RANK > 0:
            dist.recv(activations, RANK - 1)
        if RANK < WORLD - 1:
            dist.send(activations + 1, RANK + 1)

    def backward() -> None:
        if RANK < WORLD - 1:
            dist.recv(activations, RANK + 1)
        if RANK > 0:
            dist.send(activations, RANK - 1)

    def exchange(step: int) -> None:
        """With its neighbour; from step 3 on both read first, which is the bug of the job `cycle`."""
        peer = 1 - RANK
        if JOB.fault == "cycle" and step == FAULT_AT:
            if RANK < 2:
                ready()
                dist.recv(activations, peer)
                dist.send(activations, peer)

    for step in range(10**9):
        prepare(step)
        exchange(step)
        forward()
        if JOB.variant != "chain":
            backward()
        elif RANK == WORLD - 1:
            time.sleep(0.01)


class App:
    """State that a checkpoint holds."""

    def __init__(self) -> None:
        self.step = 0
        self.weights = torch.randn(256)

    def state_dict(self) -> dict[str, object]:
        if at_fault(self.step) and JOB.variant != "write":
            ready()
            FAULTS[JOB.fault]()
        return {"weights": self.weights, "step": self.step}

    def load_state_dict(self, state) -> None:
        self.weights = state["weights"]


def writer(step: int):
    import torch.distributed.checkpoint as dcp

    class Slow(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            if at_fault(step) and JOB.variant == "write":
                ready()
                FAULTS[JOB.fault]()
            return super().write_data(plan, planner)

    return Slow(f"{DIR}/ckpt")


def train_dcp() -> None:
    import torch.distributed.checkpoint as dcp

    init()
    app = App()
    for step in range(10**9):
        app.step = step
        tick(step)
        if not JOB.hung and step == READY_AT or JOB.hung and step == 0 and RANK != JOB.rank:
            ready()
        dist.all_reduce(app.weights)
        app.weights.div_(WORLD)
        dcp.save({"app": app, f"rank{RANK}": torch.randn(64)}, storage_writer=writer(step))


def train_asyncsave() -> None:
    import torch.distributed.checkpoint as dcp

    init()
    app = App()
    saving = None
    background = dist.new_group()  # two threads may not share a group
    for step in range(10**9):
        app.step = step
        tick(step)
        if not JOB.hung and step == READY_AT or JOB.hung and step == 0 and RANK != JOB.rank:
            ready()
        for _ in range(20):
            dist.all_reduce(app.weights)
            app.weights.div_(WORLD)
        if saving is not None:
            saving.result()
        saving = dcp.async_save(
            {"app": app, f"rank{RANK}": torch.randn(64)}, storage_writer=writer(step), process_group=background
        )


def train_thread() -> None:
    worker = threading.Thread(target=train_ddp, name="trainer", daemon=True)
    worker.start()
    worker.join()


def train_threadexc() -> None:
    """The trainer thread of one rank dies of a hidden exception; its main thread goes on to the last barrier."""
    init()

    def loop() -> None:
        model = DDP(nn.Linear(WIDTH, 1))
        try:
            for step in range(10**9):
                tick(step)
                if step == 0 and RANK != JOB.rank:
                    ready()
                if at_fault(step):
                    raise ValueError("bad sample")
                model(batch()).mean().backward()
        except Exception:
            pass

    worker = threading.Thread(target=loop, name="trainer")
    worker.start()
    worker.join()
    ready()
    dist.barrier()


async def _serve_and_train() -> None:
    await asyncio.get_running_loop().run_in_executor(None, train_ddp)


def train_asyncio() -> None:
    asyncio.run(_serve_and_train())


def train_uvloop() -> None:
    import uvloop

    uvloop.run(_serve_and_train())


def train_objects() -> None:
    init()
    for step in range(10**9):
        prepare(step)
        config = [{"lr": 0.1, "step": step}] if RANK == 0 else [None]
        if at_fault(step) and JOB.fault == "skip":
            ready()
        else:
            dist.broadcast_object_list(config, src=0)
        found = [None] * WORLD
        dist.all_gather_object(found, {"rank": RANK, "loss": 0.1})


def train_monitored() -> None:
    init()
    for step in range(10**9):
        prepare(step)
        dist.monitored_barrier(timeout=HOUR)


def train_newgroup() -> None:
    init()
    groups = [dist.new_group([rank for rank in range(WORLD) if rank % 2 == odd]) for odd in (0, 1)]
    for step in range(10**9):
        prepare(step)
        if JOB.fault == "skip" and step == FAULT_AT:
            if RANK == JOB.rank:
                ready()
            else:
                groups.append(dist.new_group(list(range(WORLD))))
        dist.all_reduce(torch.ones(32), group=groups[RANK % 2])
        dist.all_reduce(torch.ones(32))


def tokenize_corpus(step: int) -> None:
    """Real work of a rank that the others wait for; it goes on and on."""
    words = 0
    for number in range(10**9):
        words += len(str(number).split("7"))
        if number % 20000 == 0:
            tick(step * 10**6 + number // 20000 + 1)


def train_mpf() -> None:
    """main_process_first: rank 0 prepares the data while the others are in the first barrier."""
    init()
    model = DDP(nn.Linear(WIDTH, 1))
    for step in range(4):
        tick(step)
        model(batch()).mean().backward()
    if RANK != JOB.rank or not JOB.hung:
        ready()
    if RANK != 0:
        dist.barrier()
    if JOB.hung and RANK == JOB.rank:
        ready()
        FAULTS[JOB.fault]()
    if RANK == 0:
        if not JOB.hung:
            tokenize_corpus(5)
        dist.barrier()
    dist.all_reduce(torch.ones(1))


def write_checkpoint(step: int) -> None:
    state = {f"layer{number}": torch.randn(256, 1024) for number in range(16)}
    for number in range(10**9):
        path = f"{DIR}/save0-{number % 2}.pt"
        with open(path, "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())
        tick(step * 10**6 + number + 1)


def evaluate(step: int) -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    with torch.no_grad():
        for number in range(10**9):
            loss = model(torch.randn(64, 256)).sum().item()
            tick(step * 10**6 + number + int(loss > 1e9) + 1)


def train_rank0() -> None:
    """Every fourth step rank 0 saves or evaluates, while the others wait in a barrier."""
    init()
    model = DDP(nn.Linear(WIDTH, 1))
    for step in range(10**9):
        tick(step)
        model(batch()).mean().backward()
        if step == FAULT_AT:
            ready()
            if RANK == 0:
                if JOB.hung:
                    FAULTS[JOB.fault]()
                {"save": write_checkpoint, "eval": evaluate}[JOB.variant](step)
            dist.barrier()


def train_compile() -> None:
    """One rank compiles, again and again as its shapes and code change."""
    init()
    for step in range(10**9):
        tick(step)
        if step == FAULT_AT:
            ready()
        if RANK == JOB.rank and step >= FAULT_AT:
            for number in range(10**6):
                torch._dynamo.reset()
                depth = 3 + number

                def block(x: torch.Tensor) -> torch.Tensor:
                    for one in range(depth):
                        x = torch.softmax(x * (one + number) + torch.sin(x), dim=-1).relu() + x.mean()
                    return x

                torch.compile(block)(torch.randn(8 + number, 16))
                tick(step + number)
        dist.all_reduce(torch.ones(8))


def train_exit() -> None:
    """One rank is gone; the others wait for it where the loss of a connection does not show."""
    if JOB.fault == "init":
        ready()
        if RANK == JOB.rank:
            time.sleep(3)
            os._exit(1)
        init()
        return
    init()
    for step in range(10**9):
        tick(step)
        if step == 0 and RANK != JOB.rank:
            ready()
        if step == FAULT_AT and JOB.fault == "store":
            # every rank reports to the store that it has saved its part, and waits for all
            if RANK == JOB.rank:
                ready()
                os._exit(1)
            try:
                store().set(f"saved-{RANK}", "1")
                store().wait([f"saved-{rank}" for rank in range(WORLD)], HOUR)
            finally:
                pass
        if at_fault(step) and JOB.fault == "child":
            import multiprocessing

            multiprocessing.get_context("fork").Process(target=time.sleep, args=(10**6,)).start()  # a daemon that logs
            ready()
            os._exit(1)
        dist.all_reduce(torch.ones(8))


def train_chain() -> None:
    """One rank waits, outside of any collective, for another rank that is stuck: only that one is to blame."""
    init()
    waits, stuck = JOB.waits, JOB.rank
    path = f"{DIR}/between"
    if JOB.variant == "fifo":
        if RANK == stuck:
            os.mkfifo(path)
        dist.barrier()
    if JOB.variant == "socket":
        if RANK == stuck:
            server = socket.socket()
            server.bind(("127.0.0.1", 0))
            server.listen()
            store().set("service", str(server.getsockname()[1]))
        if RANK == waits:
            client = socket.create_connection(("127.0.0.1", int(store().get("service"))))
        if RANK == stuck:
            connection, _ = server.accept()
    for step in range(10**9):
        prepare(step) if RANK != stuck else tick(step)
        if step == FAULT_AT:
            if RANK == stuck:
                opened = os.open(path, os.O_RDWR) if JOB.variant == "fifo" else None
                time.sleep(2)
                ready()
                FAULTS[JOB.fault]()
                print(opened, connection)
            if RANK == waits and JOB.variant == "store":
                store().wait([f"shards-of-{stuck}"], HOUR)
            if RANK == waits and JOB.variant == "socket":
                client.recv(1000)
            if RANK == waits and JOB.variant == "fifo":
                with open(path) as file:
                    file.read(10)
            if RANK == waits and JOB.variant == "file":
                while not os.path.exists(f"{DIR}/shards.done"):
                    time.sleep(0.2)
        dist.all_reduce(torch.ones(8))


def train_crosslock() -> None:
    """Rank 0 holds a file lock while it waits in a collective; rank 1 wants that lock before it goes there."""
    init()
    for step in range(10**9):
        tick(step)
        if step == 0 and RANK == 2:
            ready()
        if step == FAULT_AT and RANK < 2:
            file = open(f"{DIR}/shared.lock", "w")
            if RANK == 1:
                time.sleep(2)
            ready()
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.all_reduce(torch.ones(8))


def train_everybody() -> None:
    """All ranks are stuck at the same line of user code: a licence server that does not answer."""
    init()
    server = socket.socket()
    if RANK == 0:
        server.bind(("127.0.0.1", 0))
        server.listen()
        store().set("licence", str(server.getsockname()[1]))
    port = int(store().get("licence"))
    for step in range(10**9):
        tick(step)
        dist.all_reduce(torch.ones(8))
        if step == FAULT_AT:
            client = socket.create_connection(("127.0.0.1", port))
            ready()
            client.recv(100)


def train_export() -> None:
    """Training is over: all ranks but 0 have left as they should; rank 0 exports the model."""
    init()
    for step in range(5):
        tick(step)
        dist.all_reduce(torch.ones(8))
    dist.barrier()
    ready()
    time.sleep(0.5)
    dist.destroy_process_group()
    if RANK == 0:
        write_checkpoint(5)


def train_slowinit() -> None:
    """Rank 0 still prepares the data before init_process_group, where the others wait for it."""
    ready()
    if RANK == 0:
        tokenize_corpus(0)
    init()


def train_slowstage() -> None:
    """A pipeline of which one stage takes 2 s of computing."""
    init()
    data = torch.zeros(WIDTH)
    for step in range(10**9):
        prepare(step)
        if RANK > 0:
            dist.recv(data, RANK - 1)
        if RANK == JOB.rank:
            end = time.monotonic() + 2
            weights = torch.randn(256, 256)
            while time.monotonic() < end:
                weights = (weights @ weights).tanh()
        if RANK < WORLD - 1:
            dist.send(data, RANK + 1)
            dist.recv(data, RANK + 1)
        if RANK > 0:
            dist.send(data, RANK - 1)


# ---- starters ----


def run() -> None:
    globals()[f"train_{JOB.train}"]()


def spawned(rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    global RANK
    RANK = rank
    run()


def start_ray() -> None:
    import ray

    ray.init(
        num_cpus=WORLD,
        include_dashboard=False,
        _temp_dir=f"{DIR}/r",
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=80 * 2**20,
    )

    @ray.remote(num_cpus=1)
    class Trainer:
        def fit(self, rank: int, port: str) -> None:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(WORLD))
            import jobs

            jobs.spawned(rank)

    trainers = [Trainer.remote() for _ in range(WORLD)]
    ray.get([trainer.fit.remote(rank, os.environ["STACKS_PORT"]) for rank, trainer in enumerate(trainers)])


if __name__ == "__main__":
    if JOB.launch == "spawn":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["STACKS_PORT"])
        torch.multiprocessing.spawn(spawned, nprocs=WORLD)
    elif JOB.launch == "ray":
        start_ray()
    elif JOB.train != "module":
        run()
    else:
        init()
        net = DDP(nn.Linear(WIDTH, 1))
        optim = torch.optim.SGD(net.parameters(), lr=1e-3)
        for step in range(10**9):
            prepare(step)
            optim.zero_grad()
            loss = net(torch.randn(8, WIDTH)).mean()
            loss.backward()
            optim.step()
