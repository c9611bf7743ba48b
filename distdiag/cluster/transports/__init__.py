"""Transports start the node side on hosts. Each provides links; the protocol over a link is the same for all."""

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
    """Thread-safe queue of the transports' results: a link to a host, or the reason for its absence."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[float, str, Link | HostError | str]] = queue.SimpleQueue()
        self.bell, self._push = os.pipe()
        os.set_blocking(self.bell, False)
        os.set_blocking(self._push, False)

    def take(self) -> Iterator[tuple[float, str, Link | HostError | str]]:
        """Yield new results: time, host, result."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, 65536)
        while not self._queue.empty():
            yield self._queue.get()

    def close(self) -> None:
        """Close the bell; later results are dropped."""
        push, self._push = self._push, -1
        os.close(push)
        os.close(self.bell)

    def put(self, host: str, what: Link | HostError | str) -> None:
        """Report a host's link, the reason for its absence, or the stage it has reached."""
        self._queue.put((time.monotonic(), host, what))
        with contextlib.suppress(OSError):  # full: it rings already; closed: without a reader
            os.write(self._push, b".")


class Transport(ABC):
    """A way to hosts."""

    width: int | None = None
    """Maximum number of concurrent attempts; None: the transport limits itself."""
    names_itself = False
    """Whether nodes are named by their own host names, because no target name was given."""
    remote = True
    """Whether the way can be cut without our noticing."""

    @abstractmethod
    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        """Begin to connect to these hosts without blocking; `arrivals` receives the results."""

    def last_words(self) -> tuple[str, ...]:
        """Return recent output of the launcher, if one launcher serves all hosts."""
        return ()

    def explain_end(self, refusal: HostError) -> HostError:
        """Return the reason an agent ended, by the messages of its launcher if the transport can parse these."""
        return refusal

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Release resources shared by all hosts; links are closed by then."""
