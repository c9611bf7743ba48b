"""Test of the ranks' rendezvous before the start: rank 0's address, port and each node's interface.

Two rounds of probes, both bounded: every node probes rank 0's node, then the nodes probe each other as ranks connect.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from distdiag.agent import handshake, protocol
from distdiag.agent.tcp_probe import ProbeResult  # noqa: TC001
from distdiag.cluster.records import Down, ReachListening, ReachProbe
from distdiag.facts.network.interfaces import Network  # noqa: TC001 - msgspec reads the annotations
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node

T = TypeVar("T")
PORT, RANKS = "port", "ranks"
_ORDER_S = 6.0
_FIRST_ROUND_S = 2.4
_SECOND_ROUND_S = 2.0
_GRACE_S = 0.3
_PREFER_S = 0.3
"""How much longer the best address may take than another working one."""
_ALL_PAIRS = 16
"""Up to this many nodes probe all others; beyond, each probes its two neighbours, and rank 0's node probes all."""


@record(kw_only=True)
class NetworkPath:
    """One probed path from a node to another.

    `purpose`: port (the rendezvous port), ranks (an ephemeral one, as ranks use); in `ports` also "also" (the same over
    another interface used by NCCL) and "other" (over one it should perhaps use).
    """

    source: str
    target: str
    purpose: str
    probe: ProbeResult

    @property
    def is_open(self) -> bool:
        """Whether it works, perhaps slowly."""
        return self.probe.is_open


@record(kw_only=True)
class LookUp:
    """The addresses of a name on a node."""

    node: str
    name: str
    addresses: tuple[str, ...]
    error: str

    @classmethod
    def of(cls, node: str, record: protocol.ReachName) -> LookUp:
        """Return the look-up reported by a node."""
        return cls(node=node, name=record.name, addresses=record.addresses, error=record.error)


@dataclass(kw_only=True)
class PathTest:
    """Probes between nodes, by fleet name; `hosts` maps these to labels."""

    hosts: dict[str, str]
    networks: dict[str, Network] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    """The address of each node for the others, if known."""
    paths: list[NetworkPath] = field(default_factory=list)
    lookups: list[LookUp] = field(default_factory=list)
    silent: tuple[str, ...] = ()
    """Nodes that did not answer in time."""

    @property
    def is_open(self) -> bool:
        """Whether every probed path works; lossy ones do, slowly."""
        return not self.silent and all(path.is_open for path in self.paths)


@dataclass(kw_only=True)
class RendezvousTest(PathTest):
    """The outcome: the address of rank 0's node, the head, and each node's interface to it."""

    head: str
    address: str
    port: int
    interfaces: dict[str, str] = field(default_factory=dict)


class Prober:
    """Probes between nodes, shared by all tests of paths."""

    def __init__(self, fleet: Fleet, nodes: Sequence[Node], order_s: float = _ORDER_S) -> None:
        """`order_s`: time limit of one order for all nodes together."""
        self._fleet, self._nodes, self._order_s = fleet, nodes, order_s
        self._key = handshake.new_key()

    def ask_all(self, order: protocol.Message, kind: type[T]) -> dict[str, T]:
        """Send one order to all nodes; return the answers received in time, by node."""
        for node in self._nodes:
            node.order(order)
        return self._fleet.expect(kind, self._nodes, self._order_s)

    def serve(self) -> set[str]:
        """Let all nodes answer probes; return those that do."""
        return set(self.ask_all(protocol.ReachServe(key=self._key), protocol.ReachServing))

    def probe(
        self,
        wanted: Mapping[str, list[list[Any]]],
        names: list[str],
        limits_s: tuple[float, float],
        take: Callable[[Node, ProbeResult | LookUp], None],
        is_enough: Callable[[int], bool],
    ) -> None:
        """Let nodes probe others and look up names, passing on results as received.

        Args:
            wanted: for each node [key, address, port, bytes] of each target.
            names: for every node to look up.
            limits_s: time limit on the node, and the additional time for its answers.
            take: called with the node and its result.
            is_enough: called with the number of open probes; returns whether to stop waiting for them.
        """
        for name, targets in wanted.items():
            order = protocol.ReachTry(key=self._key, targets=targets, names=names, timeout_s=limits_s[0])
            self._fleet.nodes[name].order(order)
        probes = {name: len(targets) for name, targets in wanted.items()}
        lookups = dict.fromkeys(wanted, len(names))
        deadline = time.monotonic() + sum(limits_s)
        while time.monotonic() < deadline:
            for node, said in self._fleet.records(0.05):
                if isinstance(said, ReachProbe) and probes.get(node.name):
                    take(node, said.probe)
                    probes[node.name] -= 1
                elif isinstance(said, protocol.ReachName) and lookups.get(node.name):
                    take(node, LookUp.of(node.name, said))
                    lookups[node.name] -= 1
                elif isinstance(said, Down):
                    probes.pop(node.name, None)
                    lookups.pop(node.name, None)
            left = sum(probes.values())
            if (is_enough(left) or not left) and not any(lookups.values()):
                break


