"""Reads the tables of this folder (TOML) as types."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any, TypeVar, cast

Kind = TypeVar("Kind")


def load(table: str, key: str, kind: type[Kind]) -> Kind:
    """Decode a key of TABLE.toml once, or all of it (key ""). Text becomes a pattern where a field is a re.Pattern."""
    content: Kind = _load(table, key, cast("Any", kind))
    return content


@cache
def _load(table: str, key: str, kind: type) -> Any:  # noqa: ANN401 - of that type
    import msgspec

    whole = tomllib.loads(resources.files(__package__).joinpath(f"{table}.toml").read_text("utf-8"))
    return msgspec.convert(whole[key] if key else whole, kind, dec_hook=lambda _, text: re.compile(text))
