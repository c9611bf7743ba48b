"""Checks that all ranks hold the same state: parameters, buffers, optimizer state, step, dataloader length, RNG.

Each tensor is reduced to one 64-bit sum of its bits. If all ranks agree, only one reduction of three numbers is sent,
and with shards a few numbers per rank; else one gather of all sums follows. Shards (DTensor, FSDP 1 and 2, ZeRO) are
compared only between ranks with the same shard: replicas of HYBRID_SHARD, or of a ZeRO group smaller than the job.
Tensors kept whole on each rank (NO_SHARD, ignored modules, the weights of ZeRO-1) are compared as replicas.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections import Counter
from dataclasses import asdict

from distdiag.facts import private_files
from distdiag.facts.process.rank_identity import own_label, own_rank, torch_distributed
from distdiag.facts.text import fold
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

FORMAT = "distdiag-sync/1"
MISSING = "missing"
_GROUPS = 4
"""Limit on groups of agreeing ranks named in a sentence."""
_ROOM = 60
"""Limit in characters on a list of ranks in a sentence; `ranks` and `groups` are complete."""
_COLUMNS = 1024
_ROW_WEIGHT, _COLUMN_WEIGHT = 0x9E3779B97F4A7C1, 0x2545F4914F6CDD1
"""Odd, so that a swap of two values in one row or column changes the sum."""


@record
class Entry:
    """One value of a rank. `shard`: which shard of it the rank holds; "" where it is replicated, "-" where unknown."""

    kind: str
    name: str
    shape: str
    sum: int
    shard: str = ""

    @property
    def is_own(self) -> bool:
        """Whether the ranks with the same shard are unknown."""
        return self.shard == "-"


@record
class Saved:
    """The file of one rank; `world_size` is that of the group."""

    format: str
    rank: int
    world_size: int
    entries: list[Entry]


@record
class Difference:
    """A value that differs between ranks that should be equal. `groups`: ranks that agree, largest first.

    `ranks` differ from a majority; empty without a majority. `expected`: BatchNorm statistics, which differ per rank in
    DistributedDataParallel.
    """

    kind: str
    name: str
    groups: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    why: str
    expected: bool = False

    def __str__(self) -> str:
        """Format as "parameter fc.weight: rank 2 differs from ranks 0-1,3 (values)"."""
        if not self.ranks:
            shown = list(map(_ranks, self.groups[:_GROUPS]))
            rest = sum(map(len, self.groups[_GROUPS:]))
            others = " and ".join([*shown, *([f"{rest} more ranks"] if rest else [])])
            return f"{self.kind} {self.name}: {others} differ ({self.why})"
        others = _ranks(self.groups[0])
        verb = "differs" if len(self.ranks) == 1 else "differ"
        return f"{self.kind} {self.name}: {_ranks(self.ranks)} {verb} from {others} ({self.why})"


@record
class SyncResult:
    """What `sync_check` found: differences in the order of the model, how many values were compared, how many not."""

    differences: tuple[Difference, ...]
    replicated: int
    sharded: int
    world_size: int

    @property
    def ok(self) -> bool:
        """Whether all differences are expected."""
        return all(difference.expected for difference in self.differences)


def sync_check(
    model: Any = None,  # noqa: ANN401 - torch is not ours to import
    optimizer: Any = None,  # noqa: ANN401
    *,
    step: int | None = None,
    dataloader: Any = None,  # noqa: ANN401
    rng: bool = False,
    group: Any = None,  # noqa: ANN401
    save: str = "",
) -> SyncResult:
    """Compare the state of all ranks bit by bit; every rank must call it at the same place.

    Args:
        model: its parameters and buffers, also non-persistent buffers.
        optimizer: its state and hyperparameters.
        step: of the training loop.
        dataloader: its length is compared.
        rng: compare the generators of torch, Python and NumPy. Data-parallel ranks often differ on purpose.
        group: the ranks that should hold the same; None: all. With tensor or pipeline parallelism without DTensor, give
            the data-parallel group.
        save: a folder for `distdiag sync-check`: each rank writes its sums to rank_N.json.

    Returns:
        The differences, the same on all ranks. Rank 0 also writes the first difference to stderr.

    Raises:
        OSError: the folder of `save` cannot be written.
    """
    entries = list(_entries(model, optimizer, step, dataloader, rng=rng))
    dist = torch_distributed()
    rank, size = (0, 1) if dist is None else (dist.get_rank(), dist.get_world_size(group))
    if save:
        os.makedirs(save, exist_ok=True)
        document = json.dumps(asdict(Saved(FORMAT, rank, size, entries)))
        private_files.write_whole(os.path.join(save, f"rank_{rank}.json"), document.encode())
    differences = compare(_gather(entries, dist, group)) if dist is not None and size > 1 else ()
    sharded = sum(entry.shard != "" for entry in entries)
    result = SyncResult(differences, len(entries) - sharded, sharded, size)
    first = next((difference for difference in differences if not difference.expected), None)
    if first is not None and dist is not None and dist.get_rank(group) == 0:
        count = len(differences)
        more = f"; {count - 1} more" if count > 1 else ""
        sys.stderr.write(f"{own_label() if own_rank() is not None else ''} distdiag: out of sync: {first}{more}\n")
    return result


def compare(by_rank: Mapping[int, Sequence[Entry]]) -> tuple[Difference, ...]:
    """Return the differences, in the order of the first rank with the value; expected differences last. Pure."""
    order: dict[tuple[str, str], None] = {}
    found: dict[tuple[str, str], dict[int, Entry]] = {}
    for rank, entries in sorted(by_rank.items()):
        for entry in entries:
            key = entry.kind, entry.name
            order.setdefault(key)
            found.setdefault(key, {})[rank] = entry
    ranks = sorted(by_rank)
    differences = (difference for key in order for difference in _differences(key, found[key], ranks))
    return tuple(sorted(differences, key=lambda difference: difference.expected))


def _differences(key: tuple[str, str], held: Mapping[int, Entry], ranks: Sequence[int]) -> Iterator[Difference]:
    shards: dict[str, dict[int, str]] = {}
    if all(entry.shard == "" for entry in held.values()):
        shards[""] = {rank: MISSING for rank in ranks if rank not in held}
    for rank, entry in held.items():
        if not entry.is_own:
            shards.setdefault(entry.shard, {})[rank] = f"{entry.shape} {entry.sum}"
    for states in shards.values():
        if len(set(states.values())) > 1:
            yield _difference(key, states, held)


def _difference(key: tuple[str, str], states: Mapping[int, str], held: Mapping[int, Entry]) -> Difference:
    counts = Counter(states.values())
    # On a tie the lowest rank's first, so that all ranks print the same.
    ranked = sorted(counts, key=lambda state: (-counts[state], min(r for r in states if states[r] == state)))
    groups = tuple(tuple(sorted(rank for rank in states if states[rank] == state)) for state in ranked)
    majority = len(groups[0]) > len(states) / 2
    shapes = {held[rank].shape for rank in states if rank in held}
    missing = tuple(sorted(rank for rank in states if states[rank] == MISSING))
    why = f"missing on {_ranks(missing)}" if missing else "shape or dtype" if len(shapes) > 1 else "values"
    ranks = tuple(sorted(rank for other in groups[1:] for rank in other)) if majority else ()
    return Difference(key[0], key[1], groups, ranks, why, expected=key[0] == "BatchNorm statistics" and why == "values")


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks: "rank 2", "ranks 0-1,3"; long lists are cut: "143 ranks (3,10,17,...)"."""
    text = fold(ranks)
    if len(text) > _ROOM:
        return f"{len(ranks)} ranks ({text[: text.rfind(',', 0, _ROOM - 20)]},...)"
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _gather(entries: Sequence[Entry], dist: Any, group: Any) -> dict[int, Sequence[Entry]]:  # noqa: ANN401
    """Return the entries of every rank; empty if a digest from each rank shows that all agree."""
    from distdiag.training.overflow.ranks import gather, greatest

    group = group if group is not None else dist.group.WORLD
    replicated = [entry for entry in entries if entry.shard == ""]
    digest = hashlib.blake2b(repr(replicated).encode(), digest_size=7).digest()
    number, shards = int.from_bytes(digest, "little"), int(any(entry.shard not in ("", "-") for entry in entries))
    # max(x) == -max(-x) if all ranks have the same x.
    high, low, any_shards = greatest([number, -number, shards], group)
    if high == -low and (not any_shards or _shards_agree(gather(_by_shard(entries), group))):
        return {}
    ranks = dist.get_process_group_ranks(group)
    return dict(zip(ranks, gather(list(entries), group)))


