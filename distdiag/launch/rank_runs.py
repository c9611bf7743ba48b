"""Run of N ranks on nodes from start to end, with a deadline independent of torch; blame is decided elsewhere.

A run ends when every rank finished; shortly after a rank died or gave up, to collect the others' reports; or after the
timeout without a step of any rank. In the last case state and stack of each rank are read before all are killed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from distdiag.agent import protocol
from distdiag.cluster.records import (
    Down,
    RankEnded,
    RankEvent,
    RankInspected,
)
from distdiag.cluster.ship_pyspy import bring_py_spy
from distdiag.errors import NodeFailed
from distdiag.limits import hint_for
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.host_results import HostError
    from distdiag.cluster.node import Node

_LISTEN_S = 5.0
_SETTLE_S = 0.5
"""Time for the others' reports after a death, which is reported within a second."""
_QUIET_S = 0.2
_HANG_S = 1.0
"""An interrupted run without progress for longer is inspected like a hang."""
_INSPECT_S = 1.5
"""For the stacks, which are read in parallel: py-spy is slow on busy cores, and the report is due two seconds after
the timeout."""
_PAUSE_S = 1.0
"""The nodes are read ten times as often."""
_BRING_S = 3.0
"""Time to send py-spy, a few megabytes, to a node without it."""
_MOST_EVENTS = 100_000
_INSPECTED_S = 4.0
"""Then the agent counts as dead: two rounds of stacks that reach the limit, and a margin."""


IMPORTED_ONCE = {
    "modules": ("torch", "torch.distributed"),
    "stage": "start",
    "note": "importing torch",
}
"""Imports shared by forked ranks, and the step shown during them."""


class Outcome(StrEnum):
    """The end of a run of ranks."""

    FINISHED = "finished"
    FAULT = "fault"
    STALLED = "stalled"
    INTERRUPTED = "interrupted"


@dataclass(kw_only=True)
class RankTimeline:
    """All records of one rank."""

    rank: int
    local_rank: int
    host: str
    pid: int | None = None
    events: list[RankEvent] = field(default_factory=list)
    inspection: RankInspected | None = None
    ending: RankEnded | None = None
    over_at: float | None = None
    """When it gave up or ended, by our clock."""
    lost: str = ""
    """Why contact with its node was lost, if it was."""

    @property
    def last(self) -> RankEvent | None:
        """Its last reported step."""
        return self.events[-1] if self.events else None

    @property
    def finished(self) -> bool:
        """Whether it ended normally."""
        return self.ending is not None and self.ending.status == 0 and self.has("finished")

    @property
    def gave_up(self) -> bool:
        """Whether it reported that it cannot continue, or ended without finishing."""
        return self.has("fatal") or (self.ending is not None and not self.finished)

    @property
    def is_live(self) -> bool:
        """Whether it may still take a step, as far as known."""
        return self.ending is None and not self.lost

    @property
    def died(self) -> bool:
        """Whether it ended without a report: killed, crashed, or by an unexpected error."""
        return self.ending is not None and not self.finished and not self.has("fatal") and not self.has("held")

    def position(self, stages: Sequence[str]) -> tuple[int, int]:
        """Return its progress as (stage, step); beyond all stages once finished."""
        if self.finished:
            return len(stages), 0
        return (stages.index(self.last.stage), self.last.at) if self.last is not None else (-1, 0)

    @property
    def is_waiting(self) -> bool:
        """Whether its last step needs the others, or it has ended."""
        return self.ending is not None or (self.last is not None and self.last.waiting)

    def has(self, key: str) -> bool:
        """Whether a step carried this payload."""
        return any(key in event.payload for event in self.events)


@record(kw_only=True)
class RankSpec:
    """One rank to start. `config` is passed to the rank module's `main`, `env` to its environment.

    `forked`: it may share imports with other ranks of its node, see `distdiag.agent.forkserver`.
    """

    rank: int
    local_rank: int
    config: Mapping[str, object]
    env: dict[str, str]
    forked: bool


