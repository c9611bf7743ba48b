"""Two tensors -> Pair: the counts, and the places they were found at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.training.floats.bits import as_integers, distance, name_of, precision, rounded
from distdiag.training.floats.judge import likeness
from distdiag.training.floats.model import Counts, Likeness, Nearness, Pair, Place
from distdiag.training.floats.nested import Opaque
from distdiag.training.floats.tally import Tally, pieces, spacing, usual_size

if TYPE_CHECKING:
    import torch

    Sides = tuple[torch.Tensor, torch.Tensor]


def unit_of(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Choose the dtype to compare in: the coarser float, or int64 for two kinds of integers.

    Raises:
        Opaque: no integers of torch hold both.
    """
    import torch

    floats = sorted((one for one in (a, b) if precision(one)), key=precision)
    if floats or a == b:
        return floats[0] if floats else a
    if "uint64" in (name_of(a), name_of(b)):
        raise Opaque(f"{name_of(a)} against {name_of(b)}: nothing holds both")
    return torch.int64


def bare(key: str, sides: Sides, unit: torch.dtype, notes: list[str]) -> Pair:
    """Say what two tensors are, and nothing yet of their numbers: all there is to say of two shapes."""
    a, b = sides
    if a.dtype != b.dtype:
        notes = [*notes, f"{name_of(a.dtype)} against {name_of(b.dtype)}: compared in {name_of(unit)}"]
    return Pair(
        key=key,
        likeness=Likeness.DIFFERS,
        shape_a=tuple(a.shape),
        shape_b=tuple(b.shape),
        dtype_a=name_of(a.dtype),
        dtype_b=name_of(b.dtype),
        unit=name_of(unit) if precision(unit) else "",
        counts=Counts(),
        max_scaled_ulp=0,
        max_abs=0.0,
        max_rel=0.0,
        first=None,
        worst=(),
        largest=None,
        one_sided=(),
        nearness=None,
        notes=tuple(notes),
    )


def measured(pair: Pair, sides: Sides, unit: torch.dtype, truth: torch.Tensor | None, *, worst: int) -> Pair:
    """Add what the numbers are to a pair; `truth` has their shape and is finer than `unit`."""
    a, b = sides
    if a.shape != b.shape:
        return pair
    tally = Tally(unit, keep=worst, scale=lambda: spacing(unit, min(usual_size(a), usual_size(b))))
    of_a, of_b = Tally(unit, keep=0), Tally(unit, keep=0)
    for at, (x, y, *right) in pieces((a, b) if truth is None else (a, b, truth)):
        tally.add(at, x, y)
        for one in right:
            of_a.add(at, x, one)
            of_b.add(at, y, one)
    counts = tally.counts()
    notes = pair.notes
    if tally.flushed is not None:
        count, side = max(zip(tally.flushed, "ab", strict=True))
        notes = (*notes, f"{count:,} numbers are 0 in {side} alone: each is judged by its own size")
    same = likeness(counts, pair.unit, tally.max_scaled)
    if same is Likeness.IDENTICAL and a.dtype != b.dtype and (counts.converted or pair.unit):
        same = Likeness.ROUNDING
    return replace(
        pair,
        likeness=same,
        notes=notes,
        counts=counts,
        max_scaled_ulp=tally.max_scaled,
        max_abs=tally.largest[0],
        max_rel=tally.max_rel,
        first=_place(sides, unit, tally.first) if tally.first is not None else None,
        worst=tuple(_place(sides, unit, at) for _, at in tally.worst),
        largest=_place(sides, unit, tally.largest[1]) if tally.largest[1] >= 0 else None,
        one_sided=tuple(_place(sides, unit, at) for at in tally.one_sided),
        nearness=Nearness(a=of_a.counts(), b=of_b.counts()) if truth is not None else None,
    )


def _place(sides: Sides, unit: torch.dtype, at: int) -> Place:
    import torch

    index = []
    for length in reversed(sides[0].shape):
        at, inner = divmod(at, length)
        index.append(inner)
    index.reverse()
    a, b = (one[tuple(index)].reshape(1).to("cpu") for one in sides)
    x, y = rounded(a, unit), rounded(b, unit)
    finite = all(bool(one.to(torch.float64).isfinite()) for one in (a, b, x, y))
    return Place(
        index=tuple(index),
        a=repr(a.item()),
        a_bits=_bits(a),
        b=repr(b.item()),
        b_bits=_bits(b),
        ulp=int(distance(x, y)) if finite else None,
    )


def _bits(one: torch.Tensor) -> str:
    width = 8 * one.dtype.itemsize
    return f"0x{int(as_integers(one)) % 2**width:0{width // 4}x}"
