"""The processes of a job that srun, mpirun or torchrun has started already: each is one node of the fleet.

Rank 0 is the parent: its own agent runs beside it, the others connect to its hub and serve it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.transports import Arrivals, Transport
from distdiag.cluster.transports.local import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.acceptor import Acceptor
    from distdiag.cluster.hosts import Host
    from distdiag.cluster.links import Link

_TICK_S = 0.05


def name_of(rank: int) -> str:
    """Name a rank's node in the fleet."""
    return f"rank {rank}"


class JoinTransport(Transport):
    """Waits for the other processes of our job."""

    names_itself = True

    def __init__(self, hub: Acceptor, payload: bytes, *, patience_s: float) -> None:
        """`hub` is not started yet, `payload` is for our own node side.

        `patience_s`: after this time without a new process, missing processes are given up.
        """
        self.said: dict[str, Mapping[str, object]] = {}
        self.doubles: list[int] = []
        """Ranks that more than one process claims to be."""
        self._hub = hub
        self._patience_s = patience_s
        self._local = LocalTransport(payload)
        self._over = threading.Event()
        self._arrivals: Arrivals | None = None
        self._missing: set[str] = set()
        self._came_at = time.monotonic()
        self._lock = threading.Lock()
        hub.joined = self._joined

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._missing = {host.name for host in hosts[1:]}
        self._came_at = time.monotonic()
        self._local.start(hosts[:1], arrivals)
        self._hub.start()
        threading.Thread(target=self._wait, args=(arrivals,), daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._hub.close()

    def _joined(self, who: Mapping[str, object], link: Link) -> None:
        rank = who.get("rank")
        name = name_of(rank) if isinstance(rank, int) else ""
        with self._lock:
            expected = name in self._missing
            self._missing.discard(name)
            if not expected and isinstance(rank, int):
                self.doubles.append(rank)
        if self._arrivals is None or not expected:
            link.kill()
            return
        self._came_at = time.monotonic()
        self.said[name] = who
        self._arrivals.put(name, link)

    def _wait(self, arrivals: Arrivals) -> None:
        while not self._over.wait(_TICK_S):
            with self._lock:
                late = sorted(self._missing) if time.monotonic() - self._came_at > self._patience_s else []
                self._missing.difference_update(late)
            for name in late:
                words = f"no further process connected for {self._patience_s:g} s"
                arrivals.put(name, HostError(state=HostState.TIMEOUT, stage="join", message=words))
