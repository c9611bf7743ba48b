"""floatcmp: compare tensors that should hold the same numbers, and report which is closer to a reference."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from distdiag.training.floatcmp.result import (
    FAR,
    NO_REFERENCE,
    Comparison,
    Likeness,
    Mismatch,
    Nearness,
    Pair,
    likeness,
)
from distdiag.training.floatcmp.ulp import (
    Tally,
    as_integers,
    dtype_name,
    pieces,
    precision,
    round_to,
    ulp_distance,
    usual_ulp,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Sides = tuple[torch.Tensor, torch.Tensor]

_DEEPEST, _MOST = 100, 1_000_000


class NotComparable(Exception):
    """A value that is neither a tensor nor a plain value; the text names its kind."""


def floatcmp(
    a: object, b: object, *, reference: object = None, names: tuple[str, str] = ("a", "b"), worst: int = 5
) -> Comparison:
    """Compare tensors that should be equal: from two devices, two dtypes or two runs.

    Differences are counted in ulp: adjacent values of a dtype are 1 ulp apart, also across zero; 0.0 and -0.0 are 0 ulp
    apart. nan against nan is equal; nan or an infinity against anything else is counted apart and in no maximum.
    Integers and booleans are compared exactly. The finer of two dtypes is rounded to the coarser; they are never
    reported as identical.

    A sum of numbers near 1 that yields 1e-6 by cancellation is accurate to about 1e-7 only. So in a tensor with values
    of both signs, `max_scaled_ulp` measures small values in their own ulp or in that of the tensor's geometric mean,
    whichever makes the difference smaller, unless many are 0 on one side only; `max_ulp` always uses their own. See
    result.limits for what counts as rounding. It runs on one thread of the CPU in chunks of 65536 values.

    Args:
        a: a tensor of any shape, device and strides, an array, a number, or nested dicts and lists of them.
        b: the same. Names missing on one side, and tensors of different shapes, are part of the result.
        reference: the correct values, of the same shape and a more precise dtype (float64).
        names: names of the two sides.
        worst: number of elements to keep per tensor.

    Raises:
        TypeError: `a` or `b` itself is not a tensor, number, array, dict or list.
        ValueError: they are nested deeper than 100 levels, as a container that contains itself is.
    """
    truths = leaves(reference) if reference is not None else None
    found = compare_leaves(leaves(a), leaves(b), truths, names=names, worst=worst)
    if found.not_compared and not found.pairs and not isinstance(a, (dict, list, tuple)):
        raise TypeError(f"floatcmp cannot compare {found.not_compared[0].removeprefix(': ')}")
    return found


def compare_leaves(
    a: Mapping[str, object],
    b: Mapping[str, object],
    truths: Mapping[str, object] | None = None,
    *,
    names: tuple[str, str],
    worst: int,
) -> Comparison:
    """Compare two results of `leaves`, as floatcmp does."""
    pairs: list[Pair] = []
    only_a, only_b = [name for name in a if name not in b], [name for name in b if name not in a]
    values_differ: list[str] = []
    not_compared: list[str] = []
    with _one_thread():
        for name in (name for name in a if name in b):
            try:
                x, y = _as_tensor(a[name]), _as_tensor(b[name])
                if x is not None and y is not None:
                    pairs.append(_compare_tensors(name, (x, y), truths, worst))
                elif type(a[name]) is not type(b[name]):
                    only_a.append(f"{name} ({type(a[name]).__name__})")
                    only_b.append(f"{name} ({type(b[name]).__name__})")
                elif a[name] != b[name]:
                    values_differ.append(name)
            except NotComparable as why:
                not_compared.append(f"{name}: {why}")
    return Comparison(
        a=names[0],
        b=names[1],
        tensors=len(pairs),
        identical=sum(pair.likeness == Likeness.IDENTICAL for pair in pairs),
        numbers=sum(pair.counts.size for pair in pairs),
        pairs=tuple(pairs),
        only_a=tuple(only_a),
        only_b=tuple(only_b),
        values_differ=tuple(values_differ),
        not_compared=tuple(not_compared),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: chunks are small, and on busy processors two threads took 10 times longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare_tensors(name: str, given: Sides, truths: Mapping[str, object] | None, worst: int) -> Pair:
    """Compare two tensors of one name. Raises NotComparable."""
    (a, notes), (b, more) = (_as_reals(tensor) for tensor in given)
    unit, same_shape = _common_dtype(a.dtype, b.dtype), a.shape == b.shape
    unit_name = dtype_name(unit) if precision(unit) else ""
    notes = list(dict.fromkeys([*notes, *more]))
    truth = None
    if truths is not None and unit_name:
        try:
            truth = _reference(name, truths, a.shape, unit)
        except NotComparable as why:
            notes.append(f"{NO_REFERENCE}: {why}")
    if a.dtype != b.dtype:
        notes.append(f"{dtype_name(a.dtype)} against {dtype_name(b.dtype)}: compared in {dtype_name(unit)}")
    tally = Tally(unit, keep=worst, scale=lambda: usual_ulp((a, b), unit))
    nearness = _count((a, b), truth, tally, unit) if same_shape else None
    if tally.flushed is not None:
        count, side = max(zip(tally.flushed, "ab", strict=True))
        notes.append(f"{count:,} values are 0 in {side} only: each is compared at its own size")
    counts = tally.counts()
    result = likeness(counts, unit_name, tally.max_scaled) if same_shape else Likeness.DIFFERS
    if result is Likeness.IDENTICAL and a.dtype != b.dtype and unit_name:
        result = Likeness.ROUNDING
    places = ([tally.first] if tally.first < FAR else [], [at for _, at in tally.worst], tally.one_sided)
    firsts, largest, one_sided = (tuple(_mismatch((a, b), unit, at) for at in group) for group in places)
    return Pair(
        key=name,
        likeness=result,
        shape_a=tuple(a.shape),
        shape_b=tuple(b.shape),
        dtype_a=dtype_name(a.dtype),
        dtype_b=dtype_name(b.dtype),
        unit=unit_name,
        counts=counts,
        max_scaled_ulp=tally.max_scaled,
        max_abs=tally.max_abs,
        max_rel=tally.max_rel,
        first=next(iter(firsts), None),
        worst=largest,
        one_sided=one_sided,
        nearness=nearness,
        notes=tuple(notes),
    )


def _common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Choose the dtype to compare in: the coarser float, or int64 for two kinds of integers.

    Raises:
        NotComparable: no integers of torch hold both.
    """
    floats = sorted((dtype for dtype in (a, b) if precision(dtype)), key=precision)
    if floats or a == b:
        return floats[0] if floats else a
    if "uint64" in (dtype_name(a), dtype_name(b)):
        raise NotComparable(f"{dtype_name(a)} against {dtype_name(b)}: no dtype holds both")
    return torch.int64


