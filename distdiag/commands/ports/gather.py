"""Facts of one node, of ports probed from it, or of the paths between all nodes."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

from distdiag.agent import protocol
from distdiag.cluster.records import ReachListening
from distdiag.cluster.rendezvous_test import PORT, RANKS, LookUp, NetworkPath, Prober
from distdiag.cluster.start_fleet import Agent, open_fleet
from distdiag.cluster.targets import describe, find_targets
from distdiag.commands.ports.collect import Ask, NodePorts, ScanBatch
from distdiag.commands.ports.types import USUAL_PORT, PortsFacts, address_of
from distdiag.diagnosis.nic_selection import other_addresses
from distdiag.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.agent.tcp_probe import ProbeResult
    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.cluster.targets import Targets
    from distdiag.commands.ports.types import Request
    from distdiag.output import Progress

AGENT = Agent(collect="distdiag.commands.ports.collect", facts=NodePorts)
MOST_NODES = 512
MOST_PORTS = 64
"""Requested ports, each probed over every path."""
_ALL_PAIRS = 64
"""Up to this many nodes probe all others; beyond, each probes its neighbours and a few others, mutually."""
_SOME = 6
_SAMPLES = 2
"""Ephemeral ports tested on each path."""
_PROBE_S = 2.0
_GRACE_S = 1.0
_PATHS_PER_S = 250
"""Probes per second of one node on a busy machine, for its time limit."""
_LONGEST_S = 20.0
_MUCH = 300
"""Number of paths above which less data is sent over each."""


def gather(request: Request, progress: Progress) -> PortsFacts:
    """Collect the facts for the request.

    Raises:
        UsageError: contradictory options, or too many hosts.
        DistdiagError: the agent failed on this machine.
    """
    targets = find_targets(request.cluster, os.environ)
    if len(targets.hosts) > MOST_NODES:
        raise UsageError(
            f"too many hosts to test against each other: {len(targets.hosts)}",
            hint=f"limit: {MOST_NODES} at a time: test the hosts of one rack, then one host of each rack",
        )
    if not request.targets and len(targets.hosts) > 1 and len(request.ports) > MOST_PORTS:
        raise UsageError(
            f"too many ports to test between nodes: {len(request.ports)}",
            hint=f"limit: {MOST_PORTS}, as --port 29500,6000-6010",
        )
    facts = PortsFacts(local=targets.launcher is None, named=request.named)
    with open_fleet(request.cluster, targets, AGENT) as fleet:
        if not facts.local:
            progress.news(f"connecting to {describe(targets)}")
        try:
            fleet.gather(lambda now: progress.now(f"{len(now.up)} of {len(now.hosts)} hosts connected"))
            nodes = fleet.machines(local=facts.local)
            _take_facts(nodes, targets, facts)
            facts.doubles = tuple(node.host for node in fleet.up if node not in nodes)
            if request.targets:
                _scan(fleet, nodes, request, progress, facts)
            elif len(nodes) > 1:
                _Pairs(fleet, nodes, request, facts).run(progress)
        except KeyboardInterrupt:
            if not facts.nodes:
                raise
            facts.interrupted = True
        lost = {*facts.silent, *fleet.refusals}
        facts.paths = [path for path in facts.paths if not {path.source, path.target} & lost]
        order = {name: number for number, name in enumerate(facts.nodes)}
        facts.paths.sort(key=lambda path: (order[path.source], order[path.target], path.purpose, path.probe.port))
        facts.rows = () if facts.local else fleet.rows
        facts.refusals = dict(fleet.refusals)
    return facts


def _take_facts(nodes: Sequence[Node], targets: Targets, facts: PortsFacts) -> None:
    for node in nodes:
        facts.nodes[node.name] = node.reply
        facts.hosts[node.name] = facts.nodes[node.name].host if targets.launcher is None else node.host


def _scan(fleet: Fleet, nodes: Sequence[Node], request: Request, progress: Progress, facts: PortsFacts) -> None:
    for node in nodes:
        node.order(protocol.Collect(ask=Ask(request.targets, request.timeout_s)))
    hosts = len({host for host, _ in request.targets})
    if hosts > 1 or not facts.local:
        progress.news(f"testing {len(request.targets)} ports on {hosts} host{'' if hosts == 1 else 's'}")
    rounds = 1 + len(request.targets) // 256

    def show(names: list[str]) -> None:
        progress.now(f"{sum(map(len, facts.scanned.values()))} of {len(nodes) * len(request.targets)} tested")

    for node, batch, why in fleet.more_from(nodes, ScanBatch, 10 + rounds * (request.timeout_s + 1), show):
        if batch is not None:
            facts.scanned.setdefault(node.name, []).extend(batch.results)
        elif why and node.name not in fleet.refusals:
            facts.silent.append(node.name)


class _Pairs(Prober):
    """All nodes probe each other concurrently."""

    def __init__(self, fleet: Fleet, nodes: Sequence[Node], request: Request, facts: PortsFacts) -> None:
        super().__init__(fleet, nodes)
        self._request, self._facts = request, facts
        self._samples: dict[str, list[int]] = {}

    def run(self, progress: Progress) -> None:
        """Listen on all nodes, probe every path, and stop."""
        ports = list(self._request.ports or (USUAL_PORT,))
        answers = self.ask_all(protocol.ReachListen(ports=ports, more=_SAMPLES - 1), ReachListening)
        for name, answer in answers.items():
            self._samples[name] = answer.samples
            self._facts.taken[name] = answer.failed
        served = self.serve()
        self._facts.silent += [node.name for node in self._nodes if node.name not in served]
        names = [node.name for node in self._nodes if node.name in served & answers.keys() and self._address(node.name)]
        planned = self._planned(names, ports)
        progress.news(f"testing {sum(map(len, planned.values()))} paths between {len(names)} nodes")
        self._probe(planned, progress)
        self.ask_all(protocol.ReachEnd(), protocol.ReachEnded)

    def _address(self, name: str) -> str:
        return address_of(self._facts.nodes[name])

    def _planned(self, names: list[str], ports: list[int]) -> dict[str, list[list[Any]]]:
        """List each node's probes: given ports with little data, the first ephemeral port with much."""
        peers = {name: _peers(name, names) for name in names}
        much = self._request.bulk_bytes
        bulk = much if sum(map(len, peers.values())) <= _MUCH else min(much, 2**18)
        planned: dict[str, list[list[Any]]] = {}
        for source in names:
            targets: list[list[Any]] = []
            for target in peers[source]:
                address = self._address(target)
                free = [port for port in ports if str(port) not in self._facts.taken.get(target, {})]
                targets += [[f"{PORT} {target}", address, port, 0] for port in free]
                samples, node = self._samples[target], self._facts.nodes[target]
                targets += [[f"{RANKS} {target}", address, port, 0] for port in samples[1:]]
                targets.append([f"{RANKS} {target}", address, samples[0], bulk])
                others = other_addresses(node.network.interfaces, node.variables)
                targets += [[f"{purpose} {target}", other, samples[0], 0] for purpose, other in others]
            planned[source] = targets
        return planned

    def _probe(self, planned: dict[str, list[list[Any]]], progress: Progress) -> None:
        first = self._facts.nodes[self._nodes[0].name].network.names.fqdn
        masters = {node.variables.get("MASTER_ADDR", "") for node in self._facts.nodes.values()}
        names = sorted({first, *masters} - {""})
        limit_s = min(_LONGEST_S, _PROBE_S + max(map(len, planned.values()), default=0) / _PATHS_PER_S)

        def show(left: int) -> bool:
            progress.now(f"waiting for {left} paths")
            return False

        self.probe(planned, names, (limit_s, _GRACE_S), self._take, show)

    def _take(self, node: Node, result: ProbeResult | LookUp) -> None:
        if isinstance(result, LookUp):
            self._facts.lookups.append(result)
            return
        purpose, _, target = result.key.partition(" ")
        if target in self._facts.nodes:
            path = NetworkPath(source=node.name, target=target, purpose=purpose, probe=result)
            self._facts.paths.append(path)


def _peers(source: str, names: list[str]) -> list[str]:
    """Return a node's peers: all others; beyond _ALL_PAIRS its neighbours and some at random, mutually."""
    if len(names) <= _ALL_PAIRS:
        return [name for name in names if name != source]
    at = names.index(source)
    near = {names[(at + step) % len(names)] for step in (-1, 1)}
    # Both ends draw the same numbers, so that each path is probed in both directions.
    drawn = {names[(at + step) % len(names)] for step in _steps(len(names))}
    return sorted((near | drawn) - {source})


def _steps(count: int) -> list[int]:
    steps = random.Random(count).sample(range(2, count - 1), _SOME // 2)
    return [*steps, *(-step for step in steps)]
