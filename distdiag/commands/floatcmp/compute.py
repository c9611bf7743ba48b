"""Compute one operation with given settings in torch, and measure its error against float64. Imported by child.py only.

Rounding explains some ulp of a function (result.limits). A sum of n terms is a random walk of n roundings of partial
sums, which are random walks themselves, as the inputs are normal and of both signs: its error is about
sqrt(n) u sqrt(sum of squares), u being half an ulp of 1 in the dtype of the sum (float32 for 16 bits). Six times that
is the limit, plus one ulp for the result (Higham and Mary, "A new approach to probabilistic rounding error analysis",
2019).
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from distdiag.commands.floatcmp.operation import (
    BEYOND,
    BFLOAT16,
    EXPECTED,
    SHORT_SUM,
    TF32,
    Measured,
    OpComparison,
    Side,
)
from distdiag.training.floatcmp.compare import floatcmp
from distdiag.training.floatcmp.result import limits
from distdiag.training.floatcmp.ulp import as_integers, dtype_name, precision, round_to, ulp_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    New = Callable[..., Tensor]

_SIGMAS, _RUNS = 6, 3


class Operation(NamedTuple):
    """`make` returns float64 inputs for a size, `run` computes.

    `terms`: of a sum, how many for each of the size; 0 for functions. `scale`: the size of a function's terms where
    they may cancel.
    """

    make: Callable[[New, int], list[Tensor]]
    run: Callable[..., Tensor]
    terms: int = 0
    scale: Callable[[Tensor], Tensor] = torch.zeros_like


def _row(new: New, size: int) -> list[Tensor]:
    return [new(64, size)]


def _positive(new: New, size: int) -> list[Tensor]:
    return [new(64, size).abs() + 0.01]


def _index_add(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(8, 64, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def _norm_scale(x: Tensor) -> Tensor:
    """Return the size of the subtraction's terms: the mean is a sum whose error is an ulp of the usual size of x."""
    return 1 + (x.abs() + x.mean(-1, keepdim=True).abs()) / x.std(-1, keepdim=True, correction=0)


def _softmax_scale(x: Tensor) -> Tensor:
    """Return each result times the condition of exp, by which the rounding of x - max is larger in the result."""
    return x.softmax(-1) * (1 + x.amax(-1, keepdim=True) - x)


OPERATIONS = {
    "matmul": Operation(lambda new, n: [new(256, n), new(n, 256)], torch.matmul, 1),
    "conv2d": Operation(lambda new, n: [new(2, n, 24, 24), new(32, n, 3, 3)], functional.conv2d, 9),
    "sum": Operation(_row, lambda x: x.sum(-1), 1),
    "cumsum": Operation(_row, lambda x: x.cumsum(-1), 1),
    "index_add": Operation(lambda new, n: [new(8 * n, 64), torch.arange(8 * n) % 8], _index_add, 1),
    "exp": Operation(_row, torch.exp),
    "log": Operation(_positive, torch.log),
    "sin": Operation(_row, torch.sin),
    "tanh": Operation(_row, torch.tanh),
    "pow": Operation(lambda new, n: [new(64, n).abs() + 0.1, new(64, n)], torch.pow),
    "rsqrt": Operation(_positive, torch.rsqrt),
    "sigmoid": Operation(_row, torch.sigmoid),
    "gelu": Operation(_row, functional.gelu, scale=torch.abs),
    "softmax": Operation(_row, lambda x: x.softmax(-1), scale=_softmax_scale),
    "layer_norm": Operation(_row, lambda x: functional.layer_norm(x, x.shape[-1:], eps=0.0), scale=_norm_scale),
}


