"""collect -> diagnose, for ports: one node looks around, tries hosts, or all nodes try each other."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from distdiag.cluster.access import Agent, open_fleet
from distdiag.cluster.meeting import LookUp
from distdiag.cluster.records import Down, ReachEnded, ReachListening, ReachName, ReachProbe, ReachServing
from distdiag.cluster.rows import Refusal, Row  # noqa: TC001 - msgspec reads the annotations of Seen
from distdiag.cluster.targets import describe, find_targets
from distdiag.commands.ports.choice import address_of, other_addresses
from distdiag.commands.ports.collect import Found, Ports
from distdiag.commands.ports.model import USUAL_PORT, Way
from distdiag.errors import UsageError
from distdiag.node import handshake, protocol
from distdiag.node.scan import Tried  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.cluster.targets import Targets
    from distdiag.commands.ports.model import Request
    from distdiag.deliver import Progress
    from distdiag.node.knock import Probe

T = TypeVar("T")
AGENT = Agent(collect="distdiag.commands.ports.collect", facts=Ports, ask={"listeners": True})
MOST_NODES = 512
_ALL_PAIRS = 64
"""Up to so many nodes each tries each other; beyond, each tries its neighbours and some others, and they it."""
_SOME = 6
_PROBE_S = 2.0
_WAYS_PER_S = 250
"""What one node tries in a second, on a busy machine: it gets that much longer."""
_LONGEST_S = 20.0
MOST_PORTS = 64
"""Certain ports between nodes: each is tried over every way."""
_ORDER_S = 6.0
_MUCH = 300
"""Ways from which on less is sent over each."""


@dataclass(kw_only=True)
class Seen:
    """What came from the nodes; they go by the names of the fleet, `hosts` says how to call them."""

    nodes: dict[str, Ports] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    tried: dict[str, list[Tried]] = field(default_factory=dict)
    ways: list[Way] = field(default_factory=list)
    lookups: list[LookUp] = field(default_factory=list)
    taken: dict[str, dict[str, str]] = field(default_factory=dict)
    """node -> port -> who has it, where we could not listen."""
    silent: list[str] = field(default_factory=list)
    doubles: tuple[str, ...] = ()
    """Hosts that are machines which another name stands for already."""
    unserved: dict[str, str] = field(default_factory=dict)
    """Servers that could not be checked: stranger (not ours), busy, midway (it went away)."""
    rows: tuple[Row, ...] = ()
    refusals: dict[str, Refusal] = field(default_factory=dict)
    local: bool = True
    served: bool = False
    checks: bool = False
    """Somebody of ours should have answered: a closed port is a fault then."""
    named: bool = False
    """The ports were typed; at the usual one nobody listens before there is a job."""
    interrupted: bool = False

    @property
    def host(self) -> str:
        """A name for all of it: that of the first node."""
        return next(iter(self.hosts.values()), "nodes")


def look(request: Request, progress: Progress) -> Seen:
    """Do what was asked for.

    Raises:
        UsageError: the options contradict each other, or there are too many hosts.
        DistdiagError: the node side failed on this machine.
    """
    targets = find_targets(request.cluster, os.environ)
    if len(targets.hosts) > MOST_NODES:
        raise UsageError(
            f"{len(targets.hosts)} hosts are too many to try among each other",
            hint=f"up to {MOST_NODES} at a time: those of one rack, then one of each rack",
        )
    if not request.targets and len(targets.hosts) > 1 and len(request.ports) > MOST_PORTS:
        raise UsageError(
            f"{len(request.ports)} ports are too many between nodes", hint=f"up to {MOST_PORTS}: --port 29500,6000-6010"
        )
    seen = Seen(local=targets.launcher is None, named=request.named)
    with open_fleet(request.cluster, targets, AGENT) as fleet:
        if not seen.local:
            progress.news(f"reaching {describe(targets)}")
        try:
            fleet.gather(lambda now: progress.now(f"{len(now.up)} of {len(now.hosts)} hosts reached"))
            nodes = fleet.machines(local=seen.local)
            _take_facts(nodes, targets, seen)
            seen.doubles = tuple(node.host for node in fleet.up if node not in nodes)
            if request.targets:
                _scan(fleet, nodes, request, progress, seen)
            elif len(nodes) > 1:
                _Pairs(fleet, nodes, request, seen).go(progress)
        except KeyboardInterrupt:
            if not seen.nodes:
                raise
            seen.interrupted = True
        lost = {*seen.silent, *fleet.refusals}
        seen.ways = [way for way in seen.ways if not {way.source, way.target} & lost]
        order = {name: number for number, name in enumerate(seen.nodes)}
        seen.ways.sort(key=lambda way: (order[way.source], order[way.target], way.purpose, way.probe.port))
        seen.rows = () if seen.local else fleet.rows
        seen.refusals = dict(fleet.refusals)
    return seen


def _take_facts(nodes: Sequence[Node], targets: Targets, seen: Seen) -> None:
    for node in nodes:
        seen.nodes[node.name] = node.told
        seen.hosts[node.name] = seen.nodes[node.name].host if targets.launcher is None else node.host


def _scan(fleet: Fleet, nodes: Sequence[Node], request: Request, progress: Progress, seen: Seen) -> None:
    """Let each node try the targets."""
    ask = {"targets": [list(one) for one in request.targets], "timeout_s": request.timeout_s}
    for node in nodes:
        node.order(protocol.Collect(ask=ask))
    hosts = len({host for host, _ in request.targets})
    if hosts > 1 or not seen.local:
        progress.news(f"trying {len(request.targets)} ports of {hosts} host{'' if hosts == 1 else 's'}")
    rounds = 1 + len(request.targets) // 256

    def tell(names: list[str]) -> None:
        progress.now(f"{sum(map(len, seen.tried.values()))} of {len(nodes) * len(request.targets)} tried")

    for node, found, why in fleet.more_from(nodes, Found, 10 + rounds * (request.timeout_s + 1), tell):
        if found is not None:
            seen.tried.setdefault(node.name, []).extend(found.tried)
        elif why and node.name not in fleet.refusals:
            seen.silent.append(node.name)


class _Pairs:
    """All nodes try each other, at the same time."""

    def __init__(self, fleet: Fleet, nodes: Sequence[Node], request: Request, seen: Seen) -> None:
        self._fleet, self._nodes, self._request, self._seen = fleet, nodes, request, seen
        self._key = handshake.new_key()
        self._samples: dict[str, list[int]] = {}

    def go(self, progress: Progress) -> None:
        """Listen everywhere, try everything, end."""
        ports = list(self._request.ports or (USUAL_PORT,))
        answers = self._ask_all(protocol.ReachListen(ports=ports, more=self._request.sample - 1), ReachListening)
        for name, answer in answers.items():
            self._samples[name] = answer.samples
            self._seen.taken[name] = answer.failed
        served = self._ask_all(protocol.ReachServe(key=self._key), ReachServing)
        self._seen.silent += [node.name for node in self._nodes if node.name not in served]
        names = [node.name for node in self._nodes if node.name in served and self._address(node.name)]
        wanted = self._wanted(names, ports)
        count = sum(map(len, wanted.values()))
        progress.news(f"trying {count} ways between {len(names)} nodes")
        self._probe(wanted, progress)
        self._ask_all(protocol.ReachEnd(), ReachEnded)

    def _address(self, name: str) -> str:
        return address_of(self._seen.nodes[name])

    def _ask_all(self, order: protocol.Message, kind: type[T]) -> dict[str, T]:
        for node in self._nodes:
            node.order(order)
        return self._fleet.expect(kind, self._nodes, _ORDER_S)

    def _wanted(self, names: list[str], ports: list[int]) -> dict[str, list[list[Any]]]:
        """List for each node whom to try: the certain ports with little, the first ephemeral one with much data."""
        peers = {name: _peers(name, names) for name in names}
        much = self._request.bulk_bytes
        bulk = much if sum(map(len, peers.values())) <= _MUCH else min(much, 2**18)
        wanted: dict[str, list[list[Any]]] = {}
        for source in names:
            targets: list[list[Any]] = []
            for target in peers[source]:
                address = self._address(target)
                free = [port for port in ports if str(port) not in self._seen.taken.get(target, {})]
                targets += [[f"port {target}", address, port, 0] for port in free]
                samples = self._samples[target]
                targets += [[f"ranks {target}", address, port, 0] for port in samples[1:]]
                targets.append([f"ranks {target}", address, samples[0], bulk])
                others = other_addresses(self._seen.nodes[target])
                targets += [[f"{purpose} {target}", other, samples[0], 0] for purpose, other in others]
            wanted[source] = targets
        return wanted

    def _probe(self, wanted: dict[str, list[list[Any]]], progress: Progress) -> None:
        first = self._seen.nodes[self._nodes[0].name].names.fqdn
        masters = {ports.variables.get("MASTER_ADDR", "") for ports in self._seen.nodes.values()}
        names = sorted({first, *masters} - {""})
        limit_s = min(_LONGEST_S, _PROBE_S + max(map(len, wanted.values()), default=0) / _WAYS_PER_S)
        for node in self._nodes:
            if node.name in wanted:
                node.order(protocol.ReachTry(key=self._key, targets=wanted[node.name], names=names, timeout_s=limit_s))
        ways = {name: len(targets) for name, targets in wanted.items()}
        lookups = dict.fromkeys(wanted, len(names))
        deadline = time.monotonic() + limit_s + 1.0
        while (any(ways.values()) or any(lookups.values())) and time.monotonic() < deadline:
            for node, record in self._fleet.records(0.05):
                if isinstance(record, ReachProbe) and ways.get(node.name):
                    self._add(node, record.probe)
                    ways[node.name] -= 1
                elif isinstance(record, ReachName) and lookups.get(node.name):
                    self._seen.lookups.append(LookUp.of(node.name, record))
                    lookups[node.name] -= 1
                elif isinstance(record, Down):
                    ways.pop(node.name, None)
                    lookups.pop(node.name, None)
            progress.now(f"{sum(ways.values())} ways are not answered yet")

    def _add(self, node: Node, probe: Probe) -> None:
        purpose, _, target = probe.key.partition(" ")
        if target in self._seen.nodes:
            self._seen.ways.append(Way(source=node.name, target=target, purpose=purpose, probe=probe))


def _peers(source: str, names: list[str]) -> list[str]:
    """Choose whom a node tries: all others, or of very many its neighbours and some at random, each way both ways."""
    if len(names) <= _ALL_PAIRS:
        return [name for name in names if name != source]
    at = names.index(source)
    near = {names[(at + step) % len(names)] for step in (-1, 1)}
    # The same draw on both ends, so that each way is tried in both directions.
    drawn = {names[(at + step) % len(names)] for step in _steps(len(names))}
    return sorted((near | drawn) - {source})


def _steps(count: int) -> list[int]:
    steps = random.Random(count).sample(range(2, count - 1), _SOME // 2)
    return [*steps, *(-step for step in steps)]
