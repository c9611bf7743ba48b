"""Where the ranks will meet: rank 0's address, port and each node's interface, tried before ranks start.

Two rounds of probes, both bounded: every node tries rank 0's node, then the nodes try each other as ranks do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from distdiag.cluster.records import Down, ReachEnded, ReachListening, ReachName, ReachProbe, ReachServing
from distdiag.node import handshake, protocol
from distdiag.node.knock import Probe  # noqa: TC001 - msgspec reads the annotations
from distdiag.node.network import Interface, Network, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.cluster.fleet import Fleet

T = TypeVar("T")
_ORDER_S = 6.0
_FIRST_ROUND_S = 2.4
_SECOND_ROUND_S = 2.0
_PREFER_S = 0.3
"""How much longer the best address may take than another one that works."""
_ALL_PAIRS = 16
"""Up to so many nodes each tries each other; beyond, each tries rank 0's node and its neighbour, and back."""
_CANDIDATES = 4


@dataclass(frozen=True)
class Wish:
    """What the user wants of the meeting point; empty: chosen."""

    address: str = ""
    interface: str = ""


@dataclass(frozen=True, kw_only=True)
class Path:
    """One tried way: `purpose` is rendezvous (to rank 0's port) or ranks (to an ephemeral port, as ranks use)."""

    source: str
    target: str
    purpose: str
    probe: Probe


@dataclass(frozen=True, kw_only=True)
class LookUp:
    """What a name leads to on a node."""

    node: str
    name: str
    addresses: tuple[str, ...]
    error: str

    @classmethod
    def of(cls, node: str, record: ReachName) -> LookUp:
        """Make one of what a node told."""
        return cls(node=node, name=record.name, addresses=record.addresses, error=record.error)


@dataclass(kw_only=True)
class Meeting:
    """The outcome. Nodes go by their names in the fleet; `hosts` says how to call them."""

    head: str
    hosts: dict[str, str]
    address: str
    port: int
    networks: dict[str, Network] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    lookups: list[LookUp] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    """Nodes that did not answer in time."""

    @property
    def is_open(self) -> bool:
        """Whether every tried way works; a lossy one does, slowly."""
        return not self.silent and all(path.probe.verdict in ("ok", "lossy") for path in self.paths)


