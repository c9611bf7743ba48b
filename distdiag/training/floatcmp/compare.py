"""floatcmp: compare tensors that should hold the same numbers, and report which is closer to a reference."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from distdiag.training.floatcmp.result import NO_REFERENCE, Comparison, Likeness, Mismatch, Nearness, Pair, likeness
from distdiag.training.floatcmp.ulp import (
    Tally,
    as_integers,
    dtype_name,
    pieces,
    precision,
    round_to,
    ulp_at,
    ulp_distance,
    usual_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Path = tuple[object, ...]
    Sides = tuple[torch.Tensor, torch.Tensor]

_DEEPEST, _MOST = 100, 1_000_000


class NotComparable(Exception):
    """A value that is no tensor and no plain value either; its text says what it is."""


class Index(int):
    """The index of a list; equal to a dict's key of the same number, as lists are sometimes saved so."""


def floatcmp(
    a: object,
    b: object,
    *,
    reference: object = None,
    inputs: Sequence[object] = (),
    names: tuple[str, str] = ("a", "b"),
    worst: int = 5,
) -> Comparison:
    """Compare tensors that should be equal: from two devices, two dtypes or two runs.

    Differences are counted in ulp (units in the last place), element by element: adjacent values of a dtype are 1 ulp
    apart, also across zero. 0.0 and -0.0 are 0 ulp apart. nan and nan count as equal, and are counted separately; nan
    or an infinity against anything else is counted separately and is never part of a maximum. Integers and booleans are
    compared exactly. Tensors of two dtypes are compared in the coarser dtype, to which the other is rounded; they are
    never reported as identical.

    Where a result is close to zero by cancellation, its own ulp is misleading: a sum of numbers near 1 that yields 1e-6
    is accurate to about 1e-7 only. So in a tensor with values of both signs, small values are measured in their own ulp
    or in the ulp of the tensor's usual size (the geometric mean), whichever makes the difference smaller
    (`max_scaled_ulp`); `max_ulp` always uses their own. Values of one sign only (Adam's squares, probabilities), and
    values that are 0 on one side only in many places, always use their own. See result.limits for what counts as
    rounding.

    The comparison runs on the CPU in chunks of 65536 values, copied from other devices chunk by chunk, on one thread of
    torch.

    Args:
        a: a tensor of any shape, device and strides, an array, a number, or nested dicts and lists of them.
        b: the same. Names missing on one side, and tensors of different shapes, are part of the result.
        reference: the correct values, of the same shape and a more precise dtype (float64), or a function that computes
            them. They are rounded correctly to the dtype of the comparison.
        inputs: arguments for a `reference` that is a function: floating-point tensors are passed as float64 on the CPU,
            and float64 is torch's default dtype during the call.
        names: names of the two sides.
        worst: number of elements to keep per tensor.

    Raises:
        TypeError: `a` or `b` itself is not a tensor, number, array, dict or list.
        ValueError: they are nested deeper than 100 levels, as a container that contains itself is.
    """
    truth = _calculate(reference, inputs) if callable(reference) else reference
    truths = leaves(truth) if truth is not None else None
    found = compare_leaves(leaves(a), leaves(b), truths, names=names, worst=worst)
    if found.not_compared and not found.pairs and not isinstance(a, (dict, list, tuple)):
        raise TypeError(f"floatcmp cannot compare {found.not_compared[0].removeprefix(': ')}")
    return found


