"""Agents on many hosts at once: each has its own deadline per stage, and none delays another.

One loop watches all links. An unusable host costs its own deadline and becomes a row with the reason.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from distdiag import interrupts
from distdiag.agent import protocol
from distdiag.cluster import links, records
from distdiag.cluster.checked_json import InvalidData, read_json
from distdiag.cluster.host_results import HostError, HostResult, HostState
from distdiag.cluster.node import Node, NodeStage
from distdiag.cluster.records import Down
from distdiag.cluster.transports import Arrivals
from distdiag.errors import NodeFailed
from distdiag.limits import hint_for
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import TracebackType

    from distdiag.cluster.hosts import Host
    from distdiag.cluster.links import Link
    from distdiag.cluster.records import Said
    from distdiag.cluster.transports import Transport

T = TypeVar("T")
_TURN_S = 0.1
_FLUSH_S = 0.02
_BEAT_S = 0.5
_SILENT_S = 5.0
"""A node silent for longer is lost: it sends at least one message per second."""
_HOSTS_PER_S = 20
GOODBYE_S = 2.0


def more_for(hosts: int) -> int:
    """Return the extra seconds this machine needs to start and read many agents."""
    return hosts // _HOSTS_PER_S


@record(kw_only=True)
class Limits:
    """Seconds a host may spend in a stage; the transport's own stages have separate limits."""

    start_s: float = 20.0
    facts_s: float = 30.0


def hint_here(refusal: HostError) -> str:
    """Return a hint for a failed agent on this machine."""
    words = " ".join((refusal.message, *refusal.evidence))
    known = refusal.hint or "; ".join(refusal.evidence)
    return hint_for(words) or known or "run it again; check what kills processes here"


@dataclass
class _Waiting:
    host: Host
    began: float
    stage: str = "queue"


