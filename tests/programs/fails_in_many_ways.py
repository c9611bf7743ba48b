"""Trains for six steps and fails in one way: fails_in_many_ways.py KIND; its logs are in tests/recorded/logs."""

import gc
import logging
import os
import signal
import sys
import time
from datetime import timedelta


def _variable(*names: str) -> int:
    return int(next(os.environ[name] for name in names if name in os.environ))


rank = _variable("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
world = _variable("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
kind, guilty = sys.argv[-1], int(os.environ.get("GUILTY", "2"))
me = rank == guilty
if kind == "import" and me:
    import flash_attn_that_is_not_here  # type: ignore[import-not-found]  # noqa: F401

if kind == "never" and me:
    time.sleep(3600)

gc.disable()  # imports make no garbage, and to look for it takes a third of their time

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo", timeout=timedelta(seconds=4))


class Killed(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def train_step(step: int) -> None:
    x = torch.ones(4096)
    if step == 1 and kind.startswith("handled") and rank == (guilty if kind == "handled-own" else 0):
        try:
            open("/data/cache/tokens.bin").close()
        except OSError:
            logging.exception("no cache, reading the source")
    if step == 3:
        fault(x)
    dist.all_reduce(x)
    print(f"rank {rank} step {step} loss {x[0].item():.3f}", flush=True)


def fault(x: torch.Tensor) -> None:  # noqa: C901
    if kind == "all":
        raise ValueError("optimizer got an empty parameter list")
    if kind == "two" and rank in (guilty, guilty + 1):
        if rank != guilty:
            time.sleep(0.02)
        raise {True: KeyError, False: IndexError}[me](f"sample {rank}")
    if not me:
        return
    if kind in ("raise", "handled", "handled-own"):
        raise ValueError("label 1000 is out of range for 1000 classes")
    if kind in ("kill", "handled-kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "abort":
        os.abort()
    if kind in ("exit1", "handled-exit"):
        sys.exit(1)
    if kind == "exit3":
        os._exit(3)
    if kind == "exit0":
        os._exit(0)
    if kind in ("hang", "handled-hang"):
        time.sleep(3600)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "late":
        time.sleep(6)
    if kind == "size":
        dist.all_reduce(torch.ones(2048))
    if kind == "op":
        dist.barrier()
    if kind == "order":
        dist.broadcast(x, 0)
    if kind == "file":
        open("/data/imagenet/train.idx").close()
    if kind == "full":
        os.write(os.open("/dev/full", os.O_WRONLY), b"x" * 4096)
    if kind == "save":
        torch.save({"model": torch.ones(1 << 20)}, os.environ["FULL_DISK"] + "/step3.pt")
    if kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has 1.10 GiB free.")
    if kind == "memory":
        with open(os.environ["MEMORY_CGROUP"] + "/cgroup.procs", "w") as group:
            group.write(str(os.getpid()))
        keep = []
        while True:
            keep.append(bytearray(64 << 20))
    if kind == "monitored":
        time.sleep(6)
    if kind == "assert":
        assert x.sum() < 0, "loss is not finite"
    if kind == "chained":
        try:
            dict[str, float]()["lr"]
        except KeyError as error:
            raise RuntimeError("the config of the run is not complete") from error
    if kind == "ckpt":
        import io

        torch.load(io.BytesIO(b"\0" * 64))
    if kind == "thread":
        import threading

        thread = threading.Thread(target=lambda: 1 / 0, name="prefetch")
        thread.start()
        thread.join()
        os._exit(1)
    if kind == "loader":
        for _ in torch.utils.data.DataLoader(Killed(), num_workers=1):
            pass
    if kind == "recursion":
        fault(x)


for step in range(6 - (kind == "length" and me)):
    if kind == "monitored" and step == 3:
        if me:
            time.sleep(8)
        dist.monitored_barrier(timeout=timedelta(seconds=2))
    train_step(step)
    if kind == "restart" and step == 2:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            if me:
                raise OSError(28, "No space left on device", "/ckpt/step2.pt")
        elif rank == 0:
            raise FileNotFoundError(2, "No such file or directory", "/ckpt/latest")
print(f"rank {rank} done", flush=True)
if kind == "length" and me:
    os._exit(0)
dist.destroy_process_group()
