"""Reads checkpoints of many files: safetensors with an index, or those of torch.distributed.checkpoint."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from typing import TYPE_CHECKING, Any, ClassVar

from distdiag.commands.floatcmp.ask_files import Unreadable, read_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_METADATA = ".metadata"
_INDEX = ".index.json"
_MOST_INDEX_BYTES = 100_000_000
_DAMAGED = (AttributeError, LookupError, ValueError, TypeError, pickle.UnpicklingError)
_WHOLE = "is it whole? compare its files with the original's"
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "tuple", "list", "dict", "int", "str", "slice"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
"""What the metadata of a checkpoint is made of; all of it only holds values."""


def read(path: str) -> object:
    """Read a file of tensors, or a checkpoint: its folder, or the index of its files.

    Raises:
        Unreadable: and why.
    """
    try:
        if os.path.isdir(path):
            return _folder(path)
        return _indexed(path) if path.endswith(_INDEX) else read_file(path)
    except (OSError, ValueError) as error:  # a name that cannot be a file's is a ValueError
        why = getattr(error, "strerror", None) or str(error)
        raise Unreadable(path, why, "name a file or folder that can be read") from error


def _folder(path: str) -> object:
    names = sorted(os.listdir(path))
    if _METADATA in names:
        return _distributed(path)
    indices = [name for name in names if name.endswith(f".safetensors{_INDEX}")]
    if len(indices) == 1:
        return _indexed(os.path.join(path, indices[0]))
    files = [name for name in names if name.endswith(".safetensors")]
    if not files or len(indices) > 1:
        what = "several indices" if indices else f"no .safetensors and no {_METADATA} of torch.distributed.checkpoint"
        raise Unreadable(path, f"a folder with {what}", "name the file, or the index, to compare")
    return _merged(path, files)


def _indexed(path: str) -> dict[str, object]:
    """Read what {"weight_map": {name: file}} names, as transformers writes it."""
    with open(path, "rb") as file:
        text = file.read(_MOST_INDEX_BYTES)
    try:
        places = json.loads(text)["weight_map"]
        files = sorted(set(places.values()))
        if any(os.path.basename(one) != one for one in files):
            raise ValueError("it names files that are not beside it")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(path, f"no index of files of tensors ({error})", _WHOLE) from error
    found = _merged(os.path.dirname(path), files)
    missing = [name for name in places if name not in found]
    if missing:
        raise Unreadable(path, f"{missing[0]} is not in {places[missing[0]]}, where it should be", _WHOLE)
    return {name: found[name] for name in places}


def _merged(folder: str, files: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in files:
        part: Any = read_file(os.path.join(folder, name))
        for key in part:
            if key in found:
                raise Unreadable(folder, f"{key} is in two of its files, one of them {name}", "name one file")
        found.update(part)
    return found


def _distributed(path: str) -> dict[str, object]:
    """Put the tensors of torch.distributed.checkpoint together from the parts that the ranks wrote."""
    metadata = _metadata(os.path.join(path, _METADATA))
    try:
        _fits(path, metadata)
        found: dict[str, Any] = {
            name: _whole(one) for name, one in metadata.state_dict_metadata.items() if hasattr(one, "chunks")
        }
        for index, info in metadata.storage_data.items():
            value = _part(path, info)
            if index.fqn not in found:
                found[index.fqn] = value
            elif found[index.fqn].dim():
                at = tuple(slice(a, a + n) for a, n in zip(index.offset, value.shape, strict=True))
                found[index.fqn][at] = value
            else:
                found[index.fqn].copy_(value)
    except (*_DAMAGED, ArithmeticError, MemoryError, RuntimeError) as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise Unreadable(path, f"a checkpoint that is damaged, or of another torch ({why})", _WHOLE) from error
    return _nested(found, getattr(metadata, "planner_data", None) or {})


def _fits(path: str, metadata: Any) -> None:  # noqa: ANN401 - torch's Metadata
    """Refuse sizes that are not in the files: memory would be made for them. Raises ValueError."""
    tensors = [one for one in metadata.state_dict_metadata.values() if hasattr(one, "chunks")]
    needed = sum(math.prod(one.size) * one.properties.dtype.itemsize for one in tensors)
    there = sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    if needed > there:
        raise ValueError(f"its tensors are of {needed} bytes, its files of {there}")


def _nested(found: dict[str, object], paths: Mapping[str, tuple[object, ...]]) -> dict[str, object]:
    """Nest values as they were saved: the names in a checkpoint are the keys that led there, joined by dots."""
    whole: dict[Any, Any] = {}
    for name, value in found.items():
        *outer, last = paths.get(name) or (name,)
        inner = whole
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return whole


def _whole(one: Any) -> torch.Tensor:  # noqa: ANN401 - a TensorStorageMetadata
    """Make room for a tensor; what no part covers stays nan, where its dtype has that."""
    import torch

    room = torch.empty(tuple(one.size), dtype=one.properties.dtype)
    return room.fill_(torch.nan) if room.is_floating_point() else room.zero_()


def _part(folder: str, info: Any) -> Any:  # noqa: ANN401 - a _StorageInfo; what torch.save wrote
    import torch

    if getattr(info, "transform_descriptors", None):
        raise ValueError("its parts are compressed")
    if os.path.basename(str(info.relative_path)) != str(info.relative_path):
        raise ValueError("it names files that are not beside it")
    with open(os.path.join(folder, str(info.relative_path)), "rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class _Plain(pickle._Unpickler):
    """Makes what metadata is made of, and nothing else: a pickle can run whatever it names.

    The one of Python in Python: a few bytes make the one in C reserve gigabytes, for numbers of things that never come.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        import torch

        allowed = _OF_METADATA.get(module, set())
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        if "." in name or (allowed is not None and name not in allowed):
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which can run code of whoever wrote the file")
        found = super().find_class(module, name)
        if not isinstance(found, type) and module.startswith("torch.distributed"):
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which is no class")
        return found


def _metadata(path: str) -> Any:  # noqa: ANN401 - torch's Metadata
    import torch.distributed.checkpoint  # noqa: F401 - its classes

    with open(path, "rb") as file:
        try:
            return _Plain(file).load()
        except Exception as error:  # damage may raise anything at all
            hint = "where you trust it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR tensors.pt"
            raise Unreadable(path, f"not loaded: {error}", hint) from error
