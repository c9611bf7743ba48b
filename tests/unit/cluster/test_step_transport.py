"""A step of srun that cannot be prepared: each host gets the error at once."""

from __future__ import annotations

import select

from support import need

from distdiag.cluster.host_results import HostError, HostState
from distdiag.cluster.hosts import Host
from distdiag.cluster.transports import Arrivals
from distdiag.cluster.transports.slurm import Payload, SlurmTransport


def test_a_step_that_cannot_be_prepared_is_told_at_once() -> None:
    need("srun")
    payload = Payload(message=b"", python="\0", setup=None, needs_torch=False)  # no word of a command line
    transport, arrivals = SlurmTransport("1", payload, start_s=60), Arrivals()
    try:
        transport.start([Host(name="node1"), Host(name="node2")], arrivals)
        found: dict[str, HostError] = {}
        while len(found) < 2:
            assert select.select([arrivals.bell], [], [], 10)[0], "nobody was told"
            found.update((host, what) for _, host, what in arrivals.take() if isinstance(what, HostError))
    finally:
        transport.close()
        arrivals.close()
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(("node1", "node2"), HostState.FAILED)
    assert "null byte" in found["node1"].message
