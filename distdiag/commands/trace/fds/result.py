"""The answer of trace fds. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DescriptorRow:
    """One descriptor. `target`: a path, the two ends of a socket, "pipe:[n]"; `who`: the processes at its other end.

    `state` of a socket; `peer_rank`: who has the other end, if that is one rank; `size_bytes` of a file; `gpu`: the
    minor number of an NVIDIA device. `silent`: its file system did not answer.
    """

    fd: int
    mode: str
    kind: str
    target: str
    who: str
    peer_rank: int | None
    state: str
    size_bytes: int | None
    deleted: bool
    gpu: int | None
    silent: bool


@dataclass(frozen=True, kw_only=True)
class ProcessRow:
    """One process, and what it has open. `limit`: how many it may have; `counts` by kind, the most in front.

    `unread`: why nothing is known of it: "denied", "gone".
    """

    host: str
    rank: int | None
    role: str
    pid: int
    command: str
    limit: int | None
    counts: dict[str, int]
    unread: str
    descriptors: tuple[DescriptorRow, ...]


@dataclass(frozen=True, kw_only=True)
class TraceFds:
    """The facts of the answer."""

    processes: tuple[ProcessRow, ...]
