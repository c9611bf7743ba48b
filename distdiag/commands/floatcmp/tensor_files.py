"""Read tensors by name from files and checkpoints, without executing code from the files.

Files from torch.save, .npy and .safetensors are recognized by their first bytes. Checkpoints of many files are
safetensors with an index, or from torch.distributed.checkpoint. Values are mapped rather than copied where possible.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import warnings
import zipfile
from typing import Any

import msgspec
import torch

from distdiag.training.floatcmp.compare import join_keys, leaves

_METADATA, _INDEX = ".metadata", ".index.json"
_MOST_INDEX_BYTES = 100_000_000
_STORED = "torch.distributed.checkpoint"
_METADATA_CLASSES = {
    *(f"{_STORED}.metadata", f"{_STORED}.filesystem._StorageInfo", f"{_STORED}.filesystem._StoragePrefix"),
    *("torch.Size", "torch.device", "torch.serialization._get_layout", "collections.OrderedDict"),
    *(f"builtins.{name}" for name in ("set", "frozenset", "tuple", "list", "dict", "int", "str", "slice")),
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath")),
}
"""The classes in the metadata of a checkpoint, which only hold values, and the module of the others."""
_SAVE_AGAIN = 'if you trust the file, load it and save only its tensors: torch.save(model.state_dict(), "tensors.pt")'
_WHOLE = "is it complete? compare its size with the original's"


class Unreadable(Exception):
    """A file of another kind, damaged, or one that would execute code; `hint` is the fix."""

    def __init__(self, path: str, why: str, hint: str) -> None:
        super().__init__(f"{path}: {why}")
        self.hint = hint


def read(path: str) -> dict[str, object]:
    """Read a file of tensors, or a checkpoint: its directory, or the index of its files.

    Raises:
        Unreadable: with the reason.
    """
    try:
        if os.path.exists(os.path.join(path, _METADATA)):
            return _read_distributed(path)
        return leaves(_read_parts(path) if os.path.isdir(path) or path.endswith(_INDEX) else _read_file(path))
    except (OSError, ValueError) as error:  # a name that cannot be a file's is a ValueError, as are those of leaves
        where, why = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or str(error)
        raise Unreadable(where, why, "give a readable file of tensors") from error


def _read_file(path: str) -> object:
    with open(path, "rb") as file:
        start = file.read(9)
    reader = _read_npy if start.startswith(b"\x93NUMPY") else _read_safetensors if start[8:] == b"{" else _read_torch
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats and sizes that overflow; failures raise
            return reader(path)
    except OSError:
        raise
    except ImportError as error:
        package = {_read_npy: "numpy", _read_safetensors: "safetensors"}.get(reader, "torch")
        why = f"reading it needs {package}, which cannot be imported: {error}"
        raise Unreadable(path, why, f"python -m pip install {package}") from error
    except Exception as error:  # a header is Python source, and damage may raise anything
        code = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if code:
            why = f"it contains more than tensors ({code[1]}), and loading that can execute code from the file"
            raise Unreadable(path, f"not loaded: {why}", _SAVE_AGAIN) from error
        why = f"not a tensor file, or damaged ({os.path.getsize(path):,} bytes; {_one_line(error)})"
        raise Unreadable(path, why, f"readable are files from torch.save, .npy and .safetensors; {_WHOLE}") from error


def _one_line(error: Exception) -> str:
    """Format a reader's error, without torch's advice to load the file with code execution."""
    text = (str(error).splitlines() or [""])[0].partition("Weights only load failed")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _read_torch(path: str) -> object:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def _read_npy(path: str) -> torch.Tensor:
    import numpy

    numbers = numpy.load(path, mmap_mode="c", allow_pickle=False)
    return torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="), copy=False))


def _read_safetensors(path: str) -> dict[str, torch.Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


class _Index(msgspec.Struct):
    """The list of a checkpoint's tensors in the format of transformers: the file of each name."""

    weight_map: dict[str, str]