def compare_operation(name: str, size: int, sides: tuple[Side, Side], seed: int = 0) -> OpComparison:
    """Compute an operation in two ways, from inputs that both dtypes hold exactly; sums have about `size` terms.

    Raises:
        RuntimeError: torch cannot: no such device, or no deterministic algorithm.
    """
    operation = OPERATIONS[name]
    count = max(1, size // max(1, operation.terms))
    coarser = min((getattr(torch, side.dtype) for side in sides), key=precision)
    new = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    made = operation.make(new, count)
    inputs = [round_to(value, coarser).double() if value.is_floating_point() else value for value in made]
    threads = torch.get_num_threads()
    try:
        results = [_run(operation, inputs, side, threads) for side in sides]
    finally:
        _set(Side(typed=""), threads)
    terms = operation.terms * count
    measured = [measure(operation, terms, inputs, runs) for runs in results]
    return OpComparison(
        operation=name,
        rule=f"a sum of {terms:,} terms" if terms else "one function",
        sides=sides,
        measured=(measured[0], measured[1]),
        pair=floatcmp(results[0][0], results[1][0]).pairs[0],
    )


def _set(side: Side, threads: int) -> None:
    if side.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without it
    torch.set_num_threads(side.threads or threads)
    torch.set_float32_matmul_precision(side.precision or "highest")
    torch.backends.cudnn.allow_tf32 = bool(side.precision)
    torch.use_deterministic_algorithms(side.deterministic)


def _run(operation: Operation, inputs: Sequence[Tensor], side: Side, threads: int) -> list[Tensor]:
    """Return the results of some runs, on the CPU."""
    _set(side, threads)
    dtype = getattr(torch, side.dtype)
    given = [(value.to(dtype) if value.is_floating_point() else value).to(side.device) for value in inputs]
    with torch.no_grad():
        return [operation.run(*given).to("cpu").contiguous() for _ in range(_RUNS)]


def measure(operation: Operation, terms: int, inputs: Sequence[Tensor], runs: Sequence[Tensor]) -> Measured:
    """Classify the error of the first of some results on the CPU; the inputs are float64."""
    truth, result = operation.run(*inputs), runs[0]
    error, finite = (result.double() - truth).abs(), result.isfinite()
    shares = {
        kind: error / bound.clamp_min(torch.finfo(torch.float64).tiny)
        for kind, bound in _bounds(operation, terms, inputs, truth, result.dtype)
    }
    of_limit = shares[EXPECTED].where(finite, 0.0)
    return Measured(
        kind=next((kind for kind, share in shares.items() if bool((share <= 1).all())), BEYOND),
        of_limit=float(of_limit.max()),
        worst_index=tuple(int(number) for number in torch.unravel_index(of_limit.argmax(), truth.shape)),
        right=int((round_to(truth, result.dtype) == result).sum()),
        not_finite=int((~finite).sum()),
        reproducible=all(bool((as_integers(result) == as_integers(other)).all()) for other in runs[1:]),
    )


def _bounds(
    operation: Operation, terms: int, inputs: Sequence[Tensor], truth: Tensor, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield how large the error of each number may be for each kind, the best first."""
    if not terms:
        scale = torch.maximum(truth.abs(), operation.scale(inputs[0]))
        yield EXPECTED, limits(dtype_name(dtype))[0] * ulp_at(scale, dtype)
        return
    # A sum of squares is the same sum, of squared inputs.
    spread = operation.run(*(value.square() if value.is_floating_point() else value for value in inputs)).sqrt()
    walk = _SIGMAS * math.sqrt(terms) * spread
    is_short = precision(dtype) < precision(torch.float32)
    own = ulp_at(truth.abs(), dtype) + walk * 2.0 ** -precision(torch.float32 if is_short else dtype)
    yield EXPECTED, own
    if dtype == torch.float32:
        # Each of two inputs is off by up to half an ulp of 11, or 8 bits; the errors of the products add up as squares.
        yield TF32, own + _SIGMAS * 2 * 2.0**-11 * spread
        yield BFLOAT16, own + _SIGMAS * 2 * 2.0**-8 * spread
    if is_short:
        yield SHORT_SUM, own + walk * 2.0 ** -precision(dtype)
