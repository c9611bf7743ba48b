"""Sums that a job keeps in 16 bits: norms of its own, gradients over micro-batches and over ranks. Each is noted once.

A sum of n numbers in bfloat16 (8 bits) loses what is smaller than 1/256 of it. torch's own norms add up in float32
whatever their inputs are; a norm that calls mean() or var() on 16-bit numbers does not, and in float16 the square of
anything above 255 is inf there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distdiag.facts.rank_identity import torch_distributed
from distdiag.training.overflow.modules import kind_of, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.nn import Module

    from distdiag.training.overflow.backward import Gradient

SHORT = (torch.float16, torch.bfloat16)
_MANY_BACKWARDS = 4
"""From here on a gradient loses two of its 8 bits to the sum that it is added to."""
_SUMS = ("mean", "var", "std", "var_mean", "std_mean", "sum", "norm", "linalg_vector_norm")
_COMPRESS = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}
"""Hooks of torch.distributed.algorithms.ddp_comm_hooks that reduce float32 gradients in 16 bits."""


class ShortSums:
    """Looks at one forward and at a few steps; each method returns a sentence, or "" if there is nothing new."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._backwards = 0
        self._seen: set[str] = set()
        self._norms: list[str] | None = None

    def count_backward(self) -> None:
        """Count a backward since the last step."""
        self._backwards += 1

    def own_norms(self) -> str:
        """Run each norm of the script's own once more, on one row of what it had as input, and look at its sums.

        Called after a forward: the first calls of these modules are long over, and nobody sees this one.
        """
        if "norm" in self._seen:
            return ""
        self._seen.add("norm")
        found = [(name, module, dtype) for name, module in _own_norms(self._model) if (dtype := _sums_in(module))]
        if not found:
            return ""
        name, module, dtype = found[0]
        others = f", as do {len(found) - 1} other norms" if len(found) > 1 else ""
        inf = "; x * x is inf above 255" if dtype is torch.float16 else ""
        return (
            f"`{name}` ({kind_of(module)}) computes its mean in {_name(dtype)}{others}{inf}. "
            "Compute it in float32: x.float(), and convert the result back"
        )

    def step(self, gradients: Sequence[Gradient], ddp: Module | None, *, ranks: int, scaled: bool) -> list[str]:
        """Look at the gradients of a step, the reduction over `ranks` that made them, and how many backwards did."""
        backwards, self._backwards = self._backwards, 0
        notes = [self._accumulated(gradients, backwards), self._reduced(gradients, ddp, ranks=ranks, scaled=scaled)]
        return [note for note in notes if note]

    def _accumulated(self, gradients: Sequence[Gradient], backwards: int) -> str:
        short = [gradient.tensor.dtype for gradient in gradients if gradient.tensor.dtype in SHORT]
        if backwards < _MANY_BACKWARDS or not short or "accumulation" in self._seen:
            return ""
        self._seen.add("accumulation")
        return (
            f"{len(short)} gradients add up {backwards} backwards in {_name(short[0])}: small values are lost. "
            "Keep weights in float32 and use autocast: gradients are float32 then"
        )

    def _reduced(self, gradients: Sequence[Gradient], ddp: Module | None, *, ranks: int, scaled: bool) -> str:
        if ranks < 2 or "reduction" in self._seen:
            return ""
        how, dtypes = _reductions(self._model, ddp, gradients)
        # float16 has 11 bits, and is fine with loss scaling.
        short = [dtype for dtype in dtypes if dtype is torch.bfloat16 or (dtype is torch.float16 and not scaled)]
        if not short:
            return ""
        self._seen.add("reduction")
        fix = (
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            if how == "fully_shard"
            else "keep weights in float32 and use autocast, without a hook that compresses"
        )
        return (
            f"{how} sums {len(short)} gradients over {ranks} ranks in {_name(short[0])}: small values are lost. "
            f"Reduce in float32: {fix}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own_norms(model: Module) -> Iterator[tuple[str, Module]]:
    for module, name in named(model).items():
        kind = type(module)
        is_norm = "norm" in kind.__name__.lower() and not any(True for _ in module.children())
        if is_norm and not kind.__module__.startswith(("torch.", "apex.", "transformer_engine.")):
            yield name, module


def _sums_in(module: Module) -> torch.dtype | None:
    """Return in which 16 bits the forward of a norm adds up; None if it does not, or cannot be run by itself.

    Its input is as wide as its weight, and of the weight's dtype: a norm in float32 is not looked at.
    """
    weight = next((weight for weight in module.parameters(recurse=False) if weight.dim() == 1), None)
    if weight is None or weight.dtype not in SHORT or type(weight).__name__ not in ("Parameter", "Tensor"):
        return None
    watch = _Sums()
    try:
        with torch.no_grad(), watch:
            type(module).forward(module, torch.ones(1, 1, len(weight), dtype=weight.dtype, device=weight.device))
    except Exception:  # noqa: BLE001 - it takes something else: whatever a script's module raises
        return None
    return watch.found


class _Sums(TorchDispatchMode):
    """Notes a sum over numbers of 16 bits, unless it is kept in another dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        space, _, name = str(getattr(func, "_schema", func)).partition("(")[0].partition(".")[0].partition("::")
        if "c10d" in space:
            raise RuntimeError("it waits for other ranks, who do not run it now")
        kwargs = kwargs or {}
        given = args[0] if args else None
        if name in _SUMS and isinstance(given, torch.Tensor) and given.dtype in SHORT and not kwargs.get("dtype"):
            self.found = self.found or given.dtype
        return func(*args, **kwargs)


def _reductions(model: Module, ddp: Module | None, gradients: Iterable[Gradient]) -> tuple[str, list[torch.dtype]]:
    """Return who reduces the gradients, and in which dtypes."""
    sharded = list(_of_fully_shard(model))
    if sharded:
        return "fully_shard", sharded
    if ddp is None:
        return "", []
    dtypes = [gradient.tensor.dtype for gradient in gradients]
    hooks = [getattr(hook, "__name__", "") for hook, _ in getattr(ddp, "_comm_hooks", ())]
    if hooks:  # what other hooks do is not known
        known = [_COMPRESS[name] for name in hooks[:1] if name in _COMPRESS]
        return f"{hooks[0]} of DistributedDataParallel", known * len(dtypes)
    return "DistributedDataParallel", dtypes


def _of_fully_shard(model: Module) -> Iterator[torch.dtype]:
    """Yield the dtype in which fully_shard reduces each weight: reduce_dtype, or that of its gradient."""
    for module in model.modules():
        if not any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            continue
        state = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for weight in getattr(group, "fsdp_params", ()):
                chosen = (getattr(weight, name, None) for name in ("reduce_dtype", "param_dtype", "orig_dtype"))
                dtype = next((dtype for dtype in chosen if dtype is not None), None)
                if dtype is not None:
                    yield dtype


def ranks_of(group: Any) -> int:  # noqa: ANN401 - a process group of torch
    """Return how many ranks a group has; 1 for None."""
    dist = torch_distributed()
    return 1 if group is None or dist is None else int(dist.get_world_size(group))
