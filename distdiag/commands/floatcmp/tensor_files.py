"""Reads files and checkpoints of tensors, and runs nothing in them.

Files by torch.save, .npy and .safetensors are known by their first bytes. Checkpoints of many files are safetensors
with an index, or those of torch.distributed.checkpoint. Numbers are mapped rather than copied where that is possible.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import struct
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

_NPY = b"\x93NUMPY"
_MOST_HEADER_BYTES = 100_000_000  # what the safetensors package accepts, too
_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64"},
}
"""Names of dtypes in safetensors -> in torch."""
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)
"""What a header raises that is not as it should be; AttributeError: this torch lacks the dtype."""
_METADATA, _INDEX = ".metadata", ".index.json"
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset", "tuple", "list", "dict", "int", "str", "slice"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
"""What the metadata of a checkpoint is made of; all of it only holds values."""
_SAVE_AGAIN = 'if you trust the file, load it and save only its tensors: torch.save(model.state_dict(), "tensors.pt")'
_WHOLE = "is it complete? compare its files with the original's"


class Unreadable(Exception):
    """A file that is none of ours, is damaged, or wants to run something; `hint` says what to do."""

    def __init__(self, path: str, why: str, hint: str) -> None:
        super().__init__(f"{path}: {why}")
        self.hint = hint


def read(path: str) -> object:
    """Read a file of tensors, or a checkpoint: its folder, or the index of its files.

    Raises:
        Unreadable: and why.
    """
    try:
        if os.path.isdir(path):
            return _read_folder(path)
        return _read_index(path) if path.endswith(_INDEX) else _read_file(path)
    except (OSError, ValueError) as error:  # a name that cannot be a file's is a ValueError
        why = getattr(error, "strerror", None) or str(error)
        raise Unreadable(path, why, "choose a readable file or directory") from error


def _read_file(path: str) -> object:
    try:
        with open(path, "rb") as file:
            start = file.read(9)
        if start.startswith(_NPY):
            return _read_npy(path)
        if len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] <= _MOST_HEADER_BYTES:
            return _read_safetensors(path)
        return _read_torch(path, mapped=start.startswith(b"PK"))
    except OSError as error:
        raise Unreadable(path, str(error.strerror), "choose a readable file") from error


def _damaged(path: str, error: Exception) -> Unreadable:
    return Unreadable(
        path,
        f"not a tensor file, or damaged ({os.path.getsize(path):,} bytes; {_one_line(error)})",
        "readable are files from torch.save, .npy and .safetensors; is it complete? compare its size "
        "with the original's",
    )


def _one_line(error: Exception) -> str:
    """Say what the reader says; not what torch recommends then: to load the file with all code in it."""
    text = (str(error).splitlines() or [""])[0].partition("Weights only load failed")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _read_torch(path: str, *, mapped: bool) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats and TorchScript; what fails is raised
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if wanted is None:
            raise _damaged(path, error) from error
        why = (
            f"not loaded: it contains more than tensors ({wanted[1]}), and loading that can execute code from the file"
        )
        raise Unreadable(path, why, _SAVE_AGAIN) from error


def _read_npy(path: str) -> torch.Tensor:
    try:
        import numpy
    except ImportError as error:
        why = f"reading a .npy file needs numpy, which cannot be imported: {error}"
        raise Unreadable(path, why, "python -m pip install numpy") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers by Python 2, and of sizes that overflow and are refused then
            numbers = numpy.load(path, mmap_mode="c", allow_pickle=False)
    except Exception as error:  # a header is Python source, and damage may raise anything at all
        raise _damaged(path, error) from error
    try:
        return torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="), copy=False))
    except RuntimeError as error:  # built for another major version of numpy, or without
        why = f"this torch cannot use numpy {numpy.__version__} ({_one_line(error)})"
        raise Unreadable(path, why, "install a numpy version that this torch was built for") from error
    except (TypeError, ValueError) as error:
        why = f"not loaded: its values have dtype {str(numbers.dtype)[:60]}, perhaps text or records"
        raise Unreadable(path, why, "save plain numbers: numpy.save(file, array.astype(numpy.float64))") from error


def _read_safetensors(path: str) -> dict[str, torch.Tensor]:
    """Read the format of https://github.com/huggingface/safetensors#format: a length, JSON, the numbers.

    Without its package, which is no part of torch.
    """
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        text = file.read(length)
    try:
        header = json.loads(text)
        body = torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)[8 + length :]
        return {name: _view(body, entry) for name, entry in header.items() if name != "__metadata__"}
    except _MALFORMED as error:
        raise _damaged(path, error) from error


def _view(body: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """Return the numbers of one tensor; copied where they do not lie as the processor needs them."""
    (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], getattr(torch, _DTYPES[entry["dtype"]])
    if not 0 <= begin <= end <= body.numel():
        raise ValueError(f"its data ends at byte {end:,}, but only {body.numel():,} bytes are there: truncated")
    if any(length < 0 for length in shape) or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{end - begin:,} bytes do not match {entry['dtype']} of shape {tuple(shape)}")
    data = body[begin:end]
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(shape)


def _read_folder(path: str) -> dict[str, object]:
    names = sorted(os.listdir(path))
    if _METADATA in names:
        return _read_distributed(path)
    indices = [name for name in names if name.endswith(f".safetensors{_INDEX}")]
    if len(indices) == 1:
        return _read_index(os.path.join(path, indices[0]))
    files = [name for name in names if name.endswith(".safetensors")]
    if not files or len(indices) > 1:
        what = (
            "several indices"
            if indices
            else (f"no .safetensors file and no {_METADATA} of torch.distributed.checkpoint")
        )
        raise Unreadable(path, f"a directory with {what}", "give the file or the index to compare")
    return _merge(path, files)


def _read_index(path: str) -> dict[str, object]:
    """Read what {"weight_map": {name: file}} names, as transformers writes it."""
    with open(path, "rb") as file:
        text = file.read(_MOST_HEADER_BYTES)
    try:
        files_by_name = json.loads(text)["weight_map"]
        files = sorted(set(files_by_name.values()))
        if any(os.path.basename(file) != file for file in files):
            raise ValueError("it lists files that are not in its directory")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(path, f"not an index of tensor files ({error})", _WHOLE) from error
    found = _merge(os.path.dirname(path), files)
    missing = [name for name in files_by_name if name not in found]
    if missing:
        raise Unreadable(path, f"{missing[0]} is missing from {files_by_name[missing[0]]}", _WHOLE)
    return {name: found[name] for name in files_by_name}


def _merge(folder: str, files: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in files:
        part = _read_file(os.path.join(folder, name))
        if not isinstance(part, dict):
            raise Unreadable(os.path.join(folder, name), "its tensors are unnamed", _WHOLE)
        for key in part:
            if key in found:
                raise Unreadable(folder, f"{key} is in two of its files, including {name}", "give one file")
        found.update(part)
    return found


def _read_distributed(path: str) -> dict[str, object]:
    """Put the tensors of torch.distributed.checkpoint together from the parts that the ranks wrote.

    Not by its own reader, which unpickles whatever the files name.
    """
    metadata = _read_metadata(os.path.join(path, _METADATA))
    try:
        found: dict[str, Any] = _allocate(path, metadata)
        for index, info in metadata.storage_data.items():
            value = _read_part(path, info)
            if index.fqn not in found:
                found[index.fqn] = value
            elif found[index.fqn].dim():
                at = tuple(slice(a, a + n) for a, n in zip(index.offset, value.shape, strict=True))
                found[index.fqn][at] = value
            else:
                found[index.fqn].copy_(value)
    except OSError:
        raise
    except Exception as error:  # damage may make torch.load raise anything at all
        why = f"the checkpoint is damaged or from another torch version ({_one_line(error)})"
        raise Unreadable(path, why, _WHOLE) from error
    return _nest(found, getattr(metadata, "planner_data", None) or {})


def _allocate(path: str, metadata: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401 - torch's Metadata
    """Make room for all tensors; what no part covers stays nan, where its dtype has that.

    Raises:
        ValueError: their size is not in the files.
    """
    stored = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
    needed = sum(math.prod(entry.size) * entry.properties.dtype.itemsize for entry in stored.values())
    present = sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
    if needed > present:
        raise ValueError(f"its tensors need {needed} bytes, its files have {present}")
    found = {}
    for name, entry in stored.items():
        room = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        found[name] = room.fill_(torch.nan) if room.is_floating_point() else room.zero_()
    return found


def _read_part(folder: str, info: Any) -> Any:  # noqa: ANN401 - a _StorageInfo; what torch.save wrote
    if getattr(info, "transform_descriptors", None):
        raise ValueError("its files are compressed")
    name = str(info.relative_path)
    if os.path.basename(name) != name:
        raise ValueError("it lists files that are not in its directory")
    with open(os.path.join(folder, name), "rb") as file:
        file.seek(info.offset)
        data = file.read(info.length)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _nest(found: dict[str, object], paths: Mapping[str, tuple[object, ...]]) -> dict[str, object]:
    """Nest values as they were saved: the names in a checkpoint are the keys that led there, joined by dots."""
    whole: dict[Any, Any] = {}
    for name, value in found.items():
        *outer, last = paths.get(name) or (name,)
        inner = whole
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return whole


class _MetadataUnpickler(pickle._Unpickler):
    """Makes what metadata is made of, and nothing else: a pickle can run whatever it names.

    Python's unpickler in Python: a few bytes make that in C reserve gigabytes, for numbers of things that never come.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        allowed = _METADATA_CLASSES.get(module, set())
        if "." in name or (allowed is not None and name not in allowed):
            raise pickle.UnpicklingError(
                f"it contains {module}.{name}, and loading that can execute code from the file"
            )
        found = super().find_class(module, name)
        if not isinstance(found, type) and module.startswith("torch.distributed"):
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not a class")
        return found


def _read_metadata(path: str) -> Any:  # noqa: ANN401 - torch's Metadata
    import torch.distributed.checkpoint  # noqa: F401 - its classes

    with open(path, "rb") as file:
        try:
            return _MetadataUnpickler(file).load()
        except Exception as error:  # damage may raise anything at all
            hint = (
                "if you trust the file: python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR tensors.pt"
            )
            raise Unreadable(path, f"not loaded: {error}", hint) from error
