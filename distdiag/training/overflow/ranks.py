"""What the ranks of a job tell each other: one small reduction for each step, and all there is to say after a hit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from distdiag.training.whoami import torch_distributed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def count() -> int:
    """How many ranks there are; 1 without a process group."""
    dist = torch_distributed()
    return 1 if dist is None else int(dist.get_world_size())


def agree(ends: Sequence[Tensor], weights: Sequence[int], known: int) -> int:
    """Give the greatest weight, of any rank, of 0-d tensors that are not finite, or of what is `known`; 0 if none is.

    All ranks must call it. The device is waited for once.
    """
    dist = torch_distributed()
    assert dist is not None
    device = _device()
    worst = torch.tensor([known], dtype=torch.float64).to(device)
    if ends:
        bad = ~torch.isfinite(_on_one_device(ends, device))
        worst = torch.maximum(worst, (bad * torch.tensor(weights, dtype=torch.float64).to(device)).max())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return int(worst.item())


def greatest(weight: int) -> int:
    """Give the greatest weight of all ranks, which must all call this."""
    dist = torch_distributed()
    assert dist is not None
    told = torch.tensor([weight], device=_device())
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return int(told.item())


def gather(mine: object) -> list[Any]:
    """Give what each rank has to say, to all ranks, which must all call this."""
    dist = torch_distributed()
    assert dist is not None
    told: list[Any] = [None] * count()
    dist.all_gather_object(told, mine)
    return told


def _device() -> torch.device:
    """Give a device whose tensors the default group reduces: a group of NCCL alone knows none of the CPU's."""
    dist = torch_distributed()
    assert dist is not None
    backend = str(dist.get_backend()).lower()
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _on_one_device(ends: Sequence[Tensor], device: torch.device) -> Tensor:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, one in enumerate(ends):
        groups.setdefault((one.device, one.dtype), []).append(number)
    values = torch.empty(len(ends), dtype=torch.float64, device=device)
    for where in groups.values():
        values[torch.tensor(where, device=device)] = torch.stack([ends[at] for at in where]).to(device, torch.float64)
    return values