def _by_shard(entries: Sequence[Entry]) -> dict[str, bytes]:
    held: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.shard not in ("", "-"):
            held.setdefault(entry.shard, []).append(entry)
    return {shard: hashlib.blake2b(repr(of_it).encode(), digest_size=8).digest() for shard, of_it in held.items()}


def _shards_agree(of_ranks: Sequence[Mapping[str, bytes]]) -> bool:
    """Return whether all holders of a shard agree; False too if ranks hold it for different weights."""
    first: dict[str, bytes] = {}
    return all(first.setdefault(shard, digest) == digest for held in of_ranks for shard, digest in held.items())


def _entries(
    model: Any,  # noqa: ANN401
    optimizer: Any,  # noqa: ANN401
    step: int | None,
    dataloader: Any,  # noqa: ANN401
    *,
    rng: bool,
) -> Iterator[Entry]:
    tensors = [*_of_model(model), *_of_optimizer(model, optimizer)]
    yield from _summed([row for row in tensors if _is_tensor(row[2])])
    for kind, name, value, _ in tensors:
        if not _is_tensor(value):
            yield _plain(kind, name, value)
    if step is not None:
        yield _plain("step", "step", int(step))
    if dataloader is not None:
        yield _plain("dataloader", "length", len(dataloader))
    if rng:
        yield from _of_generators()


