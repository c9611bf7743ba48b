"""Computes one operation on a device, in a dtype, with so many threads, and measures its error against float64.

What a dtype explains: a function may be off by some ulp (result.limits). A sum of n terms is a random walk of n
roundings of partial sums, which are themselves a random walk, as the inputs are normal and of both signs: its error is
about sqrt(n) u sqrt(sum of squares), u being half an ulp of 1 in the dtype of the sum (float32 for 16 bits). Six times
that is the limit, and one ulp for the result (Higham and Mary, "A new approach to probabilistic rounding error
analysis", 2019).
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from distdiag.training.floatcmp.compare import common_dtype
from distdiag.training.floatcmp.operation_result import Kind, Measured, OpComparison, Side
from distdiag.training.floatcmp.result import limits
from distdiag.training.floatcmp.ulp import as_integers, dtype_name, precision, round_to, ulp_distance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SIGMAS = 6
_RUNS = 3
_WIDTH = 256


@dataclass(frozen=True)
class Operation:
    """One operation. `squares`: the sum of squares of the terms of each result, in float64; None for functions.

    `scale`: where a function's result may be near zero because terms cancel, the size of these; None: its own size.
    """

    make: Callable[[torch.Generator, int], list[torch.Tensor]]
    run: Callable[..., torch.Tensor]
    terms: Callable[[int], int] = lambda _: 1
    squares: Callable[..., torch.Tensor] | None = None
    scale: Callable[..., torch.Tensor] | None = None


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _row(generator: torch.Generator, size: int) -> list[torch.Tensor]:
    return [_normal(generator, 64, size)]


def _positive(generator: torch.Generator, size: int) -> list[torch.Tensor]:
    return [_normal(generator, 64, size).abs() + 0.01]


def _matrices(generator: torch.Generator, size: int) -> list[torch.Tensor]:
    return [_normal(generator, _WIDTH, size), _normal(generator, size, _WIDTH)]


def _images(generator: torch.Generator, size: int) -> list[torch.Tensor]:
    channels = max(1, size // 9)
    return [_normal(generator, 2, channels, 24, 24), _normal(generator, 32, channels, 3, 3)]


def _powers(generator: torch.Generator, size: int) -> list[torch.Tensor]:
    return [_normal(generator, 64, size).abs() + 0.1, _normal(generator, 64, size)]


def _rows_to_add(generator: torch.Generator, size: int) -> list[torch.Tensor]:
    return [_normal(generator, 8 * size, 64), torch.arange(8 * size) % 8]


def _index_add(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.zeros(8, 64, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def _norm_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the size of what is subtracted: the mean itself is a sum whose error is an ulp of the usual size of x."""
    return 1 + (x.abs() + x.mean(-1, keepdim=True).abs()) / x.std(-1, keepdim=True, correction=0)


def _softmax_scale(x: torch.Tensor) -> torch.Tensor:
    """Return the size of what is rounded: exp makes the error of x - max, which is absolute, a relative error."""
    return x.softmax(-1) * (1 + x.amax(-1, keepdim=True) - x)


OPERATIONS: dict[str, Operation] = {
    "matmul": Operation(_matrices, torch.matmul, lambda n: n, lambda a, b: a.square() @ b.square()),
    "conv2d": Operation(
        _images,
        torch.nn.functional.conv2d,
        lambda n: 9 * max(1, n // 9),
        lambda x, w: torch.nn.functional.conv2d(x.square(), w.square()),
    ),
    "sum": Operation(_row, lambda x: x.sum(-1), lambda n: n, lambda x: x.square().sum(-1)),
    "mean": Operation(_row, lambda x: x.mean(-1), lambda n: n, lambda x: x.square().sum(-1) / x.shape[-1] ** 2),
    "cumsum": Operation(_row, lambda x: x.cumsum(-1), lambda n: n, lambda x: x.square().cumsum(-1)),
    "index_add": Operation(_rows_to_add, _index_add, lambda n: n, lambda x, at: _index_add(x.square(), at)),
    "exp": Operation(_row, torch.exp),
    "log": Operation(_positive, torch.log),
    "sin": Operation(_row, torch.sin),
    "tanh": Operation(_row, torch.tanh),
    "pow": Operation(_powers, torch.pow),
    "rsqrt": Operation(_positive, torch.rsqrt),
    "sigmoid": Operation(_row, torch.sigmoid),
    "gelu": Operation(_row, torch.nn.functional.gelu, scale=lambda x: x.abs()),
    "softmax": Operation(_row, lambda x: x.softmax(-1), scale=_softmax_scale),
    "layer_norm": Operation(
        _row, lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:], eps=0.0), scale=_norm_scale
    ),
}