class Scout:
    """Tries the ways between nodes."""

    def __init__(self, fleet: Fleet, names: Sequence[str], port: int, wish: Wish) -> None:
        """`names` are the nodes, rank 0's first; it listens on `port` already."""
        self._fleet = fleet
        self._nodes = [fleet.nodes[name] for name in names]
        self._head = self._nodes[0]
        self._port = port
        self._wish = wish
        self._key = handshake.new_key()
        self._ports: dict[str, int] = {}
        hosts = {node.name: node.host for node in self._nodes}
        self._meeting = Meeting(head=self._head.name, hosts=hosts, address="", port=port)

    def find(self) -> Meeting:
        """Choose an address that all nodes reach, or the most promising one; then let the nodes try each other."""
        silent = self._listen()
        if not silent:
            self._choose()
            if all(path.probe.verdict in ("ok", "lossy") for path in self._meeting.paths):
                self._try_each_other()
        self._ask_all(protocol.ReachEnd(), ReachEnded)
        self._meeting.silent = tuple(silent)
        return self._meeting

    def _listen(self) -> list[str]:
        answers = self._ask_all(protocol.ReachListen(), ReachListening)
        for name, answer in answers.items():
            self._ports[name] = answer.port
            self._meeting.networks[name] = answer.network
        if len(answers) < len(self._nodes):
            return [node.name for node in self._nodes if node.name not in answers]
        served = self._ask_all(protocol.ReachServe(key=self._key), ReachServing)
        return [node.name for node in self._nodes if node.name not in served]

    def _ask_all(self, order: protocol.Message, kind: type[T]) -> dict[str, T]:
        for node in self._nodes:
            node.order(order)
        return self._fleet.expect(kind, self._nodes, _ORDER_S)

    def _choose(self) -> None:
        """First round: everybody tries every address that rank 0's node might be reached at."""
        candidates = self._candidates()
        wanted = {}
        for node in self._nodes[1:]:
            targets = []
            for number, address in enumerate(candidates):
                targets.append([f"rendezvous {number}", address, self._port])
                targets.append([f"ranks {number}", address, self._ports[self._head.name]])
            wanted[node.name] = targets
        fqdn = self._meeting.networks[self._head.name].names.fqdn
        began = time.monotonic()

        def enough(found: dict[str, list[Probe]]) -> bool:
            number = 1 if time.monotonic() - began < _PREFER_S else len(candidates)
            return any(_reached_by_all(found, candidate) for candidate in range(number))

        found = self._probe(wanted, _FIRST_ROUND_S, names=[fqdn], enough=enough)
        best = _best(found, len(candidates), len(self._nodes) - 1)
        self._meeting.address = candidates[best]
        for name, probes in found.items():
            for probe in probes:
                purpose, _, candidate = probe.key.partition(" ")
                if candidate == str(best):
                    self._meeting.paths.append(Path(source=name, target=self._head.name, purpose=purpose, probe=probe))
                    if probe.interface:
                        self._meeting.interfaces.setdefault(name, probe.interface)
        self._name_own_interface()

    def _candidates(self) -> list[str]:
        """List rank 0's possible addresses, the most likely first."""
        if self._wish.address:
            return [self._wish.address]
        network = self._meeting.networks[self._head.name]
        named = self._wish.interface or network.wanted_gloo or network.wanted_nccl
        usable = [one for one in network.interfaces if one.up and not one.loopback]
        chosen = [one for one in usable if _matches(one.name, named)] if named else []
        usable = chosen or sorted(usable, key=lambda one: (one.virtual, not one.default_route))
        addresses = [entry.partition("/")[0] for one in usable for entry in one.addresses]
        addresses.sort(key=lambda address: ":" in address)  # stable: IPv4 first
        known = {str(self._fleet_address()), *network.names.host_addresses}
        addresses.sort(key=lambda address: address not in known)
        return addresses[:_CANDIDATES] or ["127.0.0.1"]

    def _fleet_address(self) -> str:
        """Give the address under which we ourselves reach rank 0's node, if it was asked for by address."""
        asked = next(host for host in self._fleet.hosts if host.name == self._head.name)
        return asked.address or asked.name

    def _name_own_interface(self) -> None:
        """Find the interface of rank 0's node that has the address."""
        network = self._meeting.networks[self._head.name]
        addresses = {self._meeting.address}
        for path in self._meeting.paths:
            addresses |= set(path.probe.resolved)
        name = next((one.name for one in network.interfaces if _has_one_of(one, addresses)), "")
        if name:
            self._meeting.interfaces[self._head.name] = name

    def _try_each_other(self) -> None:
        """Second round: rank 0's node tries the others, and they try each other, on ephemeral ports."""
        address = {self._head.name: self._meeting.address}
        for path in self._meeting.paths:
            address.setdefault(path.source, path.probe.local_address)
        names = [node.name for node in self._nodes if address.get(node.name)]
        wanted = {
            source: [[f"ranks {target}", address[target], self._ports[target]] for target in _peers(source, names)]
            for source in names
        }
        expected = sum(len(targets) for targets in wanted.values())
        found = self._probe(
            wanted, _SECOND_ROUND_S, names=[], enough=lambda got: sum(map(len, got.values())) == expected
        )
        for source, probes in found.items():
            for probe in probes:
                target = probe.key.partition(" ")[2]
                if target in names:
                    self._meeting.paths.append(Path(source=source, target=target, purpose="ranks", probe=probe))

    def _probe(
        self,
        wanted: dict[str, list[list[Any]]],
        timeout_s: float,
        *,
        names: list[str],
        enough: Callable[[dict[str, list[Probe]]], bool],
    ) -> dict[str, list[Probe]]:
        for name, targets in wanted.items():
            self._fleet.nodes[name].order(
                protocol.ReachTry(key=self._key, targets=targets, names=names, timeout_s=timeout_s)
            )
        found: dict[str, list[Probe]] = {name: [] for name in wanted}
        probes = {name: len(targets) for name, targets in wanted.items()}
        lookups = dict.fromkeys(wanted, len(names))
        deadline = time.monotonic() + timeout_s + 0.3
        while time.monotonic() < deadline:
            for node, record in self._fleet.records(0.05):
                if isinstance(record, ReachProbe) and probes.get(node.name):
                    found[node.name].append(record.probe)
                    probes[node.name] -= 1
                elif isinstance(record, ReachName) and lookups.get(node.name):
                    self._meeting.lookups.append(LookUp.of(node.name, record))
                    lookups[node.name] -= 1
                elif isinstance(record, Down):
                    probes.pop(node.name, None)
                    lookups.pop(node.name, None)
            if (enough(found) or not any(probes.values())) and not any(lookups.values()):
                break
        return found


def _reached_by_all(found: dict[str, list[Probe]], number: int) -> bool:
    return all(
        sum(probe.key.endswith(f" {number}") and probe.verdict == "ok" for probe in probes) == 2
        for probes in found.values()
    )


def _best(found: dict[str, list[Probe]], candidates: int, nodes: int) -> int:
    """Choose the candidate that most nodes reach, the first of equals."""

    def reached(number: int) -> int:
        good = [probe for probes in found.values() for probe in probes if probe.key.endswith(f" {number}")]
        return sum(probe.verdict in ("ok", "lossy") for probe in good)

    return max(range(candidates), key=lambda number: (reached(number), -number)) if nodes else 0


def _peers(source: str, names: list[str]) -> list[str]:
    if len(names) <= _ALL_PAIRS:
        return [name for name in names if name != source and (source == names[0] or name != names[0])]
    at = names.index(source)
    near = {names[(at + 1) % len(names)], names[at - 1]} - {source, names[0]}
    return [name for name in names if name != source] if at == 0 else sorted(near)


def _matches(interface: str, wanted: str) -> bool:
    """Read NCCL_SOCKET_IFNAME's forms: prefixes with commas, `=` for exact names, `^` to leave out."""
    words = wanted.removeprefix("^").removeprefix("=").split(",")
    hit = any(interface == word if "=" in wanted[:2] else interface.startswith(word) for word in words if word)
    return hit != wanted.startswith("^")


def _has_one_of(interface: Interface, addresses: set[str]) -> bool:
    return any(entry.partition("/")[0] in addresses for entry in interface.addresses)


def leads_home(path: Path) -> bool:
    """Tell whether the address leads back to the host that asks: a name that resolves to 127.x there."""
    return any(is_loopback(address) for address in path.probe.resolved)
