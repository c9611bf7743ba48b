"""Version advisories: each just inside and just outside its range; a current machine gets none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.knowledge.advisories import KINDS, NAMES, entries, matching, satisfies

if TYPE_CHECKING:
    from distdiag.knowledge.advisories import Advisory

CURRENT = {
    "nccl": "2.32.3+cuda13.0",
    "torch": "2.15.0+cu130",
    "cuda": "13.0",
    "driver": "580.82.09",
    "kernel": "6.8.0-45-generic",
    "glibc": "2.39",
    "python": "3.12.11",
    "ucx": "1.22.1",
    "aws-ofi-nccl": "1.21.1",
    "nvshmem": "3.6.5",
    "ofed": "24.10-0.7.0",
}
# By advisory: the component at its limits, the versions just inside, those just outside.
LIMITS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "nccl-arm-proxy": ("nccl", ("2.29.2", "2.28.9+cuda13.0"), ("2.29.3",)),
    "nccl-2.29.2": ("nccl", ("2.29.2",), ("2.29.1", "2.29.3")),
    "nccl-pxn-infiniband": ("nccl", ("2.29.7", "2.30.6"), ("2.29.6", "2.30.7")),
    "nccl-rma-graphs": ("nccl", ("2.30.4", "2.30.6"), ("2.30.3", "2.30.7")),
    "nccl-one-rank-avg": ("nccl", ("2.27.5", "2.29.6"), ("2.27.4", "2.29.7")),
    "torch-2.7.0-device-id": ("torch", ("2.7.0+cu126",), ("2.6.0", "2.7.1", "2.7.0a0+git1234.nv25.03")),
    "nccl-2.26-nonblocking": ("nccl", ("2.26.2", "2.26.5"), ("2.25.1", "2.27.3")),
    "nccl-abort": ("nccl", ("2.25.1",), ("2.24.3", "2.26.2")),
    "nccl-graph-mixing": ("nccl", ("2.20.5", "2.21.5"), ("2.20.3", "2.22.3")),
    "nccl-cumem-alltoall": ("nccl", ("2.19.3",), ("2.18.6", "2.20.3")),
    "nccl-launch-blocking": ("nccl", ("2.13.4", "2.16.5"), ("2.12.12", "2.17.1")),
    "nccl-irregular-sendrecv": ("nccl", ("2.12.7", "2.17.1"), ("2.11.4", "2.18.1")),
    "nccl-ll128-tree": ("nccl", ("2.18.1",), ("2.17.1", "2.18.3")),
    "nccl-sharp-bfloat16": ("nccl", ("2.18.1",), ("2.17.1", "2.18.3")),
    "nccl-sharp-multi-gpu": ("nccl", ("2.18.1",), ("2.17.1", "2.18.3")),
    "nccl-channels-per-peer": ("nccl", ("2.27.7",), ("2.27.6", "2.28.3")),
    "nccl-nvlink-down": ("nccl", ("2.10.3", "2.11.4"), ("2.9.9", "2.12.7")),
    "nccl-init-order": ("nccl", ("2.7.8", "2.9.9"), ("2.10.3",)),
    "nccl-cubemesh": ("nccl", ("2.7.8", "2.9.9"), ("2.10.3",)),
    "nccl-2.8.3-alltoall": ("nccl", ("2.7.8", "2.8.3"), ("2.6.4", "2.8.4")),
    "nccl-ll128-steps": ("nccl", ("2.8.2", "2.4.8"), ("2.8.3",)),
    "nccl-one-gpu-per-node": ("nccl", ("2.8.2",), ("2.8.3",)),
    "nccl-cudafree": ("nccl", ("2.1.14",), ("2.1.15",)),
    "driver-390-gdr": ("driver", ("390.48", "396.25"), ("387.26", "396.26")),
    "driver-560-p2p": ("driver", ("560.35.03", "565.57.01"), ("555.42.02", "570.86.10")),
    "driver-367-titan": ("driver", ("367.35", "367.57"), ("367.27", "375.20")),
    "kernel-5.4": ("kernel", ("5.4.0-150-generic", "4.18.0-553.el8_10.x86_64"), ("5.5.0", "5.15.0-131-generic")),
    "glibc-2.25-condvar": ("glibc", ("2.25",), ("2.24", "2.26")),
    "python-3.13-pdb": ("python", ("3.13.1", "3.13.7"), ("3.13.0", "3.13.8", "3.12.11")),
    "ucx-shared-memory": ("ucx", ("1.18.0", "1.19.0"), ("1.17.0", "1.19.1")),
    "ucx-1.21-cuda-ipc": ("ucx", ("1.21.0",), ("1.20.0", "1.22.0")),
    "ucx-1.8": ("ucx", ("1.8.1",), ("1.9.0",)),
    "ucx-registered-buffers": ("ucx", ("1.9.0",), ("1.10.0",)),
    "ofi-failed-requests": ("aws-ofi-nccl", ("1.8.0",), ("1.8.1",)),
    "ofi-lost-peer": ("aws-ofi-nccl", ("1.19.2",), ("1.20.0",)),
    "rccl-msccl": ("hip", ("7.0.0", "7.1.0"), ("6.4.3", "7.1.1")),
    "rccl-kernel-6.8": ("hip", ("6.2.1",), ("6.3.0",)),
    "torch-2.2.0-dtensor": ("torch", ("2.2.0+cu121",), ("2.1.2", "2.2.1")),
    "torch-2.1.0-shard-grad-op": ("torch", ("2.1.0+cu118",), ("2.0.1", "2.1.1")),
    "nccl-symmetric-windows": ("nccl", ("2.30.4", "2.30.7"), ("2.30.3", "2.31.2")),
    "nccl-pat-uneven-nodes": ("nccl", ("2.23.4", "2.31.2"), ("2.22.3", "2.32.3")),
    "nccl-2.31-b40-tma": ("nccl", ("2.31.2",), ("2.30.7", "2.32.3")),
    "nccl-2.31-pat-nvls": ("nccl", ("2.31.2",), ("2.30.7", "2.32.3")),
    "torch-nvshmem-signals": ("torch", ("2.8.0+cu128", "2.13.0+cu130"), ("2.14.0",)),
    "deepep-nvshmem": ("nvshmem", ("3.5.19", "3.6.5"), ("3.4.5", "3.5.18")),
}
OTHERWISE = {
    "nccl-arm-proxy": {"arch": "aarch64"},
    "ucx-registered-buffers": {"cuda": "11.1"},
    "rccl-kernel-6.8": {"kernel": "6.8.0-45-generic"},
    "deepep-nvshmem": {"deep-ep": "1.2.1"},
}
"""What else must be there for an advisory to hold."""


def found(entry: Advisory, version: str, environment: dict[str, str] | None = None) -> bool:
    component = LIMITS[entry.id][0]
    versions = {**CURRENT, "arch": "x86_64", **OTHERWISE.get(entry.id, {}), component: version}
    ids = {advisory.id for advisory in matching(versions, {**entry.env, **(environment or {})})}
    return entry.id in ids


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_a_current_machine_gets_none(arch: str) -> None:
    assert matching({**CURRENT, "arch": arch}) == []
    assert matching({}) == []


def test_every_advisory_has_its_limits_here_and_there_are_at_least_30() -> None:
    assert [entry.id for entry in entries()] == list(LIMITS)
    assert len(LIMITS) >= 30


@each("entry", entries())
def test_just_inside_and_just_outside(entry: Advisory) -> None:
    _, inside, outside = LIMITS[entry.id]
    assert all(found(entry, version) for version in inside)
    assert not any(found(entry, version) for version in outside)


@each("entry", entries())
def test_the_environment_decides_where_it_is_part_of_the_bug(entry: Advisory) -> None:
    version = LIMITS[entry.id][1][0]
    for name, value in entry.env.items():
        assert not found(entry, version, {name: f"{value}0"})
    for name, value in entry.unless.items():
        assert not found(entry, version, {name: value})
        assert found(entry, version, {name: f"{value}0"})
    if entry.env:  # not known: nothing is claimed
        component = LIMITS[entry.id][0]
        assert entry.id not in {each.id for each in matching({**CURRENT, component: version}, None)}


@each("entry", entries())
def test_an_entry_is_complete(entry: Advisory) -> None:
    advisory = entry
    assert advisory.kind in KINDS
    assert advisory.source.startswith("https://")
    assert advisory.title
    assert advisory.symptom
    assert advisory.fix
    assert len(advisory.title) <= 80
    assert set(entry.when) <= set(NAMES)
    for name, condition in entry.when.items():
        if name != "arch":
            assert re.fullmatch(r"(?:[<>]=?|==)\d+(?:\.\d+)*(?:,(?:[<>]=?|==)\d+(?:\.\d+)*)*", condition), condition


def test_what_matches_is_named_with_the_versions_of_the_machine_and_hangs_come_first() -> None:
    advisories = matching({"nccl": "2.29.2+cuda13.0", "arch": "aarch64"})
    assert [advisory.kind for advisory in advisories] == sorted((each.kind for each in advisories), key=KINDS.index)
    assert advisories[0].applies == "NCCL 2.29.2+cuda13.0 on aarch64"


@each(
    "version, condition, holds",
    [
        ("2.29.3+cuda13.0", "<2.29.3", False),
        ("2.9", ">=2.9.0", True),
        ("2.10", ">=2.9", True),
        ("v2.27.5-1", ">=2.27.5", True),
        ("2.7.0rc1", ">=2.0", False),
        ("2.8.0.dev20250330+cu126", ">=2.0", False),
        ("2.7.0a0+7c8ec84dab.nv25.03", ">=2.0", False),
        ("", "<99", False),
        ("unknown", "<99", False),
    ],
)
def test_versions_are_compared_as_numbers_and_pre_releases_match_nothing(
    version: str, condition: str, holds: bool
) -> None:
    assert satisfies(version, condition) is holds
