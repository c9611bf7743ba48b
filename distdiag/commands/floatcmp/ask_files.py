"""Reads files of tensors, and runs nothing in them: torch.save, .npy, .safetensors, known by their first bytes."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import struct
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_NPY = b"\x93NUMPY"
_HEADER_BYTES = 100_000_000  # what the safetensors package accepts, too
_NPY_HEADER_BYTES = 10_000  # what numpy itself takes for safe
_SAFETENSORS = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64"},
}
_NPY_KINDS = {
    **{"f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128", "b1": "bool"},
    **{"i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64"},
    **{"u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64"},
}
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, RuntimeError, MemoryError)
"""What a header raises that is not as it should be; AttributeError: this torch lacks the dtype."""
_SAVE_AGAIN = 'where you trust it, load it and save its tensors alone: torch.save(model.state_dict(), "tensors.pt")'


class Unreadable(Exception):
    """A file that is none of ours, is damaged, or wants to run something; `hint` says what to do."""

    def __init__(self, path: str, why: str, hint: str) -> None:
        super().__init__(f"{path}: {why}")
        self.hint = hint


def read_file(path: str) -> object:
    """Read what is in a file of tensors, mapped rather than copied where the format allows that.

    Raises:
        Unreadable: and why.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(9)
        if start.startswith(_NPY):
            return _npy(path)
        if len(start) == 9 and start[8:] == b"{" and struct.unpack("<Q", start[:8])[0] <= _HEADER_BYTES:
            return _safetensors(path)
        return _torch(path, mapped=start.startswith(b"PK"))
    except OSError as error:
        raise Unreadable(path, str(error.strerror), "name a file that can be read") from error


def _torch(path: str, *, mapped: bool) -> object:
    import pickle

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats and TorchScript; what fails is raised
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
        if wanted is None:
            raise _damaged(path, error) from error
        why = f"not loaded: it wants more than tensors ({wanted[1]}), which can run code of whoever wrote the file"
        raise Unreadable(path, why, _SAVE_AGAIN) from error
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> Unreadable:
    size = os.path.getsize(path)
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return Unreadable(
        path,
        f"no file of tensors, or a damaged one of {size:,} bytes ({why})",
        "files by torch.save, .npy and .safetensors can be read; is it whole? compare its size with the original's",
    )


def _mapped(path: str) -> torch.Tensor:
    import torch

    return torch.from_file(path, shared=False, size=os.path.getsize(path), dtype=torch.uint8)


def _typed(data: torch.Tensor, dtype: str, shape: list[int]) -> torch.Tensor:
    """Look at bytes as numbers; copied where they do not lie as the processor needs them. Raises ValueError."""
    import torch

    kind = getattr(torch, dtype)
    if any(length < 0 for length in shape) or math.prod(shape) * kind.itemsize != data.numel():
        raise ValueError(f"{data.numel():,} bytes do not make {dtype} of the shape {tuple(shape)}")
    if data.storage_offset() % kind.itemsize:
        data = data.clone()
    return data.view(kind).reshape(shape)


def _safetensors(path: str) -> dict[str, torch.Tensor]:
    """Read the format of https://github.com/huggingface/safetensors#format: a length, JSON, the numbers."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        text = file.read(length)
    try:
        header = json.loads(text)
        body = _mapped(path)[8 + length :]
        return {name: _one_of(body, one) for name, one in header.items() if name != "__metadata__"}
    except _MALFORMED as error:
        raise _damaged(path, error) from error


def _one_of(body: torch.Tensor, one: Mapping[str, Any]) -> torch.Tensor:
    begin, end = one["data_offsets"]
    if not 0 <= begin <= end <= body.numel():
        raise ValueError(f"numbers up to byte {end:,} of {body.numel():,}: cut off")
    return _typed(body[begin:end], _SAFETENSORS[one["dtype"]], one["shape"])


def _npy(path: str) -> torch.Tensor:
    """Read the format of numpy.lib.format, without numpy: a header that is a literal, then the numbers."""
    try:
        header, start = _npy_header(path)
        descr, shape = str(header["descr"]), list(header["shape"])
        order, kind = descr[0], descr[1:]
        if kind not in _NPY_KINDS:
            why = f"not loaded: its numbers are of the kind {descr[:60]}, objects, text or records perhaps"
            raise Unreadable(path, why, "save numbers alone: numpy.save(file, array.astype(numpy.float64))")
        data = _mapped(path)[start:]
        if order == ">":
            part = int(kind[1:]) // (2 if kind[0] == "c" else 1)
            data = data.view(-1, part).flip(1).reshape(-1)
        if not header["fortran_order"]:
            return _typed(data, _NPY_KINDS[kind], shape)
        return _typed(data, _NPY_KINDS[kind], shape[::-1]).permute(*range(len(shape))[::-1])
    except (*_MALFORMED, SyntaxError, struct.error) as error:
        raise _damaged(path, error) from error


def _npy_header(path: str) -> tuple[dict[str, Any], int]:
    with open(path, "rb") as file:
        major = file.read(8)[6]
        width = "<H" if major == 1 else "<I"
        (length,) = struct.unpack(width, file.read(struct.calcsize(width)))
        text = file.read(min(length, _NPY_HEADER_BYTES))
        header = ast.literal_eval(text.decode("latin-1" if major < 3 else "utf-8").strip())
        if not isinstance(header, dict):
            raise ValueError("its header is no dict")
        return header, file.tell()
