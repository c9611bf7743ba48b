"""What bundle is asked, what a node adds to it, and its answer as --json prints it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.commands.bundle.collect import LogTail, Machine, Names, RankProcess  # noqa: TC001

COMMAND = "bundle"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for. `logs` and `recorder` are paths on the hosts; `packing`: zst or gz."""

    program: str
    cluster: Cluster
    target: str
    packing: str
    job: str = ""
    user: str = ""
    logs: tuple[str, ...] = ()
    recorder: tuple[str, ...] = ()
    timeout_s: float = 60.0
    most_bytes: int = 20 * 2**20


@dataclass(frozen=True, kw_only=True)
class NodeDetails:
    """What bundle itself reads on one node; `missing`: why it is not complete."""

    host: str
    machine: Machine | None = None
    names: Names | None = None
    ranks: tuple[RankProcess, ...] = ()
    logs: tuple[LogTail, ...] = ()
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one command says of the facts in the bundle. `same`: so it did before they were redacted.

    `aside`: why it may not matter to this job; empty if it does.
    """

    command: str
    verdict: str
    summary: str
    same: bool
    aside: str = ""


@dataclass(frozen=True, kw_only=True)
class OnHost:
    """The processes of the job on one host that were read."""

    host: str
    ranks: tuple[int, ...]
    launchers: tuple[int, ...]
    """Both are pids."""


@dataclass(frozen=True, kw_only=True)
class TakenJob:
    """The job in the bundle. `has_gpu`: a rank has a GPU open."""

    name: str
    title: str
    processes: tuple[OnHost, ...]
    has_gpu: bool


@dataclass(frozen=True, kw_only=True)
class Member:
    """A file in the bundle, and what it is."""

    name: str
    bytes: int
    about: str


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """How many different secrets one rule found."""

    rule: str
    secrets: int


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The bundle that was written. `map_file` stays at home; `cut`: what was left out for want of room.

    `job`: None if no rank was found; `replaced`: the secrets by the rule that found them.
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
    replaced: tuple[Replaced, ...]
    stand_ins: int