def _reference(name: str, truths: Mapping[str, object], shape: torch.Size, unit: torch.dtype) -> torch.Tensor:
    """Return the reference values for a tensor. Raises NotComparable."""
    found = _as_tensor(truths.get(name))
    if found is None:
        raise NotComparable("it has no tensor of this name")
    truth, _ = _as_reals(found)
    if truth.shape != shape:
        raise NotComparable(f"its shape is {tuple(truth.shape)}")
    if precision(truth.dtype) <= precision(unit):
        raise NotComparable(f"it is {dtype_name(truth.dtype)}, which is not more precise than {dtype_name(unit)}")
    return truth


def _count(sides: Sides, truth: torch.Tensor | None, tally: Tally, unit: torch.dtype) -> Nearness | None:
    """Count all pairs in `tally`, and each side against the reference, if given."""
    of_a, of_b = Tally(unit, keep=0), Tally(unit, keep=0)
    for at, (x, y, *right) in pieces((*sides, *([] if truth is None else [truth]))):
        tally.add(at, x, y)
        for number in right:
            of_a.add(at, x, number)
            of_b.add(at, y, number)
    return None if truth is None else Nearness(a=of_a.counts(), b=of_b.counts())


def _mismatch(sides: Sides, unit: torch.dtype, at: int) -> Mismatch:
    index = tuple(int(number) for number in torch.unravel_index(torch.tensor(at), sides[0].shape))
    a, b = (side[index].reshape(1).to("cpu") for side in sides)
    x, y = round_to(a, unit), round_to(b, unit)
    finite = all(bool(number.to(torch.float64).isfinite()) for number in (a, b, x, y))
    return Mismatch(
        index=index,
        a=repr(a.item()),
        a_bits=_bits(a),
        b=repr(b.item()),
        b_bits=_bits(b),
        ulp=int(ulp_distance(x, y)) if finite else None,
    )


