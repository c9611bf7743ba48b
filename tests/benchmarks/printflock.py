"""What printflock costs, and how many lines are torn, beside print() and the usual recipe.

The recipe: open the script's own file at each call, flock it, print, unlock; with and without a flush inside the lock.
One writer to /dev/null for the cost, the least of several rounds; four writers of 60 kB messages to a pipe otherwise.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from fcntl import LOCK_EX, LOCK_UN, flock
from typing import TYPE_CHECKING

from distdiag import printflock

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS, CALLS = 9, 10_000
WRITERS, MESSAGES, LENGTH = 4, 300, 60_000
TEXT = "step 1200 loss 2.3187 lr 3.0e-04 grad norm 0.871"


def by_print(text: str) -> None:
    print(text)


def by_recipe(text: str, flush: bool = False) -> None:
    with open(__file__) as lock:
        flock(lock, LOCK_EX)
        try:
            print(text, flush=flush)
        finally:
            flock(lock, LOCK_UN)


def by_flushing_recipe(text: str) -> None:
    by_recipe(text, flush=True)


def by_flushing_print(text: str) -> None:
    print(text, flush=True)


def kernel_only(text: str) -> None:
    """Do nothing but the three system calls that are needed."""
    flock(0, LOCK_EX)
    os.write(1, b"................................................\n")
    flock(0, LOCK_UN)


WAYS: dict[str, Callable[[str], None]] = {
    "print": by_print,
    "print, flushed": by_flushing_print,
    "recipe": by_recipe,
    "recipe, flushed": by_flushing_recipe,
    "printflock": printflock,
    "system calls alone": kernel_only,
}


def cost_us(way: Callable[[str], None]) -> float:
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            way(TEXT)
        least = min(least, (time.perf_counter() - began) / CALLS)
    return least * 1e6


def torn(name: str) -> tuple[int, float]:
    """Count lines that are not whole, and take the time of all."""
    reading, writing = os.pipe()
    began = time.perf_counter()
    argv = [sys.executable, __file__, name]
    writers = [subprocess.Popen([*argv, str(me)], stdout=writing, stdin=0) for me in range(WRITERS)]
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    took = time.perf_counter() - began
    for one in writers:
        one.wait()
    whole = re.compile(rb"(?:\[[^\]]*\] )?(0+|1+|2+|3+)")
    good = sum(match is not None and len(match[1]) == LENGTH for match in map(whole.fullmatch, lines))
    return WRITERS * MESSAGES - good, took


def main() -> None:
    if len(sys.argv) == 2:
        with open(os.devnull, "w") as sink:
            shown = os.dup(1)
            os.dup2(sink.fileno(), 1)
            os.write(shown, f"{cost_us(WAYS[sys.argv[1]])}\n".encode())
        return
    if len(sys.argv) == 3:
        for _ in range(MESSAGES):
            WAYS[sys.argv[1]](sys.argv[2] * LENGTH)
        return
    print(f"{'':20} {'us a call':>10} {'torn of ' + str(WRITERS * MESSAGES):>14} {'s for all':>10}")
    with open(__file__) as lock:
        os.dup2(lock.fileno(), 0)
        for name in WAYS:
            took = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, check=True, stdin=0).stdout
            bad, seconds = torn(name) if name != "system calls alone" else ("", float("nan"))
            print(f"{name:20} {float(took):10.2f} {bad:>14} {seconds:10.2f}")


if __name__ == "__main__":
    main()
