"""Trains for four steps on Gloo, and ends in one way: ends_in_many_ways.py END CONSOLE; rank 1 is the guilty one.

CONSOLE: `bar` draws a progress bar without newlines on stderr, `plain` prints lines, `json` logs one object per line,
with the traceback of an uncaught exception in "msg".
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import faulthandler
import json
import logging
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

END, CONSOLE = sys.argv[-2:]
RANK = int(os.environ["RANK"])
ME = RANK == 1
if END == "import" and ME:
    import flash_attn_that_is_not_here  # type: ignore[import-not-found]  # noqa: F401

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS = 4


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = record.getMessage() + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        return json.dumps({"time": stamp, "level": record.levelname.lower(), "rank": RANK, "msg": said})


def _speak() -> logging.Logger:
    handler = logging.StreamHandler()
    if CONSOLE == "json":
        handler.setFormatter(_Json())
        sys.excepthook = lambda *exc: logging.getLogger().error("uncaught exception", exc_info=exc)
        threading.excepthook = lambda args: logging.getLogger().error(
            "uncaught exception in a thread",
            exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
        )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    return logging.getLogger()


def _progress(step: int, log: logging.Logger) -> None:
    if CONSOLE == "bar":
        part = 100 * step // _STEPS
        bar = "█" * (part // 10)
        sys.stderr.write(f"\r{part:3d}%|{bar:<10}| {step}/{_STEPS} [00:0{step}<00:0{_STEPS - step},  1.02it/s]")
        sys.stderr.flush()
    elif CONSOLE == "json":
        log.info("step %d loss %.3f", step, 1 / (step + 1))
    else:
        print(f"step {step} loss {1 / (step + 1):.3f}", flush=True)


class ShardError(Exception):
    """Cannot be unpickled: it has more arguments than it gives to Exception."""

    def __init__(self, shard: int, why: str) -> None:
        super().__init__(f"shard {shard}: {why}")


class Shards(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if END == "worker-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if END == "worker-unpicklable":
            raise ShardError(index, "checksum mismatch")
        raise ValueError(f"sample {index} is empty")


def _load() -> None:
    for _ in torch.utils.data.DataLoader(Shards(), num_workers=1):
        pass


def _value_error() -> None:
    raise ValueError("label 1000 is out of range for 1000 classes")


def _chained() -> None:
    try:
        dict[str, float]()["warmup"]
    except KeyError as error:
        raise RuntimeError("the schedule is not complete") from error


def _during() -> None:
    try:
        open("/data/absent/tokens.bin").close()
    except OSError:
        int("seven")


def _group() -> None:
    raise ExceptionGroup(
        "2 loaders failed",
        [ValueError("shard 3 is empty"), FileNotFoundError(2, "No such file or directory", "/data/absent/9.bin")],
    )


def _argparse() -> None:
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--lr", type=float)
    parser.parse_args(["--lr", "0.1", "--lr-decay", "3"])


def _abort_in_c() -> None:
    ctypes.CDLL(None)["__assert_fail"](b"rows % 8 == 0", b"fused_norm.cpp", 88, b"void launch(int)")


def _terminate() -> None:
    # As C++ does it where nothing catches: abort, with the text of std::terminate before it.
    os.write(2, b"terminate called after throwing an instance of 'std::runtime_error'\n  what():  pool is empty\n")
    os.abort()


def _overflow_the_stack() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc = ctypes.CDLL(None)
    sys.setrecursionlimit(1 << 20)

    def again(one: int, other: int) -> int:
        libc.qsort((ctypes.c_int * 2)(2, 1), 2, 4, called)
        return 0

    called = compare(again)
    again(2, 1)


def _recurse(depth: int = 0) -> None:
    _recurse(depth + 1)


def _exhaust_cgroup() -> None:
    kept = []
    while True:
        kept.append(bytearray(64 << 20))


def _exhaust_limit() -> None:
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), now + (256 << 20)))
    bytearray(1 << 30)


def _survive_and_die() -> None:
    try:
        open("/data/absent/tokens.bin").close()
    except OSError:
        logging.exception("no cache, reading the source")
    os.kill(os.getpid(), signal.SIGKILL)


def _fail_in_thread() -> None:
    thread = threading.Thread(target=lambda: 1 // 0, name="prefetch")
    thread.start()
    thread.join()
    os._exit(1)


def _fail_at_exit() -> None:
    def flush() -> None:
        traceback.print_exception(OSError(5, "Input/output error", "/mnt/metrics/run.db"))
        os._exit(4)

    atexit.register(flush)
    sys.exit(0)


def _warn_and_die() -> None:
    warnings.warn("lr_scheduler.step() was called before optimizer.step()", stacklevel=1)
    os._exit(9)


def _segv_with_faulthandler() -> None:
    faulthandler.enable()
    os.kill(os.getpid(), signal.SIGSEGV)


def _kill(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


ENDS: dict[str, Callable[[], Any]] = {
    "value-error": _value_error,
    "chained": _chained,
    "during": _during,
    "group": _group,
    "assert": lambda: exec("assert 0.0 > 1.0, 'loss is not finite'"),
    "sys-exit-words": lambda: sys.exit("config not found: conf/large.yaml"),
    "sys-exit-3": lambda: sys.exit(3),
    "os-exit": lambda: os._exit(7),
    "leaves-with-0": lambda: os._exit(0),
    "sigkill": _kill(signal.SIGKILL),
    "sigsegv": _kill(signal.SIGSEGV),
    "sigsegv-faulthandler": _segv_with_faulthandler,
    "sigabrt": os.abort,
    "sigterm": _kill(signal.SIGTERM),
    "interrupt": lambda: exec("raise KeyboardInterrupt"),
    "memory-cgroup": _exhaust_cgroup,
    "memory-limit": _exhaust_limit,
    "survived-then-killed": _survive_and_die,
    "c-assert": _abort_in_c,
    "cpp-terminate": _terminate,
    "stack-overflow": _overflow_the_stack,
    "recursion": _recurse,
    "worker-killed": _load,
    "worker-raises": _load,
    "worker-unpicklable": _load,
    "unpicklable": lambda: pickle.dumps({"collate": lambda batch: batch}),
    "cuda-library": lambda: ctypes.CDLL("libcudart.so.12"),
    "timeout": lambda: time.sleep(3600),
    "thread": _fail_in_thread,
    "at-exit": _fail_at_exit,
    "warns-then-dies": _warn_and_die,
}


def _fault() -> None:
    if END == "two" and RANK == 2:
        time.sleep(0.05)
        raise IndexError("sample 2 is out of range")
    if END == "two" and ME:
        raise KeyError("sample 1")
    if ME and END in ENDS:
        ENDS[END]()


def main() -> None:
    if END == "argparse":  # all ranks have the same command line
        _argparse()
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    log = _speak()
    for step in range(_STEPS):
        if step == 2:
            _fault()
        dist.all_reduce(torch.ones(16))
        _progress(step, log)
    dist.destroy_process_group()


main()