def _of_model(model: Any) -> Iterator[tuple[str, str, Any, str]]:  # noqa: ANN401
    """Yield kind, name, tensor and shard; shard is "" for replicas and if a DTensor describes it."""
    if model is None:
        return
    of_fsdp = _of_fsdp1(model)
    for name, parameter in model.named_parameters():
        yield "parameter", _uncompiled(name), parameter, _shard_of(parameter, of_fsdp)
    norms = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if any(kind.__name__ == "_BatchNorm" for kind in type(module).__mro__) and "Sync" not in type(module).__name__
        for name in ("running_mean", "running_var")
    }
    for name, buffer in model.named_buffers():
        kind = "BatchNorm statistics" if name in norms else "buffer"
        yield kind, _uncompiled(name), buffer, _shard_of(buffer, {})


def _uncompiled(name: str) -> str:
    """Return the name without torch.compile's prefix, which only some ranks may have."""
    return name.replace("_orig_mod.", "")


def _of_fsdp1(model: Any) -> dict[int, str]:  # noqa: ANN401
    """Map the id of each parameter managed by FullyShardedDataParallel to the shard held by this rank.

    Each wrapped module has a flat parameter; with use_orig_params the model has views into its shard instead. The ranks
    of `process_group` share it; HYBRID_SHARD has several such groups with equal shards.
    """
    found: dict[int, str] = {}
    for module in model.modules():
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None or not any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            continue
        is_sharded = getattr(handle, "uses_sharded_strategy", True)
        shard = _place_in(getattr(module, "process_group", None)) if is_sharded else ""
        found.update((id(parameter), shard) for parameter in (flat, *(getattr(flat, "_params", None) or ())))
    return found


def _place_in(group: Any) -> str:  # noqa: ANN401
    """Return this rank's shard within a group, "RANK of SIZE"; "-" if unknown."""
    dist = torch_distributed()
    if dist is None or group is None:
        return "-"
    try:
        return f"{dist.get_rank(group)} of {dist.get_world_size(group)}"
    except (ValueError, RuntimeError, TypeError):
        return "-"


def _shard_of(tensor: Any, of_fsdp: Mapping[int, str]) -> str:  # noqa: ANN401
    """Return the shard as marked by FSDP 1, DeepSpeed's ZeRO-3 or Megatron's TP; "" for replicas."""
    if id(tensor) in of_fsdp:
        return of_fsdp[id(tensor)]
    if type(tensor).__name__ == "FlatParameter" or getattr(tensor, "_is_flat_param", False):
        return "-"
    if hasattr(tensor, "ds_id"):
        return _place_in(getattr(tensor, "ds_process_group", None))
    return "-" if getattr(tensor, "tensor_model_parallel", False) else ""


def _of_optimizer(model: Any, optimizer: Any) -> Iterator[tuple[str, str, Any, str]]:  # noqa: ANN401
    if optimizer is None:
        return
    names = {} if model is None else {parameter: _uncompiled(name) for name, parameter in model.named_parameters()}
    of_fsdp = {} if model is None else _of_fsdp1(model)
    zero, state = _of_zero(optimizer)
    for at, settings in enumerate(optimizer.param_groups):
        for key, value in sorted(settings.items()):
            if key != "params" and isinstance(value, (bool, int, float, str, tuple, type(None))):
                yield "optimizer", f"param_groups[{at}].{key}", value, ""
        for number, parameter in enumerate(settings["params"]):
            name = names.get(parameter, f"group {at}, parameter {number}")
            shard = zero or _shard_of(parameter, of_fsdp)
            for key, value in sorted(state.get(parameter, {}).items()):
                if _is_tensor(value) or (isinstance(value, (bool, int, float)) and not shard):
                    yield "optimizer state", f"{name}.{key}", value, shard


