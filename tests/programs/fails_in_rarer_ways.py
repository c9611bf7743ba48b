"""Trains for six steps and fails in one way, or does not and only writes of failures: fails_in_rarer_ways.py KIND."""

import logging
import os
import signal
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

rank = int(os.environ["RANK"])
kind = sys.argv[-1]
logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")


class Shards(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 24 and rank == 1:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return torch.ones(8)


class FetchError(OSError):
    pass


def fetch() -> None:
    if kind == "service":
        raise ConnectionResetError(104, "Connection reset by peer")
    raise FetchError("cannot fetch s3://bucket/shard-17:\n  Connection closed by peer\n  gave up after 5 attempts")


def recurse(depth: int) -> None:
    recurse(depth + 1)


def upload() -> None:
    """Fail in every step, on every rank, and go on."""
    try:
        raise TimeoutError("telemetry: read timed out after 30 s")
    except TimeoutError:
        if kind == "telemetry-segv":
            logging.exception("telemetry upload failed")
        else:
            traceback.print_exc()


def write_of_failures(step: int) -> None:
    print(f"rank {rank} step {step} error_rate: 0.01 overflow: 0", flush=True)
    print('sample: "Traceback (most recent call last):" is what Python prints first', flush=True)
    print("eval: Killed 3 of 4 mutants; CUDA out of memory events: 0; NCCL timeouts: 0", flush=True)
    print("ValueError: 12 occurrences in the corpus, Segmentation fault: 3", flush=True)


def fault() -> None:  # noqa: C901
    if kind in ("service", "service-text") and rank == 3:
        fetch()
    if kind == "telemetry-segv" and rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "telemetry-exit" and rank == 2:
        os._exit(7)
    if kind == "recursion" and rank == 2:
        recurse(0)
    if kind == "sysexit" and rank == 1:
        sys.exit("config not found: conf/large.yaml")
    if kind == "group" and rank == 2:
        raise ExceptionGroup("2 loaders failed", [ValueError("shard 3 is empty"), OSError(5, "I/O error", "/data/9")])
    if kind == "noted" and rank == 1:
        error = KeyError("attention.bias")
        error.add_note("while loading layer 7")
        raise error
    if kind == "restart-segv":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 3:
            raise RuntimeError("cannot reach the license server lic01:27000")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)


@record
def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    batches = iter(torch.utils.data.DataLoader(Shards(), batch_size=8, num_workers=1)) if kind == "worker" else None
    for step in range(6):
        if batches is not None:
            next(batches)
        if kind.startswith("telemetry"):
            upload()
        if kind == "healthy":
            write_of_failures(step)
        if step == 3:
            fault()
        dist.all_reduce(torch.ones(16))
        print(f"[{rank}] step {step} ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
