"""Read tensors by name from files and checkpoints, without executing code from the files.

Files from torch.save, .npy and .safetensors are recognized by their first bytes. Checkpoints of many files are
safetensors with an index. Values are mapped rather than copied where possible.
"""

from __future__ import annotations

import os
import pickle
import re
import shlex
import warnings
import zipfile

import msgspec
import torch

from distdiag.training.floatcmp.compare import leaves

_INDEX, _METADATA = ".index.json", ".metadata"
_MOST_INDEX_BYTES = 100_000_000
_SAVE_AGAIN = 'if you trust the file, load it and save only its tensors: torch.save(model.state_dict(), "tensors.pt")'
_CONVERT = "if you trust it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {} tensors.pt"
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
            why = "a checkpoint of torch.distributed.checkpoint, whose metadata is a pickle that can execute code"
            raise Unreadable(path, f"not loaded: {why}", _CONVERT.format(shlex.quote(path)))
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
        raise Unreadable(path, f"its reader is missing: {error}", "python -m pip install numpy safetensors") from error
    except Exception as error:  # a header is Python source, and damage may raise anything
        code = re.search(r"GLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if code:
            why = f"it contains more than tensors ({code[1]}), and loading that can execute code from the file"
            raise Unreadable(path, f"not loaded: {why}", _SAVE_AGAIN) from error
        # Without torch's advice to load the file with code execution.
        text = f"{type(error).__name__}: {error}".partition("\n")[0].partition("Weights only load failed")[0][:200]
        why = f"not a tensor file, or damaged ({os.path.getsize(path):,} bytes; {text.rstrip(': ')})"
        raise Unreadable(path, why, f"readable are files from torch.save, .npy and .safetensors; {_WHOLE}") from error


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
        why = f"a directory with {'several indices' if indices else 'no .safetensors file'}"
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
