"""Communication of the ranks of a job: one small reduction for each step, and all details after a detection."""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from distdiag.facts.process.rank_identity import torch_distributed
from distdiag.training.overflow import extrema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Module


def count() -> int:
    """Return the number of ranks; 1 without a process group."""
    dist = torch_distributed()
    return 1 if dist is None else int(dist.get_world_size())


def _groups_of(module: Module) -> list[Any]:
    if not any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
        return []
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


class Sharing:
    """Whether the weights of a model are sharded over ranks, and over which.

    During a forward, fully_shard has gathered the weights and sharding is not visible: so all parameters and submodules
    are inspected before it, and a positive result is kept.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._meshes: dict[tuple[int, ...], Any] = {}
        self._looked_at: object = None
        self.is_shared = False
        """A forward of this rank alone would wait for the others."""
        self.look()

    def look(self, when: object = None) -> None:
        """Inspect the whole model, unless done under the same `when` with the model of the same class."""
        if (when, type(self._model)) == self._looked_at:
            return
        self._looked_at = (when, type(self._model))
        for module in self._model.modules():
            self._look_at(module)

    def _look_at(self, module: Module) -> None:
        kinds = [kind.__name__ for kind in type(module).__mro__]
        self.is_shared |= "FSDPModule" in kinds or "FullyShardedDataParallel" in kinds
        meshes = [getattr(weight, "device_mesh", None) for weight in module._parameters.values()]
        # While its weights are put together, only fully_shard's own state has the mesh.
        meshes += [getattr(getattr(group, "mesh_info", None), "mesh", None) for group in _groups_of(module)]
        for mesh in meshes:
            if mesh is not None:
                self._meshes[tuple(mesh.mesh.flatten().tolist())] = mesh
        # DeepSpeed's third stage keeps a part of each weight, without a mesh.
        self.is_shared |= bool(self._meshes) or any(hasattr(weight, "ds_id") for weight in module._parameters.values())

    def group(self) -> Any:  # noqa: ANN401 - a process group of torch
        """Return the process group that shards the weights; None if unsharded or if no group covers all shards."""
        if not self._meshes:
            return None
        dist = torch_distributed()
        assert dist is not None
        numbers = max(self._meshes, key=len)
        if any(not set(other) <= set(numbers) for other in self._meshes):
            return None
        if len(numbers) == count():
            return dist.group.WORLD
        mesh = self._meshes[numbers]
        return mesh.get_group() if mesh.ndim == 1 else None


def group_of(sharing: Sharing, ddp: DistributedDataParallel | None) -> Any:  # noqa: ANN401 - a process group of torch
    """Return the process group that steps in lockstep with this rank, None if not guaranteed; call it in a forward.

    DistributedDataParallel (except in join()) and fully_shard guarantee lockstep. Without it, waiting for a rank that
    takes fewer steps would hang.
    """
    if count() == 1:
        return None
    ddp = ddp or getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None:
        joins = getattr(getattr(ddp, "_join_config", None), "enable", False)
        return None if joins else ddp.process_group
    return sharing.group()


def members(group: Any) -> frozenset[int]:  # noqa: ANN401
    """Return the ranks of a group; none for None."""
    dist = torch_distributed()
    if group is None or dist is None:
        return frozenset()
    return frozenset(dist.get_process_group_ranks(group))


def agree(weighted: Sequence[tuple[Tensor, int]], known: int, group: Any) -> int:  # noqa: ANN401
    """Return the maximum over ranks of `known` and the weights of non-finite 0-d tensors; 0 if all are finite.

    Collective over the group, if there is one. Synchronizes with the device once.
    """
    if group is None:
        values = extrema.fetch([value for value, _ in weighted])
        bad = [weight for value, (_, weight) in zip(values, weighted) if not math.isfinite(value)]
        return max([known, *bad])
    dist = torch_distributed()
    assert dist is not None
    device = _device(group)
    worst = torch.tensor([known], dtype=torch.float64).to(device)
    if weighted:
        are_bad = ~torch.isfinite(extrema.stacked([value for value, _ in weighted], device))
        weights = torch.tensor([weight for _, weight in weighted], dtype=torch.float64).to(device)
        worst = torch.maximum(worst, (are_bad * weights).max())
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return int(worst.item())


def greatest(numbers: Sequence[int], group: Any) -> list[int]:  # noqa: ANN401
    """Return the element-wise maximum over the ranks of the group, if there is one. Collective."""
    if group is None:
        return list(numbers)
    dist = torch_distributed()
    assert dist is not None
    values = torch.tensor(numbers, device=_device(group))
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    found: list[int] = values.tolist()
    return found


def gather(mine: object, group: Any) -> list[Any]:  # noqa: ANN401
    """Return the objects of all ranks of the group, in rank order. Collective.

    Like torch's all_gather_object, but without its dependency on numpy.
    """
    dist = torch_distributed()
    assert dist is not None
    data = pickle.dumps(mine)
    (most,) = greatest([len(data)], group)
    own = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data.ljust(most)), dtype=torch.uint8)
    own = own.to(_device(group))
    received = [torch.empty_like(own) for _ in range(int(dist.get_world_size(group)))]
    dist.all_gather(received, own, group=group)
    found = [bytes(data.tolist()) for data in received]
    return [pickle.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]) for data in found]


def _device(group: Any) -> torch.device:  # noqa: ANN401
    """Return a device whose tensors the group reduces: a group with NCCL alone cannot reduce CPU tensors."""
    dist = torch_distributed()
    assert dist is not None
    backend = str(dist.get_backend(group)).lower()
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
