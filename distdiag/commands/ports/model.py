"""The types of ports: what is asked, and the ways that were tried between nodes. Pure data."""

from __future__ import annotations

import re
from dataclasses import dataclass

# msgspec reads the annotations.
from distdiag.cluster.targets import Cluster  # noqa: TC001
from distdiag.errors import UsageError
from distdiag.node.knock import Probe  # noqa: TC001

COMMAND = "ports"
USUAL_PORT = 29500
"""torch's MASTER_PORT where nobody says otherwise."""
MOST_TARGETS = 65536
MOST_HOSTS = 256
"""Hosts that are tried from one node; nodes among each other: see check.MOST_NODES."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for."""

    program: str
    cluster: Cluster
    targets: tuple[tuple[str, int], ...] = ()
    ports: tuple[int, ...] = ()
    named: bool = False
    """Whether ports were typed."""
    sample: int = 2
    bulk_bytes: int = 2**20
    timeout_s: float = 3.2
    verbose: bool = False


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way that was tried.

    `purpose`: port (a certain one), ranks (an ephemeral one), also (the same over another interface that NCCL takes),
    other (over one that it does not take, and should perhaps).
    """

    source: str
    target: str
    purpose: str
    probe: Probe

    @property
    def is_open(self) -> bool:
        """Whether it works, if slowly."""
        return self.probe.verdict in ("ok", "lossy")


def read_ports(text: str) -> tuple[int, ...]:
    """Read "6000,29500-29510". Raises UsageError."""
    found: dict[int, None] = {}
    for word in (one.strip() for one in text.split(",")):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= 65535:
            raise UsageError(f"{word!r} is no port", hint="ports are 1 to 65535: --port 6000,29500-29510")
        found.update(dict.fromkeys(range(first, last + 1)))
    return tuple(found)


def read_target(text: str, ports: tuple[int, ...]) -> list[tuple[str, int]]:
    """Read HOST, HOST:PORT, [IPv6]:PORT, or an IPv6 address alone. Raises UsageError."""
    match = re.fullmatch(r"\[([^\]]+)\](?::(\S+))?|([^:\s\[]+)(?::([^:\s]+))?|([0-9a-fA-F:.]+(?:%\w+)?)", text)
    if match is None or not text:
        raise UsageError(f"{text!r} is no host", hint="write node1, node1:29500, 10.0.0.1 or [fd00::1]:29500")
    host = match[1] or match[3] or match[5]
    own = match[2] or match[4]
    return [(host, port) for port in (read_ports(own) if own else ports or (USUAL_PORT,))]
