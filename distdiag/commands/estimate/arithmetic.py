"""The arithmetic of `distdiag estimate`. Pure; each formula names its source.

Units: parameters and tokens are counts, times are seconds, traffic is bytes that each GPU sends in one step, TFLOPS
are 1e12 operations a second of one GPU. The busbw of an all_reduce over several nodes is what all NICs of a node carry
together, as its ring enters and leaves each node once. Where several groups of a node send at the same time (8 data-
parallel groups with TP=8), each has a part of it: `Traffic.sharing` counts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distdiag.commands.estimate.model_config import Shape

BYTES_PER_VALUE = 2
"""Of what is sent: bfloat16 or float16."""
GOOD_SHARE = 0.5
"""Half of the data sheet's peak is good for a large training run. Source: ml-engineering, "TFLOPs as a metric"."""
ABOUT = 0.9
"""What is within a tenth of half counts as half: BLOOM-176B ran at 48% and was called done."""


@dataclass(frozen=True, kw_only=True)
class Run(Shape):
    """A training run. `batch` is global: sequences per step; `accumulate`: micro-batches in a step."""

    params: float
    batch: int
    seq: int
    step_s: float
    gpus: int
    gpus_per_node: int = 8
    tp: int = 1
    pp: int = 1
    zero: int = 0
    accumulate: int = 1
    recompute: bool = False

    @property
    def layer_weights(self) -> tuple[float, float]:
        """Weights of all layers that a token uses, and all there are: projections and feed-forwards, no norms."""
        h, matrices = self.hidden, 3 if self.gated else 2
        width = self.attention_width
        kv = width if not (self.heads and self.kv_heads) else width * self.kv_heads // self.heads
        attention = self.layers * (2 * h * width + 2 * h * kv)
        dense = self.dense_layers * matrices * h * (self.dense_ffn or self.ffn)
        expert = (self.layers - self.dense_layers) * matrices * h * (self.ffn or 4 * h)
        return (
            attention + dense + expert * max(1, self.active_experts),
            attention + dense + expert * max(1, self.experts),
        )

    @property
    def active_params(self) -> float:
        """Parameters that a token uses: without the other experts of a mixture."""
        used, there_are = self.layer_weights
        return max(self.params - (there_are - used), used)

    @property
    def attention_width(self) -> int:
        """Heads x head size; as in GPT the hidden size where that is not given."""
        return self.heads * self.head_dim if self.heads and self.head_dim else self.hidden

    @property
    def params_of_shape(self) -> float:
        """Parameters that the shape has, without norms and biases; 0 where the shape is not known."""
        if not (self.hidden and self.layers and self.vocab):
            return 0
        return self.layer_weights[1] + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return self.gpus // (self.tp * self.pp)

    @property
    def spans_nodes(self) -> bool:
        """Whether it needs more than one node."""
        return self.gpus > self.gpus_per_node

    @property
    def tp_spans_nodes(self) -> bool:
        """Whether a tensor-parallel group of consecutive ranks lies on two nodes: TP=6 on nodes of 8 does."""
        return self.spans_nodes and self.tp > 1 and self.gpus_per_node % self.tp != 0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What each GPU sends in one step, and how it was counted."""

    kind: str
    bytes_per_step: float
    steps: str
    source: str
    in_use: bool
    """Whether the run as described uses it; the others are alternatives."""
    within_node: bool = False
    """It stays on NVLink or PCIe of a node, while the run has several nodes: the network does not carry it."""
    sharing: int = 1
    """So many of these groups share the network of a node."""

    @property
    def node_bytes_per_step(self) -> float:
        """Bytes that leave a node in one step; divided by busbw between nodes, a time."""
        return self.bytes_per_step * self.sharing


def tflops_by_params(run: Run, *, recompute: bool) -> float:
    """Return TFLOPS per GPU: 6 operations for each parameter and token, 8 with recomputation of activations.

    A forward takes 2, a backward 4, and a second forward 2 more. Attention scores and logits are not counted, so the
    result is a few percent low. Source: arXiv:2001.08361 (section 2.1) and arXiv:2104.04473 (section 5.1, appendix).
    """
    return (8 if recompute else 6) * run.active_params * run.tokens / (run.step_s * run.gpus * 1e12)


def tflops_by_layers(run: Run, *, recompute: bool) -> float:
    """Return TFLOPS per GPU from the shape of a transformer; needs `hidden` and `layers`.

    A forward takes 2 operations for each weight and token, and 4 x seq x attention width for scores and values; a
    backward twice that. For a GPT (feed-forward of 4h, as many K and V heads as heads) this is the
    F = 96 B s l h^2 (1 + s / 6h + V / 16lh) of arXiv:2104.04473, equation 3; without recomputation the layers cost
    three quarters, and the logits, which are never recomputed, stay whole.
    """
    weights, _ = run.layer_weights
    forward = 2 * weights + 4 * run.seq * run.attention_width * run.layers
    layers = (4 if recompute else 3) * run.tokens * forward
    logits = 6 * run.tokens * run.hidden * run.vocab
    return (layers + logits) / (run.step_s * run.gpus * 1e12)


def seconds_at(run: Run, tflops: float) -> float:
    """Return the time of a step's computation at so many TFLOPS per GPU (6ND, with recomputation 8ND)."""
    return (8 if run.recompute else 6) * run.active_params * run.tokens / (run.gpus * tflops * 1e12)


