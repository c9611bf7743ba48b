"""Words that findings, tables and pictures of overflow show share. Pure."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show.kept import INPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.growth import Chain, Point
    from distdiag.commands.overflow.show.kept import Recording, Row, Side

MODEL = "the model"


def named(module: str) -> str:
    """Name a module in a sentence."""
    return f"`{module}`" if module else MODEL


def count(number: int, thing: str) -> str:
    """Write a number of things: "1 call", "2,000 calls"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def magnitude(value: float | None) -> str:
    """Write a number as frames have it: 6.27e+04, inf, nan; - where it is not known."""
    return "-" if value is None else f"{value:.2e}"


def times(factor: float) -> str:
    """Write a factor: 1.2e+04, 340, 5.8."""
    if not math.isfinite(factor):
        return "infinitely many"
    return f"{factor:.1e}" if factor >= 1000 or factor < 0.01 else f"{factor:.3g}"


def percent(share: float) -> str:
    """Write a share of a limit: 96 %, <1 %."""
    return f"{100 * share:.0f} %" if share >= 0.01 else "<1 %"


def point(one: Point) -> str:
    """Name a tensor on a way."""
    return f"the input of {named(one.call.module)}" if one.tensor == INPUT else named(one.call.module)


def grown(chain: Chain) -> str:
    """Say how the greatest number came about."""
    limit = f"{percent(chain.end.share)} of {chain.end.dtype}'s greatest number"
    if len(chain.points) == 1:
        return f"the greatest number is {magnitude(chain.end.most)}, made by {point(chain.end)} ({limit})"
    return (
        f"abs max grows {times(chain.factor)} x from {point(chain.start)} to {point(chain.end)} "
        f"({magnitude(chain.start.most)} -> {magnitude(chain.end.most)}, {limit})"
    )


def source(recording: Recording, among: Sequence[Recording]) -> str:
    """Name a recording among others: by its rank where that tells them apart, else by its file."""
    ranks = [one.rank for one in among]
    if recording.rank is not None and ranks.count(recording.rank) == 1:
        return f"rank {recording.rank}"
    names = [os.path.basename(one.path) for one in among]
    name = os.path.basename(recording.path)
    return name if names.count(name) == 1 else recording.path


def side(one: Side, among: Sequence[Side]) -> str:
    """Name a forward among others: "rank 1", "batch 3", "rank 1, batch 3", "batch 3, forward 2"."""
    recordings = list({id(each.recording): each.recording for each in among}.values())
    parts = [source(one.recording, recordings)] if len(recordings) > 1 else []
    if len({each.forward.batch for each in among}) > 1 or not parts:
        parts.append(f"batch {one.forward.batch}")
    if one.forward.turn or any(each.forward.turn and each.forward.batch == one.forward.batch for each in among):
        parts.append(f"forward {one.forward.turn}")
    return ", ".join(parts)


def within(one: Side, among: Sequence[Side]) -> str:
    """Say in which forward: "in batch 3", "on rank 1 in batch 3"."""
    said = side(one, among)
    return "on " + said.replace(", ", " in ", 1) if said.startswith("rank ") else f"in {said}"


def like(row: Row) -> str:
    """Say what a tensor is like: float16 [2, 8]; or what stands in its place."""
    shape = "" if row.spec.shape is None else f" [{', '.join(map(str, row.spec.shape))}]"
    return row.spec.text or f"{row.spec.dtype or 'of an unknown dtype'}{shape}"