@dataclass
class Fleet:
    """All hosts of one command. Leaving the `with` block ends every agent and its processes."""

    hosts: Sequence[Host]
    transport: Transport
    payload: bytes
    facts: type[Any]
    """The type of each node's first report."""
    limits: Limits = field(default_factory=Limits)
    _rows: dict[str, HostResult] = field(default_factory=dict)
    refusals: dict[str, HostError] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._arrivals = Arrivals()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._arrivals.bell, selectors.EVENT_READ, None)
        self._queue = deque(self.hosts)
        self._waiting: dict[str, _Waiting] = {}
        self._pending: list[tuple[Node, Said | Down]] = []
        self._over = threading.Event()
        self._last_turn = time.monotonic()
        self._began = time.monotonic()
        self._flush_at = 0.0

    def __enter__(self) -> Fleet:
        if self.transport.remote:
            threading.Thread(target=self._beat, daemon=True).start()
        else:
            self._start_more()  # overlaps with the remaining imports
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Keep an interrupt during close from losing the results or leaving an agent behind.
        with interrupts.held():
            self.close()

    @property
    def up(self) -> list[Node]:
        """Nodes in stage UP, in the order of the host list."""
        found = (self.nodes.get(host.name) for host in self.hosts)
        return [node for node in found if node is not None and node.stage is NodeStage.UP]

    @property
    def rows(self) -> tuple[HostResult, ...]:
        """One row per host, in order; a host without an outcome was cancelled."""
        return tuple(self._rows.get(host.name) or self._unfinished(host) for host in self.hosts)

    def gather(self, watch: Callable[[Fleet], None], *, close: bool = False) -> None:
        """Reach all hosts and read their facts; with `close`, release each one after its facts.

        Return when each host is up or given up.
        """
        check_at = 0.0
        while len(self._rows) < len(self.hosts):
            self._start_more()
            for node, said in self._turn(_TURN_S):
                self._progress(node, said, close=close)
            if (now := time.monotonic()) >= check_at:
                check_at = now + _TURN_S
                self._give_up_late()
                watch(self)

    def machines(self, *, local: bool) -> list[Node]:
        """List the nodes in stage UP, once per machine: a second name is skipped.

        Raises:
            NodeFailed: with `local` (this machine alone), it is unusable.
        """
        if local and self.refusals:
            refusal = next(iter(self.refusals.values()))
            raise NodeFailed(
                f"the distdiag agent failed on this machine: {refusal.message}",
                hint=hint_here(refusal),
            )
        found: dict[str, Node] = {}
        for node in self.up:
            found.setdefault(node.hello.machine or node.name, node)
        return list(found.values())

    def records(self, timeout_s: float) -> Iterator[tuple[Node, Said | Down]]:
        """Wait at most `timeout_s` seconds for records from the nodes in stage UP, and yield all.

        `Down`: a lost node; its `refusal` has the reason.
        """
        pending, self._pending = self._pending, []
        yield from pending
        if not pending:
            yield from self._turn(timeout_s)
            yield from self._silent()

    def expect(self, kind: type[T], nodes: Iterable[Node], timeout_s: float) -> dict[str, T]:
        """Wait for one record of a type from each node, and keep all others for `records`.

        Return the records received in time, by host. Nodes that go down are skipped.
        """
        missing = {node.name for node in nodes}
        found: dict[str, T] = {}
        deadline = time.monotonic() + timeout_s
        kept: list[tuple[Node, Said | Down]] = []
        while missing and (left := deadline - time.monotonic()) > 0:
            for node, said in self.records(min(left, _TURN_S)):
                if node.name in missing and isinstance(said, kind):
                    found[node.name] = said
                    missing.discard(node.name)
                    continue
                if isinstance(said, Down):
                    missing.discard(node.name)
                kept.append((node, said))
        self._pending = kept + self._pending
        return found

    def more_from(
        self, nodes: Iterable[Node], type_: type[T], timeout_s: float, watch: Callable[[list[str]], None]
    ) -> Iterator[tuple[Node, T | None, str | None]]:
        """Yield the pieces of nodes ordered to collect; `watch` gets the names of unfinished ones.

        Yields (node, facts, None) for each piece, then (node, None, "") when a node is done, or (node, None, reason) if
        it was lost, sent invalid facts, or did not answer in time.
        """
        busy = {node.name: node for node in nodes}
        deadline = time.monotonic() + timeout_s
        while busy and (left := deadline - time.monotonic()) > 0:
            for node, said in self.records(min(left, _TURN_S)):
                if node.name not in busy:
                    continue
                if isinstance(said, records.More):
                    try:
                        facts = read_json(said.facts, type_)
                    except InvalidData as error:
                        self.distrust(node, f"it sent invalid facts: {error}")
                    else:
                        yield node, facts, None
                        continue
                elif not isinstance(said, (protocol.MoreEnd, Down)):
                    continue
                del busy[node.name]
                yield node, None, "" if isinstance(said, protocol.MoreEnd) else _why_down(node)
            watch(list(busy))
        for node in busy.values():
            node.unresponsive = True
            yield node, None, "no answer in time"

    def distrust(self, node: Node, why: str) -> None:
        """Drop a node that sends invalid messages; its later ones are ignored."""
        if node.stage is not NodeStage.DOWN:
            self._drop(node, node.protocol_error(why))

    def no_answer(self, node: Node) -> NodeFailed:
        """Return the error for an unresponsive node in stage UP, which close() will kill at once."""
        node.unresponsive = True
        return NodeFailed(node.why_no_answer(), hint=node.last_words() or "check what stops processes there")

    def refuse(self, name: str, refusal: HostError, began: float, ended: float | None = None) -> None:
        """Drop a host and record why."""
        seconds = (time.monotonic() if ended is None else ended) - began
        self.refusals[name] = refusal
        self._rows[name] = HostResult(
            host=name, state=refusal.state, stage=refusal.stage, message=refusal.message, seconds=round(seconds, 3)
        )

    def close(self) -> None:
        """End all agents, without waiting for unresponsive ones."""
        if self._over.is_set():
            return
        self._over.set()
        all_links = [node.link for node in self.nodes.values()]
        unresponsive = [node.link for node in self.nodes.values() if node.unresponsive]
        for node in self.nodes.values():
            if node.stage is NodeStage.STARTING:
                node.link.hang_up()
        for link in unresponsive:
            link.kill()
        links.close_all([link for link in all_links if link not in unresponsive], GOODBYE_S)
        self.transport.close()
        self._selector.close()
        self._arrivals.close()

    def _start_more(self) -> None:
        if not self._queue:
            return
        width = self.transport.width or len(self.hosts)
        room = (
            width
            - len(self._waiting)
            - sum(node.stage in (NodeStage.STARTING, NodeStage.TELLING) for node in self.nodes.values())
        )
        batch = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
        now = time.monotonic()
        for host in batch:
            self._waiting[host.name] = _Waiting(host, now)
        if batch:
            self.transport.start(batch, self._arrivals)

    def _turn(self, timeout_s: float) -> Iterator[tuple[Node, Said | Down]]:
        """Poll everything once."""
        if any(node.link.has_unsent for node in self.nodes.values()):
            timeout_s = min(timeout_s, _FLUSH_S)
        ready = self._selector.select(timeout_s)
        now = time.monotonic()
        pause, self._last_turn = now - self._last_turn, now
        if pause > 1.0:  # distdiag itself was stopped or busy: silence in that time does not count
            for node in self.nodes.values():
                node.heard_at += pause
        seen = set()
        for key, _ in ready:
            if key.data is None:
                self._take_arrivals()
            elif key.data.name not in seen:
                seen.add(key.data.name)
                yield from self._read(key.data)
        if now >= self._flush_at:
            self._flush_at = now + _FLUSH_S
            for node in self.nodes.values():
                node.link.flush()

    def _take_arrivals(self) -> None:
        for at, name, what in self._arrivals.take():
            waiting = self._waiting.get(name)
            if isinstance(what, str):
                if waiting is not None:
                    if waiting.stage == "queue":  # waiting in the queue is not the host's time
                        waiting.began = at
                    waiting.stage = what
            elif isinstance(what, HostError):
                if waiting is not None:
                    del self._waiting[name]
                    self.refuse(name, what, waiting.began, at)
            elif waiting is None:  # too late
                what.kill()
            else:
                self._connect(waiting, what)

    def _connect(self, waiting: _Waiting, link: Link) -> None:
        name = waiting.host.name
        del self._waiting[name]
        own_name = self.transport.names_itself
        node = Node(waiting.host, link, self.payload, self.facts, began=waiting.began, names_itself=own_name)
        self.nodes[name] = node
        node.watched = set(link.fds())
        for fd in node.watched:
            self._selector.register(fd, selectors.EVENT_READ, node)

    def _read(self, node: Node) -> Iterator[tuple[Node, Said | Down]]:
        found, ended, refusal = node.receive()
        self._watch_only(node, () if ended else node.link.fds())
        for said in found:
            if node.stage is not NodeStage.DOWN:  # an earlier record may have dropped it
                yield node, said
        if node.stage is NodeStage.DOWN:
            return
        if node.stage is NodeStage.DONE:
            if ended or refusal is not None:
                node.link.kill()
        elif refusal is not None or ended:
            was_up = node.stage is NodeStage.UP
            self._drop(node, refusal or self._why_it_ended(node))
            if was_up:
                yield node, Down()

    def _drop(self, node: Node, refusal: HostError) -> None:
        self._watch_only(node, ())
        if node.stage is NodeStage.STARTING:
            node.link.hang_up()
        node.stage = NodeStage.DOWN
        node.refusal = refusal
        self.refuse(node.name, refusal, node.began)
        # Without waiting: an agent that loses its connection ends on its own.
        node.link.kill()

    def _why_it_ended(self, node: Node) -> HostError:
        refusal = self.transport.explain_end(node.why_it_ended())
        words = self.transport.last_words() if refusal.state is HostState.LOST else ()
        return replace(refusal, evidence=(*refusal.evidence, *words)) if words else refusal

    def _watch_only(self, node: Node, fds: tuple[int, ...]) -> None:
        """Unregister descriptors at end of file before they are closed."""
        for fd in node.watched.difference(fds):
            self._selector.unregister(fd)
        node.watched.intersection_update(fds)

    def _progress(self, node: Node, record: Said | Down, *, close: bool) -> None:
        refusal = None if isinstance(record, Down) else node.advance(record)
        if refusal is not None:
            self._drop(node, refusal)
        elif node.stage is NodeStage.UP and node.name not in self._rows:
            seconds = round(time.monotonic() - node.began, 3)
            self._rows[node.name] = HostResult(
                host=node.name, state=HostState.OK, stage="facts", message="", seconds=seconds
            )
            if close:
                node.stage = NodeStage.DONE
                node.link.finish()
        elif isinstance(record, Down) or (node.stage is NodeStage.UP and not isinstance(record, records.Facts)):
            self._pending.append((node, record))

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for node in list(self.nodes.values()):
            limit = self.limits.start_s if node.stage is NodeStage.STARTING else self.limits.facts_s
            if node.stage in (NodeStage.STARTING, NodeStage.TELLING) and now - node.entered > limit:
                self._drop(node, node.why_late(limit))

    def _silent(self) -> Iterator[tuple[Node, Said | Down]]:
        if not self.transport.remote:
            return
        now = time.monotonic()
        for node in self.up:
            if now - node.heard_at > _SILENT_S + more_for(len(self.hosts)):
                words = f"no message for {now - node.heard_at:.0f} s: it is down, or the path to it is cut"
                self._drop(node, HostError(state=HostState.LOST, stage="run", message=words))
                yield node, Down()

    def _unfinished(self, host: Host) -> HostResult:
        waiting = self._waiting.get(host.name)
        node = self.nodes.get(host.name)
        stage = waiting.stage if waiting else node.stage if node else "queue"
        began = waiting.began if waiting else node.began if node else self._began
        seconds = round(time.monotonic() - began, 3)
        return HostResult(host=host.name, state=HostState.CANCELLED, stage=stage, message="cancelled", seconds=seconds)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_S):
            for node in list(self.nodes.values()):
                if node.stage in (NodeStage.TELLING, NodeStage.UP):
                    node.link.beat()


def _why_down(node: Node) -> str:
    refusal = node.refusal
    return "; ".join([refusal.message, *refusal.evidence[-2:]]) if refusal is not None else "contact lost"
