"""The reader of strace's logs beside a plain Python loop over the same lines and `grep -c .`; best of several rounds.

    python tests/benchmarks/trace_sys.py [MB]

Logs of `strace -ff -yy -ttt -T` with lines as a training job writes them, 4 threads; the same as one file of
`strace -f -yy -ttt -T` with the threads interleaved, a tenth of the calls in two halves.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", "3"))
THREADS = 4
READER = """
import resource, sys, time
from distdiag.facts.strace.log import read_logs
began = time.perf_counter()
logs = read_logs(sys.argv[1:])
took = time.perf_counter() - began
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
print(took, memory, sum(thread.n_calls for thread in logs.threads), *logs.errors)
"""
LOOP = """
import sys, time
began = time.perf_counter()
sum(1 for path in sys.argv[1:] for line in open(path, "rb") if line.rpartition(b" = ")[2])
print(time.perf_counter() - began)
"""


def calls(draw: random.Random) -> list[bytes]:
    """Give 400 calls without their time and duration; every twentieth is an error, every twentieth is made again."""
    found = []
    for number in range(400):
        text = "".join(draw.choice(["\\0", "\\377", "a", "x", "\\n", "\\3", "q", "7"]) for _ in range(16))
        socket = (
            f"{draw.randint(4, 60)}<TCP:[10.0.0.{draw.randint(1, 9)}:{draw.randint(30000, 60000)}->10.0.0.1:29500]>"
        )
        shard = f"/mnt/data/imagenet/train/shard-{draw.randint(0, 999):05d}.tar"
        file, lock = f"{draw.randint(3, 90)}<{shard}>", f"0x7f3a{draw.getrandbits(32):08x}"
        found.append(
            [
                f'read({file}, "{text}"..., 131072) = 131072',
                f"futex({lock}, FUTEX_WAIT_BITSET_PRIVATE|FUTEX_CLOCK_REALTIME, 0, NULL, FUTEX_BITSET_MATCH_ANY) = 0",
                f"futex({lock}, FUTEX_WAKE_PRIVATE, 1) = 1",
                f"poll([{{fd={socket}, events=POLLIN}}], 1, 5000) = 1 ([{{fd=9, revents=POLLIN}}])",
                f'recvfrom({socket}, "{text}"..., 65536, 0, NULL, NULL) = 65536',
                f'sendto({socket}, "{text}"..., 4096, MSG_NOSIGNAL, NULL, 0) = 4096',
                f'write({file}, "{text}", 48) = 48',
                f'openat(AT_FDCWD</srv/job>, "{shard}", O_RDONLY|O_CLOEXEC) = 7<{shard}>',
                f'openat(AT_FDCWD</srv/job>, "/opt/conda/lib/x{number}.so", O_RDONLY|O_CLOEXEC) = '
                "-1 ENOENT (No such file or directory)",
                f"recvfrom({socket}, {lock}, 65536, MSG_DONTWAIT, NULL, NULL) = "
                "-1 EAGAIN (Resource temporarily unavailable)",
            ][(0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 7, 8, 9)[number % 20]].encode()
        )
    return found


def write_logs(folder: Path, size: int) -> None:
    """Write the logs of each kind into a folder of its own, of `size` bytes together."""
    draw = random.Random(7)
    now_s = 1_700_000_000.0
    for kind in ("-ff -yy", "-f -yy"):
        (folder / kind).mkdir()
    kinds = [calls(draw) for _ in range(THREADS)]
    with open(folder / "-f -yy" / "log", "wb") as one:
        each = [open(folder / "-ff -yy" / f"F.{1000 + thread}", "wb") for thread in range(THREADS)]  # noqa: SIM115
        written = 0
        while written < size:
            thread = draw.randrange(THREADS)
            now_s += draw.random() * 5e-5
            call = draw.choice(kinds[thread])
            line = b"%.6f %b <0.%06d>\n" % (now_s, call, draw.random() * 999)
            written += each[thread].write(line)
            head, comma, rest = line.partition(b", ")
            if comma and draw.random() < 0.1:
                again = b"%.6f <... %b resumed>%b" % (now_s + 1e-5, call.partition(b"(")[0], rest)
                lines = [head + b",  <unfinished ...>\n", again]
            else:
                lines = [line]
            for half in lines:
                one.write(b"%d %b" % (1000 + thread, half))
        for file in each:
            file.close()


def best(command: list[str]) -> list[float]:
    """Give the numbers that a command prints, of the round with the smallest first one (its seconds)."""
    return min(
        [float(one) for one in subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()]
        for _ in range(ROUNDS)
    )


def grep(paths: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(["grep", "-c", ".", *paths], check=True, stdout=subprocess.PIPE)  # it stops early for no reader
    return time.perf_counter() - began


def main() -> None:
    size = int(sys.argv[1] if len(sys.argv) > 1 else "200") * 10**6
    with tempfile.TemporaryDirectory() as folder:
        write_logs(Path(folder), size)
        print(f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} processors, best of {ROUNDS} rounds\n")
        print(
            "| log | size | calls | MB/s | peak memory | Python line loop | grep -c . |\n|---|---|---|---|---|---|---|"
        )
        for kind in ("-ff -yy", "-f -yy"):
            paths = sorted(str(path) for path in (Path(folder) / kind).iterdir())
            megabytes = sum(os.stat(path).st_size for path in paths) / 1e6
            took, memory, count = best([sys.executable, "-c", READER, *paths])
            loop = best([sys.executable, "-c", LOOP, *paths])[0]
            grepped = min(grep(paths) for _ in range(ROUNDS))
            print(
                f"| strace {kind} -ttt -T | {megabytes:.0f} MB | {count:.0f} | {megabytes / took:.0f} "
                f"| {memory:.0f} MB | {megabytes / loop:.0f} MB/s | {megabytes / grepped:.0f} MB/s |"
            )


if __name__ == "__main__":
    main()
