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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distdiag.commands.floatcmp import operation as op
from distdiag.commands.floatcmp.operation import Measured, OpComparison, Side
from distdiag.training.floatcmp.compare import floatcmp
from distdiag.training.floatcmp.result import limits
from distdiag.training.floatcmp.ulp import as_integers, dtype_name, precision, round_to, ulp_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SIGMAS, _RUNS = 6, 3


def make(name: str, size: int, new: Callable[..., Tensor]) -> list[Tensor]:
    """Return float64 inputs of an operation; sums of matrix products and numbers have `size` terms."""
    if name == "matmul":
        return [new(256, size), new(size, 256)]
    if name == "conv2d":
        return [new(2, size // 9, 24, 24), new(32, size // 9, 3, 3)]
    if name == "index_add":
        return [new(8 * size, 64), torch.arange(8 * size) % 8]
    if name in ("log", "rsqrt"):
        return [new(64, size).abs() + 0.01]
    return [new(64, size).abs() + 0.1, new(64, size)] if name == "pow" else [new(64, size)]


def run(name: str, *inputs: Tensor) -> Tensor:
    """Compute an operation."""
    if name == "index_add":
        zeros = torch.zeros(8, 64, dtype=inputs[0].dtype, device=inputs[0].device)
        return zeros.index_add_(0, inputs[1], inputs[0])
    along = (-1,) if name in ("sum", "cumsum") else ()
    found: Tensor = getattr(torch, name)(*inputs, *along)
    return found


def compare_operation(name: str, size: int, sides: tuple[Side, Side]) -> OpComparison:
    """Compute an operation in two ways, from inputs that both dtypes hold exactly.

    Raises:
        RuntimeError: torch cannot: no such device, or no deterministic algorithm.
    """
    size = 9 * max(1, size // 9) if name == "conv2d" else size
    coarser = min((getattr(torch, side.dtype) for side in sides), key=precision)
    new = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = [round_to(each, coarser).double() if each.is_floating_point() else each for each in make(name, size, new)]
    threads = torch.get_num_threads()
    try:
        results = [_run(name, inputs, side, threads) for side in sides]
    finally:
        _set(Side(typed=""), threads)
    a, b = (measure(name, side, size, inputs, runs) for side, runs in zip(sides, results, strict=True))
    rule = f"a sum of {size:,} terms" if name in op.SUMS else "one function"
    return OpComparison(
        operation=name, rule=rule, measured=(a, b), pair=floatcmp(results[0][0], results[1][0]).pairs[0]
    )


def _set(side: Side, threads: int) -> None:
    if side.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without it
    torch.set_num_threads(side.threads or threads)
    torch.set_float32_matmul_precision("high" if side.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = side.tf32
    torch.use_deterministic_algorithms(side.deterministic)


def _run(name: str, inputs: Sequence[Tensor], side: Side, threads: int) -> list[Tensor]:
    _set(side, threads)
    dtype = getattr(torch, side.dtype)
    given = [(value.to(dtype) if value.is_floating_point() else value).to(side.device) for value in inputs]
    with torch.no_grad():
        return [run(name, *given).to("cpu").contiguous() for _ in range(_RUNS)]


def measure(name: str, side: Side, size: int, inputs: Sequence[Tensor], runs: Sequence[Tensor]) -> Measured:
    """Classify the error of the first of some results on the CPU; the inputs are float64."""
    truth, result = run(name, *inputs), runs[0]
    error, finite = (result.double() - truth).abs(), result.isfinite()
    shares = {
        kind: error / bound.clamp_min(torch.finfo(torch.float64).tiny)
        for kind, bound in _bounds(name, size, inputs, truth, result.dtype)
    }
    of_limit = shares[op.EXPECTED].where(finite, 0.0)
    return Measured(
        side=side,
        kind=next((kind for kind, share in shares.items() if bool((share <= 1).all())), op.BEYOND),
        of_limit=float(of_limit.max()),
        worst_index=tuple(int(number) for number in torch.unravel_index(of_limit.argmax(), truth.shape)),
        right=int((round_to(truth, result.dtype) == result).sum()),
        not_finite=int((~finite).sum()),
        reproducible=all(bool((as_integers(result) == as_integers(other)).all()) for other in runs[1:]),
    )


def _bounds(
    name: str, terms: int, inputs: Sequence[Tensor], truth: Tensor, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield each kind of error with its bound per element, the smallest first."""
    if name not in op.SUMS:
        yield op.EXPECTED, limits(dtype_name(dtype))[0] * ulp_at(truth.abs(), dtype)
        return
    # A sum of squares is the same sum, of squared inputs.
    spread = run(name, *(value.square() if value.is_floating_point() else value for value in inputs)).sqrt()
    walk = _SIGMAS * math.sqrt(terms) * spread
    is_short = precision(dtype) < precision(torch.float32)
    own = ulp_at(truth.abs(), dtype) + walk * 2.0 ** -precision(torch.float32 if is_short else dtype)
    yield op.EXPECTED, own
    if dtype == torch.float32:
        # Each of two inputs is off by up to half an ulp of 11, or 8 bits; the errors of the products add up as squares.
        yield op.TF32, own + _SIGMAS * 2 * 2.0**-11 * spread
        yield op.BFLOAT16, own + _SIGMAS * 2 * 2.0**-8 * spread
    if is_short:
        yield op.SHORT_SUM, own + walk * 2.0 ** -precision(dtype)