def _read_parts(path: str) -> dict[str, object]:
    """Read safetensors of several files: those of an index, or of a directory."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    names = sorted(os.listdir(folder or "."))
    indices = [name for name in names if name.endswith(f".safetensors{_INDEX}")] if folder == path else [path]
    places = _read_index(os.path.join(folder, os.path.basename(indices[0]))) if len(indices) == 1 else {}
    files = sorted(set(places.values())) or [name for name in names if name.endswith(".safetensors")]
    if len(indices) > 1 or not files:
        no_file = f"no .safetensors file and no {_METADATA} of torch.distributed.checkpoint"
        why = f"a directory with {'several indices' if indices else no_file}"
        raise Unreadable(path, why, "give the file or the index to compare")
    found: dict[str, object] = {}
    for name in files:
        part = _read_file(os.path.join(folder, name))
        if not isinstance(part, dict) or part.keys() & found.keys():
            raise Unreadable(path, f"the tensors of {name} are unnamed, or in another file too", "give one file")
        found.update(part)
    missing = [name for name in places if name not in found]
    if missing:
        raise Unreadable(path, f"{missing[0]} is missing from {places[missing[0]]}", _WHOLE)
    return {name: found[name] for name in places or found}


def _read_index(path: str) -> dict[str, str]:
    with open(path, "rb") as file:
        text = file.read(_MOST_INDEX_BYTES)
    try:
        files = msgspec.json.decode(text, type=_Index).weight_map
    except msgspec.DecodeError as error:
        raise Unreadable(path, f"not an index of tensor files ({error})", _WHOLE) from error
    if any(os.path.basename(file) != file for file in files.values()):
        raise Unreadable(path, "not an index of tensor files: it lists files outside of its directory", _WHOLE)
    return files


def _read_distributed(path: str) -> dict[str, object]:
    """Assemble the tensors of torch.distributed.checkpoint from the parts written by the ranks.

    Its own reader unpickles any object named in the files. Values covered by no part stay NaN, or 0 in integers.
    """
    metadata = _read_metadata(os.path.join(path, _METADATA))
    try:
        stored = {name: each for name, each in metadata.state_dict_metadata.items() if hasattr(each, "chunks")}
        needed = sum(math.prod(each.size) * each.properties.dtype.itemsize for each in stored.values())
        if needed > sum(entry.stat().st_size for entry in os.scandir(path)):
            raise ValueError(f"its files are smaller than its tensors, which need {needed} bytes")
        found: dict[str, Any] = {name: _room_for(each) for name, each in stored.items()}
        for index, info in metadata.storage_data.items():
            value = _read_part(path, info)
            if index.fqn not in found:
                found[index.fqn] = value
            else:
                at = tuple(slice(a, a + n) for a, n in zip(index.offset or (), value.shape, strict=True))
                found[index.fqn][at] = value
    except OSError:
        raise
    except Exception as error:  # damage may make torch.load raise anything
        why = f"the checkpoint is damaged or from another torch version ({_one_line(error)})"
        raise Unreadable(path, why, _WHOLE) from error
    keys = getattr(metadata, "planner_data", None) or {}
    return leaves({join_keys(keys.get(name) or (name,)): value for name, value in found.items()})


def _room_for(stored: Any) -> torch.Tensor:  # noqa: ANN401 - torch's TensorStorageMetadata
    room = torch.empty(tuple(stored.size), dtype=stored.properties.dtype)
    return room.fill_(torch.nan) if room.is_floating_point() else room.zero_()


def _read_part(folder: str, info: Any) -> Any:  # noqa: ANN401 - a _StorageInfo; the value given to torch.save
    name = str(info.relative_path)
    if getattr(info, "transform_descriptors", None) or os.path.basename(name) != name:
        raise ValueError("its files are compressed, or not in its directory")
    with open(os.path.join(folder, name), "rb") as file:
        file.seek(info.offset)
        return torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)


class _MetadataUnpickler(pickle._Unpickler):
    """Makes only the classes of metadata: a pickle can run anything that it names.

    Python's unpickler in Python: in that in C a few bytes reserve gigabytes, for items that never follow.
    """

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        if not {module, f"{module}.{name}"} & _METADATA_CLASSES or "." in name:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, and loading that can execute code")
        found = super().find_class(module, name)
        if not isinstance(found, type) and module.startswith(_STORED):
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not a class")
        return found


def _read_metadata(path: str) -> Any:  # noqa: ANN401 - torch's Metadata
    import torch.distributed.checkpoint  # noqa: F401 - its classes

    with open(path, "rb") as file:
        try:
            return _MetadataUnpickler(file).load()
        except Exception as error:  # damage may raise anything
            convert = f"python -m {_STORED}.format_utils dcp_to_torch DIR tensors.pt"
            raise Unreadable(path, f"not loaded: {error}", f"if you trust the file: {convert}") from error
