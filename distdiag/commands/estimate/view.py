"""distdiag estimate for people: each figure with its arithmetic and source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Column

from distdiag.knowledge.bandwidth import GB
from distdiag.output import Wrapped, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from distdiag.commands.estimate.diagnose import Estimate
    from distdiag.report import Report


def estimate_view(report: Report[Estimate]) -> Iterator[RenderableType]:
    """Render the speed, the traffic of each way of parallel training, and the init std."""
    estimate = report.data
    yield "Speed"
    for line in estimate.speed.steps:
        yield Wrapped(line, margin=2, hang=4)
    if estimate.run.recompute:
        yield Wrapped(f"{estimate.speed.model:.1f} TFLOPS per GPU without the recomputation", margin=2)
    yield Wrapped(f"source: {estimate.speed.source}", margin=2)
    if estimate.peak is not None:
        card = estimate.peak
        peak = f"peak of {card.name}: {card.tflops:g} TFLOPS dense, half of it: {card.tflops / 2:g}"
        sparse = f"; the data sheet prints {card.sparse_tflops:g}, with sparsity" if card.sparse_tflops else ""
        yield Wrapped(f"{peak}{sparse} ({card.source})", margin=2, hang=4)
    if estimate.compute_s is not None:
        yield Wrapped(f"at half of the peak, this step would compute for {estimate.compute_s:.3g} s", margin=2)
    yield ""
    yield from _traffic(estimate)
    if estimate.init_std:
        yield ""
        yield f"Init std for hidden size {estimate.run.hidden}"
        for row in estimate.init_std:
            yield Wrapped(f"{row.formula} = {row.std:.5f}  ({row.source})", margin=2, hang=4)


def _traffic(estimate: Estimate) -> Iterator[RenderableType]:
    network = estimate.network
    yield "Traffic of each GPU per step"
    number = {"justify": "right", "no_wrap": True}
    table = plain_table(
        Column("layout", no_wrap=True),
        Column("GB", **number),  # type: ignore[arg-type]
        Column("node Gb/s", **number),  # type: ignore[arg-type]
        Column("seconds", **number),  # type: ignore[arg-type]
        Column("arithmetic", overflow="fold"),
    )
    for row in estimate.traffic:
        rate = "-" if row.within_node else _short(row.node_bytes_per_step * 8 / estimate.run.step_s / GB)
        seconds = (
            _short(row.node_bytes_per_step / network.busbw_bytes_per_s) if network and not row.within_node else "-"
        )
        mark = "* " if row.in_use else "  "
        table.add_row(mark + row.kind, f"{row.bytes_per_step / GB:.4g}", rate, seconds, row.steps)
    yield table
    yield Wrapped(
        "* in this run; sources: " + ", ".join(dict.fromkeys(row.source for row in estimate.traffic)), margin=2
    )
    yield Wrapped("node Gb/s: what a node must send to finish within the step", margin=2)
    inside = [row.kind for row in estimate.traffic if row.within_node and row.in_use]
    if inside:
        stays = f"{', '.join(inside)} stays within a node of {estimate.run.gpus_per_node} GPUs"
        yield Wrapped(f"{stays}: not counted as network", margin=2)
    shared = max((row.sharing for row in estimate.traffic if row.in_use), default=1)
    if shared > 1:
        yield Wrapped(f"up to {shared} groups share the network of a node: their traffic is added up", margin=2)
    if estimate.zero3 is not None:
        need = f"ZeRO-3 at half of the peak needs {estimate.zero3.bits_per_s / GB:.0f} Gb/s between nodes"
        yield Wrapped(f"{need}: {estimate.zero3.steps} ({estimate.zero3.source})", margin=2, hang=4)
    if network:
        yield Wrapped(f"seconds at {network.busbw_bytes_per_s / GB:.3g} GB/s busbw, {network.origin}", margin=2)
    else:
        yield Wrapped("no busbw known: add --busbw GB/s, or --busbw DIR (from allreduce-bench --save)", margin=2)


def _short(number: float) -> str:
    """Format a figure with three digits, and a large one whole: 0.926, 14, 1,404; no 1.4e+03."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
