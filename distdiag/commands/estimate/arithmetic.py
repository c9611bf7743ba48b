"""The arithmetic of `distdiag estimate`. Pure; each formula names its source.

Units: parameters and tokens are counts, times are seconds, traffic is bytes that each GPU sends in one step, TFLOPS
are 1e12 operations a second of one GPU. The busbw of an all_reduce over several nodes is the rate of all NICs of a node
together, as its ring enters and leaves each node once. Groups of a node that send at the same time (8 data-parallel
groups with TP=8) share it: `Traffic.sharing` counts the groups.
"""

from __future__ import annotations

from distdiag.record import record

_BYTES = 2
"""Size of a sent value: bfloat16 or float16."""


@record(kw_only=True)
class Shape:
    """Sizes of a transformer; 0 where not given.

    Of a mixture each token uses `active_experts` of a layer's `experts`, shared experts counted in both; `dense_layers`
    of its layers have one feed-forward of `dense_ffn` instead.
    """

    hidden: int = 0
    layers: int = 0
    vocab: int = 0
    ffn: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    experts: int = 0
    active_experts: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    tied: bool = False

    @property
    def attention_width(self) -> int:
        """Heads x head size; the hidden size, as in GPT, if the head size is unknown."""
        return self.heads * self.head_dim or self.hidden

    @property
    def params_of_shape(self) -> float:
        """Parameters without norms and biases; 0 where the shape is not known."""
        if not (self.hidden and self.layers and self.vocab):
            return 0
        return self.weights(self.experts) + self.vocab * self.hidden * (1 if self.tied else 2)

    def weights(self, experts: int) -> float:
        """Return the weights of all layers, projections and feed-forwards, with this number of experts per layer."""
        width = self.attention_width
        kv = width * self.kv_heads // self.heads if self.heads and self.kv_heads else width
        ffn = (self.layers - self.dense_layers) * (self.ffn or 4 * self.hidden) * max(1, experts)
        ffn += self.dense_layers * (self.dense_ffn or self.ffn)
        return self.hidden * (self.layers * 2 * (width + kv) + ffn * (3 if self.gated else 2))


@record(kw_only=True)
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
    def spans_nodes(self) -> bool:
        """Whether it needs more than one node."""
        return self.gpus > self.gpus_per_node


@record
class Traffic:
    """Bytes that each GPU sends in one step, with the arithmetic.

    `in_use`: by the run as described; other rows are alternatives. `within_node`: it stays on NVLink or PCIe of a node,
    while the run has several nodes. `sharing`: groups that share the network of a node. `node_bytes_per_step` leaves a
    node; divided by busbw between nodes, it is a time.
    """

    kind: str
    bytes_per_step: float
    steps: str
    in_use: bool
    within_node: bool
    sharing: int
    node_bytes_per_step: float


def tflops(run: Run, *, recompute: bool) -> float:
    """Return TFLOPS per GPU, with the second forward of recomputation or without.

    By parameters: a forward takes 2 operations for each parameter and token, a backward 4. Attention scores and logits
    are not counted: a few percent low. Source: arXiv:2001.08361 (section 2.1), arXiv:2104.04473 (section 5.1).

    By the shape: 2 operations for each weight and token, and 4 x seq x attention width for scores and values; a
    backward twice that. For a GPT (feed-forward of 4h, as many K and V heads as heads) this is the
    F = 96 B s l h^2 (1 + s / 6h + V / 16lh) of arXiv:2104.04473, equation 3; without recomputation the layers cost
    three quarters, and the logits, which are never recomputed, stay whole.
    """
    forward = 2 * run.params
    if run.hidden:
        forward = 2 * run.weights(run.active_experts) + 4 * run.seq * run.attention_width * run.layers
    token = (4 if recompute else 3) * forward + 6 * run.hidden * run.vocab
    return token * run.batch * run.seq / (run.step_s * run.gpus * 1e12)


def traffic(run: Run) -> tuple[Traffic, ...]:
    """Return the traffic of each way of parallel training.

    Sources: arXiv:1910.02054, section 7, and of TP and PP arXiv:2104.04473, section 3.2.

    DDP all_reduces the gradients (2 x); ZeRO-1 and 2 reduce_scatter them and all_gather parameters; ZeRO-3 gathers
    parameters twice. If gradients (2) or parameters (3) are sharded, each micro-batch pays. With a shape: TP
    all_reduces 4 times per layer (6 with recomputation); PP sends activations and their gradients once each.
    """
    dp, m = run.gpus // (run.tp * run.pp), run.accumulate

    def row(kind: str, sent: float, steps: str, *, in_use: bool, inside: bool, senders: int) -> Traffic:
        sharing = min(senders, run.gpus_per_node) if run.spans_nodes else 1
        return Traffic(kind, sent, steps, in_use, run.spans_nodes and inside, sharing, sent * sharing)

    share = run.params / (run.tp * run.pp) * _BYTES
    stages = (
        ("DDP", 2, "2"),
        ("ZeRO-1", 2, "(1 + 1)"),
        ("ZeRO-2", m + 1, f"({m} + 1)"),
        ("ZeRO-3", 3 * m, f"(3 x {m})"),
    )
    rows = [
        row(
            kind,
            factor * share * (dp - 1) / dp,
            f"{written} x {share / 1e9:.4g} GB x ({dp}-1)/{dp}",
            in_use=stage == run.zero and dp > 1,
            inside=run.tp * dp <= run.gpus_per_node,
            senders=run.tp,
        )
        for stage, (kind, factor, written) in enumerate(stages)
    ]
    activations = run.batch * run.seq / dp * run.hidden * _BYTES
    size = f"{activations / 1e9:.4g} GB"
    if run.tp > 1:
        calls, layers = 6 if run.recompute else 4, run.layers / run.pp
        sent = calls * layers * activations * 2 * (run.tp - 1) / run.tp
        steps = f"{calls} x {layers:g} layers x {size} x 2({run.tp}-1)/{run.tp}"
        # Ranks of a group are consecutive: TP=6 on nodes of 8 has groups on two nodes.
        inside = run.gpus_per_node % run.tp == 0
        rows.append(row(f"TP={run.tp}", sent, steps, in_use=True, inside=inside, senders=1))
    if run.pp > 1:
        steps = f"2 x {size} (activations forward, gradients back)"
        # Ranks of a stage are consecutive: those at its end on a node send to another node.
        senders = run.tp * dp
        rows.append(row(f"PP={run.pp}", 2 * activations, steps, in_use=True, inside=False, senders=senders))
    return tuple(rows)
