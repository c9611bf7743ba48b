"""Reads the tables of this folder (TOML) as types."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def load(table: str, key: str, kind: type[Kind]) -> Kind:
    """Decode a key of TABLE.toml; a field of type re.Pattern is compiled from its text. Cache the result."""
    import msgspec

    return msgspec.convert(_read(table)[key], kind, dec_hook=_pattern)


def load_whole(table: str, kind: type[Kind]) -> Kind:
    """Decode all of TABLE.toml, like `load`."""
    import msgspec

    return msgspec.convert(_read(table), kind, dec_hook=_pattern)


@cache
def _read(table: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath(f"{table}.toml").read_text("utf-8"))


def _pattern(_: object, text: str) -> re.Pattern[str]:
    return re.compile(text)
