"""Work side by side in processes of our own, as one interpreter uses one processor only."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import struct
import traceback
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    Job = TypeVar("Job")
    Result = TypeVar("Result")

MOST = 4
"""A node may have work of its own to do."""
_NUMBER = struct.Struct("<H")
_JOBS = 16384
"""Numbers that fit into a pipe, which holds 64 KiB, while nobody reads."""


def run(work: Callable[[Job], Result], jobs: Sequence[Job], *, width: int | None = None) -> list[Result | str]:
    """Do jobs in up to `width` processes, by default one for each processor.

    Returns:
        The result of each job in their order, or why there is none: its process was killed.

    Raises:
        Exception: what `work` raised, where there was only one process.
    """
    width = min(MOST, len(jobs), len(os.sched_getaffinity(0)) if width is None else width)
    if width < 2 or len(jobs) > _JOBS:
        return [work(job) for job in jobs]
    numbers, ends = _queue(len(jobs)), []
    try:
        for _ in range(width):
            ends.append(_fork(work, jobs, numbers))
    finally:
        os.close(numbers)
    results: dict[int, Result] = {}
    why = ""
    for pid, data in _gather(ends):
        _, status = os.waitpid(pid, 0)
        if status:
            why = f"the process that read it ended with {os.waitstatus_to_exitcode(status)}"
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            results.update(pickle.loads(data))  # It is from our own child.
    return [results.get(number, why) for number in range(len(jobs))]


def _queue(count: int) -> int:
    reading, writing = os.pipe()
    os.write(writing, b"".join(_NUMBER.pack(number) for number in range(count)))
    os.close(writing)
    return reading


def _fork(work: Callable[[Job], Result], jobs: Sequence[Job], numbers: int) -> tuple[int, int]:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Other threads may hold locks for ever in the child: it takes none of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        with os.fdopen(writing, "wb") as out:
            pickle.dump({number: work(jobs[number]) for number in _taken(numbers)}, out)
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Never back into the program that this is a copy of.
        os._exit(status)


def _taken(numbers: int) -> Iterator[int]:
    while True:
        taken = os.read(numbers, _NUMBER.size)
        if not taken:
            return
        yield int(_NUMBER.unpack(taken)[0])


def _gather(ends: list[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """Read what all children write until they end."""
    data = {reading: bytearray() for _, reading in ends}
    with selectors.DefaultSelector() as selector:
        for reading in data:
            selector.register(reading, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                got = os.read(key.fd, 1 << 20)
                data[key.fd] += got
                if not got:
                    selector.unregister(key.fd)
                    os.close(key.fd)
    return [(pid, bytes(data[reading])) for pid, reading in ends]
