"""Parses the options of `distdiag estimate`: numbers, a layout, a card, a config.json."""

from __future__ import annotations

import re
from dataclasses import asdict

import msgspec  # noqa: TID253 - this module is imported when the command runs

from distdiag.commands.estimate.arithmetic import Run, Shape
from distdiag.errors import UsageError
from distdiag.knowledge.peaks import Peak, find_peaks, peaks

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_LAYOUT = {"tp": (1, 10**6), "pp": (1, 10**6), "zero": (0, 3), "accumulate": (1, 10**6)}
"""Words of --layout -> smallest and largest number."""
_UNGATED = (
    *("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "bert", "roberta", "mpt", "starcoder2"),
    "t5",
)
"""Model types with two matrices in a feed-forward (modeling_*.py in transformers); later types have a gate."""


def read_run(given: dict[str, object], params: str, config: str, gpus: str, layout: str) -> Run:
    """Return the run that the options describe; `given` are the fields that need no parsing. Raises UsageError."""
    shape = read_config(config) if config else Shape()
    size = {"params": _parse_params(params) if params else shape.params_of_shape}
    run = msgspec.convert({**given, **size, **_parse_gpus(gpus), **_parse_layout(layout), **asdict(shape)}, Run)
    if run.gpus % (run.tp * run.pp):
        raise UsageError(
            f"{run.gpus} GPUs are not a multiple of tp={run.tp} x pp={run.pp}", hint="see --gpus, --layout"
        )
    if (run.tp > 1 or run.pp > 1) and not run.hidden:
        raise UsageError("tp and pp need the shape of the model", hint="add --config config.json")
    if not run.params:
        raise UsageError("the size of the model is not known", hint="add --params 7B, or --config config.json")
    return run


def _parse_params(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)\s*", text, re.IGNORECASE)
    number = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 1 <= number < 1e18:
        raise UsageError(f"--params {text}: not a number of parameters", hint="write 176B, 350M or 1.3e9")
    return number


def _parse_gpus(text: str) -> dict[str, int]:
    """Return the GPUs in all and of a node, of "64" or "16x4"."""
    match = re.fullmatch(r"([1-9]\d{0,6})(?:x([1-9]\d{0,3}))?", text)
    if match is None:
        raise UsageError(f"--gpus {text}: not a number of GPUs", hint="write 64, or 16x4 for 16 nodes of 4")
    return {"gpus": int(match[1]) * int(match[2] or 1), **({"gpus_per_node": int(match[2])} if match[2] else {})}


def _parse_layout(text: str) -> dict[str, int]:
    found = {}
    for word in filter(None, text.split(",")):
        name, _, number = word.partition("=")
        least, most = _LAYOUT.get(name, (0, -1))
        if not re.fullmatch(r"\d{1,7}", number, re.ASCII) or not least <= int(number) <= most:
            raise UsageError(f"--layout {word}: not a layout", hint="write --layout tp=4,pp=2,zero=1,accumulate=8")
        found[name] = int(number)
    return found


def find_peak(gpu: str) -> Peak | None:
    """Return the card of this name; None for no name. Raises UsageError."""
    found = find_peaks(gpu)
    if not gpu:
        return None
    if len({peak.tflops for peak in found}) == 1:
        return found[0]
    names = ", ".join(peak.name for peak in found or peaks())
    raise UsageError(f"--gpu {gpu}: {'several cards match' if found else 'no such card'}", hint=f"use one of: {names}")


def read_config(path: str) -> Shape:
    """Read a config.json, of a multimodal model its text part. Raises UsageError."""
    hint = "give the config.json of the model"
    try:
        with open(path, "rb") as file:
            whole = msgspec.json.decode(file.read(2**22), type=dict[str, object])
    except (OSError, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: {error}", hint=hint) from error
    text = whole.get("text_config")
    given = {**whole, **text} if isinstance(text, dict) else whole

    def size(*names: str) -> int:
        found = (given.get(name) for name in names)
        return next((value for value in found if type(value) is int and 0 <= value < 10**9), 0)

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head")
    layers = size("num_hidden_layers", "n_layer", "num_layers")
    if not (hidden and layers):
        raise UsageError(f"--config {path}: no hidden_size and num_hidden_layers", hint=hint)
    experts = size("num_local_experts", "num_experts", "n_routed_experts")
    shared = size("n_shared_experts") if experts else 0
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
        experts=experts + shared,
        active_experts=size("num_experts_per_tok", "num_experts_per_token") + shared if experts else 0,
        dense_layers=size("first_k_dense_replace") if experts else 0,
        dense_ffn=dense_ffn,
        tied=given.get("tie_word_embeddings") is True,
    )
