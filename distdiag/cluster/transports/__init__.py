"""How to start the node side on hosts. Each transport brings links; what is said over them is the same for all."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.cluster.host_results import HostError
    from distdiag.cluster.hosts import Host
    from distdiag.cluster.links import Link


class Arrivals:
    """What the transports bring, from whatever thread: a link to a host, or why there is none."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[float, str, Link | HostError | str]] = queue.SimpleQueue()
        self.bell, self._push = os.pipe()
        os.set_blocking(self.bell, False)
        os.set_blocking(self._push, False)

    def link(self, host: str, link: Link) -> None:
        """Bring a link."""
        self._put(host, link)

    def refuse(self, host: str, refusal: HostError) -> None:
        """Drop a host."""
        self._put(host, refusal)

    def stage(self, host: str, stage: str) -> None:
        """Report that a host has come to this stage."""
        self._put(host, stage)

    def take(self) -> Iterator[tuple[float, str, Link | HostError | str]]:
        """Yield what came since: when, for which host, and what."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, 65536)
        while not self._queue.empty():
            yield self._queue.get()

    def explain_end(self, refusal: HostError) -> HostError:
        """Return why an agent ended, where the transport understands what its tool said about it."""
        return refusal

    def close(self) -> None:
        """Close the bell; what comes after is dropped."""
        push, self._push = self._push, -1
        os.close(push)
        os.close(self.bell)

    def _put(self, host: str, what: Link | HostError | str) -> None:
        self._queue.put((time.monotonic(), host, what))
        with contextlib.suppress(OSError):  # full: it rings already; closed: nobody listens any more
            os.write(self._push, b".")


class Transport(ABC):
    """A way to hosts."""

    name: str
    width: int | None = None
    """How many hosts to have on their way at once; None: the transport sees to it itself."""
    names_itself = False
    """Whether nodes are called as they call themselves, for want of a name that was asked for."""
    remote = True
    """Whether the way can be cut without our noticing."""

    @abstractmethod
    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        """Begin to reach these hosts. Returns soon; what becomes of them goes to `arrivals`."""

    @abstractmethod
    def explain(self, host: Host) -> str:
        """Write the command that does the same from a shell."""

    def explain_all(self, hosts: Sequence[Host]) -> str:
        """Write the one command that does it for all hosts, where one does."""
        return "\n".join(self.explain(host) for host in hosts)

    def last_words(self) -> tuple[str, ...]:
        """Return what the launcher itself said lately, where one launcher leads to all hosts."""
        return ()

    def explain_end(self, refusal: HostError) -> HostError:
        """Return why an agent ended, where the transport understands what its tool said about it."""
        return refusal

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what was kept for all hosts; links are closed by then."""
