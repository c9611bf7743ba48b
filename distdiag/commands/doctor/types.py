"""What doctor is asked, what it has of one node, and its answer as --json prints it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.doctor.collect import (  # noqa: TC001
    Clock,
    Disks,
    Gpus,
    Jobs,
    KernelLog,
    NodeNetwork,
    Software,
    System,
)
from distdiag.commands.doctor.paths import NodePaths  # noqa: TC001
from distdiag.report import Fix, Level  # noqa: TC001

COMMAND = "doctor"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. `ignore`: (id, reason); `paths`: further folders whose file systems are looked at.

    `connects`: whether the nodes try the paths between them.
    """

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    ignore: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 20.0
    connects: bool = True
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeDoctor:
    """The facts of one node; a part that is None did not come: it is in `late` or `failed`, or all of `missing`."""

    host: str
    clock: Clock | None = None
    system: System | None = None
    disks: Disks | None = None
    network: NodeNetwork | None = None
    software: Software | None = None
    gpus: Gpus | None = None
    kernel: KernelLog | None = None
    jobs: Jobs | None = None
    paths: NodePaths | None = None
    late: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """What is wrong with one node, without its name: equal ones of several nodes become one finding.

    `subject` tells what of the node it is about: two symptoms of one id and subject are the same.
    """

    id: str
    level: Level
    title: str
    subject: str = ""
    detail: str = ""
    evidence: tuple[str, ...] = ()
    fix: Fix | None = None


@dataclass(frozen=True, kw_only=True)
class DifferenceRow:
    """A fact that is not the same on all nodes: value -> hosts. `outliers`: hosts without what most have, if any."""

    id: str
    fact: str
    values: dict[str, tuple[str, ...]]
    outliers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One node: "fit", "fit with warnings", "not fit" or "unknown", and the ids of the findings that say so."""

    host: str
    fit: str
    findings: tuple[str, ...]
    facts: dict[str, str]
    clock_offset_s: float | None
    clock_uncertainty_s: float | None


@dataclass(frozen=True, kw_only=True)
class Silenced:
    """A finding that --ignore took out."""

    id: str
    title: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """The answer. `fit` of all nodes; `exclude`: nodes to leave out, as SLURM's --exclude takes them."""

    fit: str
    exclude: str
    nodes: tuple[NodeRow, ...]
    differences: tuple[DifferenceRow, ...]
    silenced: tuple[Silenced, ...]
    unchecked: tuple[str, ...]
