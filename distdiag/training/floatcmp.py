"""floatcmp: how far apart are tensors that should hold the same numbers, and which of them is nearer to the truth?"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.training.floats import nested
from distdiag.training.floats.bits import name_of, precision
from distdiag.training.floats.measure import bare, measured, unit_of
from distdiag.training.floats.model import NO_REFERENCE, Likeness, Pair
from distdiag.training.floats.nested import Opaque
from distdiag.training.floats.words import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    Path = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The answer of floatcmp. str() of it is for people; the parts are for programs, and have no tensors in them."""

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    """The tensors that both sides have, in the order of the first."""
    only_a: tuple[str, ...]
    """Names that the other side lacks, or has as something of another kind, which is said then."""
    only_b: tuple[str, ...]
    values_differ: tuple[str, ...]
    """Names of text and other values, no tensors, that are not the same."""
    not_compared: tuple[str, ...]
    """Names of what floatcmp cannot look into, each with the reason."""

    @property
    def likeness(self) -> Likeness:
        """The worst of all; names that one side lacks count as differing, text that differs does not."""
        if self.only_a or self.only_b:
            return Likeness.DIFFERS
        found = [pair.likeness for pair in self.pairs] + [Likeness.NOT_COMPARED] * bool(self.not_compared)
        return max(found, key=lambda one: one.rank, default=Likeness.NOT_COMPARED)

    @property
    def worst_first(self) -> tuple[Pair, ...]:
        """The tensors, those that differ most first."""
        return tuple(
            sorted(self.pairs, key=lambda one: (-one.likeness.rank, -one.counts.one_sided, -one.max_scaled_ulp))
        )

    def __str__(self) -> str:
        return "\n".join(describe(self))


def floatcmp(
    a: object,
    b: object,
    *,
    reference: object = None,
    inputs: Sequence[object] = (),
    names: tuple[str, str] = ("a", "b"),
    worst: int = 5,
) -> Comparison:
    """Compare tensors that should be the same: of two devices, two dtypes, two runs.

    Distances are counted in ulp (units in the last place), number by number: neighbours of a dtype are 1 apart, across
    zero as well. 0.0 and -0.0 are 0 apart; nan and nan count as equal, and apart; nan or an infinity against something
    else is counted by itself and never part of a maximum. Integers and booleans are exact. Two dtypes are compared in
    the coarser one, to which the other side is rounded; that is never called identical.

    Where a result is near zero by cancellation, its own ulp says little: a sum of numbers near 1 that comes to 1e-6 is
    no more exact than 1e-7. So in a tensor that has numbers of both signs, small ones are judged by their own ulp or by
    that of their usual size (the geometric mean), whichever makes less of the difference (`max_scaled_ulp`); `max_ulp`
    is always their own. What is of one sign (Adam's squares, probabilities), or 0 on one side alone in many places, is
    judged by its own. See judge.limits for what counts as rounding.

    It works on the CPU in pieces of 65536 numbers, fetched from other devices one by one, on one thread of torch.

    Args:
        a: a tensor of any shape, device and strides, an array, a number, or dicts and lists of them, however nested.
        b: the same; what one side lacks, and tensors of another shape, are part of the answer.
        reference: what the right values are, of the same shape and in a finer dtype (float64), or a function that
            calculates them. They are rounded correctly to the dtype that is compared in.
        inputs: what a `reference` that is a function is called with: floating point tensors among them as float64 on
            the CPU, while float64 is torch's default dtype.
        names: what to call the sides.
        worst: how many places to keep of each tensor.

    Raises:
        TypeError: `a` or `b` itself is no tensor, number, array, dict or list.
        ValueError: they are nested more than 100 levels deep, as what contains itself is.
    """
    truth = _calculated(reference, inputs) if callable(reference) else reference
    right = nested.leaves(truth) if truth is not None else None
    found = compare_leaves(nested.leaves(a), nested.leaves(b), right, names=names, worst=worst)
    if found.not_compared and not found.pairs and not isinstance(a, (dict, list, tuple)):
        raise TypeError(f"floatcmp cannot compare {found.not_compared[0].removeprefix(': ')}")
    return found


def compare_leaves(
    a: Mapping[Path, object],
    b: Mapping[Path, object],
    truth: Mapping[Path, object] | None,
    *,
    names: tuple[str, str],
    worst: int,
) -> Comparison:
    """Do what floatcmp does with what `nested.leaves` gave."""
    found = _Found(truth, worst)
    with _one_thread():
        for path in a:
            if path in b:
                found.compare(path, a[path], b[path])
    return Comparison(
        names=names,
        pairs=tuple(found.pairs),
        only_a=(*found.only_a, *(nested.name_of(path) for path in a if path not in b)),
        only_b=(*found.only_b, *(nested.name_of(path) for path in b if path not in a)),
        values_differ=tuple(found.values_differ),
        not_compared=tuple(found.not_compared),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: pieces are small, and on busy processors two took 10 times longer than one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _calculated(function: Callable[..., object], inputs: Sequence[object]) -> object:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            return function(*[_in_float64(one) for one in inputs])
    finally:
        torch.set_default_dtype(before)


def _in_float64(value: object) -> object:
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu")
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.to(wide) if value.is_complex() or value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_float64(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_float64(one) for one in value]
    return value


class _Found:
    """What the comparison has found so far."""

    def __init__(self, truth: Mapping[Path, object] | None, worst: int) -> None:
        self._truth, self._worst = truth, worst
        self.pairs: list[Pair] = []
        self.only_a: list[str] = []
        self.only_b: list[str] = []
        self.values_differ: list[str] = []
        self.not_compared: list[str] = []

    def compare(self, path: Path, a: object, b: object) -> None:
        key = nested.name_of(path)
        try:
            x, y = nested.as_tensor(a), nested.as_tensor(b)
            if x is None or y is None:
                self._compare_others(key, a, b)
                return
            (x, notes), (y, more) = nested.plain(x), nested.plain(y)
            unit = unit_of(x.dtype, y.dtype)
        except Opaque as why:
            self.not_compared.append(f"{key}: {why}")
            return
        truth = None
        notes = list(dict.fromkeys([*notes, *more]))
        if self._truth is not None and precision(unit):
            try:
                truth = self._reference(path, x, unit)
            except Opaque as reason:
                notes.append(f"{NO_REFERENCE}: {reason}")
        self.pairs.append(measured(bare(key, (x, y), unit, notes), (x, y), unit, truth, worst=self._worst))

    def _compare_others(self, key: str, a: object, b: object) -> None:
        if type(a) is not type(b):
            self.only_a.append(f"{key} ({type(a).__name__})")
            self.only_b.append(f"{key} ({type(b).__name__})")
        elif a != b:
            self.values_differ.append(key)

    def _reference(self, path: Path, beside: torch.Tensor, unit: torch.dtype) -> torch.Tensor:
        """Find the right values for a tensor. Raises Opaque where there are none."""
        assert self._truth is not None
        if path not in self._truth:
            raise Opaque("it lacks this name")
        found = nested.as_tensor(self._truth[path])
        if found is None:
            raise Opaque("it has no numbers there")
        truth, _ = nested.plain(found)
        if truth.shape != beside.shape:
            raise Opaque(f"its shape is {tuple(truth.shape)}")
        if precision(truth.dtype) <= precision(unit):
            raise Opaque(f"it is {name_of(truth.dtype)}, which is not finer than {name_of(unit)}")
        return truth
