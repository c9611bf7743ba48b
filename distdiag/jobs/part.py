"""Messages of a node about its ranks. Only the receiver imports this, with the types of all sources."""

from __future__ import annotations

from distdiag.facts.gpu.gpu_use import GpuReadings  # noqa: TC001 - decoded by its annotations
from distdiag.facts.host.kernel_signs import KernelSigns  # noqa: TC001
from distdiag.facts.logs.collect import NodeLogs  # noqa: TC001
from distdiag.facts.logs.job_output import Bar  # noqa: TC001
from distdiag.facts.network.socket_owners import Network, PeerProcess  # noqa: TC001
from distdiag.facts.process.blocked_threads import Blocked  # noqa: TC001
from distdiag.facts.process.mapped_versions import MappedVersions  # noqa: TC001
from distdiag.facts.recorder.collect import NodeDumps  # noqa: TC001
from distdiag.facts.recorder.nccl_ras import RasFacts  # noqa: TC001
from distdiag.jobs.collect import Watched  # noqa: TC001
from distdiag.jobs.starts import Starts  # noqa: TC001
from distdiag.record import record


@record
class SourceEnd:
    """The end of one source's reading. `why`: the reason for missing data; `hint`: how to get it.

    `at_s`: the node's clock, in seconds since 1970.
    """

    source: str
    seconds: float
    why: str = ""
    hint: str = ""
    at_s: float = 0.0


@record
class Part:
    """One message: all or a part of one source; `ended` lists finished sources."""

    watched: tuple[Watched, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    networks: tuple[Network, ...] = ()
    peer_processes: tuple[PeerProcess, ...] = ()
    logs: tuple[NodeLogs, ...] = ()
    bars: tuple[Bar, ...] = ()
    dumps: tuple[NodeDumps, ...] = ()
    ras: tuple[RasFacts, ...] = ()
    kernel: tuple[KernelSigns, ...] = ()
    gpus: tuple[GpuReadings, ...] = ()
    versions: tuple[MappedVersions, ...] = ()
    starts: tuple[Starts, ...] = ()
    ended: tuple[SourceEnd, ...] = ()