def zero3_break_even_bits_per_s(run: Run, tflops: float) -> float:
    """Return the network of a node, in bits/s, on which ZeRO-3 sends as long as it computes at `tflops` per GPU.

    It sends 3 x bytes x N in each micro-batch and computes 6N (8N) operations for each token of a GPU, so the size of
    the model cancels: rate = 3 x bytes x 8 x TFLOPS / (6 or 8 x tokens of a GPU and micro-batch). So come the rule for
    ZeRO-3 on V100, "100 Gb/s is not enough, 200-400 is fine", and that faster GPUs need more. Source:
    https://github.com/deepspeedai/DeepSpeed/issues/2928 (the rule and its measurements).
    """
    tokens = run.tokens / run.gpus / run.accumulate
    return 3 * BYTES_PER_VALUE * 8 * tflops * 1e12 / ((8 if run.recompute else 6) * tokens)


@dataclass(frozen=True)
class InitStd:
    """A standard deviation for initial weights."""

    formula: str
    std: float
    source: str


def init_std(hidden: int) -> tuple[InitStd, ...]:
    """Return the standard deviations for initial weights of a hidden size; none for 0."""
    if not hidden:
        return ()
    return (
        InitStd("sqrt(1 / (3 hidden))", math.sqrt(1 / (3 * hidden)), "arXiv:2201.11990 (530B), used by BLOOM-176B"),
        InitStd("sqrt(2 / (5 hidden))", math.sqrt(2 / (5 * hidden)), "arXiv:1910.05895"),
    )


def traffic(run: Run) -> tuple[Traffic, ...]:
    """List what each way of parallel training sends; TP and PP need `hidden` and `layers`."""
    return (*_data_parallel(run), *_model_parallel(run))


def _data_parallel(run: Run) -> list[Traffic]:
    """DDP all_reduces the gradients (2 x); ZeRO-1 and 2 reduce_scatter them and all_gather parameters; ZeRO-3 gathers
    parameters twice. Where gradients are sharded (2), or parameters (3), each micro-batch pays. Source:
    arXiv:1910.02054, section 7.
    """
    share = run.params / (run.tp * run.pp) * BYTES_PER_VALUE
    ring = (run.dp - 1) / run.dp
    m = run.accumulate
    times = (
        ("DDP", 2, "2"),
        ("ZeRO-1", 2, "(1 + 1)"),
        ("ZeRO-2", m + 1, f"({m} + 1)"),
        ("ZeRO-3", 3 * m, f"(3 x {m})"),
    )
    return [
        Traffic(
            kind=kind,
            bytes_per_step=factor * share * ring,
            steps=f"{written} x {share / 1e9:.4g} GB x ({run.dp}-1)/{run.dp}",
            source="arXiv:1910.02054, section 7",
            in_use=number == run.zero and run.dp > 1,
            within_node=run.spans_nodes and run.tp * run.dp <= run.gpus_per_node,
            sharing=min(run.tp, run.gpus_per_node) if run.spans_nodes else 1,
        )
        for number, (kind, factor, written) in enumerate(times)
    ]


def _model_parallel(run: Run) -> list[Traffic]:
    """TP all_reduces 4 times per layer (6 with recomputation); PP sends activations and their gradients once each."""
    if not (run.hidden and run.layers):
        return []
    activations = run.tokens / run.dp * run.hidden * BYTES_PER_VALUE
    found = []
    if run.tp > 1:
        calls, layers = 6 if run.recompute else 4, run.layers / run.pp
        found.append(
            Traffic(
                kind=f"TP={run.tp}",
                bytes_per_step=calls * layers * activations * 2 * (run.tp - 1) / run.tp,
                steps=f"{calls} x {layers:g} layers x {activations / 1e9:.4g} GB x 2({run.tp}-1)/{run.tp}",
                source="arXiv:2104.04473, section 3.2",
                in_use=True,
                within_node=run.spans_nodes and not run.tp_spans_nodes,
            )
        )
    if run.pp > 1:
        found.append(
            Traffic(
                kind=f"PP={run.pp}",
                bytes_per_step=2 * activations,
                steps=f"2 x {activations / 1e9:.4g} GB (activations forward, gradients back)",
                source="arXiv:2104.04473, section 3.2",
                in_use=True,
                # Ranks of a stage are consecutive: those at its end on a node send to another node.
                sharing=min(run.gpus_per_node, run.tp * run.dp) if run.spans_nodes else 1,
            )
        )
    return found