def _bits(number: torch.Tensor) -> str:
    width = 8 * number.dtype.itemsize
    return f"0x{int(as_integers(number)) % 2**width:0{width // 4}x}"


def leaves(value: object) -> dict[str, object]:
    """List the values in nested dicts and lists by name: "model.layers[0].weight"; a list of numbers is one value.

    Raises:
        ValueError: nested too deeply, as a container that contains itself is; more than a million values; or two of
            one name.
    """
    found: dict[str, object] = {}
    _flatten(value, (), found)
    return found


def _flatten(value: object, path: Sequence[object], found: dict[str, object]) -> None:
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)) and not _is_numbers(value):
        inner = list(enumerate(value))
    else:
        name = _join_keys(path)
        if name in found:
            raise ValueError(f"two of its values are named {name}")
        found[name] = value
        return
    if len(path) >= _DEEPEST or len(found) + len(inner) > _MOST:
        raise ValueError(f"nested deeper than {_DEEPEST} levels, or more than {_MOST:,} values")
    for key, item in inner:
        _flatten(item, (*path, key), found)


def _join_keys(path: Sequence[object]) -> str:
    """Format the keys and indices that lead to a value as its name."""
    return "".join(f"[{key}]" if type(key) is int else f".{key}" for key in path).removeprefix(".")


def _is_numbers(value: list[object] | tuple[object, ...]) -> bool:
    return bool(value) and all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)


def _as_tensor(value: object) -> torch.Tensor | None:
    """Return numbers, arrays and lists of numbers as a tensor; None for plain values: text, None, dtypes.

    Python's numbers become float64, int64, bool and complex128; whole numbers beyond 64 bits are plain values.

    Raises:
        NotComparable: it is neither.
    """
    if isinstance(value, torch.Tensor):
        return value
    if value is None or isinstance(value, (str, bytes, torch.dtype, torch.device, torch.layout)):
        return None
    is_array = hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__")
    if not is_array and not isinstance(value, (bool, int, float, complex, list, tuple)):
        hint = "; pass its state_dict()" if hasattr(value, "state_dict") else ""
        raise NotComparable(f"{type(value).__name__}{hint}")
    import numpy

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a read-only array is only read
            return torch.as_tensor(value if is_array else numpy.asarray(value))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:  # text, dates, objects, float128
        if not is_array:
            return None
        raise NotComparable(f"{type(value).__name__}: {str(error).splitlines()[0][:120]}") from error


def _as_reals(tensor: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Return a strided real tensor with the same values, and notes on the conversion.

    Raises:
        NotComparable: it has no values, or they cannot be extracted.
    """
    notes = []
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
        notes.append("a DTensor: only this rank's part")
    if tensor.is_meta:
        raise NotComparable("a tensor on the meta device, which has no values")
    if tensor.is_nested:
        raise NotComparable("a nested tensor; pass its components")
    if tensor.is_quantized:
        tensor = tensor.dequantize()
        notes.append("quantized: the dequantized values")
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
        notes.append("sparse: all values, including zeros")
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
        notes.append("complex: two numbers each; the last index is 0 for the real part, 1 for the imaginary part")
    tensor = tensor.resolve_neg()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 and not precision(tensor.dtype):
        tensor = tensor.view(torch.uint8)
        notes.append("a format without ulps: compared byte by byte")
    return tensor, notes
