"""Network paths between the nodes: each node tests its peers on an ephemeral port, in both directions, as ranks do.

Above 16 nodes each tests its neighbours in the list. The payload exceeds a few full packets, to detect paths that drop
large packets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag.agent import protocol
from distdiag.cluster.hosts import fold_within
from distdiag.cluster.records import ReachListening
from distdiag.cluster.rendezvous_test import RANKS, LookUp, NetworkPath, PathTest, Prober
from distdiag.commands.doctor.symptoms import finding_about, symptom
from distdiag.commands.doctor.types import COMMAND, NodePaths
from distdiag.diagnosis.connectivity import Case, path_findings, slow_links, slow_paths
from distdiag.diagnosis.nic_selection import address_of
from distdiag.diagnosis.wording import counted
from distdiag.report import Witnesses

if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.agent.tcp_probe import ProbeResult
    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.report import Finding

_ALL_PAIRS = 16
_BULK_BYTES = 2**18
_LIMITS_S = (2.0, 1.0)
_ORDER_S = 2.0
_MORE_TRIES, _DOUBTFUL_SHARE = 3, 0.5
"""While a path looks slow, all are tested again and the best result counts: busy endpoints are slow occasionally, a bad
link always."""


class PathProbe(Prober):
    """Makes all nodes test their peers at the same time."""

    def __init__(self, fleet: Fleet, nodes: Mapping[str, Node], variables: Mapping[str, Mapping[str, str]]) -> None:
        """`variables`: by host, those that select an interface."""
        super().__init__(fleet, list(nodes.values()), _ORDER_S)
        self._hosts = {node.name: host for host, node in nodes.items()}
        self._variables = variables
        self._paths: dict[tuple[str, str], NetworkPath] = {}

    def run(self) -> dict[str, NodePaths]:
        """Listen everywhere, test every path, stop; return the results of each host."""
        heard = self.ask_all(protocol.ReachListen(), ReachListening)
        served = self.serve()
        addresses = {
            name: address_of(answer.network.interfaces, self._variables.get(self._hosts[name], {}))
            for name, answer in heard.items()
        }
        names = [name for name in self._hosts if name in served and name in heard]
        peers = {name: _peers(name, names) for name in names}
        wanted: dict[str, list[list[Any]]] = {
            source: [
                [f"{RANKS} {target}", addresses[target], heard[target].samples[0], _BULK_BYTES]
                for target in targets
                if addresses[target]
            ]
            for source, targets in peers.items()
        }
        self.probe(wanted, [], _LIMITS_S, self._take, lambda _: False)
        tries = 0
        while tries < _MORE_TRIES and slow_paths(self._paths.values(), share=_DOUBTFUL_SHARE):
            self.probe(wanted, [], _LIMITS_S, self._take, lambda _: False)
            tries += 1
        self.ask_all(protocol.ReachEnd(), protocol.ReachEnded)
        return {
            host: NodePaths(
                network=heard[name].network if name in heard else None,
                address=addresses.get(name, ""),
                peers=tuple(self._hosts[peer] for peer in peers.get(name, ())),
                paths=tuple(path for (source, _), path in self._paths.items() if source == name),
                silent=name not in peers,
            )
            for name, host in self._hosts.items()
        }

    def _take(self, node: Node, result: ProbeResult | LookUp) -> None:
        if isinstance(result, LookUp):
            return
        purpose, _, target = result.key.partition(" ")
        if target in self._hosts:
            source, target = self._hosts[node.name], self._hosts[target]
            path = NetworkPath(source=source, target=target, purpose=purpose, probe=result)
            first = self._paths.setdefault((node.name, result.key), path)
            if first is not path and result.bulk_s and first.probe.bulk_s:
                best = replace(first.probe, bulk_s=min(result.bulk_s, first.probe.bulk_s))
                self._paths[node.name, result.key] = replace(first, probe=best)


def _peers(source: str, names: list[str]) -> list[str]:
    if len(names) <= _ALL_PAIRS:
        return [name for name in names if name != source]
    at = names.index(source)
    return [names[(at + 1) % len(names)], names[at - 1]]


def judge(by_host: Mapping[str, NodePaths]) -> list[Finding]:
    """Judge the paths between all nodes, with the criteria of ports and gpu-test. Pure."""
    test = PathTest(
        hosts={host: host for host in by_host},
        networks={host: own.network for host, own in by_host.items() if own.network is not None},
        addresses={host: own.address for host, own in by_host.items()},
        paths=[path for own in by_host.values() for path in own.paths],
        silent=tuple(host for host, own in by_host.items() if own.silent),
    )
    lost = set(test.silent)
    test.paths = [path for path in test.paths if not {path.source, path.target} & lost]
    case = Case(command=COMMAND, test=test, head=next(iter(by_host), ""))
    return [*path_findings(case), *slow_links(case), *_untested(by_host)]


def _untested(by_host: Mapping[str, NodePaths]) -> list[Finding]:
    tried = {(path.source, path.target) for own in by_host.values() for path in own.paths}
    left = [(host, peer) for host, own in by_host.items() for peer in own.peers if (host, peer) not in tried]
    if not left:
        return []
    hosts = tuple(dict.fromkeys(host for edge in left for host in edge))
    found = finding_about(symptom("paths-untested", paths=counted(len(left), "path"), hosts=fold_within(hosts, 40)), ())
    return [replace(found, witnesses=Witnesses(hosts=hosts))]
