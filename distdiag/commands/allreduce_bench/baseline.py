"""An earlier run to compare with: a document of ours, or what nccl-tests wrote, as text or JSON.

The file is untrusted: what makes no sense is refused, or passed over with a note.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec  # noqa: TID253 - this module is only imported when there is a file to read

from distdiag.commands.allreduce_bench.earlier import HINT, Baseline, Earlier, Found, known, number
from distdiag.commands.allreduce_bench.nccl_tests import read_text
from distdiag.commands.allreduce_bench.nccl_tests_json import Nccl, Size, Text, read_nccl
from distdiag.deliver import SCHEMA
from distdiag.errors import UsageError
from distdiag.files import as_text

_MOST_BYTES = 64 * 2**20
_AGAIN = "it was not written to its end: name another, or run that one again"
_Document = TypeVar("_Document", bound=msgspec.Struct)


class _Head(msgspec.Struct):
    schema: str = ""
    command: str = ""
    nccl_version: int | None = None


class _Times(msgspec.Struct):
    p50: float
    iqr: float | None = None


class _Result(msgspec.Struct):
    op: Text
    size_bytes: Size
    dtype: Text
    in_place: bool
    time_s: _Times | None = None
    busbw_bytes_per_s: float | None = None
    wrong: int | None = None


class _Data(msgspec.Struct):
    results: list[_Result]
    world_size: Size | None = None
    device: Text = ""
    device_name: Text | None = None
    stat: Text = "p50"


class _Ours(msgspec.Struct):
    version: Text
    data: _Data | None = None


def read(path: str) -> Baseline:
    """Read the file, or the pipe, that --compare names.

    Raises:
        UsageError: it cannot be read, is too large, or holds no results that we understand.
    """
    return read_text_of(as_text(_load(path)), path)


def read_text_of(text: str, path: str) -> Baseline:
    """Read what a file held, see `read`."""
    text = text.lstrip("\ufeff \t\r\n")
    if not text:
        raise UsageError(f"{path} is empty", hint=_AGAIN)
    baseline = _read_json(text, path) if text.startswith("{") else read_text(text, path)
    if not baseline.rows:
        why = "; ".join(baseline.notes) or "its list of results is empty"
        raise UsageError(f"{path} holds nothing to compare with: {why}", hint=HINT)
    return baseline


def _load(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file", hint=HINT) from error
    except IsADirectoryError as error:
        raise UsageError(f"{path} is a folder", hint="name one file in it") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="name a file that you may read") from error
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} is larger than {_MOST_BYTES >> 20} MiB", hint=HINT)
    return data


def _read_json(text: str, path: str) -> Baseline:
    head = _decode(text, _Head, path)
    if head.schema == SCHEMA:
        if head.command != "allreduce-bench":
            raise UsageError(f"{path} is of distdiag {head.command[:40]}, not of allreduce-bench", hint=HINT)
        return _read_ours(_decode(text, _Ours, path), path)
    if head.schema:
        raise UsageError(f"{path} is of {head.schema[:40]}, not of {SCHEMA}", hint=HINT)
    if head.nccl_version is None:
        raise UsageError(f"{path} is JSON, but of neither distdiag nor nccl-tests", hint=HINT)
    return read_nccl(_decode(text, Nccl, path), path)


def _decode(text: str, type_: type[_Document], path: str) -> _Document:
    try:
        return msgspec.json.decode(text, type=type_)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is of no format that we know: {error}", hint=HINT) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not one whole JSON document: {error}", hint=_AGAIN) from error


def _read_ours(document: _Ours, path: str) -> Baseline:
    data = document.data
    if data is None:
        raise UsageError(f"{path} holds no results: that run failed", hint=HINT)
    found = Found()
    for one in data.results:
        found.wrong += (one.wrong or 0) > 0
        if one.time_s is None or one.busbw_bytes_per_s is None:
            found.passed["it was not measured"] += 1
            continue
        row = Earlier(
            op=one.op,
            size_bytes=one.size_bytes,
            dtype=one.dtype,
            in_place=one.in_place,
            p50_s=one.time_s.p50,
            spread=known(number(one.time_s.iqr) / (one.time_s.p50 or math.nan)),
            busbw_bytes_per_s=one.busbw_bytes_per_s,
        )
        found.add(row)
    others = [] if data.stat == "p50" else [f"its bandwidths are of {data.stat} times, not of medians"]
    return Baseline(
        rows=tuple(found.rows.values()),
        made_by=f"distdiag {document.version}",
        world_size=data.world_size or None,
        device=data.device_name or data.device or None,
        notes=(*others, *found.notes()),
    )
