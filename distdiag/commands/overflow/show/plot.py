"""abs max over the modules in their order, one curve for each forward: in the terminal, or as a picture in a file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from distdiag.commands.overflow.show import words
from distdiag.commands.overflow.show.choose import columns, wants
from distdiag.files import write_picture

if TYPE_CHECKING:
    from distdiag.commands.overflow.show.choose import Chosen
    from distdiag.commands.overflow.show.kept import Side
    from distdiag.commands.overflow.show.model import Request

_COLUMNS, _LINES = 60, 14
_MARKS = "oxs+*#@"
_NAMED = 6
_NAMED_IN_PICTURE = 24
_LEAST, _MOST = 1e-300, 1e300


class Curve(NamedTuple):
    """One forward: numbers of frames and their greatest magnitudes; the frames that hold nan or inf; the names."""

    label: str
    numbers: list[int]
    values: list[float]
    bad: list[int]
    names: dict[int, str]
    limits: dict[str, float]


def drawn(request: Request, chosen: Chosen) -> str:
    """Draw in text, for a terminal of 80 columns; empty where there are less than two modules."""
    import plotille

    curves = _curves(request, chosen)
    ends = _ends(curves)
    if ends is None:
        return ""
    (first, last), (low, high) = ends
    figure = plotille.Figure()
    figure.width, figure.height = _COLUMNS, _LINES
    figure.with_colors = False
    figure.set_x_limits(first, last)
    figure.set_y_limits(math.log10(low), math.log10(high))
    figure.x_ticks_fkt = lambda value, _: f"{value:.0f}"
    figure.y_ticks_fkt = lambda value, _: f"{10**value:.1e}"
    figure.x_label, figure.y_label = "frame", "abs max"
    for mark, curve in zip(_MARKS, curves, strict=False):
        figure.plot(curve.numbers, [math.log10(value) for value in curve.values], label=curve.label, marker=mark)
    lines = [line.rstrip() for line in str(figure.show(legend=True)).splitlines()]
    return "\n".join([*lines, *_below(curves)])


def save(request: Request, chosen: Chosen, target: str) -> None:
    """Write a picture. Raises DistdiagError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6))
    curves = _curves(request, chosen)
    # parse_math: names are the user's, and a $ in them is no formula.
    for curve in curves:
        (line,) = axes.plot(curve.numbers, curve.values, marker=".", label=curve.label)
        for number in curve.bad[:1]:
            axes.axvline(number, linestyle=":", color=line.get_color(), label=f"{curve.label}: nan or inf from here on")
    for name, limit in _near_limits(curves).items():
        axes.axhline(limit, linestyle="--", color="gray", label=f"the greatest number of {name}")
    axes.set_yscale("log")
    ticks = _ticks(curves, _NAMED_IN_PICTURE)
    axes.set_xticks(list(ticks), list(ticks.values()), rotation=90, fontsize=7, parse_math=False)
    axes.set_ylabel("abs max of the outputs")
    axes.set_title(", ".join(dict.fromkeys(one.model for one in chosen.recordings)), parse_math=False)
    axes.grid(visible=True, alpha=0.3)
    if curves:
        for text in axes.legend(fontsize=8).get_texts():
            text.set_parse_math(False)
    try:
        write_picture(figure, target)
    finally:
        pyplot.close(figure)


def _curves(request: Request, chosen: Chosen) -> list[Curve]:
    shown = columns(chosen.sides, len(_MARKS))
    return [curve for side in shown if (curve := _curve(request, side, words.side(side, shown))).numbers]


def _curve(request: Request, side: Side, label: str) -> Curve:
    fits = wants(request)
    curve = Curve(label, [], [], [], {}, {})
    for call in side.forward.calls():
        if not fits(call.module):
            continue
        # What cannot be printed has no glyph, and no place in XML.
        name = "".join(one if one.isprintable() else "?" for one in call.module)
        curve.names[call.number] = name or words.MODEL
        top = call.top
        if any(row.is_bad for row in call.rows):
            curve.bad.append(call.number)
        elif top is not None and top.most is not None and _LEAST < top.most < _MOST:
            curve.numbers.append(call.number)
            curve.values.append(top.most)
            curve.limits[top.spec.dtype] = top.spec.limit
    return curve


def _ends(curves: list[Curve]) -> tuple[tuple[int, int], tuple[float, float]] | None:
    numbers = [number for curve in curves for number in curve.numbers]
    values = [value for curve in curves for value in curve.values]
    if not numbers or min(numbers) == max(numbers):
        return None
    return (min(numbers), max(numbers)), (min(values) / 2, max(values) * 2)


def _near_limits(curves: list[Curve]) -> dict[str, float]:
    """Choose the limits that would be seen: far above all numbers they would press these to the ground."""
    most = max((value for curve in curves for value in curve.values), default=0.0)
    limits = {name: limit for curve in curves for name, limit in curve.limits.items()}
    return {name: limit for name, limit in limits.items() if limit <= 1e4 * most}


def _ticks(curves: list[Curve], most: int) -> dict[int, str]:
    """Name some frames, evenly, of the forward that has most of them."""
    names = max((curve.names for curve in curves), key=len, default={})
    numbers = list(names)
    step = max(1, math.ceil(len(numbers) / most))
    return {number: names[number] for number in numbers[::step]}


def _below(curves: list[Curve]) -> list[str]:
    lines = [f"frame {number:>5}  {name}" for number, name in _ticks(curves, _NAMED).items()]
    lines += [
        f"{curve.label}: nan or inf from frame {curve.bad[0]} on, {curve.names[curve.bad[0]]}"
        for curve in curves
        if curve.bad
    ]
    return ["", *lines]
