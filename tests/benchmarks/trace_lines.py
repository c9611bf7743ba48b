"""What one traced line costs, beside `python -m trace --trace` and a tracer that flushes each line to a file.

The same loop in one process, tracers in turn; the least of several rounds. `--torch` adds a training step. Needs no
root. With an argument that is a path, that interpreter is measured instead of this one (3.12 and 3.13: sys.monitoring).
"""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import linecache
import os
import subprocess
import sys
import tempfile
import time
import trace
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

ROUNDS, LOOPS, LINES = 9, 20_000, 9


def loop(count: int) -> int:
    a = 0
    for _ in range(count):
        a += 1
        a += 2
        a += 3
        a -= 1
        a ^= 1
        a += 1
        a += 2
        a -= 3
    return a


def per_line_ns(count: int) -> float:
    began = time.perf_counter()
    loop(count)
    return (time.perf_counter() - began) / (count * LINES) * 1e9


def bare() -> float:
    return per_line_ns(LOOPS)


def ours() -> float:
    from distdiag import trace_lines

    with trace_lines(tempfile.mkdtemp()):
        per_line_ns(LOOPS // 5)  # the ring is made as it is filled for the first time
        return per_line_ns(LOOPS)


def stdlib() -> float:
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        return float(trace.Trace(count=False, trace=True).runfunc(per_line_ns, LOOPS // 20))


class Flushing(trace.Trace):
    """What people build on the standard library's tracer: counts, and prints time, place and source of each line."""

    def __init__(self) -> None:
        super().__init__(count=True, trace=True)
        self.began = time.time()

    def localtrace_trace_and_count(self, frame: FrameType, why: str, arg: object) -> Any:  # noqa: ANN401
        if why == "line":
            name, number = frame.f_code.co_filename, frame.f_lineno
            self.counts[name, number] = self.counts.get((name, number), 0) + 1  # type: ignore[index, call-overload]
            print(datetime.timedelta(seconds=int(time.time() - self.began)), end=" ")
            print(f"{os.path.basename(name)}:{number:>6}: {linecache.getline(name, number)}", end="")
        return self.localtrace


class Both(io.StringIO):
    """Replaces stdout, and also writes to a file, which is flushed at once."""

    def __init__(self, stdout: TextIO, file: TextIO) -> None:
        super().__init__()
        self.streams = stdout, file

    def write(self, text: str) -> int:
        stdout, file = self.streams
        stdout.write(text)
        count = file.write(text)
        file.flush()
        return count


def flushed() -> float:
    log_path = os.path.join(tempfile.mkdtemp(), "log")
    with open(log_path, "a") as log, open(os.devnull, "w") as sink, contextlib.redirect_stdout(Both(sink, log)):
        return float(Flushing().runfunc(per_line_ns, LOOPS // 20))


def excluded() -> float:
    """Code that is not traced, while the tracer is on."""
    from distdiag import trace_lines

    namespace: dict[str, Callable[[int], int]] = {}
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    start = text.index("def loop(")
    library = os.path.join(os.path.dirname(os.__file__), "x.py")
    exec(compile(text[start : text.index("def per_line_ns")], library, "exec"), namespace)
    function = namespace["loop"]
    with trace_lines(tempfile.mkdtemp()):
        return _called(function)


def excluded_bare() -> float:
    return _called(loop)


def _called(function: Callable[[int], int]) -> float:
    began = time.perf_counter()
    deque(map(function, itertools.repeat(10, LOOPS // 10)), maxlen=0)  # a loop of C's, which is not traced
    return (time.perf_counter() - began) / (LOOPS * LINES) * 1e9


def lines() -> None:
    kinds = (bare, ours, stdlib, flushed, excluded_bare, excluded)
    best = {kind.__name__: float("inf") for kind in kinds}
    for _ in range(ROUNDS):
        for kind in kinds:
            best[kind.__name__] = min(best[kind.__name__], kind())
    print(f"Python {sys.version.split()[0]}, ns a line, the least of {ROUNDS} rounds")
    print(f"  bare                          {best['bare']:8.0f}")
    print(f"  distdiag trace py             {best['ours']:8.0f}")
    print(f"  python -m trace --trace       {best['stdlib']:8.0f}   {best['stdlib'] / best['ours']:.0f} x distdiag")
    print(f"  a file flushed at each line   {best['flushed']:8.0f}   {best['flushed'] / best['ours']:.0f} x distdiag")
    ratio = best["excluded"] / best["excluded_bare"]
    print(f"  code that is not traced       {best['excluded']:8.1f}   {ratio:.2f} x bare")


def training_step() -> None:
    import torch

    from distdiag import trace_lines

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(64, 64) for _ in range(19)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(32, 64)

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - began) / count * 1e3

    steps(20)
    best = {"bare": float("inf"), "user code": float("inf"), "torch too": float("inf")}
    for _ in range(ROUNDS):
        best["bare"] = min(best["bare"], steps(40))
        for name, include in (("user code", []), ("torch too", ["torch"])):
            with trace_lines(tempfile.mkdtemp(), include=include):
                steps(10)  # as above
                best[name] = min(best[name], steps(40))
    print("a training step of 19 layers and AdamW, ms, one thread")
    for name, value in best.items():
        print(f"  {name:<12} {value:6.2f}   {value / best['bare']:.2f} x bare")


def main() -> None:
    others = [word for word in sys.argv[1:] if os.path.isfile(word)]
    for python in others:
        env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))}
        subprocess.run([python, __file__], env=env, check=True)
    if not others:
        sys.stdout.flush()
        lines()
        if "--torch" in sys.argv:
            training_step()


if __name__ == "__main__":
    main()