def compare_leaves(
    a: Mapping[Path, object],
    b: Mapping[Path, object],
    truths: Mapping[Path, object] | None,
    *,
    names: tuple[str, str],
    worst: int,
) -> Comparison:
    """Compare what `leaves` returned, as floatcmp does."""
    pairs: list[Pair] = []
    only_a: list[str] = []
    only_b: list[str] = []
    values_differ: list[str] = []
    not_compared: list[str] = []
    with _one_thread():
        for path in (path for path in a if path in b):
            name = path_name(path)
            try:
                x, y = as_tensor(a[path]), as_tensor(b[path])
                if x is not None and y is not None:
                    pairs.append(_compare_tensors(path, (x, y), truths, worst))
                elif type(a[path]) is not type(b[path]):
                    only_a.append(f"{name} ({type(a[path]).__name__})")
                    only_b.append(f"{name} ({type(b[path]).__name__})")
                elif a[path] != b[path]:
                    values_differ.append(name)
            except NotComparable as why:
                not_compared.append(f"{name}: {why}")
    return Comparison(
        names=names,
        pairs=tuple(pairs),
        only_a=(*only_a, *(path_name(path) for path in a if path not in b)),
        only_b=(*only_b, *(path_name(path) for path in b if path not in a)),
        values_differ=tuple(values_differ),
        not_compared=tuple(not_compared),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: pieces are small, and on busy processors two took 10 times longer than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _calculate(reference: Callable[..., object], inputs: Sequence[object]) -> object:
    """Call a reference that is a function, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            return reference(*[_in_float64(value) for value in inputs])
    finally:
        torch.set_default_dtype(before)


def _in_float64(value: object) -> object:
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu")
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.to(wide) if value.is_complex() or value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_float64(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_float64(inner) for inner in value]
    return value


def _compare_tensors(path: Path, given: Sides, truths: Mapping[Path, object] | None, worst: int) -> Pair:
    """Compare two tensors of one name. Raises NotComparable."""
    (a, notes), (b, more) = (as_strided_reals(tensor) for tensor in given)
    unit = common_dtype(a.dtype, b.dtype)
    notes = list(dict.fromkeys([*notes, *more]))
    same_shape = a.shape == b.shape
    truth = None
    if truths is not None and precision(unit):
        try:
            truth = _reference(path, truths, a.shape, unit)
        except NotComparable as why:
            notes.append(f"{NO_REFERENCE}: {why}")
    if a.dtype != b.dtype:
        notes.append(f"{dtype_name(a.dtype)} against {dtype_name(b.dtype)}: compared in {dtype_name(unit)}")
    tally = Tally(unit, keep=worst, scale=lambda: ulp_at(unit, min(usual_size(a), usual_size(b))))
    nearness = None
    if same_shape:
        nearness = _count((a, b), truth, tally, unit)
    if tally.flushed is not None:
        count, side = max(zip(tally.flushed, "ab", strict=True))
        notes.append(f"{count:,} values are 0 in {side} only: each is compared at its own size")
    counts = tally.counts()
    unit_name = dtype_name(unit) if precision(unit) else ""
    result = likeness(counts, unit_name, tally.max_scaled) if same_shape else Likeness.DIFFERS
    if result is Likeness.IDENTICAL and a.dtype != b.dtype and unit_name:
        result = Likeness.ROUNDING
    return Pair(
        key=path_name(path),
        likeness=result,
        shape_a=tuple(a.shape),
        shape_b=tuple(b.shape),
        dtype_a=dtype_name(a.dtype),
        dtype_b=dtype_name(b.dtype),
        unit=unit_name,
        counts=counts,
        max_scaled_ulp=tally.max_scaled,
        max_abs=tally.largest[0],
        max_rel=tally.max_rel,
        first=_mismatch((a, b), unit, tally.first) if tally.first is not None else None,
        worst=tuple(_mismatch((a, b), unit, at) for _, at in tally.worst),
        largest=_mismatch((a, b), unit, tally.largest[1]) if tally.largest[1] >= 0 else None,
        one_sided=tuple(_mismatch((a, b), unit, at) for at in tally.one_sided),
        nearness=nearness,
        notes=tuple(notes),
    )


def common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
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


def _reference(path: Path, truths: Mapping[Path, object], shape: torch.Size, unit: torch.dtype) -> torch.Tensor:
    """Return the right values for a tensor. Raises NotComparable where there are none."""
    if path not in truths:
        raise NotComparable("it does not have this name")
    found = as_tensor(truths[path])
    if found is None:
        raise NotComparable("it has no tensor there")
    truth, _ = as_strided_reals(found)
    if truth.shape != shape:
        raise NotComparable(f"its shape is {tuple(truth.shape)}")
    if precision(truth.dtype) <= precision(unit):
        raise NotComparable(f"it is {dtype_name(truth.dtype)}, which is not more precise than {dtype_name(unit)}")
    return truth


def _count(sides: Sides, truth: torch.Tensor | None, tally: Tally, unit: torch.dtype) -> Nearness | None:
    """Count all pairs of numbers in `tally`, and how near each side is to the reference, if there is one."""
    if truth is None:
        for at, (x, y) in pieces(sides):
            tally.add(at, x, y)
        return None
    of_a, of_b = Tally(unit, keep=0), Tally(unit, keep=0)
    for at, (x, y, right) in pieces((*sides, truth)):
        tally.add(at, x, y)
        of_a.add(at, x, right)
        of_b.add(at, y, right)
    return Nearness(a=of_a.counts(), b=of_b.counts())


def _mismatch(sides: Sides, unit: torch.dtype, at: int) -> Mismatch:
    """Return the pair of numbers at a flat index."""
    index: list[int] = []
    for length in reversed(sides[0].shape):
        at, inner = divmod(at, length)
        index.insert(0, inner)
    a, b = (side[tuple(index)].reshape(1).to("cpu") for side in sides)
    x, y = round_to(a, unit), round_to(b, unit)
    finite = all(bool(number.to(torch.float64).isfinite()) for number in (a, b, x, y))
    return Mismatch(
        index=tuple(index),
        a=repr(a.item()),
        a_bits=_bits(a),
        b=repr(b.item()),
        b_bits=_bits(b),
        ulp=int(ulp_distance(x, y)) if finite else None,
    )


def _bits(number: torch.Tensor) -> str:
    width = 8 * number.dtype.itemsize
    return f"0x{int(as_integers(number)) % 2**width:0{width // 4}x}"


def leaves(value: object) -> dict[Path, object]:
    """List all that is no dict and no list, by the keys and indices that lead there; a list of numbers is one leaf.

    Raises:
        ValueError: nested too deeply, as what contains itself is, or more than a million values.
    """
    found: dict[Path, object] = {}
    _flatten(value, (), found)
    return found


def _flatten(value: object, path: Path, found: dict[Path, object]) -> None:
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)) and not _is_numbers(value):
        inner = [(Index(number), item) for number, item in enumerate(value)]
    else:
        found[path] = value
        return
    if len(path) >= _DEEPEST or len(found) + len(inner) > _MOST:
        raise ValueError(f"nested deeper than {_DEEPEST} levels, or more than {_MOST:,} values")
    for key, item in inner:
        _flatten(item, (*path, key), found)


def _is_numbers(value: list[object] | tuple[object, ...]) -> bool:
    return bool(value) and all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)


def path_name(path: Path) -> str:
    """Format a path as a name: "model.layers[0].weight"."""
    name = ""
    for key in path:
        name += f"[{int(key)}]" if isinstance(key, Index) else f"{'.' if name else ''}{key}"
    return name


def as_tensor(value: object) -> torch.Tensor | None:
    """Return numbers, arrays and lists of numbers as a tensor; None for values that are none: text, None, dtypes.

    Python's numbers become float64, int64, bool and complex128.

    Raises:
        NotComparable: it is neither.
    """
    if isinstance(value, torch.Tensor):
        return value
    if value is None or isinstance(value, (str, bytes, torch.dtype, torch.device, torch.layout)):
        return None
    try:
        if isinstance(value, (bool, int, float, complex, list, tuple)):
            return _from_numbers(value)
        if hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an array that is only for reading is only read
                return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:  # text, dates, objects, float128
        raise NotComparable(f"{type(value).__name__}: {str(error).splitlines()[0][:120]}") from error
    hint = "; pass its state_dict()" if hasattr(value, "state_dict") else ""
    raise NotComparable(f"{type(value).__name__}{hint}")


def _from_numbers(value: Any) -> torch.Tensor | None:  # noqa: ANN401 - what torch.tensor takes
    items = value if isinstance(value, (list, tuple)) else [value]
    try:
        if any(isinstance(item, float) for item in items):
            return torch.tensor(value, dtype=torch.float64)
        return torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else None)
    except (OverflowError, RuntimeError, ValueError):  # whole numbers beyond 64 bits, which compare well without torch
        return None


def as_strided_reals(tensor: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Return a strided tensor of real numbers with the same values, and what there is to say about that.

    Raises:
        NotComparable: it holds no values, or none that can be taken out.
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
