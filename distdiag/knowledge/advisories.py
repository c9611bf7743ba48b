"""Known bugs of versions (hangs, wrong results, crashes) and their fixes, as data (advisories.toml)."""

from __future__ import annotations

import re
from dataclasses import field, replace
from typing import TYPE_CHECKING

from distdiag.knowledge.tables import load
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping

KINDS = ("hang", "wrong-result", "crash", "slow")
NAMES = {
    "nccl": "NCCL",
    "rccl": "RCCL",
    "torch": "torch",
    "cuda": "CUDA",
    "hip": "ROCm",
    "driver": "NVIDIA driver",
    "kernel": "Linux",
    "glibc": "glibc",
    "python": "Python",
    "ucx": "UCX",
    "ofed": "OFED",
    "aws-ofi-nccl": "aws-ofi-nccl",
    "nvshmem": "NVSHMEM",
    "deep-ep": "DeepEP",
    "arch": "",
    "interconnect": "",
}
"""Names allowed in a predicate, with their display form. `arch` and `interconnect` are words, all others versions."""
_WORDS = ("arch", "interconnect")
_CONDITION = re.compile(r"(<=|>=|==|<|>)(\d+(?:\.\d+)*)")
_VERSION = re.compile(r"v?(\d{1,9}(?:\.\d{1,9}){0,5})(a|b|rc|\.?dev)?")


@record(kw_only=True)
class Advisory:
    """One known bug. `kind`: one of KINDS; `applies`: the matching versions, in words.

    `when`: conditions on versions, all of which must hold, e.g. ">=2.26,<2.26.2"; `env`: variables that must have this
    value; `unless`: variables whose value excludes the bug.
    """

    id: str
    kind: str
    title: str
    symptom: str
    fix: str
    source: str
    when: dict[str, str]
    env: dict[str, str] = field(default_factory=dict)
    unless: dict[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    applies: str = ""


def matching(versions: Mapping[str, str], environment: Mapping[str, str] | None = None) -> list[Advisory]:
    """List the advisories for these versions, hangs first.

    Args:
        versions: by the names of NAMES, e.g. {"nccl": "2.29.2+cuda13.0", "arch": "aarch64"}. A missing or unreleased
            version (a nightly, a vendor build such as "2.7.0a0+nv25.03") matches no condition.
        environment: NCCL_*, TORCH_* and CUDA_* variables of the process; None if unknown, which meets no `env`
            condition.
    """
    found = [_of(entry, versions) for entry in entries() if _holds(entry, versions, environment)]
    return sorted(found, key=lambda advisory: KINDS.index(advisory.kind))


def _of(entry: Advisory, versions: Mapping[str, str]) -> Advisory:
    words = [f"{NAMES[name]} {versions[name]}".strip() for name in entry.when if name not in _WORDS]
    words += [f"on {versions[name]}" for name in entry.when if name in _WORDS]
    words += [f"with {name}={value}" for name, value in entry.env.items()]
    return replace(entry, applies=" ".join(words))


def _holds(entry: Advisory, versions: Mapping[str, str], environment: Mapping[str, str] | None) -> bool:
    for name, condition in entry.when.items():
        if name in _WORDS:
            if versions.get(name) != condition:
                return False
        elif not satisfies(versions.get(name, ""), condition):
            return False
    known = environment or {}
    if any(known.get(name) != value for name, value in entry.env.items()):
        return False
    return all(known.get(name) != value for name, value in entry.unless.items())


def satisfies(version: str, condition: str) -> bool:
    """Return whether a version is in a range, e.g. ">=2.26,<2.26.2"; a pre-release is in none."""
    numbers = parse(version)
    return numbers is not None and all(
        _compare(numbers, operator, tuple(map(int, limit.split("."))))
        for operator, limit in _CONDITION.findall(condition)
    )


def parse(version: str) -> tuple[int, ...] | None:
    """Return the numbers of a release: "2.29.3+cuda13.0" is (2, 29, 3); None for a pre-release and other text."""
    match = _VERSION.match(version)
    return None if match is None or match[2] else tuple(map(int, match[1].split(".")))


def _compare(numbers: tuple[int, ...], operator: str, limit: tuple[int, ...]) -> bool:
    length = max(len(numbers), len(limit))
    left, right = (each + (0,) * (length - len(each)) for each in (numbers, limit))
    if operator == "==":  # "==2.18.1" holds for 2.18.1.1 too
        return numbers[: len(limit)] == limit
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[operator]


def entries() -> tuple[Advisory, ...]:
    """Read the table."""
    return load("advisories", "advisory", tuple[Advisory, ...])
