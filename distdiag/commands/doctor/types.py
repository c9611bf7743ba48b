"""The request of doctor, its facts of one node, and its result as printed by --json. Pure data."""

from __future__ import annotations

# msgspec reads the annotations.
from distdiag.cluster.rendezvous_test import NetworkPath  # noqa: TC001
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.doctor.collect import Part
from distdiag.facts.network.interfaces import Network  # noqa: TC001
from distdiag.record import record
from distdiag.report import Fix, Level  # noqa: TC001

COMMAND = "doctor"


@record(kw_only=True)
class Request:
    """The options of one run. `ignore`: (id, reason); `paths`: further folders whose file systems are checked.

    `connects`: whether to test the paths between the nodes.
    """

    program: str
    cluster: Cluster
    paths: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    ignore: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 20.0
    connects: bool = True
    verbose: bool = False


@record(kw_only=True)
class NodePaths:
    """Results of one node for its paths to others.

    `peers`: the hosts it had to test; `silent`: it did not respond when the test began.
    """

    network: Network | None = None
    address: str = ""
    peers: tuple[str, ...] = ()
    paths: tuple[NetworkPath, ...] = ()
    silent: bool = False


@record(kw_only=True)
class NodeDoctor(Part):
    """The facts of one node; a missing part is None, with the reason in `late`, `failed` or `missing`."""

    host: str
    paths: NodePaths | None = None
    missing: str = ""


@record(kw_only=True)
class Symptom:
    """A problem of one node, without its name: equal symptoms of several nodes become one finding.

    `subject`: the affected part of the node; symptoms are equal if id and subject are.
    """

    id: str
    level: Level
    title: str
    subject: str = ""
    detail: str = ""
    evidence: tuple[str, ...] = ()
    fix: Fix | None = None


@record(kw_only=True)
class DifferenceRow:
    """A fact that differs between nodes: value -> hosts. `outliers`: hosts without the majority value, if any."""

    id: str
    fact: str
    values: dict[str, tuple[str, ...]]
    outliers: tuple[str, ...]


@record(kw_only=True)
class NodeRow:
    """One node: "fit", "fit with warnings", "not fit" or "unknown", and the ids of the findings behind that."""

    host: str
    fit: str
    findings: tuple[str, ...]
    facts: dict[str, str]
    clock_offset_s: float | None
    clock_uncertainty_s: float | None


@record(kw_only=True)
class Silenced:
    """A finding suppressed by --ignore."""

    id: str
    title: str
    reason: str


@record(kw_only=True)
class Doctor:
    """The result. `fit`: of all nodes; `exclude`: nodes to exclude, in the format of SLURM's --exclude."""

    fit: str
    exclude: str
    nodes: tuple[NodeRow, ...]
    differences: tuple[DifferenceRow, ...]
    silenced: tuple[Silenced, ...]
    unchecked: tuple[str, ...]
