"""Executes lines of every kind that a tracer meets; the first argument says which. No torch: for any Python."""

import _thread
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator


def count(number: int) -> int:
    total = 0
    for _ in range(number):
        total += 1
    return total


def ends_by_signal() -> None:
    count(50)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))  # LAST
    signal.pause()


def ends_at_once() -> None:
    count(50)
    os._exit(7)  # LAST


def crashes() -> None:
    import ctypes

    count(50)
    ctypes.string_at(1)  # LAST


def raises() -> None:
    raise SystemExit(5)


def fails() -> None:
    raise ValueError("bad batch")  # RAISED


def forkserves() -> None:
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    worker = context.Process(target=count, args=(7,))
    worker.start()
    worker.join()


def prints() -> None:
    print("argv", sys.argv[1:], __name__, os.path.basename(__file__), len(sys.path))
    print("modules", __import__("__main__").count is count, __spec__ is None)
    sys.stdout.buffer.write(b"\x00\xff raw\n")
    sys.exit(3)


def threads() -> None:
    done, tids = threading.Event(), []

    def raw() -> None:
        count(3)
        tids.append(_thread.get_native_id())
        done.set()

    _thread.start_new_thread(raw, ())
    done.wait()
    while os.path.exists(f"/proc/self/task/{tids[0]}"):  # it cannot be joined
        time.sleep(0.001)
    for number in range(6):
        thread = threading.Thread(target=count, args=(number,), name=f"counts {number}")
        thread.start()
        thread.join()


def forks() -> None:
    pid = os.fork()
    if pid == 0:
        count(2)
        os.kill(os.getpid(), signal.SIGKILL)  # CHILD
    os.waitpid(pid, 0)  # PARENT


def runs_another() -> None:
    subprocess.run([sys.executable, "-c", "x = 1\ny = 2\n"], check=True)


def without_a_file() -> None:
    exec(compile("a = 1\nb = 2\n", "<made up>", "exec"), {})


def generates() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2

    for number in numbers():
        count(number)
    return  # GENERATED


async def _wait() -> None:
    await asyncio.sleep(0)
    count(1)
    return  # AWAITED


def waits() -> None:
    asyncio.run(_wait())


def in_turn() -> None:
    without_a_file()
    generates()
    waits()


def turns() -> None:
    count(5000)


def eats() -> None:
    kept = []
    while True:
        kept.append(bytearray(10**6))  # EATS


class Late(Exception):
    pass


def is_interrupted() -> None:
    def late(number: int, frame: object) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    for _ in range(20):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            while True:
                count(10)
        except Late:
            pass
    _later()


def recurses() -> None:
    def deeper() -> None:
        deeper()

    for number in range(64):  # so that the last frame comes with each of the 16 lines of a block
        if number % 3 == 0:
            garbage = [number]
            del garbage
        if number % 2:
            garbage = [number]
        with contextlib.suppress(RecursionError):
            deeper()
    _later()


def _later() -> None:
    garbage = []
    for number in range(5000):
        garbage.append([number])
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # END


def _argument() -> float:
    return 0.0


def hangs_after_a_call() -> None:
    os.kill(os.getpid() + 0 * int(_argument()), signal.SIGKILL)  # CALLER


def is_alarmed() -> None:
    """Run code that is new to the tracer, until an alarm ends it; tell how often that did not end it."""

    def ring(number: int, frame: object) -> None:
        raise Late

    signal.signal(signal.SIGALRM, ring)
    missed = 0
    for number in range(200):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                space: dict[str, Callable[[], int]] = {}
                exec(compile("def one():\n  return 1\n", f"new{number}.py", "exec"), space)
                space["one"]()
            missed += 1
        except Late:
            pass
        garbage = [[number] for number in range(5000)]  # the collector runs, and tracing is taken up
        del garbage
    print("missed", missed)


def is_traced_now_and_then() -> None:
    """Begin and end tracing while other threads run new code; print the lines they were seen at."""
    from distdiag import trace_lines

    seen: list[str] = []
    over = threading.Event()

    def work() -> None:
        number = 0
        while not over.is_set():
            number += 1
            space: dict[str, Callable[[int], int]] = {}
            try:
                exec(compile("def one(x):\n  y = x\n  return y\n", f"new{number}.py", "exec"), space)
                space["one"](1)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is not theirs
                seen.append(repr(error))

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for _ in range(20):
        with trace_lines(sys.argv[2]):
            time.sleep(0.01)
    over.set()
    for worker in workers:
        worker.join()
    print("seen", seen)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
