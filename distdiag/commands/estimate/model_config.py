"""The shape of a transformer, from a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_BYTES = 2**22
_UNGATED = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "bert", "roberta", "mpt", "starcoder2"),
    "t5",
)
"""Model types with two matrices in a feed-forward, by their modeling_*.py; later ones have a gate."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a transformer; 0 where not given."""

    hidden: int = 0
    layers: int = 0
    vocab: int = 0
    ffn: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    experts: int = 0
    """Experts of a layer, of which each token uses `active_experts`; shared experts count in both."""
    active_experts: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    """Layers of a mixture of experts that have one feed-forward of this size instead."""
    tied: bool = False


def read_config(path: str) -> Shape:
    """Read a config.json; of a multimodal model its text part. Raises UsageError."""
    import msgspec

    from distdiag.errors import UsageError

    try:
        with open(path, "rb") as file:
            whole = msgspec.json.decode(file.read(_MOST_BYTES), type=dict[str, object])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"--config {path}: {error}", hint="give the config.json of the model") from error
    text = whole.get("text_config")
    given = {**whole, **text} if isinstance(text, dict) else whole

    def size(*names: str) -> int:
        found = (given.get(name) for name in names)
        return next((value for value in found if type(value) is int and 0 <= value < 10**9), 0)

    hidden, layers = size("hidden_size", "n_embd", "d_model"), size("num_hidden_layers", "n_layer", "num_layers")
    if not (hidden and layers):
        raise UsageError(
            f"--config {path}: no hidden_size and num_hidden_layers", hint="give the config.json of the model"
        )
    heads = size("num_attention_heads", "n_head")
    experts = size("num_local_experts", "num_experts", "n_routed_experts")
    shared = size("n_shared_experts")
    dense_ffn = size("intermediate_size", "n_inner", "ffn_dim")
    return Shape(
        hidden=hidden,
        layers=layers,
        vocab=size("vocab_size"),
        ffn=(size("moe_intermediate_size") if experts else 0) or dense_ffn,
        heads=heads,
        kv_heads=size("num_key_value_heads") or heads,
        head_dim=size("head_dim") or (hidden // heads if heads else 0),
        gated=given.get("model_type") not in _UNGATED,
        experts=experts + shared if experts else 0,
        active_experts=size("num_experts_per_tok", "num_experts_per_token") + shared if experts else 0,
        dense_layers=size("first_k_dense_replace") if experts else 0,
        dense_ffn=dense_ffn,
        tied=given.get("tie_word_embeddings") is True,
    )
