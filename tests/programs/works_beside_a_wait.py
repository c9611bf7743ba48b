"""A healthy job of 4 Gloo ranks: rank 2 works for minutes, in the way that HOW names, and the others wait for it.

The work outlasts six minutes. FOLDER/steps-2 counts it, except in programs that are not Python.
"""

from __future__ import annotations

import asyncio
import functools
import math
import mmap
import multiprocessing
import os
import queue
import random
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import zipfile
import zlib
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from gloo_job import BAD, FAULT_AT, FOLDER, RANK, begin, compute, compute_on, join, outside, progress, reduce_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

THROTTLE = """
import os, time
while part := os.read(0, 8192):
    while part:
        part = part[os.write(1, part):]
    time.sleep(0.3)
"""
"""A program that passes 27 kB/s from stdin to stdout: 16 MB last for ten minutes."""


def big_file(megabytes: int = 16) -> Path:
    """Return a file of random bytes, which do not compress."""
    path = FOLDER / "big"
    path.write_bytes(random.Random(0).randbytes(megabytes << 20))
    return path


def shell(command: str) -> None:
    """Run a command in FOLDER, where $throttle passes its input slowly."""
    throttle = FOLDER / "throttle.py"
    throttle.write_text(THROTTLE)
    env = {**os.environ, "throttle": f"{sys.executable} {throttle}"}
    subprocess.run(command, shell=True, check=True, cwd=FOLDER, env=env)  # noqa: S602 - pipes are the point


def map_shard(rows: queue.Queue[int], shard: int) -> None:
    for row in range(1_000_000):
        compute()
        rows.put(shard + row)


def map_with_processes() -> None:
    """datasets' map(num_proc=2): the parent polls a managed queue that the shards feed."""
    with multiprocessing.Manager() as manager, multiprocessing.Pool(2) as pool:
        rows = manager.Queue()
        shards = [pool.apply_async(map_shard, (rows, shard)) for shard in range(2)]
        while not all(shard.ready() for shard in shards):
            try:
                rows.get(timeout=0.05)
            except queue.Empty:
                continue


def score_in_processes() -> None:
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(compute_on, range(2)))


def fetch(port: str) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/shard") as body:
        while body.read(4096):
            progress()


def fetch_in_pauses(port: str) -> None:
    """Fetch small files with a pause after each, as a polite client does."""
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/shard") as body:
            body.read(8192)
        progress()
        time.sleep(3)


def download_in_processes() -> None:
    with multiprocessing.Pool(2) as pool:
        pool.map(fetch_in_pauses, [outside("trickles")] * 2)


def download_in_threads() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fetch, [outside("trickles")] * 2))


def upload(port: str) -> None:
    with socket.create_connection(("127.0.0.1", int(port))) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        server.sendall(b"POST /shard HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            server.sendall(b"x" * 8192)
            progress()


def upload_in_threads() -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(upload, [outside("drains-uploads")] * 2))


def copy_with_a_child() -> None:
    """An rsync with --bwlimit: bursts, and sleeps between them."""
    big_file()
    shell(
        "while :; do dd if=big of=copy bs=64k count=4 skip=$((n % 60)) conv=notrunc 2>&1; n=$((n + 4)); sleep 0.7; done"
    )


def archive_with_a_child() -> None:
    big_file()
    shell("tar -cf - big | $throttle > big.tar")


def compress_with_a_child() -> None:
    with open("/dev/zero", "rb") as zeros:
        subprocess.run(["gzip", "-9"], stdin=zeros, stdout=subprocess.DEVNULL, check=True)


def clone_slowly() -> None:
    big_file()
    user = "-c user.name=u -c user.email=u@localhost"
    shell(f"git init -q repo && mv big repo && cd repo && git add big && git {user} commit -qm big")
    (FOLDER / "upload-pack").write_text('#!/bin/sh\ngit upload-pack "$@" | $throttle\n')
    (FOLDER / "upload-pack").chmod(0o755)
    shell("git clone -q --no-local --upload-pack $PWD/upload-pack file://$PWD/repo clone")


def evaluate_in_a_grandchild() -> None:
    count = "while True: sum(number * number for number in range(2000))"
    subprocess.run(["sh", "-c", f"{sys.executable} -c '{count}'; true"], check=True)


def read_checkpoint_from_a_pipe() -> None:
    big_file()
    shell("mkfifo fifo; $throttle < big > fifo &")
    with (FOLDER / "fifo").open("rb") as file:
        while file.read(4096):
            progress()


def read_checkpoint_in_pieces() -> None:
    """O_DIRECT reads of a page, with the latency of a far file system between them."""
    page = mmap.mmap(-1, 4096)
    file = os.open(big_file(), os.O_RDONLY | os.O_DIRECT)
    for offset in range(0, 16 << 20, 4096):
        os.preadv(file, [page], offset)
        progress()
        time.sleep(0.5)


