"""The stage compute of gpu-test's ranks: matrix products and copies, checked and timed.

Three checks of products. A small product of -1, 0 and 1 has sums below 256, exact in every precision and order of
summation. A large product has identical bits in every repetition, on every device of one model. Its row and column sums
follow from the factors in float64 (Huang and Abraham, "Algorithm-based fault tolerance for matrix operations", 1984).

Identical bits rely on cuBLAS ("Results Reproducibility" in its documentation): one version gives the same bits on each
run, on GPUs of one architecture with one number of SMs, while a handle serves a single stream. Ranks compute on the
default stream alone. CUBLAS_WORKSPACE_CONFIG and other switches that choose kernels are part of the model's name. Two
sources of varying bits are disabled: TunableOp, which picks the fastest kernel of a trial (torch.cuda.tunable), and the
atomics of rocBLAS, which torch allows unless use_deterministic_algorithms is on (pytorch/pytorch#48654).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import replace
from importlib import metadata

from distdiag.facts.gpu import gpu_health
from distdiag.facts.gpu.computed import Computed, Product, Summary, bad_ranks
from distdiag.facts.machine import cpu_model

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from distdiag.launch.rank import Rank

    Multiply = Callable[[], torch.Tensor]
    """Returns the product, shape (n, n)."""

_SMALL = 256
_N_ON_CPU = 384
_LARGEST_N = 8192
_PRODUCTS_SHARE = 0.7
"""Share of the time for products; the rest is for bandwidths."""
_LEAST_REPETITIONS = {"cuda": 3, "cpu": 25}
"""The best of few one-millisecond repetitions on a busy core varies by 25%."""
_ROUNDS = 3
_COPY_BYTES_ON_CPU = 32 << 20
_HOST_BYTES = 64 << 20
_ALL_TURNS_S = 2.0
_HEALTH_S = 5.0
_SIGMAS = 16
_EPSILON = {"float32": 2.0**-24, "tf32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8": 2.0**-8}
"""Rounding of one element of the result; fp8 products are written as bfloat16."""
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")
_BLAS_FILES = ("libcublas", "librocblas", "libhipblaslt")
_SWITCHES = ("CUBLAS", "NVIDIA_TF32", "TORCH_BLAS", "ROCBLAS_", "HIPBLASLT_", "MKL_", "ONEDNN_", "DNNL_")
_SLOW_FAULT = 0.7
"""Relative speed under `--inject slow-compute`."""


class Compute:
    """Computes on the device of one rank, for the given seconds per round."""

    def __init__(self, rank: Rank, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds
        self.device = rank.device
        self.on_gpu = self.device.type == "cuda"
        self.bad: set[int] = set()
        """Ranks that computed slowly or wrongly; set on rank 0 by `run`."""
        if not self.on_gpu:
            torch.set_num_threads(1)  # each rank measures one core, however many ranks share the node
        elif torch.version.hip:
            torch.use_deterministic_algorithms(True)
        if self.on_gpu and hasattr(torch.cuda, "tunable"):
            torch.cuda.tunable.enable(False)
        self.n = self._size()

    def run(self) -> Computed:
        """Measure on all ranks at once; repeat, up to three rounds in all, while any looks slow."""
        found = self._measure(1)
        again = self._agree(1, found)
        for number in range(2, _ROUNDS + 1):
            if again:
                found = _better(found, self._measure(number))
                again = self._agree(number, found)
        if self.on_gpu:
            bad = again or any(product.is_wrong for product in found.products)
            found = replace(found, health=self._health_under_load() if bad else None)
            torch.cuda.empty_cache()  # NCCL allocates outside torch's cache
            return found
        return replace(found, cpus=len(os.sched_getaffinity(0)))

    def _agree(self, number: int, found: Computed) -> bool:
        """Return rank 0's verdict whether any rank is slow compared to the others."""
        rank, store = self.rank, self.rank.store
        rank.progress.step(f"comparing the results of all ranks, round {number}", waiting=True)
        store.set(f"compute/{number}/{rank.rank}", json.dumps(vars(found.summary())))
        if rank.rank == 0:
            slow, wrong = bad_ranks(
                {each: Summary(**json.loads(store.get(f"compute/{number}/{each}"))) for each in range(rank.world_size)}
            )
            self.bad = slow | wrong
            store.set(f"computed/{number}", "again" if slow else "")
        return bool(store.get(f"computed/{number}"))

    def _measure(self, number: int) -> Computed:
        rank, store = self.rank, self.rank.store
        rank.progress.step("starting to compute with all ranks", waiting=True)
        if store.add(f"compute/{number}/ready", 1) == rank.world_size:
            store.set(f"compute/{number}/go", "")
        store.wait([f"compute/{number}/go"])
        precisions = self._precisions()
        each_s = self.seconds * _PRODUCTS_SHARE / len(precisions)
        products = tuple(self._product(precision, each_s) for precision in precisions)
        bandwidths = self._bandwidths(self.seconds * (1 - _PRODUCTS_SHARE))
        has = torch.cuda.get_device_properties(self.device) if self.on_gpu else None
        return Computed(self._model(), products, bandwidths, device=str(getattr(has, "uuid", "")))

    def _model(self) -> str:
        """Name all influences on the bits and the speed of a product: only devices with equal names are compared.

        On a GPU this includes the file of its BLAS library, which torch's version determines only for pip packages.
        """
        switches = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_SWITCHES)]
        if not self.on_gpu:
            capability = torch.backends.cpu.get_cpu_capability()
            return ", ".join([cpu_model() or "cpu", capability, f"torch {torch.__version__}", f"n {self.n}", *switches])
        has = torch.cuda.get_device_properties(self.device)
        built = torch.version.cuda or torch.version.hip
        parts = [has.name, f"{has.multi_processor_count} multiprocessors", f"torch {torch.__version__}", str(built)]
        for package in _CUBLAS:
            with contextlib.suppress(metadata.PackageNotFoundError):
                parts.append(f"cuBLAS {metadata.version(package)}")
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            files = {os.path.basename(line.split()[-1]) for line in maps}
        parts += sorted(name for name in files if name.startswith(_BLAS_FILES))
        return ", ".join([*parts, f"n {self.n}", *switches])

    def _precisions(self) -> list[str]:
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
        n = self.n
        self.rank.progress.step(f"multiplying in {precision}")
        _allow_tf32(precision == "tf32")
        try:
            inexact = self._inexact(precision)
            left, right = self._fractions(n, 37, 101), self._fractions(n, 59, 17)
            found = self._repeat(
                Product(precision, n, inexact=inexact), self._multiply(precision, left, right), seconds
            )
            return replace(found[0], sums_off=self._sums_off(precision, left, right, found[1]))
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            if precision != "fp8":  # not every build and GPU has an fp8 kernel
                raise
            return Product(precision, skipped=str(error).splitlines()[0][:160])

    def _size(self) -> int:
        """Return n for the free memory of the GPU: half of it must hold 64 n^2 bytes, the int64 steps of the factors
        and the float64 copies of the sums. Other programs may take it meanwhile: out-of-memory is reported."""
        if not self.on_gpu:
            return _N_ON_CPU
        torch.cuda.empty_cache()  # frees the cached buffers of the stage memory
        free = torch.cuda.mem_get_info()[0] / self.rank.config["sharing"]
        n = _LARGEST_N
        while n > _SMALL and 64 * n * n > free / 2:
            n //= 2
        return n

    def _multiply(self, precision: str, left: torch.Tensor, right: torch.Tensor) -> Multiply:
        """Return a function that multiplies two float32 matrices, shape (n, n), after rounding them to a precision.

        torch._scaled_mm requires (aten/src/ATen/native/cuda/Blas.cpp): compute capability 8.9 or from 9.0, all sizes
        multiples of 16, the first matrix in row-major and the second in column-major order, scales of one float32
        element on the device. Before torch 2.5 it also returned the largest value of the result.
        """
        if precision == "fp8":
            one = torch.ones((), device=self.device)
            a = left.to(torch.float8_e4m3fn)
            b = right.t().contiguous().to(torch.float8_e4m3fn).t()

            def scaled() -> torch.Tensor:
                result = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
                return result[0] if isinstance(result, tuple) else result

            return scaled
        dtype = torch.float32 if precision == "tf32" else getattr(torch, precision)
        a, b = left.to(dtype), right.to(dtype)
        return lambda: a @ b

    def _fractions(self, n: int, by_row: int, by_column: int) -> torch.Tensor:
        """Return pseudo-random k/128 with |k| < 128, shape (n, n), float32: exact in all precisions but fp8."""
        index = torch.arange(n, device=self.device, dtype=torch.int64)
        mixed = (index[:, None] * by_row + 1) * (index[None, :] * by_column + 3) % 65521 * 40503
        return ((mixed >> 7) % 255 - 127).to(torch.float32) / 128

    def _inexact(self, precision: str) -> int:
        """Count wrong elements of a product of -1, 0 and 1, compared with an exact product on the CPU."""
        left = (self._fractions(_SMALL, 37, 101) * 128).remainder(3) - 1
        right = (self._fractions(_SMALL, 59, 17) * 128).remainder(3) - 1
        result = self._multiply(precision, left, right)().to("cpu", torch.float64)
        return int((result != left.cpu().double() @ right.cpu().double()).sum())

    def _repeat(self, product: Product, multiply: Multiply, seconds: float) -> tuple[Product, torch.Tensor]:
        """Multiply for `seconds`; return the observations, and the most frequent result."""
        rank = self.rank
        multiply()
        rank.synchronize()
        end = time.monotonic() + seconds
        best = float("inf")
        digests: list[str] = []
        kept: dict[str, torch.Tensor] = {}
        while len(digests) < _LEAST_REPETITIONS[self.device.type] or time.monotonic() < end:
            took_s, result = self._timed(multiply, slowed=rank.is_faulty("slow-compute"))
            best = min(best, took_s)
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

    def _timed(self, work: Callable[[], torch.Tensor], *, slowed: bool = False) -> tuple[float, torch.Tensor]:
        """Run it once; return its seconds and its result.

        On a GPU between two events of its stream, as launches are asynchronous ("Asynchronous execution" in torch's
        CUDA semantics). On the CPU in thread time: other programs affect the wall clock, not the speed of the core.
        `slowed`: take as long as at 70% of the speed.
        """
        clock = time.perf_counter if self.on_gpu else time.thread_time
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.on_gpu else []
        began = clock()
        if events:
            events[0].record()
        result = work()
        if slowed:
            self.rank.synchronize()
            end_of_fault = began + (clock() - began) / _SLOW_FAULT
            while clock() < end_of_fault:
                pass
        if not events:
            return clock() - began, result
        events[1].record()
        self.rank.synchronize()
        return events[0].elapsed_time(events[1]) / 1e3, result

    def _digest(self, result: torch.Tensor) -> str:
        """Return two weighted sums of the bits of a result, modulo 2^64, which detect a change of any element."""
        bits = result.view(torch.int32 if result.element_size() == 4 else torch.int16)
        weights = torch.arange(1, len(bits) + 1, device=self.device, dtype=torch.int64)
        rows, columns = (int((bits.sum(dim, dtype=torch.int64) * weights).sum()) for dim in (1, 0))
        return f"{rows & (2**64 - 1):016x}{columns & (2**64 - 1):016x}"

    def _sums_off(self, precision: str, left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> int:
        """Count the rows and columns whose sum deviates from that of the factors by more than rounding explains."""
        if precision == "fp8":
            left, right = (matrix.to(torch.float8_e4m3fn).float() for matrix in (left, right))
        left, right, result = left.double(), right.double(), result.double()
        ones = torch.ones(len(left), device=self.device, dtype=torch.float64)
        size = float(result.square().mean().sqrt())
        # Tensor cores truncate each of n partial sums in float32, always towards zero; elements round independently.
        allowed = _SIGMAS * len(left) ** 0.5 * size * (_EPSILON[precision] + len(left) * 2.0**-24)
        rows = result @ ones - left @ (right @ ones)
        columns = ones @ result - (ones @ left) @ right
        # Negated, so that nan counts as off.
        return int((~(rows.abs() <= allowed)).sum() + (~(columns.abs() <= allowed)).sum())

    # --- bandwidths

    def _bandwidths(self, seconds: float) -> dict[str, float]:
        size = 16 * self.n**2 if self.on_gpu else _COPY_BYTES_ON_CPU
        a, b, c = (torch.full((size // 4,), float(value), device=self.device) for value in (1, 2, 3))
        ways: dict[str, tuple[int, Callable[[], torch.Tensor]]] = {
            "copy": (2 * size, lambda: a.copy_(b)),
            "triad": (3 * size, lambda: torch.add(b, c, alpha=3.0, out=a)),
        }
        if self.on_gpu:
            part = a[: _HOST_BYTES // 4]
            with contextlib.suppress(RuntimeError):  # pinned memory unavailable
                host = torch.empty(len(part), pin_memory=True)
                ways["to device"] = (4 * len(part), lambda: part.copy_(host, non_blocking=True))
                ways["from device"] = (4 * len(part), lambda: host.copy_(part, non_blocking=True))
        found = {}
        for name, (moved, way) in ways.items():
            self.rank.progress.step(f"measuring {name}")
            if "device" in name:
                found[name] = moved / self._best_in_turn(way, seconds / len(ways))
            else:
                found[name] = moved / self._best_of(way, seconds / len(ways))
        return found

    def _best_of(self, way: Callable[[], torch.Tensor], seconds: float) -> float:
        self._timed(way)
        best, end, count = float("inf"), time.monotonic() + seconds, 0
        while count < 3 or time.monotonic() < end:
            best, count = min(best, self._timed(way)[0]), count + 1
            self.rank.progress.still("copying")
        return best

    def _best_in_turn(self, way: Callable[[], torch.Tensor], seconds: float) -> float:
        """Time copies to or from the host while the node's other ranks are idle: GPUs may share a PCIe switch.

        Local ranks take turns by the monotonic clock, which is common to the node.
        """
        number = self.rank.config["local_world_size"]
        seconds = min(seconds, _ALL_TURNS_S)
        place = self.rank.config["local_rank"] / number * seconds
        time.sleep((place - time.monotonic()) % seconds)
        return self._best_of(way, seconds / number)

    def _health_under_load(self) -> gpu_health.GpuHealth | None:
        uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", None)
        read: list[gpu_health.Health] = []
        reader = threading.Thread(target=lambda: read.append(gpu_health.read(_HEALTH_S, users=False)), daemon=True)
        matrix = self._fractions(self.n, 37, 101)
        self.rank.progress.step("reading the GPU's health under load")
        reader.start()
        while reader.is_alive():
            matrix @ matrix
            self.rank.synchronize()
            self.rank.progress.still("reading the GPU's health under load")
        own = [gpu for gpu in (read[0].gpus if read else ()) if uuid is not None and gpu.uuid == f"GPU-{uuid}"]
        return replace(own[0], processes=()) if own else None


def _allow_tf32(allowed: bool) -> None:
    """Let float32 products round factors to TF32, or not.

    Since torch 2.9 the old name warns, and reading it raises if the new one was set ("TensorFloat-32" in torch's CUDA
    semantics).
    """
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        matmul.fp32_precision = "tf32" if allowed else "ieee"
    else:
        matmul.allow_tf32 = allowed


def _better(first: Computed, second: Computed) -> Computed:
    """Merge two rounds: the best rates, and the errors of either."""
    products = []
    for old, new in zip(first.products, second.products):
        bad = old if old.is_wrong else new
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