def compare_operation(name: str, size: int, sides: tuple[Side, Side], seed: int = 0) -> OpComparison:
    """Compute an operation in two ways, from inputs that both dtypes hold exactly.

    Raises:
        RuntimeError: torch cannot compute it so: no such device, or no deterministic way.
    """
    operation = OPERATIONS[name]
    dtypes = tuple(getattr(torch, side.dtype) for side in sides)
    coarser = min(dtypes, key=precision)
    made = operation.make(torch.Generator().manual_seed(seed), size)
    inputs = [_rounded(value, coarser) for value in made]
    truth = operation.run(*inputs)
    results = [_run(operation, inputs, side) for side in sides]
    a, b = (results[number][0] for number in (0, 1))
    unit = common_dtype(*dtypes)
    distances = ulp_distance(round_to(a, unit), round_to(b, unit))
    finite = a.isfinite() & b.isfinite()
    same = a.dtype == b.dtype and bool((as_integers(a) == as_integers(b)).all())
    measured = [
        measure(operation, inputs, truth, result, reproducible=reproducible, terms=operation.terms(size))
        for result, reproducible in results
    ]
    return OpComparison(
        operation=name,
        size=size,
        terms=operation.terms(size),
        sides=sides,
        measured=(measured[0], measured[1]),
        numbers=truth.numel(),
        differing=int((distances != 0).sum()),
        max_ulp=int(distances[finite].max()) if bool(finite.any()) else 0,
        unit=dtype_name(unit),
        identical=same,
    )


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float64 that a coarser dtype holds exactly; an index stays as it is."""
    return round_to(value, dtype).to(torch.float64) if value.is_floating_point() else value


def _run(operation: Operation, inputs: Sequence[torch.Tensor], side: Side) -> tuple[torch.Tensor, bool]:
    """Return the result, on the CPU, and whether some runs gave the same bits."""
    dtype = getattr(torch, side.dtype)
    given = [(value.to(dtype) if value.is_floating_point() else value).to(side.device) for value in inputs]
    with _settings(side), torch.no_grad():
        results = [operation.run(*given).to("cpu").contiguous() for _ in range(_RUNS)]
    bits = [as_integers(result) for result in results]
    return results[0], all(bool((bits[0] == other).all()) for other in bits[1:])


@contextlib.contextmanager
def _settings(side: Side) -> Iterator[None]:
    threads, precise = torch.get_num_threads(), torch.get_float32_matmul_precision()
    cudnn, deterministic = torch.backends.cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()
    try:
        if side.threads:
            torch.set_num_threads(side.threads)
        torch.set_float32_matmul_precision(side.precision or ("high" if side.tf32 else "highest"))
        torch.backends.cudnn.allow_tf32 = side.tf32
        torch.use_deterministic_algorithms(side.deterministic)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precise)
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.use_deterministic_algorithms(deterministic)


def measure(
    operation: Operation,
    inputs: Sequence[torch.Tensor],
    truth: torch.Tensor,
    result: torch.Tensor,
    *,
    reproducible: bool,
    terms: int,
) -> Measured:
    """Classify the error of a result on the CPU; inputs and truth are float64."""
    dtype = result.dtype
    error = (result.to(torch.float64) - truth).abs()
    finite = result.isfinite()
    allowed = _limits(operation, inputs, truth, dtype, terms)
    shares = {kind: (error / limit.clamp_min(torch.finfo(torch.float64).tiny)) for kind, limit in allowed.items()}
    fits = (kind for kind, share in shares.items() if bool((share[finite] <= 1).all()))
    kind = next(fits, Kind.BEYOND) if bool(finite.all()) else Kind.BEYOND
    worst = shares[Kind.EXPECTED].where(finite, torch.full_like(error, -1.0)).flatten()
    at = int(worst.argmax()) if worst.numel() else 0
    sizes = torch.maximum(truth.abs(), _size_of_terms(operation, inputs, truth))
    return Measured(
        kind=kind,
        of_limit=float(worst[at].clamp_min(0)) if worst.numel() else 0.0,
        max_ulp=float((error / _ulp(sizes, dtype))[finite].max()) if bool(finite.any()) else math.inf,
        right=float((round_to(truth, dtype) == result).to(torch.float64).mean()),
        not_finite=int((~finite).sum()),
        reproducible=reproducible,
        worst_index=tuple(int(number) for number in torch.unravel_index(torch.tensor(at), truth.shape)),
        worst_value=float(result.flatten()[at]),
        worst_reference=float(truth.flatten()[at]),
    )


def _size_of_terms(operation: Operation, inputs: Sequence[torch.Tensor], truth: torch.Tensor) -> torch.Tensor:
    if operation.squares is not None:
        return operation.squares(*inputs).sqrt()
    return operation.scale(*inputs) if operation.scale is not None else truth.abs()


def _limits(
    operation: Operation, inputs: Sequence[torch.Tensor], truth: torch.Tensor, dtype: torch.dtype, terms: int
) -> dict[Kind, torch.Tensor]:
    """Return, for each kind, how large the error of each number may be; the best kind first."""
    if operation.squares is None:
        sizes = torch.maximum(truth.abs(), _size_of_terms(operation, inputs, truth))
        return {Kind.EXPECTED: limits(dtype_name(dtype))[0] * _ulp(sizes, dtype)}
    spread = operation.squares(*inputs).sqrt()
    is_short = precision(dtype) < precision(torch.float32)
    half_ulp = 2.0 ** -precision(torch.float32 if is_short else dtype)
    own = _ulp(truth.abs(), dtype) + _SIGMAS * math.sqrt(terms) * half_ulp * spread
    found = {Kind.EXPECTED: own}
    if dtype == torch.float32:
        # Each of two inputs is off by up to half an ulp of 11, or 8 bits; the errors of the products add up as squares.
        found[Kind.TF32] = own + _SIGMAS * 2 * 2.0**-11 * spread
        found[Kind.BFLOAT16] = own + _SIGMAS * 2 * 2.0**-8 * spread
    if is_short:
        found[Kind.SHORT_SUM] = own + _SIGMAS * math.sqrt(terms) * 2.0 ** -precision(dtype) * spread
    return found


def _ulp(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance of neighbours of a dtype at each of these sizes, in float64."""
    smallest = math.frexp(torch.finfo(dtype).smallest_normal)[1]
    exponents = torch.frexp(sizes)[1].clamp_min(smallest) - precision(dtype)
    return torch.exp2(exponents.to(torch.float64))