class Computes(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        compute_on()
        return index


class Reads(Computes):
    def __getitem__(self, index: int) -> int:
        with (FOLDER / "big").open("rb") as file:
            while file.read(4096):
                progress()
                time.sleep(0.5)
        return index


def load_first_batch(data: type[Computes]) -> None:
    big_file()
    next(iter(torch.utils.data.DataLoader(data(), num_workers=1)))


def query() -> None:
    """One SQLite statement: a single call in C that runs for hours."""
    rows = "with recursive n(x) as (select 1 union all select x + 1 from n where x < 1e12) select sum(x % 7) from n"
    sqlite3.connect(":memory:").execute(rows).fetchall()


def tokenize() -> None:
    """Rust's threads tokenize; the main thread sleeps in one call in C."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = "2"
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({chr(code): code for code in range(128)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    while True:
        tokenizer.encode_batch(["lorem ipsum dolor sit amet " * 2000] * 200)
        progress()


def compress_on() -> None:
    data = bytes(1 << 24)
    while True:
        zlib.compress(data, 9)
        progress()


def compress_in_threads() -> None:
    threads = [threading.Thread(target=compress_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def roll_out() -> None:
    port = int(outside("generates"))
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /generate HTTP/1.0\r\n\r\n")
        await reader.read()
        writer.close()
        progress()


def fault_pages_in() -> None:
    """Touch each page of a mapped file that the page cache does not hold."""
    with big_file(64).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        os.fsync(file.fileno())
        while True:
            mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            sum(mapped[::4096])
            progress()


def save_to_a_slow_disk() -> None:
    outside("reads-slowly")
    with (FOLDER / "fifo").open("wb") as file:
        torch.save({"weights": torch.rand(16 << 20)}, file)


def unzip() -> None:
    with zipfile.ZipFile(FOLDER / "shards.zip", "w") as archive:
        for number in range(500):
            archive.writestr(f"shard/{number}", "sample " * 500)
    while True:
        with zipfile.ZipFile(FOLDER / "shards.zip") as archive:
            archive.extractall(FOLDER / "unzipped")
        progress()
        shutil.rmtree(FOLDER / "unzipped")


def by_length(one: float, other: float) -> int:
    return (one > other) - (one < other)


def sort_samples() -> None:
    """One sort, with a comparison in Python, takes about a minute."""
    lengths = [random.random() for _ in range(3_000_000)]
    while True:
        sorted(lengths, key=functools.cmp_to_key(by_length))
        progress()


def search_text() -> None:
    """One search in C, quadratic in 45,000 words: it holds the GIL for minutes."""
    text = "lorem ipsum dolor " * 15_000
    while True:
        re.search(r"(?:\w+ )*end", text)
        progress()


def wait_for_download() -> None:
    """Another process fetches the file; this rank checks its size once a second."""
    outside("writes-slowly")
    while (FOLDER / "shard").stat().st_size < 1 << 30:
        time.sleep(1)


def compile_in_workers() -> None:
    """torch's own pool of compile processes, with jobs that take minutes."""
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    pool = SubprocPool(2)
    for job in [pool.submit(math.factorial, 5_000_000 + number) for number in range(20)]:
        job.result()


WAYS: dict[str, Callable[[], None]] = {
    "map-num-proc": map_with_processes,
    "process-pool": score_in_processes,
    "pool-downloads": download_in_processes,
    "thread-downloads": download_in_threads,
    "uploads": upload_in_threads,
    "copies": copy_with_a_child,
    "tars": archive_with_a_child,
    "gzips": compress_with_a_child,
    "clones": clone_slowly,
    "evaluates": evaluate_in_a_grandchild,
    "reads-pipe": read_checkpoint_from_a_pipe,
    "reads-direct": read_checkpoint_in_pieces,
    "loader-computes": lambda: load_first_batch(Computes),
    "loader-reads": lambda: load_first_batch(Reads),
    "sqlite": query,
    "tokenizes": tokenize,
    "zlib-threads": compress_in_threads,
    "rollout": lambda: asyncio.run(roll_out()),
    "page-faults": fault_pages_in,
    "slow-save": save_to_a_slow_disk,
    "unzips": unzip,
    "sorts": sort_samples,
    "regex": search_text,
    "file-grows": wait_for_download,
    "compile-workers": compile_in_workers,
}


def main() -> None:
    join()
    for step in range(FAULT_AT + 1):
        if RANK == BAD and step == FAULT_AT:
            begin()
            WAYS[os.environ["HOW"]]()
        reduce_all()


if __name__ == "__main__":
    main()
