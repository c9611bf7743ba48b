"""What the figures of a training run mean. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdiag.commands.estimate.arithmetic import (
    ABOUT,
    BYTES_PER_VALUE,
    GOOD_SHARE,
    InitStd,
    Run,
    Traffic,
    init_std,
    seconds_at,
    tflops_by_layers,
    tflops_by_params,
    traffic,
    zero3_break_even_bits_per_s,
)
from distdiag.diagnosis.wording import counted, format_duration
from distdiag.knowledge.bandwidth import GB
from distdiag.knowledge.peaks import Peak  # noqa: TC001 - msgspec reads the annotations
from distdiag.report import Finding, Fix, Level, Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COMMAND = "estimate"
_SHAPE_OFF = 1.1
"""So far --params may be from the shape: norms, biases and rounded names ("7B" has 7.6) stay below."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A measured or given busbw between the GPUs, and where it comes from."""

    busbw_bytes_per_s: float
    origin: str
    nodes: int = 0
    """Nodes of the measurement; 0: unknown."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """TFLOPS per GPU: `model` counts no recomputation, `hardware` counts it where the run recomputes."""

    model: float
    hardware: float
    percent_of_peak: float | None
    steps: tuple[str, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """The network of a node on which ZeRO-3 sends as long as it computes at half of the card's peak."""

    bits_per_s: float
    steps: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """All figures of a run."""

    run: Run
    speed: Speed
    peak: Peak | None
    traffic: tuple[Traffic, ...]
    network: Network | None
    init_std: tuple[InitStd, ...]
    compute_s: float | None
    """Time of the computation at half of the card's peak; None without a card."""
    zero3: BreakEven | None


_LARGE_BUBBLE = 0.2
"""Of a step. With m = 4 p, from where on GPipe (arXiv:1811.06965) calls it negligible, it is below."""


def diagnose(run: Run, peak: Peak | None, network: Network | None) -> Report[Estimate]:
    """Compute and judge."""
    estimate = Estimate(
        run=run,
        speed=_speed(run, peak),
        peak=peak,
        traffic=traffic(run),
        network=network,
        init_std=init_std(run.hidden),
        compute_s=seconds_at(run, GOOD_SHARE * peak.tflops) if peak else None,
        zero3=_break_even(run, GOOD_SHARE * peak.tflops) if peak and run.zero == 3 and run.spans_nodes else None,
    )
    findings = tuple(_findings(estimate))
    return Report(command=COMMAND, data=estimate, findings=findings, summary=_summary(estimate, findings))


def _speed(run: Run, peak: Peak | None) -> Speed:
    by_layers = bool(run.hidden and run.layers)
    compute = tflops_by_layers if by_layers else tflops_by_params
    model, hardware = compute(run, recompute=False), compute(run, recompute=run.recompute)
    factor = 8 if run.recompute else 6
    steps: tuple[str, ...]
    if by_layers:
        weights, _ = run.layer_weights
        steps = (
            f"{factor} x {run.batch} x {run.seq} tokens x ({weights / 1e9:.4g}e9 weights of {run.layers} layers"
            f" + 2 x {run.seq} x {run.attention_width} x {run.layers} (attention))"
            f" + 6 x {run.batch} x {run.seq} x {run.hidden} x {run.vocab} (logits)",
            f"divided by {run.step_s:g} s x {run.gpus} GPUs = {hardware:.1f} TFLOPS per GPU",
        )
    else:
        steps = (
            f"{factor} x {run.active_params / 1e9:.4g}e9 parameters x {run.batch} x {run.seq} tokens"
            f" / ({run.step_s:g} s x {run.gpus} GPUs) = {hardware:.1f} TFLOPS per GPU",
        )
    return Speed(
        model=model,
        hardware=hardware,
        percent_of_peak=100 * hardware / peak.tflops if peak else None,
        steps=steps,
        source="arXiv:2104.04473, equation 3" if by_layers else "6ND, arXiv:2001.08361",
    )


def _break_even(run: Run, tflops: float) -> BreakEven:
    tokens = run.tokens / run.gpus / run.accumulate
    return BreakEven(
        bits_per_s=zero3_break_even_bits_per_s(run, tflops),
        steps=f"3 x {BYTES_PER_VALUE} bytes x 8 x {tflops:g} TFLOPS"
        f" / ({8 if run.recompute else 6} x {tokens:g} tokens of a GPU and micro-batch)",
        source="https://github.com/deepspeedai/DeepSpeed/issues/2928",
    )


def _summary(estimate: Estimate, findings: Sequence[Finding]) -> str:
    for level in (Level.FAIL, Level.UNKNOWN):
        for finding in findings:
            if finding.level is level:
                return finding.title
    speed, peak = estimate.speed, estimate.peak
    recompute = " with recomputation" if estimate.run.recompute else ""
    text = f"{speed.hardware:.1f} TFLOPS per GPU{recompute}"
    if peak is None or speed.percent_of_peak is None:
        return f"{text}; name the card with --gpu to compare with its peak"
    return f"{text}: {speed.percent_of_peak:.0f}% of the peak of {peak.name} ({peak.tflops:g})"


