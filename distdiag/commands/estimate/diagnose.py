"""What the figures of a training run mean. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.estimate.arithmetic import Run, Traffic, tflops, traffic
from distdiag.diagnosis.verdicts import finding
from distdiag.diagnosis.wording import counted, format_duration
from distdiag.knowledge.bandwidth import GB
from distdiag.knowledge.peaks import Peak  # noqa: TC001 - msgspec reads the annotations
from distdiag.record import record
from distdiag.report import Finding, Level, Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_GOOD_SHARE = 0.5
"""Half of the data sheet's peak is good for a large training run. Source: ml-engineering, "TFLOPs as a metric"."""
_ABOUT = 0.9
"""What is within a tenth of half counts as half: BLOOM-176B ran at 48% and was called done."""
_SHAPE_OFF = 1.1
"""--params may differ from the shape by this factor: norms, biases and rounded names ("7B" has 7.6) stay below."""
_LARGE_BUBBLE = 0.2
"""Of a step. With m = 4 p, from where on GPipe (arXiv:1811.06965) calls it negligible, it is below."""


@record(kw_only=True)
class Speed:
    """TFLOPS per GPU: `model` counts no recomputation, `hardware` counts it where the run recomputes."""

    model: float
    hardware: float
    percent_of_peak: float | None
    steps: tuple[str, ...]


@record(kw_only=True)
class Estimate:
    """All figures of a run.

    `compute_s` is the time of the computation at half of the card's peak; None without a card.
    """

    run: Run
    speed: Speed
    peak: Peak | None
    traffic: tuple[Traffic, ...]
    busbw_bytes_per_s: float | None
    compute_s: float | None


def diagnose(run: Run, peak: Peak | None, busbw_bytes_per_s: float | None) -> Report[Estimate]:
    """Compute and judge."""
    speed = _speed(run, peak)
    estimate = Estimate(
        run=run,
        speed=speed,
        peak=peak,
        traffic=traffic(run),
        busbw_bytes_per_s=busbw_bytes_per_s,
        compute_s=run.step_s * speed.hardware / (_GOOD_SHARE * peak.tflops) if peak else None,
    )
    findings = tuple(_findings(estimate))
    return Report(command="estimate", data=estimate, findings=findings, summary=_summary(estimate, findings))


def _speed(run: Run, peak: Peak | None) -> Speed:
    hardware = tflops(run, recompute=run.recompute)
    tokens = f"{8 if run.recompute else 6} x {run.batch} x {run.seq} tokens x"
    time = f"divided by {run.step_s:g} s x {run.gpus} GPUs = {hardware:.1f} TFLOPS per GPU"
    if run.hidden:
        weights = f"{run.weights(run.active_experts) / 1e9:.4g}e9 weights of {run.layers} layers"
        attention = f"2 x {run.seq} x {run.attention_width} x {run.layers} (attention)"
        logits = f"6 x {run.batch} x {run.seq} x {run.hidden} x {run.vocab} (logits)"
        count, source = f"{tokens} ({weights} + {attention}) + {logits}", "arXiv:2104.04473, equation 3"
    else:
        count, source = f"{tokens} {run.params / 1e9:.4g}e9 parameters", "6ND, arXiv:2001.08361"
    return Speed(
        model=tflops(run, recompute=False),
        hardware=hardware,
        percent_of_peak=100 * hardware / peak.tflops if peak else None,
        steps=(count, time, f"source: {source}"),
    )


def _summary(estimate: Estimate, findings: Sequence[Finding]) -> str:
    speed, peak = estimate.speed, estimate.peak
    text = f"{speed.hardware:.1f} TFLOPS per GPU{' with recomputation' if estimate.run.recompute else ''}"
    if peak is None:
        text += "; name the card with --gpu to compare with its peak"
    else:
        text += f": {speed.percent_of_peak:.0f}% of the peak of {peak.name} ({peak.tflops:g})"
    return next((found.title for found in findings if found.level is Level.FAIL), text)


def _findings(estimate: Estimate) -> Iterator[Finding]:
    run, peak, tflops = estimate.run, estimate.peak, estimate.speed.hardware
    share = tflops / peak.tflops if peak else _GOOD_SHARE
    if peak and share > 1:
        words = {"tflops": f"{tflops:.1f}", "gpu": peak.name, "peak": f"{peak.tflops:g}"}
        yield finding("above-peak", words, share=f"{share:.0%}", evidence=estimate.speed.steps)
    elif share < _ABOUT * _GOOD_SHARE:
        yield finding("below-half-of-peak", share=f"{share:.0%}")
    whole = run.params_of_shape
    # Without a vocabulary, the layers alone are a lower bound.
    shape = whole or (run.weights(run.experts) if run.ffn else 0)
    if shape > _SHAPE_OFF * run.params or 0 < whole < run.params / _SHAPE_OFF:
        words = {"shape": f"{'' if whole else 'at least '}{shape / 1e9:.4g}e9", "params": f"{run.params / 1e9:.4g}e9"}
        yield finding("shape-contradicts-params", words, superfluous="--params" if whole else "")
    if run.spans_nodes and run.gpus_per_node % run.tp:
        fits = max(size for size in range(1, run.tp) if run.gpus_per_node % size == 0)
        yield finding("tp-spans-nodes", tp=run.tp, gpus=run.gpus_per_node, fits=fits)
    if run.pp > 1 and run.accumulate > 1:
        idle = (run.pp - 1) / (run.accumulate + run.pp - 1)
        words = {"pp": str(run.pp), "idle": f"{idle:.0%}", "ratio": f"{run.pp - 1} / {run.accumulate}"}
        parts = counted(run.accumulate, "micro-batch", "micro-batches")
        level = Level.WARN if idle > _LARGE_BUBBLE else Level.INFO
        yield finding("pipeline-bubble", words, level=level, parts=parts, enough=4 * run.pp)
    if rate := estimate.busbw_bytes_per_s:
        rows = [row for row in estimate.traffic if row.in_use and not row.within_node]
        times = {row.kind: row.node_bytes_per_step / rate for row in rows}
        seconds = sum(times.values())
        if seconds > run.step_s / 2:
            verdict = "network-too-slow" if seconds > run.step_s else "network-bound"
            evidence = tuple(f"{kind}: {format_duration(each)} at {rate / GB:.3g} GB/s" for kind, each in times.items())
            yield finding(verdict, seconds=format_duration(seconds), step=f"{run.step_s:g}", evidence=evidence)
