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
        half = estimate.peak.tflops / 2
        peak = f"peak of {estimate.peak.name}: {estimate.peak.tflops:g} TFLOPS, half of it: {half:g}"
        yield Wrapped(f"{peak} ({estimate.peak.source})", margin=2, hang=4)
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
        Column("Gb/s to hide it", **number),  # type: ignore[arg-type]
        Column("seconds", **number),  # type: ignore[arg-type]
        Column("arithmetic", overflow="fold"),
    )
    for row in estimate.traffic:
        rate = row.bytes_per_step * 8 / estimate.run.step_s / GB
        seconds = f"{row.bytes_per_step / network.busbw_bytes_per_s:.3g}" if network and not row.within_node else "-"
        mark = "* " if row.in_use else "  "
        table.add_row(mark + row.kind, f"{row.bytes_per_step / GB:.4g}", f"{rate:.3g}", seconds, row.steps)
    yield table
    yield Wrapped(
        "* in this run; sources: " + ", ".join(dict.fromkeys(row.source for row in estimate.traffic)), margin=2
    )
    if any(row.within_node for row in estimate.traffic):
        yield Wrapped(f"TP stays within a node of {estimate.run.gpus_per_node} GPUs: not counted as network", margin=2)
    if network:
        yield Wrapped(f"seconds at {network.busbw_bytes_per_s / GB:.3g} GB/s busbw, {network.origin}", margin=2)
    else:
        yield Wrapped("no busbw known: add --bench DIR (from allreduce-bench --save) or --busbw GB/s", margin=2)