def _of_zero(optimizer: Any) -> tuple[str, Mapping[Any, Any]]:  # noqa: ANN401
    """Return the shard of a ZeRO optimizer's state ("" for other optimizers), and the state.

    torch's ZeroRedundancyOptimizer keeps whole states of some parameters in an inner optimizer, DeepSpeed's a flat part
    of all.
    """
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    if "ZeroRedundancyOptimizer" in kinds:
        return _place_in(getattr(optimizer, "process_group", None)), optimizer.optim.state
    if any("Zero" in kind or kind.startswith("DeepSpeed") for kind in kinds):
        return _place_in(getattr(optimizer, "dp_process_group", None)), optimizer.state
    return "", optimizer.state


def _of_generators() -> Iterator[Entry]:
    import random

    torch = sys.modules["torch"]
    yield _plain("RNG", "python", random.getstate())
    yield _plain("RNG", "torch", torch.get_rng_state().tolist())
    with contextlib.suppress(
        ImportError
    ):  # imported here, not only if loaded: rank 0 alone may have imported it to plot
        import numpy as np

        state: Any = np.random.get_state()  # (name, array of keys, position, ...)
        yield _plain("RNG", "numpy", (state[0], state[1].tolist(), *state[2:]))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield _plain("RNG", "cuda", torch.cuda.get_rng_state().tolist())


def _is_tensor(value: Any) -> bool:  # noqa: ANN401
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _plain(kind: str, name: str, value: object) -> Entry:
    digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
    return Entry(kind, name, type(value).__name__, int.from_bytes(digest, "little"))


def _summed(rows: Sequence[tuple[str, str, Any, str]]) -> Iterator[Entry]:
    """Sum the bits of tensors; synchronizes once per device."""
    torch = sys.modules.get("torch")
    described, sums = [], []
    for kind, name, tensor, of_framework in rows:
        local, shape, shard = _local(tensor)
        if local.layout != torch.strided or local.device.type == "meta":  # type: ignore[union-attr]
            continue
        described.append((kind, name, f"{tuple(shape)} {local.dtype}", of_framework or shard))
        sums.append(_sum(local.detach()))
    numbers: dict[int, int] = {}
    for device in {total.device for total in sums}:
        where = [at for at, total in enumerate(sums) if total.device == device]
        numbers.update(zip(where, torch.stack([sums[at] for at in where]).tolist()))  # type: ignore[union-attr]
    for at, (kind, name, shape, shard) in enumerate(described):
        yield Entry(kind, name, shape, numbers[at], shard)


def _local(tensor: Any) -> tuple[Any, Any, str]:  # noqa: ANN401
    """Return the local tensor, the global shape, and the shard of a DTensor."""
    part = getattr(tensor, "ds_tensor", None)  # DeepSpeed's ZeRO-3: the parameter itself is empty between forwards
    if part is not None:
        return part, getattr(tensor, "ds_shape", part.shape), ""
    placements = getattr(tensor, "placements", None)
    mesh = getattr(tensor, "device_mesh", None)
    if placements is None or mesh is None:
        return tensor, tensor.shape, ""
    coordinate = mesh.get_coordinate() or []
    parts = [f"{dim}:{at}" for dim, (place, at) in enumerate(zip(placements, coordinate)) if not place.is_replicate()]
    return tensor.to_local(), tensor.shape, " ".join(parts)


def _sum(tensor: Any) -> Any:  # noqa: ANN401
    """Return a 0-d int64 checksum of all bits, sensitive to swapped values."""
    torch = sys.modules["torch"]
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
    bits = plain.contiguous().view(integers).reshape(-1)
    whole = bits.numel() // _COLUMNS * _COLUMNS
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for block in (bits[:whole].view(-1, _COLUMNS), bits[whole:].view(1, -1)):
        if block.numel():
            rows, columns = block.sum(1, dtype=torch.int64), block.sum(0, dtype=torch.int64)
            weights = torch.arange(1, max(block.shape) + 1, device=bits.device)
            total = total * 31 + (rows * weights[: len(rows)]).sum() * _ROW_WEIGHT
            total = total + (columns * weights[: len(columns)]).sum() * _COLUMN_WEIGHT + rows.sum()
    return total
