"""A run of ranks reconstructed from a node's messages: the definition of a standstill."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distdiag.agent import host_info, protocol
from distdiag.agent.wire import Writer
from distdiag.cluster.fleet import Fleet, Limits
from distdiag.cluster.hosts import Host
from distdiag.cluster.links import SocketLink
from distdiag.cluster.transports import Transport
from distdiag.launch.rank_runs import Outcome, RankSpec, Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.transports import Arrivals

STAGES = ("start", "reduce", "done")
TIMEOUT_S = 0.3
SEEN: dict[str, Any] = {"state": "S", "wait_channel": "", "frames": [], "stack_error": "no", "tail": ""}


@dataclass
class Stand(Transport):
    """One node whose two ranks go into the reduction and are silent there, until they are looked at `looks` times."""

    looks: int
    remote = False
    looked_at: list[list[int]] = field(default_factory=list)

    def start(self, hosts: Sequence[Host], arrivals: Arrivals) -> None:
        ours, self._theirs = socket.socketpair()
        threading.Thread(target=self._answer, daemon=True).start()
        arrivals.put(hosts[0].name, SocketLink(ours))

    def _answer(self) -> None:
        with self._theirs, self._theirs.makefile() as orders:
            self._wire = Writer(self._theirs.fileno())
            self._wire.send(host_info.hello())
            self._wire.send(protocol.Facts(facts={}))
            for line in filter(str.strip, orders):
                order = protocol.read_order(line.encode())
                if isinstance(order, protocol.StartRank):
                    self._wire.send(protocol.RankStarted(rank=order.rank, pid=1))
                    self._step(order.rank, "reduce", waiting=True)
                elif isinstance(order, protocol.Inspect):
                    self._inspect(order.ranks)

    def _inspect(self, ranks: list[int]) -> None:
        self.looked_at.append(ranks)
        if len(self.looked_at) == self.looks:  # one rank leaves it now, and is at the next step
            self._step(1, "done", waiting=False)
        for rank in ranks:
            self._wire.send(protocol.RankInspected(rank=rank, **SEEN))
        if len(self.looked_at) == self.looks:
            for rank in ranks:
                self._step(rank, "done", waiting=False, finished=True)
                self._wire.send(protocol.RankEnded(rank=rank, status=0, elapsed_s=1.0, tail="", oom_kills=0))

    def _step(self, rank: int, stage: str, *, waiting: bool, **payload: object) -> None:
        self._wire.send(
            protocol.RankEvent(rank=rank, stage=stage, at=0, note="", waiting=waiting, elapsed_s=1.0, payload=payload)
        )


def follow(stand: Stand) -> tuple[Outcome, Run]:
    host = Host(name="here")
    with Fleet([host], stand, b"", dict[str, Any], Limits()) as fleet:
        fleet.gather(lambda now: None)
        specs = [RankSpec(rank=rank, local_rank=rank, config={}, env={}, forked=False) for rank in (0, 1)]
        run = Run(fleet, {"here": specs}, "nothing", STAGES, lambda now: None)
        return run.wait(TIMEOUT_S), run


def test_ranks_that_are_silent_before_and_while_they_are_looked_at_stand_still() -> None:
    stand = Stand(looks=0)
    outcome, run = follow(stand)
    assert outcome is Outcome.STALLED
    assert stand.looked_at == [[0, 1]]
    assert all(trace.inspection is not None for trace in run.traces.values())
    assert run.stalled_s >= TIMEOUT_S


def test_a_step_that_comes_while_ranks_are_looked_at_ends_the_standstill() -> None:
    stand = Stand(looks=1)
    outcome, run = follow(stand)
    assert outcome is Outcome.FINISHED
    assert all(trace.inspection is None for trace in run.traces.values())
