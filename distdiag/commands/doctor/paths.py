"""The paths between the nodes: each tries its peers in both directions, on the rendezvous port and on a port of ranks.

Above 16 nodes each tries its neighbours in the list. What is sent over a path of ranks is more than a few full packets,
so that a path that swallows large packets is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distdiag.agent import protocol
from distdiag.cluster.records import ReachEnded, ReachListening
from distdiag.cluster.rendezvous_test import PORT, RANKS, LookUp, NetworkPath, PathTest, Prober
from distdiag.diagnosis.connectivity import Case, path_findings
from distdiag.diagnosis.nic_selection import address_of
from distdiag.facts.network import Network  # noqa: TC001 - saved facts are decoded by it

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.agent.tcp_probe import ProbeResult
    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.report import Finding

_RENDEZVOUS_PORT = 29500
_ALL_PAIRS = 16
_BULK_BYTES = 2**18
_LIMITS_S = (2.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class NodePaths:
    """What one node saw of its paths to others. `silent`: it did not answer when the paths were to be tested."""

    network: Network | None = None
    address: str = ""
    paths: tuple[NetworkPath, ...] = ()
    silent: bool = False


class PathProbe(Prober):
    """Lets all nodes try their peers at the same time."""

    def __init__(self, fleet: Fleet, nodes: Mapping[str, Node], variables: Mapping[str, Mapping[str, str]]) -> None:
        """`variables`: of each host, those that select an interface."""
        super().__init__(fleet, list(nodes.values()))
        self._hosts = {node.name: host for host, node in nodes.items()}
        self._variables = variables
        self._paths: dict[str, list[NetworkPath]] = {}

    def run(self) -> dict[str, NodePaths]:
        """Listen everywhere, try every path, end; return what each host saw."""
        heard = self.ask_all(protocol.ReachListen(ports=[_RENDEZVOUS_PORT]), ReachListening)
        served = self.serve()
        addresses = {
            name: address_of(answer.network.interfaces, self._variables.get(self._hosts[name], {}))
            for name, answer in heard.items()
        }
        names = [name for name in self._hosts if name in served and addresses.get(name)]
        wanted = {source: self._targets(source, names, heard, addresses) for source in names}
        self.probe(wanted, [], _LIMITS_S, self._take, lambda _: False)
        self.ask_all(protocol.ReachEnd(), ReachEnded)
        return {
            host: NodePaths(
                network=heard[name].network if name in heard else None,
                address=addresses.get(name, ""),
                paths=tuple(self._paths.get(name, ())),
                silent=name not in served,
            )
            for name, host in self._hosts.items()
        }

    def _targets(
        self, source: str, names: list[str], heard: Mapping[str, ReachListening], addresses: Mapping[str, str]
    ) -> list[list[Any]]:
        targets: list[list[Any]] = []
        for target in _peers(source, names):
            if str(_RENDEZVOUS_PORT) not in heard[target].failed:
                targets.append([f"{PORT} {target}", addresses[target], _RENDEZVOUS_PORT, 0])
            targets.append([f"{RANKS} {target}", addresses[target], heard[target].samples[0], _BULK_BYTES])
        return targets

    def _take(self, node: Node, result: ProbeResult | LookUp) -> None:
        if isinstance(result, LookUp):
            return
        purpose, _, target = result.key.partition(" ")
        if target in self._hosts:
            source, target = self._hosts[node.name], self._hosts[target]
            path = NetworkPath(source=source, target=target, purpose=purpose, probe=result)
            self._paths.setdefault(node.name, []).append(path)


def _peers(source: str, names: list[str]) -> list[str]:
    if len(names) <= _ALL_PAIRS:
        return [name for name in names if name != source]
    at = names.index(source)
    return [names[(at + 1) % len(names)], names[at - 1]]


def judge(command: str, by_host: Mapping[str, NodePaths]) -> list[Finding]:
    """Judge the paths between all nodes, as ports and gpu-test do. Pure."""
    test = PathTest(
        hosts={host: host for host in by_host},
        networks={host: own.network for host, own in by_host.items() if own.network is not None},
        addresses={host: own.address for host, own in by_host.items()},
        paths=[path for own in by_host.values() for path in own.paths],
        silent=tuple(host for host, own in by_host.items() if own.silent),
    )
    lost = set(test.silent)
    test.paths = [path for path in test.paths if not {path.source, path.target} & lost]
    return path_findings(Case(command=command, test=test, head=next(iter(by_host), "")))


def add_paths(
    fleet: Fleet, nodes: Mapping[str, Node], facts: Sequence[Any], variables: Mapping[str, Mapping[str, str]]
) -> list[Any]:
    """Test the paths between the nodes that sent facts, and add to the facts of each what it saw."""
    known = {host: node for host, node in nodes.items() if any(node_facts.host == host for node_facts in facts)}
    if len(known) < 2:
        return list(facts)
    seen = PathProbe(fleet, known, variables).run()
    return [replace(node_facts, paths=seen.get(node_facts.host)) for node_facts in facts]
