"""Whether the largest all_reduce is good for this hardware, and what it means for a training step. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.allreduce_bench.formulas import ITEM_BYTES
from distdiag.commands.allreduce_bench.model import Expectation
from distdiag.commands.allreduce_bench.words import short
from distdiag.knowledge.bandwidth import training_lines, zero3_rule
from distdiag.knowledge.busbw import assess
from distdiag.knowledge.expectation import Judgement, Setting
from distdiag.report import Finding, Fix, Level
from distdiag.workload.model import Device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.allreduce_bench.model import Request, SizeResult
    from distdiag.workload.record import Plan, Scene

_LARGE_IN_A_NODE_BYTES = 128 * 2**20
_LARGE_BETWEEN_NODES_BYTES = 512 * 2**20
"""Smaller ones say more of latency than of bandwidth; see knowledge.busbw.assess."""


def expectation(plan: Plan, scene: Scene, device_name: str | None, results: Sequence[SizeResult]) -> Expectation | None:
    """Judge the largest all_reduce; None if none was measured."""
    largest = _largest(results)
    if largest is None or largest.busbw_bytes_per_s is None:
        return None
    nodes = len(plan.machines)
    least = _LARGE_BETWEEN_NODES_BYTES if nodes > 1 else _LARGE_IN_A_NODE_BYTES
    setting = Setting(
        device_name=device_name if plan.device is Device.CUDA else None,
        world_size=plan.nproc,
        nodes=nodes,
        ranks_per_node=plan.nproc // nodes,
        nic_bytes_per_s=nic_rate(plan, scene),
    )
    found = assess(largest.busbw_bytes_per_s, setting)
    too_small = largest.size_bytes < least and plan.device is Device.CUDA
    small = f"the largest all_reduce, {short(largest.size_bytes)}, is too small to judge by: it takes {short(least)}"
    return Expectation(
        judgement=Judgement.UNKNOWN if too_small else found.judgement,
        size_bytes=largest.size_bytes,
        expected_busbw_bytes_per_s=found.expected_bytes_per_s,
        percent_of_link=found.percent_of_link,
        percent_of_nic=found.percent_of_nic,
        lines=(small,) if too_small else found.lines,
        source=found.source,
    )


def nic_rate(plan: Plan, scene: Scene) -> float | None:
    """Give the line rate in bytes/s that each GPU has of its node's active RDMA ports, the least of all nodes."""
    rates = []
    for place in scene.places:
        ranks = sum(share.nproc for share in plan.shares if share.node == place.node)
        if not place.facts.rdma_bits_per_s:
            return None
        rates.append(place.facts.rdma_bits_per_s / 8 / max(ranks, place.facts.gpus.visible or 0, 1))
    return min(rates, default=None)


def hardware_findings(request: Request, found: Expectation | None) -> list[Finding]:
    """Say where the bandwidth is less than it should be."""
    if found is None or found.judgement not in (Judgement.LOW, Judgement.BAD):
        return []
    bad = found.judgement == Judgement.BAD
    return [
        Finding(
            id=f"{request.command}.{'bandwidth-bad' if bad else 'bandwidth-low'}",
            level=Level.FAIL if bad else Level.WARN,
            title=f"all_reduce of {short(found.size_bytes)} has far less bandwidth than this hardware gives"
            if bad
            else f"all_reduce of {short(found.size_bytes)} has less bandwidth than this hardware usually gives",
            evidence=(*found.lines, f"source: {found.source}"),
            fix=Fix(
                text="see which transport NCCL takes, then measure pairs of ranks to find the link",
                commands=(
                    request.again(nccl_debug=""),
                    request.pairs(),
                ),
            ),
        )
    ]


def training(request: Request, plan: Plan, scene: Scene, results: Sequence[SizeResult]) -> tuple[str, ...]:
    """Say what the bandwidth means for a model of --params; empty where that was not asked."""
    largest = _largest(results)
    if request.params is None or largest is None or not largest.algbw_bytes_per_s or plan.nproc < 2:
        return ()
    lines = training_lines(request.params, ITEM_BYTES[request.dtype], largest.algbw_bytes_per_s)
    nodes = len(plan.machines)
    if nodes < 2:
        return lines
    rate = nic_rate(plan, scene)
    return (*lines, zero3_rule(rate * 8 * plan.nproc / nodes if rate is not None else None, plan.nproc))


def _largest(results: Sequence[SizeResult]) -> SizeResult | None:
    rows = [row for row in results if row.op == "all_reduce" and row.time_s is not None]
    return max(rows, key=lambda row: row.size_bytes, default=None)