def _findings(estimate: Estimate) -> Iterator[Finding]:
    run, speed, peak = estimate.run, estimate.speed, estimate.peak
    if peak is not None and speed.hardware > peak.tflops:
        yield Finding(
            id="estimate.above-peak",
            level=Level.FAIL,
            title=f"{speed.hardware:.1f} TFLOPS per GPU is {speed.hardware / peak.tflops:.0%} of the peak of "
            f"{peak.name} ({peak.tflops:g}): the numbers cannot be right",
            evidence=(
                *speed.steps,
                f"{peak.tflops:g} is dense; {peak.sparse_tflops:g}, with sparsity, is out of reach of training"
                if peak.sparse_tflops
                else f"{peak.tflops:g} is dense",
            ),
            fix=Fix(
                text="check the numbers: --batch is global (all GPUs), --step-time is one optimizer step, --gpus "
                "counts all nodes"
            ),
        )
    elif peak is not None and speed.hardware < ABOUT * GOOD_SHARE * peak.tflops:
        yield Finding(
            id="estimate.below-half-of-peak",
            level=Level.INFO,
            title=f"{speed.hardware / peak.tflops:.0%} of peak: a well-tuned large run reaches about half",
            evidence=(f"half of {peak.tflops:g} = {GOOD_SHARE * peak.tflops:g} TFLOPS ({peak.source})",),
        )
    whole = run.params_of_shape
    # Without a vocabulary, the layers alone are a lower bound.
    shape = whole or (run.layer_weights[1] if run.ffn else 0)
    if shape > _SHAPE_OFF * run.params or 0 < whole < run.params / _SHAPE_OFF:
        yield Finding(
            id="estimate.shape-contradicts-params",
            level=Level.WARN,
            title=f"the shape has {'' if whole else 'at least '}{shape / 1e9:.4g}e9 parameters, --params says "
            f"{run.params / 1e9:.4g}e9",
            detail="The speed is counted from the shape, the traffic from --params.",
            fix=Fix(
                text="check that --config is of this model"
                + (", and leave --params out to count by the shape" if whole else "")
            ),
        )
    if run.tp_spans_nodes:
        fits = max(size for size in range(1, run.tp) if run.gpus_per_node % size == 0)
        yield Finding(
            id="estimate.tp-spans-nodes",
            level=Level.WARN,
            title=f"TP={run.tp} spans nodes of {run.gpus_per_node} GPUs: every layer waits for the network",
            detail="Tensor parallelism runs four all_reduces per layer, and no computation hides them.",
            fix=Fix(text=f"use tp={fits}, and more pipeline or data parallelism"),
        )
    if run.pp > 1 and run.accumulate > 1:
        yield _bubble(run)
    yield from _network(estimate)


def _bubble(run: Run) -> Finding:
    """Report how long the stages of a pipeline idle: (p - 1) / m of the time in which they compute."""
    idle = (run.pp - 1) / (run.accumulate + run.pp - 1)
    parts = counted(run.accumulate, "micro-batch", "micro-batches")
    return Finding(
        id="estimate.pipeline-bubble",
        level=Level.WARN if idle > _LARGE_BUBBLE else Level.INFO,
        title=f"PP={run.pp} with {parts} idles for {idle:.0%} of each step",
        evidence=(
            f"(p - 1) / m = {run.pp - 1} / {run.accumulate} of the computing time (arXiv:2104.04473, section 2.2); an "
            "interleaved schedule with v parts per stage has 1/v of that",
        ),
        fix=Fix(text=f"use {4 * run.pp} micro-batches or more (accumulate=), an interleaved schedule, or a smaller pp"),
    )


def _groups(row: Traffic) -> str:
    return f"{row.sharing} groups x " if row.sharing > 1 else ""


def _on_network(row: Traffic) -> bool:
    return row.in_use and not row.within_node


def seconds_of(estimate: Estimate) -> float | None:
    """Return the time of all traffic in use on the network that is known."""
    if estimate.network is None:
        return None
    total = sum(row.node_bytes_per_step for row in estimate.traffic if _on_network(row))
    return total / estimate.network.busbw_bytes_per_s


def _network(estimate: Estimate) -> Iterator[Finding]:
    network, seconds = estimate.network, seconds_of(estimate)
    if network is None or seconds is None:
        return
    step = estimate.run.step_s
    if network.nodes == 1 and estimate.run.gpus > estimate.run.gpus_per_node:
        yield Finding(
            id="estimate.bench-on-one-node",
            level=Level.UNKNOWN,
            title="busbw was measured on one node, but the run spans several: network limit unknown",
            fix=Fix(text="measure between nodes", commands=("distdiag allreduce-bench --hosts LIST --save DIR",)),
        )
        return
    in_use = [row for row in estimate.traffic if _on_network(row)]
    rate = f"{network.busbw_bytes_per_s / GB:.3g} GB/s ({network.origin})"
    evidence = tuple(
        f"{row.kind}: {_groups(row)}{row.bytes_per_step / GB:.4g} GB / {rate} = "
        f"{format_duration(row.node_bytes_per_step / network.busbw_bytes_per_s)}"
        for row in in_use
    )
    if seconds > step:
        yield Finding(
            id="estimate.network-too-slow",
            level=Level.FAIL,
            title=f"the traffic of a step takes {format_duration(seconds)}, longer than the step itself "
            f"({step:g} s): the busbw, the layout or the step time is not that of this run",
            evidence=evidence,
            fix=Fix(text="check --busbw, --layout and --step-time"),
        )
    elif seconds > step / 2:
        yield Finding(
            id="estimate.network-bound",
            level=Level.WARN,
            title=f"the network is the likely limit: {format_duration(seconds)} of traffic in a step of {step:g} s",
            evidence=evidence,
            fix=Fix(text="raise the batch per GPU, use a lower ZeRO stage, or measure the overlap with a profiler"),
        )
