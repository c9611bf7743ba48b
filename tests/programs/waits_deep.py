"""Waits at a stack of all kinds of frames, says on stdout that it does. Any Python from 3.8 on, and nothing else.

argv[1]: "sleeps"; "recurses" 5,000 calls deep; "runs"; "alternates" between two stacks, each with one number in all its
frames; "behind": a thread holds the interpreter's lock in a long C call, and the main thread waits for it.
"""

from __future__ import annotations

import contextlib
import select
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def steps(count: int) -> Iterator[Holder]:
    for step in range(count):
        yield within(step)


class Whole(int):
    """A number that is not exactly an int."""


class Holder:
    def __init__(self) -> None:
        self.found = [deep(30) for i in range(1)]


def within(
    step: int,
    epoch: int = 10**11,
    batch: int = -5,
    it: int = Whole(7),
    big: int = 2**40,
    cur_step: object = True,
    idx: int = 10**13,
    current_step: float = 1.5,
) -> Holder:
    return (lambda: Holder())()


def deep(micro: int) -> object:
    if micro:
        return deep(micro - 1)
    return {key: last() for key in [1]}


def last() -> object | None:
    with contextlib.suppress(ValueError):
        try:
            raise ValueError
        except ValueError:
            for batch_idx, local_step in ((2**30 - 1, 2**30),):

                def é_ü日本() -> object:
                    step = 7

                    def keeps() -> int:
                        return step

                    print("ready", flush=True)
                    return (
                        keeps,
                        select.select(
                            *([], [], []),
                            600,
                        ),
                    )

                é_ü日本()
                print(batch_idx, local_step)
    return None


def recurse(micro: int) -> None:
    if micro:
        return recurse(micro - 1)
    print("ready", flush=True)
    return time.sleep(600)


def pause(step: int) -> float:
    """Mostly too short to be read in, and now and then long enough also on a busy machine."""
    return 0.0002 if step // 2 % 8 else 0.01


def one(step: int) -> None:
    time.sleep(pause(step))
    one_within(step, step)


def one_within(step: int, micro: int) -> None:
    time.sleep(pause(step))


def other(step: int) -> None:
    other_within(step, step)
    time.sleep(pause(step))


def other_within(step: int, micro: int) -> None:
    time.sleep(pause(step))
    sum(range(2000))


def alternate() -> None:
    print("ready", flush=True)
    for step in range(10**9):
        (one if step % 2 else other)(step)


def run() -> None:
    print("ready", flush=True)
    while True:
        pass


def behind() -> None:
    def hold() -> None:
        print(threading.get_native_id(), flush=True)
        sum(range(10**12))

    threading.Thread(target=hold, daemon=True).start()
    while True:
        time.sleep(0.001)


def sleep() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    sorted([1], key=lambda x: sum(1 for _ in steps(3)))


def recurse_deep() -> None:
    sys.setrecursionlimit(10**6)
    recurse(5000)


{"recurses": recurse_deep, "sleeps": sleep, "runs": run, "alternates": alternate, "behind": behind}[sys.argv[1]]()
