"""busbw against size, a line for each collective: in the terminal, or as a picture in a file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.findings import short
from distdiag.commands.allreduce_bench.types import GIGA
from distdiag.files import write_picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.allreduce_bench.types import Bench, SizeResult

_COLUMNS, _LINES = 60, 12
_COLUMNS_OF_A_DOUBLING = (10, 5, 2.5, 2, 1)
"""plotille writes a number every ten columns: with these steps each number is a power of two."""
_MARKS = "oxs+*#@"
Line = tuple[str, list[int], list[float]]


def drawn(data: Bench) -> str:
    """Draw in text, for a terminal of 80 columns; "" for fewer than two sizes."""
    import plotille

    lines = _lines(data.results)
    sizes = [size for _, own, _ in lines for size in own]
    if not sizes or min(sizes) == max(sizes):
        return ""
    low, high = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    step = next((columns for columns in _COLUMNS_OF_A_DOUBLING if columns * (high - low) <= _COLUMNS), 1)
    figure = plotille.Figure()
    figure.width, figure.height = math.ceil(step * (high - low)), _LINES
    figure.with_colors = False
    figure.set_x_limits(low, low + figure.width / step)
    figure.set_y_limits(0, max(max(values) for _, _, values in lines) * 1.1)
    figure.x_ticks_fkt = lambda value, _: short(2 ** round(value))
    figure.y_ticks_fkt = lambda value, _: f"{value:.3g}"
    figure.x_label, figure.y_label = "size", "busbw GB/s"
    for mark, (op, own, values) in zip(_MARKS, lines, strict=False):
        figure.plot([math.log2(size) for size in own], values, label=op, marker=mark)
    return "\n".join(line.rstrip() for line in str(figure.show(legend=True)).splitlines())


def save(data: Bench, target: str) -> None:
    """Write a picture. Raises DistdiagError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for op, sizes, values in _lines(data.results):
        axes.plot(sizes, values, marker="o", label=op)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda size, _: short(int(size)) if size >= 1 else "")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("size")
    axes.set_ylabel("busbw (GB/s)")
    axes.set_title(f"{data.world_size} ranks, {data.backend}, {data.device_name or data.device}")
    axes.grid(visible=True, alpha=0.3)
    if data.results:
        axes.legend()
    try:
        write_picture(figure, target)
    finally:
        pyplot.close(figure)


def _lines(results: Sequence[SizeResult]) -> list[Line]:
    found: list[Line] = []
    for op in dict.fromkeys(row.op for row in results):
        rows = sorted(
            (row for row in results if row.op == op and row.busbw_bytes_per_s), key=lambda row: row.size_bytes
        )
        if rows:
            values = [(row.busbw_bytes_per_s or 0.0) / GIGA for row in rows]
            found.append((op, [row.size_bytes for row in rows], values))
    return found
