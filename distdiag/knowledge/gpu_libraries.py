"""GPU drivers and communication libraries by file name, and the effect of their functions, as data."""

from __future__ import annotations

import re  # noqa: TC003 - msgspec reads the annotations
from functools import cache
from typing import Literal

from distdiag.knowledge.tables import load
from distdiag.record import record

Kind = Literal["driver", "communication", "compiler", ""]
Meaning = Literal["waits", "launches", "loads", "init", "abort", ""]


@record(kw_only=True)
class _Library:
    kind: Kind
    name: re.Pattern[str]


@record(kw_only=True)
class _Call:
    meaning: Meaning
    call: re.Pattern[str]


def for_nodes() -> list[str]:
    """Return patterns of all base names, for facts/thread_places."""
    return [library.name.pattern for library in _libraries()]


@cache
def kind_of_library(name: str) -> Kind:
    """Return the kind of a library by its base name ("libcuda.so.550.90.07"); "" for one that uses no GPU itself."""
    return next((library.kind for library in _libraries() if library.name.fullmatch(name)), "")


@cache
def meaning_of(call: str) -> Meaning:
    """Return the effect of an exported function on the calling thread; "" for one that neither blocks nor is slow."""
    rows = load("gpu_libraries", "call", tuple[_Call, ...])
    return next((row.meaning for row in rows if row.call.fullmatch(call)), "")


def _libraries() -> tuple[_Library, ...]:
    return load("gpu_libraries", "library", tuple[_Library, ...])
