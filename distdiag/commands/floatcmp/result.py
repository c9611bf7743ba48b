"""What floatcmp finds in two files."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.training.floats.model import Pair  # noqa: TC001 - msgspec reads it


@dataclass(frozen=True, kw_only=True)
class FloatCmp:
    """Two files, and how their tensors compare."""

    a: str
    b: str
    reference: str
    """Empty if there is none."""
    tensors: int
    """How many both have."""
    identical: int
    numbers: int
    both_nan: tuple[str, ...]
    """Names of tensors with nan at the same places on both sides."""
    pairs: tuple[Pair, ...]
    """Those that are not identical, or that a reference was used for, the worst first."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    values_differ: tuple[str, ...]
    not_compared: tuple[str, ...]
    """Each with the reason."""
    peak_bytes: int
    """The most memory that the comparison had at once, torch and mapped files included."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the process that has torch writes: one of them is set."""

    found: FloatCmp | None = None
    unreadable: str = ""
    hint: str = ""
    no_match: tuple[str, ...] = ()
    """Some of the names there are, where the pattern fits none."""
