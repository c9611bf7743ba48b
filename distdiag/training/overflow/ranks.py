"""What the ranks of a job tell each other: one small reduction for each step, and all there is to say after a hit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distdiag.training.whoami import torch_distributed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Module


def count() -> int:
    """How many ranks there are; 1 without a process group."""
    dist = torch_distributed()
    return 1 if dist is None else int(dist.get_world_size())


def group_of(model: Module, ddp: DistributedDataParallel | None) -> Any:  # noqa: ANN401 - a process group of torch
    """Give the ranks that step together with this one; None if nothing says that any do. Asked in a forward.

    They do in the forward of DistributedDataParallel, though not in its join(), and where the weights are shared out
    (fully_shard): nobody else promises that all ranks take the same steps, and who waits for one that does not come
    hangs.
    """
    if count() == 1:
        return None
    ddp = ddp or getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None:
        joins = getattr(getattr(ddp, "_join_config", None), "enable", False)
        return None if joins else ddp.process_group
    mesh = getattr(next(model.parameters(), None), "device_mesh", None)
    if mesh is None:
        return None
    dist = torch_distributed()
    assert dist is not None
    if mesh.size() == count():
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else None


def shares_weights(model: Module) -> bool:
    """Tell whether a forward of this rank alone would wait for weights of the others."""
    return hasattr(next(model.parameters(), None), "device_mesh")


def agree(ends: Sequence[Tensor], weights: Sequence[int], known: int, group: Any) -> int:  # noqa: ANN401
    """Give the greatest weight, of any rank, of 0-d tensors that are not finite, or of what is `known`; 0 if none is.

    All ranks of the group must call it. The device is waited for once.
    """
    dist = torch_distributed()
    assert dist is not None
    device = _device(group)
    worst = torch.tensor([known], dtype=torch.float64).to(device)
    if ends:
        bad = ~torch.isfinite(_on_one_device(ends, device))
        worst = torch.maximum(worst, (bad * torch.tensor(weights, dtype=torch.float64).to(device)).max())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return int(worst.item())


def greatest(weight: int, group: Any) -> int:  # noqa: ANN401
    """Give the greatest weight of all ranks of the group, which must all call this."""
    dist = torch_distributed()
    assert dist is not None
    told = torch.tensor([weight], device=_device(group))
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return int(told.item())


def gather(mine: object, group: Any) -> list[Any]:  # noqa: ANN401
    """Give what each rank of the group has to say, to all of them, which must all call this."""
    dist = torch_distributed()
    assert dist is not None
    told: list[Any] = [None] * int(dist.get_world_size(group))
    dist.all_gather_object(told, mine, group=group)
    return told


def _device(group: Any) -> torch.device:  # noqa: ANN401
    """Give a device whose tensors the group reduces: one of NCCL alone knows none of the CPU's."""
    dist = torch_distributed()
    assert dist is not None
    backend = str(dist.get_backend(group)).lower()
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