class RendezvousProbe(Prober):
    """Finds a rendezvous address for the ranks."""

    def __init__(
        self, fleet: Fleet, names: Sequence[str], port: int, candidates: Callable[[Network, str], Sequence[str]]
    ) -> None:
        """`names` are the nodes, rank 0's first, which already listens on `port`.

        `candidates` lists rank 0's possible addresses, from its network and its name.
        """
        super().__init__(fleet, [fleet.nodes[name] for name in names])
        self._head = self._nodes[0]
        self._port = port
        self._candidates = candidates
        self._ports: dict[str, int] = {}
        hosts = {node.name: node.host for node in self._nodes}
        self._test = RendezvousTest(head=self._head.name, hosts=hosts, address="", port=port)

    def run(self) -> RendezvousTest:
        """Choose an address that all nodes reach, or the most promising one; then let the nodes probe each other."""
        self._test.silent = tuple(self._listen())
        if not self._test.silent:
            self._choose()
            if self._test.is_open:
                self._try_each_other()
        self.ask_all(protocol.ReachEnd(), protocol.ReachEnded)
        return self._test

    def _listen(self) -> list[str]:
        answers = self.ask_all(protocol.ReachListen(), ReachListening)
        for name, answer in answers.items():
            self._ports[name] = answer.port
            self._test.networks[name] = answer.network
        if len(answers) < len(self._nodes):
            return [node.name for node in self._nodes if node.name not in answers]
        served = self.serve()
        return [node.name for node in self._nodes if node.name not in served]

    def _choose(self) -> None:
        """First round: every node probes every possible address of rank 0's node."""
        candidates = self._candidates(self._test.networks[self._head.name], self._head.name)
        wanted = {}
        for node in self._nodes[1:]:
            targets = []
            for number, address in enumerate(candidates):
                targets.append([f"{PORT} {number}", address, self._port])
                targets.append([f"{RANKS} {number}", address, self._ports[self._head.name]])
            wanted[node.name] = targets
        fqdn = self._test.networks[self._head.name].names.fqdn
        began = time.monotonic()

        def enough(found: dict[str, list[ProbeResult]]) -> bool:
            number = 1 if time.monotonic() - began < _PREFER_S else len(candidates)
            return any(_reached_by_all(found, candidate) for candidate in range(number))

        found = self._round(wanted, _FIRST_ROUND_S, [fqdn], enough)
        best = _best(found, len(candidates), len(self._nodes) - 1)
        self._test.address = candidates[best]
        for name, probes in found.items():
            for probe in probes:
                purpose, _, candidate = probe.key.partition(" ")
                if candidate == str(best):
                    path = NetworkPath(source=name, target=self._head.name, purpose=purpose, probe=probe)
                    self._test.paths.append(path)
                    if probe.interface:
                        self._test.interfaces.setdefault(name, probe.interface)
        self._test.addresses[self._head.name] = self._test.address
        for path in self._test.paths:
            if path.probe.local_address:
                self._test.addresses.setdefault(path.source, path.probe.local_address)
        self._name_own_interface()

    def _name_own_interface(self) -> None:
        """Find the interface of rank 0's node with the chosen address."""
        network = self._test.networks[self._head.name]
        addresses = {self._test.address}
        for path in self._test.paths:
            addresses |= set(path.probe.resolved)
        name = next((nic.name for nic in network.interfaces if addresses & set(nic.plain_addresses)), "")
        if name:
            self._test.interfaces[self._head.name] = name

    def _try_each_other(self) -> None:
        """Second round: all nodes, including rank 0's, probe each other on ephemeral ports."""
        address = self._test.addresses
        names = [node.name for node in self._nodes if address.get(node.name)]
        wanted = {
            source: [[f"{RANKS} {target}", address[target], self._ports[target]] for target in _peers(source, names)]
            for source in names
        }
        found = self._round(wanted, _SECOND_ROUND_S, [], lambda found: False)
        for source, probes in found.items():
            for probe in probes:
                target = probe.key.partition(" ")[2]
                if target in names:
                    self._test.paths.append(NetworkPath(source=source, target=target, purpose=RANKS, probe=probe))

    def _round(
        self,
        wanted: dict[str, list[list[Any]]],
        timeout_s: float,
        names: list[str],
        enough: Callable[[dict[str, list[ProbeResult]]], bool],
    ) -> dict[str, list[ProbeResult]]:
        found: dict[str, list[ProbeResult]] = {name: [] for name in wanted}

        def take(node: Node, result: ProbeResult | LookUp) -> None:
            if isinstance(result, LookUp):
                self._test.lookups.append(result)
            else:
                found[node.name].append(result)

        self.probe(wanted, names, (timeout_s, _GRACE_S), take, lambda left: enough(found))
        return found


def _reached_by_all(found: dict[str, list[ProbeResult]], number: int) -> bool:
    return all(
        sum(probe.key.endswith(f" {number}") and probe.verdict == "ok" for probe in probes) == 2
        for probes in found.values()
    )


def _best(found: dict[str, list[ProbeResult]], candidates: int, nodes: int) -> int:
    """Choose the candidate that most nodes reach, the first of equals."""

    def reached(number: int) -> int:
        probes = [probe for own in found.values() for probe in own if probe.key.endswith(f" {number}")]
        return sum(probe.is_open for probe in probes)

    return max(range(candidates), key=lambda number: (reached(number), -number)) if nodes else 0


def _peers(source: str, names: list[str]) -> list[str]:
    if len(names) <= _ALL_PAIRS:
        return [name for name in names if name != source and (source == names[0] or name != names[0])]
    at = names.index(source)
    near = {names[(at + 1) % len(names)], names[at - 1]} - {source, names[0]}
    return [name for name in names if name != source] if at == 0 else sorted(near)
