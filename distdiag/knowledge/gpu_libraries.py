"""GPU drivers and communication libraries by file name, and the effect of their functions, as data."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

Kind = Literal["driver", "communication", "compiler", ""]
Meaning = Literal["waits", "launches", "loads", "init", "abort", ""]


@dataclass(frozen=True, kw_only=True)
class _Library:
    vendor: str
    kind: Kind
    name: re.Pattern[str]


@dataclass(frozen=True, kw_only=True)
class _Call:
    meaning: Meaning
    call: re.Pattern[str]


def for_nodes() -> list[str]:
    """Return patterns of all base names, for facts/thread_places."""
    return [library.name.pattern for library in _tables()[0]]


def kind_of_library(name: str) -> Kind:
    """Return the kind of a library by its base name ("libcuda.so.550.90.07"); "" for one that uses no GPU itself."""
    library = _library(name)
    return library.kind if library else ""


def vendor_of(name: str) -> str:
    """Return "NVIDIA", "AMD", "Intel", "Ascend" or "Moore Threads"; "" for any other library."""
    library = _library(name)
    return library.vendor if library else ""


@cache
def meaning_of(call: str) -> Meaning:
    """Return the effect of an exported function on the calling thread; "" for one that neither blocks nor is slow."""
    return next((row.meaning for row in _tables()[1] if row.call.fullmatch(call)), "")


@cache
def _library(name: str) -> _Library | None:
    return next((library for library in _tables()[0] if library.name.fullmatch(name)), None)


@cache
def _tables() -> tuple[tuple[_Library, ...], tuple[_Call, ...]]:
    data = tomllib.loads(resources.files(__package__).joinpath("gpu_libraries.toml").read_text("utf-8"))
    libraries = (
        _Library(vendor=row["vendor"], kind=row["kind"], name=re.compile(row["name"])) for row in data["library"]
    )
    calls = (_Call(meaning=row["meaning"], call=re.compile(row["call"])) for row in data["call"])
    return tuple(libraries), tuple(calls)
