"""Work side by side in processes of our own, as one interpreter uses one processor only."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import struct
import traceback
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from typing import TypeVar

    Job = TypeVar("Job")
    Result = TypeVar("Result")

MOST = 4
"""A node may have work of its own to do."""
_ENDING = (signal.SIGINT, signal.SIGTERM)
_NUMBER = struct.Struct("<H")
_HEAD = struct.Struct("<HQ")
"""The number of a job, and how long its result is that follows."""
_JOBS = 16384
"""Numbers that fit into a pipe, which holds 64 KiB, while nobody reads."""


def run(
    work: Callable[[Job], Result], jobs: Sequence[Job], *, width: int | None = None
) -> Generator[Result | str, None, None]:
    """Do jobs in up to `width` processes, by default one for each processor.

    Yields:
        The result of each job, in their order and as soon as it is there, so that not all of them are in memory; or
        why there is none: its process was killed.

    Raises:
        Exception: what `work` raised, where there was only one process.
    """
    width = min(MOST, len(jobs), len(os.sched_getaffinity(0)) if width is None else width)
    if width < 2 or len(jobs) > _JOBS:
        yield from map(work, jobs)
        return
    numbers, children = _queue(len(jobs)), {}
    found: dict[int, Result] = {}
    told, why = 0, ""
    try:
        for _ in range(width):
            pid, reading = _fork(work, jobs, numbers)
            children[pid] = reading
        for number, data in _gather(list(children.values())):
            found[number] = pickle.loads(data)  # It is from our own child.
            while told in found:
                yield found.pop(told)
                told += 1
        for pid in list(children):
            _, status = os.waitpid(pid, 0)
            del children[pid]
            if status:
                why = f"the process that read it ended with {os.waitstatus_to_exitcode(status)}"
    finally:
        os.close(numbers)
        for pid in children:  # whoever asked has lost interest, or was interrupted
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # interrupted right after its end
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    yield from (found.get(number, why) for number in range(told, len(jobs)))


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
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        os.close(writing)
        return pid, reading
    status = 1
    try:
        # Ctrl-C reaches all processes of a terminal: this one just ends, and its parent says what is to be said.
        for ending in _ENDING:
            signal.signal(ending, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        os.close(reading)
        with os.fdopen(writing, "wb") as out:
            for number in _taken(numbers):
                data = pickle.dumps(work(jobs[number]))
                out.write(_HEAD.pack(number, len(data)) + data)
                out.flush()
        status = 0
    except BrokenPipeError:
        pass  # whoever asked is gone
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


def _gather(readings: list[int]) -> Iterator[tuple[int, bytes]]:
    """Read what all children write until they end; yield each whole result, by the number of its job."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for reading in readings:
            stack.callback(os.close, reading)
            selector.register(reading, selectors.EVENT_READ, bytearray())
        while selector.get_map():
            for key, _ in selector.select():
                got = os.read(key.fd, 1 << 20)
                key.data.extend(got)
                yield from _whole(key.data)
                if not got:
                    selector.unregister(key.fd)


def _whole(data: bytearray) -> Iterator[tuple[int, bytes]]:
    """Take the results off that are there as a whole."""
    while len(data) >= _HEAD.size:
        number, size = _HEAD.unpack_from(data)
        end = _HEAD.size + size
        if len(data) < end:
            return
        yield number, bytes(data[_HEAD.size : end])
        del data[:end]
