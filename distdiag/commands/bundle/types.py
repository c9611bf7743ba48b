"""Request, own facts and report data of bundle. Pure data."""

from __future__ import annotations

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.bundle.collect import Part
from distdiag.record import record

COMMAND = "bundle"


@record(kw_only=True)
class Request:
    """The options. `logs` and `recorder` are paths on the hosts."""

    program: str
    cluster: Cluster
    target: str
    job: str = ""
    user: str = ""
    logs: tuple[str, ...] = ()
    recorder: tuple[str, ...] = ()
    timeout_s: float = 60.0
    most_bytes: int = 20 * 2**20


@record(kw_only=True)
class NodeDetails(Part):
    """Bundle's own facts of one node; `missing`: why some are missing."""

    host: str
    missing: str = ""


@record(kw_only=True)
class Verdict:
    """One command's verdict on the facts in the bundle. `same`: equal to the one before redaction.

    `aside`: why it may not matter to this job; empty if it does.
    """

    command: str
    verdict: str
    summary: str
    same: bool
    aside: str = ""


@record(kw_only=True)
class OnHost:
    """The job's processes read on one host."""

    host: str
    ranks: tuple[int, ...]
    launchers: tuple[int, ...]
    """Both are pids."""


@record(kw_only=True)
class TakenJob:
    """The job in the bundle. `has_gpu`: a rank has a GPU open."""

    name: str
    title: str
    processes: tuple[OnHost, ...]
    has_gpu: bool


@record(kw_only=True)
class Member:
    """A file in the bundle, with a description."""

    name: str
    bytes: int
    about: str


@record(kw_only=True)
class Bundle:
    """The written bundle. `map_file` is kept local; `cut`: parts left out due to size.

    `job`: None if no rank was found; `replaced`: number of secrets by rule.
    """

    file: str
    bytes: int
    map_file: str
    hosts: tuple[str, ...]
    missing: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    job: TakenJob | None
    members: tuple[Member, ...]
    cut: tuple[str, ...]
    secrets: int
    replaced: dict[str, int]
    stand_ins: int
