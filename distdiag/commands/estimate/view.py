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
    """Render the speed, and the traffic of each way of parallel training."""
    estimate = report.data
    yield "Speed"
    for line in _speed_lines(estimate):
        yield Wrapped(line, margin=2, hang=4)
    yield ""
    yield "Traffic of each GPU per step"
    number = {"justify": "right", "no_wrap": True}
    numbers = (Column(title, **number) for title in ("GB", "node Gb/s", "seconds"))  # type: ignore[arg-type]
    table = plain_table(Column("layout", no_wrap=True), *numbers, Column("arithmetic", overflow="fold"))
    for row in estimate.traffic:
        rate = seconds = "-"
        if not row.within_node:
            rate = _short(row.node_bytes_per_step * 8 / estimate.run.step_s / GB)
            if estimate.busbw_bytes_per_s:
                seconds = _short(row.node_bytes_per_step / estimate.busbw_bytes_per_s)
        mark = "* " if row.in_use else "  "
        table.add_row(mark + row.kind, f"{row.bytes_per_step / GB:.4g}", rate, seconds, row.steps)
    yield table
    for line in _traffic_notes(estimate):
        yield Wrapped(line, margin=2, hang=4)


def _speed_lines(estimate: Estimate) -> Iterator[str]:
    yield from estimate.speed.steps
    if estimate.run.recompute:
        yield f"{estimate.speed.model:.1f} TFLOPS per GPU without the recomputation"
    if card := estimate.peak:
        sparse = f"; the data sheet prints {card.sparse_tflops:g}, with sparsity" if card.sparse_tflops else ""
        half = f"{card.tflops:g} TFLOPS dense, half of it: {card.tflops / 2:g}"
        yield f"peak of {card.name}: {half}{sparse} ({card.source})"
        yield f"at half of the peak, this step would compute for {estimate.compute_s:.3g} s"


def _traffic_notes(estimate: Estimate) -> Iterator[str]:
    yield "* in this run; sources: arXiv:1910.02054, section 7; of TP and PP arXiv:2104.04473, section 3.2"
    yield "node Gb/s: what a node must send to finish within the step"
    used = [row for row in estimate.traffic if row.in_use]
    if inside := ", ".join(row.kind for row in used if row.within_node):
        yield f"{inside} stays within a node of {estimate.run.gpus_per_node} GPUs: not counted as network"
    if (shared := max((row.sharing for row in used), default=1)) > 1:
        yield f"up to {shared} groups share the network of a node: their traffic is added up"
    if estimate.busbw_bytes_per_s is None:
        yield "no busbw known: add --busbw GB/s; distdiag allreduce-bench between nodes measures it"


def _short(number: float) -> str:
    """Format a figure with three digits, and a large one whole: 0.926, 14, 1,404; no 1.4e+03."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"