def take_port(fleet: Fleet, node: Node, port: int) -> protocol.Listening:
    """Let rank 0's node listen on the rendezvous port (0: any free one); return the port, or its owner.

    Raises:
        NodeFailed: the node does not answer.
    """
    node.order(protocol.Listen(port=port))
    answer = fleet.expect(protocol.Listening, [node], _LISTEN_S).get(node.name)
    if answer is None:
        raise fleet.no_answer(node)
    return answer


class Run:
    """Running ranks on nodes."""

    def __init__(
        self,
        fleet: Fleet,
        specs: dict[str, list[RankSpec]],
        entry: str,
        stages: Sequence[str],
        watch: Callable[[Run], None],
    ) -> None:
        """Start the ranks, by node name; `watch` is called after each event and a few times per second."""
        self._stages = stages
        self.traces: dict[int, RankTimeline] = {}
        self.lost: dict[str, HostError] = {}
        self.stalled_s = 0.0
        self._fleet = fleet
        self._watch = watch
        self._moved = time.monotonic()
        self._looked = time.monotonic()
        self._inspecting = False
        self._marked = 0.0
        self._gave_up = False
        self._death_at: float | None = None
        self._of_node = {name: [spec.rank for spec in mine] for name, mine in specs.items()}
        for name, mine in specs.items():
            node = fleet.nodes[name]
            for spec in mine:
                self.traces[spec.rank] = RankTimeline(rank=spec.rank, local_rank=spec.local_rank, host=node.host)
                forked = IMPORTED_ONCE if spec.forked else None
                node.order(
                    protocol.StartRank(rank=spec.rank, env=spec.env, entry=entry, config=spec.config, forked=forked)
                )
        self.traces = dict(sorted(self.traces.items()))

    @property
    def silent_s(self) -> float:
        """Seconds since the last step of any rank."""
        return time.monotonic() - self._moved

    def wait(self, timeout_s: float) -> Outcome:
        """Follow the ranks until the run is decided; Ctrl-C ends it with the state so far.

        Raises:
            NodeFailed: the only node ended or stopped answering.
        """
        try:
            outcome = self._next_decision(timeout_s)
            while outcome is Outcome.STALLED and not self._stand_still():
                outcome = self._next_decision(timeout_s)
        except KeyboardInterrupt:
            outcome = Outcome.INTERRUPTED
            self.stalled_s = self.silent_s
            if self.stalled_s > _HANG_S:
                self._stand_still()
        return outcome

    def _next_decision(self, timeout_s: float) -> Outcome:
        while (outcome := self._decided(timeout_s)) is None:
            self._take(min(0.1, max(0.0, timeout_s - self.silent_s)))
            self._watch(self)
            if self._marked != self._moved and self.silent_s > timeout_s / 2:
                self._marked = self._moved
                for name in self._of_node:
                    self._fleet.nodes[name].order(protocol.Mark())
        self.stalled_s = self.silent_s
        return outcome

    def _stand_still(self) -> bool:
        """Inspect the silent ranks; return False if one took a step meanwhile, which voids the inspection."""
        moved = self._moved
        self._inspect()
        if self._moved == moved:
            return True
        for trace in self.traces.values():
            trace.inspection = None
        return False

    def _decided(self, timeout_s: float) -> Outcome | None:
        now = time.monotonic()
        live = [trace for trace in self.traces.values() if trace.is_live]
        if not live:
            return Outcome.FAULT if self._gave_up or self.lost else Outcome.FINISHED
        if self._death_at is not None and now - self._death_at > _SETTLE_S:
            return Outcome.FAULT
        settled = all(trace.is_waiting or trace.gave_up for trace in live) and self.silent_s > _QUIET_S
        if self._gave_up and settled:
            return Outcome.FAULT
        return Outcome.STALLED if self.silent_s > timeout_s else None

    def _take(self, timeout_s: float) -> None:
        pause = time.monotonic() - self._looked
        if pause > _PAUSE_S:  # distdiag itself was stopped or without a core: silence in that time does not count
            self._moved += pause
        for node, said in self._fleet.records(timeout_s):
            if isinstance(said, Down):
                self._lose(node)
            elif isinstance(
                said, (protocol.RankStarted, RankEvent, RankEnded, RankInspected)
            ) and said.rank in self._of_node.get(node.name, ()):  # a node may report only its own ranks
                self._note(node, self.traces[said.rank], said)
        self._looked = time.monotonic()

    def _note(
        self,
        node: Node,
        trace: RankTimeline,
        record: protocol.RankStarted | RankEvent | RankEnded | RankInspected,
    ) -> None:
        if isinstance(record, protocol.RankStarted):
            trace.pid = record.pid
        elif isinstance(record, RankEvent):
            if why := self._why_rejected(trace, record):
                self._fleet.distrust(node, f"rank {trace.rank} sent an invalid report: {why}")
                self._lose(node)
                return
            if "pairs" in record.payload:  # resent in full each time: drop the earlier ones
                for event in trace.events:
                    event.payload.pop("pairs", None)
            trace.events.append(record)
            self._moved = time.monotonic()
        elif isinstance(record, RankEnded):
            trace.ending = record
            self._moved = time.monotonic()
            if trace.died and self._death_at is None:
                self._death_at = self._moved
        elif self._inspecting:
            trace.inspection = record
        if trace.over_at is None and (trace.gave_up or trace.ending is not None):
            trace.over_at = time.monotonic()
        self._gave_up = self._gave_up or trace.gave_up

    def _why_rejected(self, trace: RankTimeline, event: RankEvent) -> str:
        """Return why a rank cannot have taken this step in this run; empty if it can."""
        if event.stage not in self._stages:
            return f"unknown stage {event.stage[:30]!r}"
        if len(trace.events) > _MOST_EVENTS:
            return f"more than {_MOST_EVENTS} steps"
        if "row" in event.payload and not trace.has("started"):
            return "a measurement before it had a device"
        pairs = event.payload.get("pairs", ())
        sides = event.payload.get("trouble", {}).get("differing", {})
        named = {pair[end] for pair in pairs for end in ("a", "b")}
        named |= {rank for groups in sides.values() for ranks in groups.values() for rank in ranks}
        strange = named - self.traces.keys()
        return f"unknown rank {min(strange)}" if strange else ""

    def _lose(self, node: Node) -> None:
        assert node.refusal is not None
        if len(self._of_node) == 1:
            raise NodeFailed(
                f"{node.host}: {node.refusal.message}; its ranks ended with it",
                hint="; ".join(filter(None, (node.last_words(), hint_for(node.last_words()))))
                or "run it again; check what kills processes on this node",
            )
        self.lost[node.name] = node.refusal
        for rank in self._of_node.get(node.name, ()):
            if self.traces[rank].is_live:
                self.traces[rank].lost = node.refusal.message
                self._death_at = self._death_at or time.monotonic()

    def _inspect(self) -> None:
        self._inspecting = True
        try:
            self._look_at_live_ranks()
        finally:
            self._inspecting = False

    def _look_at_live_ranks(self) -> None:
        live = [trace for trace in self.traces.values() if trace.is_live]
        # Longest silence first: these need an explanation, if too many for all stacks.
        live.sort(key=lambda trace: trace.last.elapsed_s if trace.last is not None else 0.0)
        wanted = {name: [trace.rank for trace in live if trace.rank in ranks] for name, ranks in self._of_node.items()}
        asked = [self._fleet.nodes[name] for name, mine in wanted.items() if mine]
        brought = bring_py_spy(asked)
        for node in asked:
            node.order(protocol.Inspect(ranks=wanted[node.name], timeout_s=_INSPECT_S))
        deadline = time.monotonic() + _INSPECTED_S + (_BRING_S if brought else 0.0)
        while any(trace.inspection is None and trace.is_live for trace in live):
            self._take(0.05)
            if time.monotonic() > deadline:
                if len(self._of_node) == 1:
                    raise self._fleet.no_answer(asked[0])
                return  # an uninspected rank is marked in the report
