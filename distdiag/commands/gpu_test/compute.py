"""The stage compute of gpu-test's ranks: matrix products and copies, checked and timed.

A product is checked three ways. A small one of the whole numbers -1, 0 and 1 has sums below 256, which every precision
holds exactly in any order of summation. A large one has the same bits in every repetition on one device, and on every
device of one model. The sums of its rows and columns follow from the factors in float64 (Huang and Abraham,
"Algorithm-based fault tolerance for matrix operations", 1984).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import replace
from importlib import metadata

from distdiag.facts import gpu_health
from distdiag.facts.computed import Computed, Product, slow_by_rate
from distdiag.facts.machine import cpu_model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from distdiag.commands.gpu_test.rank import Rank

    Multiply = Callable[[], torch.Tensor]
    """Returns the product, shape (n, n)."""

_SMALL = 256
_N_ON_CPU = 384
_LARGEST_N = 8192
_PRODUCTS_SHARE = 0.7
"""Of the time; the rest is for bandwidths."""
_LEAST_REPETITIONS = {"cuda": 3, "cpu": 25}
"""The best of a few repetitions of a millisecond on a busy core varies by 25%."""
_ROUNDS = 3
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 32 << 20}
_HOST_BYTES = 64 << 20
_HEALTH_S = 5.0
_SIGMAS = 16
_EPSILON = {"float32": 2.0**-24, "tf32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8": 2.0**-8}
"""Rounding of one element of the result; products in fp8 are written as bfloat16."""
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
_SWITCHES = ("CUBLAS", "NVIDIA_TF32", "TORCH_BLAS", "MKL_", "ONEDNN_", "DNNL_")
_SLOW_FAULT = 0.7
"""Of its speed is what `--inject slow-compute` leaves."""


class Compute:
    """Computes on the device of one rank for so many seconds in each round."""

    def __init__(self, rank: Rank, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds
        self.device = rank.device
        self.on_gpu = self.device.type == "cuda"
        # On the CPU, time of this thread: other programs on its cores change the wall clock, not the speed of the core.
        self.clock = time.perf_counter if self.on_gpu else time.thread_time
        if not self.on_gpu:
            torch.set_num_threads(1)  # so that a rank measures one core, however many ranks share the node

    def run(self) -> Computed:
        """Measure with all ranks at once; again, up to three times, while one of them looks slow."""
        found = self._measure()
        for number in range(1, _ROUNDS + 1):
            again = self._agree(number, found)
            if not again or number == _ROUNDS:
                break
            found = _better(found, self._measure())
        if self.on_gpu and (again or any(product.wrong or product.inexact for product in found.products)):
            found = replace(found, health=self._health_under_load())
        return found if self.on_gpu else replace(found, cpus=len(os.sched_getaffinity(0)))

    def _agree(self, number: int, found: Computed) -> bool:
        """Return whether a rank is slow beside the others, as rank 0 sees it."""
        rank, store = self.rank, self.rank.store
        rank.progress.step(f"comparing the speeds of all ranks, round {number}", waiting=True)
        store.set(f"compute/{number}/{rank.rank}", json.dumps([found.model, found.rates()]))
        if rank.rank == 0:
            told = {each: json.loads(store.get(f"compute/{number}/{each}")) for each in range(rank.world_size)}
            seen = slow_by_rate({each: (model, rates) for each, (model, rates) in told.items()})
            store.set(f"computed/{number}", "again" if any(ranks for _, ranks in seen.values()) else "")
        return bool(store.get(f"computed/{number}"))

    def _measure(self) -> Computed:
        rank = self.rank
        rank.progress.step("starting to compute with all ranks", waiting=True)
        rank.all_reduce(torch.ones(1, device=self.device))
        precisions = self._precisions()
        each_s = self.seconds * _PRODUCTS_SHARE / len(precisions)
        products = tuple(self._product(precision, each_s) for precision in precisions)
        return Computed(self._model(), products, self._bandwidths(self.seconds * (1 - _PRODUCTS_SHARE)))

    def _model(self) -> str:
        """Name everything that decides which bits a product has: devices with equal names are compared."""
        switches = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_SWITCHES)]
        if not self.on_gpu:
            capability = torch.backends.cpu.get_cpu_capability()
            return ", ".join([cpu_model() or "cpu", capability, f"torch {torch.__version__}", *switches])
        has = torch.cuda.get_device_properties(self.device)
        built = torch.version.cuda or torch.version.hip
        parts = [has.name, f"{has.multi_processor_count} multiprocessors", f"torch {torch.__version__}", str(built)]
        for package in _CUBLAS:
            with contextlib.suppress(metadata.PackageNotFoundError):
                parts.append(f"cuBLAS {metadata.version(package)}")
        return ", ".join([*parts, *switches])

    def _precisions(self) -> list[str]:
        """List what the device multiplies in hardware."""
        if not self.on_gpu:
            return ["float32", "bfloat16"]
        if torch.version.hip:
            return ["float32", "bfloat16", "float16"]
        capability = torch.cuda.get_device_capability(self.device)
        found = ["float32", "float16"]
        if capability >= (8, 0):
            found += ["tf32", "bfloat16"]
        if capability >= (8, 9) and hasattr(torch, "float8_e4m3fn"):
            found.append("fp8")
        return found

    # --- products

    def _product(self, precision: str, seconds: float) -> Product:
        n = self._size()
        self.rank.progress.step(f"multiplying in {precision}")
        matmul = torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, precision == "tf32"
        try:
            inexact = self._inexact(precision)
            left, right = self._fractions(n, 37, 101), self._fractions(n, 59, 17)
            found = self._repeat(
                Product(precision, n, inexact=inexact), self._multiply(precision, left, right), seconds
            )
            return replace(found[0], sums_off=self._sums_off(precision, left, right, found[1]))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            if precision != "fp8":  # of which not every build and GPU has a kernel
                raise
            return Product(precision, skipped=str(error).splitlines()[0][:160])
        finally:
            matmul.allow_tf32 = before

    def _size(self) -> int:
        if not self.on_gpu:
            return _N_ON_CPU
        free = torch.cuda.mem_get_info()[0] / self.rank.config["sharing"]
        n = _LARGEST_N
        while n > _SMALL and 64 * n * n > free / 2:  # int64 steps of the factors, float64 of the sums
            n //= 2
        return n

    def _multiply(self, precision: str, left: torch.Tensor, right: torch.Tensor) -> Multiply:
        """Return what multiplies two float32 matrices, shape (n, n), in a precision; rounded to it already."""
        if precision == "fp8":
            one = torch.ones((), device=self.device)
            a = left.to(torch.float8_e4m3fn)
            b = right.t().contiguous().to(torch.float8_e4m3fn).t()  # cuBLASLt wants the second one by columns
            return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
        a, b = left.to(dtype), right.to(dtype)
        return lambda: a @ b

    def _fractions(self, n: int, by_row: int, by_column: int) -> torch.Tensor:
        """Return k/128 with |k| < 128 in no visible order, shape (n, n), float32: exact in all precisions but fp8."""
        index = torch.arange(n, device=self.device, dtype=torch.int64)
        mixed = (index[:, None] * by_row + 1) * (index[None, :] * by_column + 3) % 65521 * 40503
        return ((mixed >> 7) % 255 - 127).to(torch.float32) / 128

    def _inexact(self, precision: str) -> int:
        """Count wrong elements of a product of -1, 0 and 1, beside the product of whole numbers on the CPU."""
        left = (self._fractions(_SMALL, 37, 101) * 128).remainder(3) - 1
        right = (self._fractions(_SMALL, 59, 17) * 128).remainder(3) - 1
        result = self._multiply(precision, left, right)().to("cpu", torch.float64)
        return int((result != left.cpu().double() @ right.cpu().double()).sum())

    def _repeat(self, product: Product, multiply: Multiply, seconds: float) -> tuple[Product, torch.Tensor]:
        """Multiply for so long; return what was seen, and the result that most repetitions have."""
        rank = self.rank
        multiply()
        rank.synchronize()
        end = time.monotonic() + seconds
        best = float("inf")
        digests: list[str] = []
        kept: dict[str, torch.Tensor] = {}
        while len(digests) < _LEAST_REPETITIONS[self.device.type] or time.monotonic() < end:
            began = self.clock()
            result = multiply()
            rank.synchronize()
            if rank.is_faulty("slow-compute"):
                end_of_fault = began + (self.clock() - began) / _SLOW_FAULT
                while self.clock() < end_of_fault:
                    pass
            best = min(best, self.clock() - began)
            if rank.is_faulty("wrong-compute") and product.precision == "float32" and len(digests) == 1:
                result.view(torch.int32)[product.n // 2, product.n // 3] ^= 1 << 12  # one bit of one element
            digests.append(self._digest(result))
            if len(kept) < 2:
                kept.setdefault(digests[-1], result)
            rank.progress.still(f"multiplying in {product.precision}: {len(digests)} products")
        usual = max(kept, key=digests.count)
        product = replace(product, repetitions=len(digests), best_s=best, digest=usual)
        other = next((digest for digest in kept if digest != usual), None)
        if other is None:
            return product, kept[usual]
        differ = (kept[other] != kept[usual]).flatten().nonzero().flatten()
        first = int(differ[0]) if len(differ) else 0
        got, expected = (f"{float(kept[digest].flatten()[first]):.9g}" for digest in (other, usual))
        product = replace(product, wrong=len(differ), first_index=first, got=got, expected=expected)
        return replace(product, wrong_repetition=digests.index(other) + 1), kept[usual]

    def _digest(self, result: torch.Tensor) -> str:
        """Return two weighted sums of the bits of a result, modulo 2^64: any single element that changes, shows."""
        bits = result.view(torch.int32 if result.element_size() == 4 else torch.int16)
        weights = torch.arange(1, len(bits) + 1, device=self.device, dtype=torch.int64)
        rows, columns = (int((bits.sum(dim, dtype=torch.int64) * weights).sum()) for dim in (1, 0))
        return f"{rows & (2**64 - 1):016x}{columns & (2**64 - 1):016x}"

    def _sums_off(self, precision: str, left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> int:
        """Count the rows and columns whose sum is farther from that of the factors than rounding explains."""
        if precision == "fp8":
            left, right = (matrix.to(torch.float8_e4m3fn).float() for matrix in (left, right))
        left, right, result = left.double(), right.double(), result.double()
        ones = torch.ones(len(left), device=self.device, dtype=torch.float64)
        size = float(result.square().mean().sqrt())
        # Tensor cores truncate each of n partial sums in float32, always towards zero; elements round independently.
        allowed = _SIGMAS * len(left) ** 0.5 * size * (_EPSILON[precision] + len(left) * 2.0**-24)
        rows = result @ ones - left @ (right @ ones)
        columns = ones @ result - (ones @ left) @ right
        return int((rows.abs() > allowed).sum() + (columns.abs() > allowed).sum())

    # --- bandwidths

    def _bandwidths(self, seconds: float) -> dict[str, float]:
        size = _COPY_BYTES[self.device.type]
        if self.on_gpu:
            size = min(size, int(torch.cuda.mem_get_info()[0] / self.rank.config["sharing"]) // 8)
        a, b, c = (torch.full((size // 4,), float(value), device=self.device) for value in (1, 2, 3))
        ways: dict[str, tuple[int, Callable[[], object]]] = {
            "copy": (2 * size, lambda: a.copy_(b)),
            "triad": (3 * size, lambda: torch.add(b, c, alpha=3.0, out=a)),
        }
        if self.on_gpu:
            part = a[: _HOST_BYTES // 4]
            with contextlib.suppress(RuntimeError):  # a system that pins no memory
                host = torch.empty(len(part), pin_memory=True)
                ways["to device"] = (4 * len(part), lambda: part.copy_(host, non_blocking=True))
                ways["from device"] = (4 * len(part), lambda: host.copy_(part, non_blocking=True))
        found = {}
        for name, (moved, way) in ways.items():
            self.rank.progress.step(f"measuring {name}")
            found[name] = moved / self._best_of(way, seconds / len(ways))
        return found

    def _best_of(self, way: Callable[[], object], seconds: float) -> float:
        way()
        self.rank.synchronize()
        best, end, count = float("inf"), time.monotonic() + seconds, 0
        while count < 3 or time.monotonic() < end:
            began = self.clock()
            way()
            self.rank.synchronize()
            best, count = min(best, self.clock() - began), count + 1
            self.rank.progress.still("copying")
        return best

    def _health_under_load(self) -> gpu_health.GpuHealth | None:
        """Return what nvidia-smi reports of this GPU while it multiplies."""
        uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", None)
        read: list[gpu_health.Health] = []
        reader = threading.Thread(target=lambda: read.append(gpu_health.read(_HEALTH_S, users=False)), daemon=True)
        matrix = self._fractions(self._size(), 37, 101)
        self.rank.progress.step("reading the GPU's health under load")
        reader.start()
        while reader.is_alive():
            matrix @ matrix
            self.rank.synchronize()
            self.rank.progress.still("reading the GPU's health under load")
        own = [gpu for gpu in (read[0].gpus if read else ()) if uuid is not None and gpu.uuid == f"GPU-{uuid}"]
        return replace(own[0], processes=()) if own else None


def _better(first: Computed, second: Computed) -> Computed:
    """Return the best rates of two rounds, and whatever either found wrong."""
    products = []
    for old, new in zip(first.products, second.products):
        bad = old if old.wrong_repetition or old.inexact or old.sums_off else new
        if old.digest != new.digest and not bad.wrong_repetition:
            bad = replace(bad, wrong_repetition=old.repetitions + 1)
        times = [product.best_s for product in (old, new) if product.best_s]
        products.append(replace(bad, best_s=min(times, default=0.0), repetitions=old.repetitions + new.repetitions))
    return replace(
        second,
        products=tuple(products),
        bandwidths={name: max(rate, first.bandwidths.get(name, 0.0)) for name, rate in second.bandwidths.items()},
        rounds=first.rounds + 1,
    )
