"""A healthy job of 4 Gloo ranks whose loop is written, or paced, in the way that HOW names: all ranks make progress."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING

from gloo_job import RANK, begin, compute, join, reduce_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANY = 1_000_000


def step(seconds: float) -> None:
    compute(seconds)
    reduce_all()


def plain_loop(seconds: float) -> None:
    for _step in range(MANY):
        step(seconds)


def odd_names() -> None:
    for zz in range(MANY):
        qux = zz * 3
        step(1 + 0 * qux)


def batches() -> Iterator[list[str]]:
    """Yield batches that no number marks."""
    while True:
        yield ["a", "b"]


def loop_over_generator() -> None:
    for _batch in batches():
        step(5)


def nested_functions() -> None:
    done = 0

    def epoch() -> None:
        nonlocal done

        def one() -> None:
            nonlocal done
            step(5)
            done += 1

        while True:
            one()

    epoch()


class Trainer:
    """Counts in attributes, as Lightning's loops do."""

    def __init__(self, seconds: float) -> None:
        self.global_step = 0
        self.seconds = seconds

    def training_step(self) -> None:
        step(self.seconds)

    def advance(self) -> None:
        self.training_step()
        self.global_step += 1

    def fit(self) -> None:
        while self.global_step < MANY:
            self.advance()


def map_over_iterator() -> None:
    list(map(step, itertools.repeat(5.0)))


def no_counter() -> None:
    while True:
        step(5)


async def loop_in_tasks() -> None:
    while True:
        await asyncio.to_thread(compute, 1)
        reduce_all()


WAYS: dict[str, Callable[[], None]] = {
    "step-50ms": lambda: plain_loop(0.05),
    "step-1s": lambda: plain_loop(1),
    "step-5s": lambda: plain_loop(5),
    "step-20s": lambda: plain_loop(20),
    "odd-names": odd_names,
    "generator": loop_over_generator,
    "nested": nested_functions,
    "trainer": Trainer(1).fit,
    "trainer-slow": Trainer(20).fit,
    "map": map_over_iterator,
    "no-counter": no_counter,
    "async": lambda: asyncio.run(loop_in_tasks()),
}


def main() -> None:
    join()
    reduce_all()
    if RANK == 0:
        begin()
    WAYS[os.environ["HOW"]]()


if __name__ == "__main__":
    main()
