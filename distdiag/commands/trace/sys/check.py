"""collect -> diagnose, for trace sys: attach strace on all nodes at the same time, wait, detach, judge."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distdiag.cluster import bundle
from distdiag.cluster.access import open_fleet
from distdiag.cluster.node import NodeStage, decode
from distdiag.cluster.targets import find_targets
from distdiag.commands.trace import nodes as all_nodes
from distdiag.commands.trace import ranks
from distdiag.commands.trace.nodes import Answers
from distdiag.commands.trace.sys.choices import expression
from distdiag.commands.trace.sys.collect import Told, reader_text
from distdiag.commands.trace.sys.model import MAX_LOG_BYTES, MAX_PROCESSES, Request
from distdiag.commands.trace.sys.words import lasting, log_name
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.cluster.targets import Targets
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.sys.model import TraceSys
    from distdiag.deliver import Progress
    from distdiag.report import Report

_COLLECT = "distdiag.commands.trace.sys.collect"
_TURN_S = 0.1
_ATTACH_S, _EACH_S, _FINISH_S = 25.0, 1.0, 90.0
_DEAD = ("Z", "X", "")


def check(request: Request, progress: Progress) -> Report[TraceSys]:
    """Trace the processes that were asked for, here or on all nodes.

    Raises:
        UsageError: the options contradict each other.
        DistdiagError: there is no such process; or the node side failed on this machine.
    """
    targets = find_targets(request.cluster, os.environ)
    with open_fleet(request.cluster, targets, all_nodes.finder(_COLLECT, request.wanted)) as fleet:
        session = _Session(request, fleet, targets, progress)
        session.go()
        session.answers.rows = () if targets.launcher is None else fleet.rows
        session.answers.refusals = dict(fleet.refusals)
    from distdiag.commands.trace.sys.diagnose import diagnose

    return diagnose(request, session.answers, session.chosen)


def explain(request: Request) -> list[str]:
    """Write how the hosts would be reached."""
    return all_nodes.explain(request.cluster, all_nodes.finder(_COLLECT, request.wanted))


@dataclass
class _Session:
    """From reaching the nodes to the last word of them. Ctrl-C ends the tracing early, and what was seen is told."""

    request: Request
    fleet: Fleet
    targets: Targets
    progress: Progress
    answers: Answers[Told] = field(default_factory=Answers[Told])
    chosen: Sequence[Chosen] = ()
    _by_host: dict[str, Node] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)

    def go(self) -> None:
        all_nodes.reach(self.fleet, self.targets, self.progress)
        self._by_host = all_nodes.take_processes(self.fleet, self.targets, self.answers)
        self.chosen = ranks.choose(self.answers.nodes, self.request.wanted)
        if not self.chosen and not self.answers.refusals and not self.fleet.refusals:
            raise ranks.nobody(self.answers.nodes, self.request.wanted, f"{self.request.program} trace sys")
        pids = _pids(self.chosen)
        if not pids:
            return
        self._say_what_it_costs(sum(map(len, pids.values())))
        asks = {host: self._ask(host, pids.get(host, ())) for host in self._by_host}
        timeout_s = _ATTACH_S + _EACH_S * max(map(len, pids.values()))
        attaching = [self._order(host, ask) for host, ask in asks.items()]
        try:
            self._take(attaching, timeout_s)
            if any(not one.why for told in self.answers.told.values() for part in told for one in part.attached):
                self._wait(self.request.for_s)
        except KeyboardInterrupt:
            self.answers.interrupted = True
            # Who was still attaching has to come to the end of that first.
            self._take([node for node in attaching if node.name in self._busy], timeout_s)
        self.progress.news("detaching, and reading what was seen")
        ask = {"do": "finish", "reader": _reader()}
        self._take([self._order(host, ask) for host in pids if host in self._by_host], _FINISH_S)

    def _say_what_it_costs(self, count: int) -> None:
        what = "1 process" if count == 1 else f"{count} processes"
        self.progress.news(
            f"tracing {what} for {lasting(self.request.for_s)}: each of their system calls takes 75-190 times as long "
            "meanwhile"
        )

    def _ask(self, host: str, pids: Sequence[int]) -> dict[str, Any]:
        known = {one.process.pid: one.rank for one in self.chosen if one.process is not None and one.host == host}
        node = next(one for one in self.answers.nodes if one.host == host)
        local = self.targets.launcher is None
        return {
            "do": "attach",
            "pids": list(pids),
            "calls": expression(self.request.only),
            "limit_bytes": MAX_LOG_BYTES,
            "folder": os.path.abspath(self.request.save) if self.request.save and local else self.request.save,
            "names": {str(pid): log_name(known[pid], host, pid) for pid in pids},
            "near": [one.pid for one in node.processes.processes],
        }

    def _order(self, host: str, ask: Mapping[str, Any]) -> Node:
        node = self._by_host[host]
        node.order("collect", ask=ask)
        self._busy.add(node.name)
        return node

    def _take(self, nodes: Sequence[Node], timeout_s: float) -> None:
        """Take all that nodes have to tell."""
        hosts = {node.name: host for host, node in self._by_host.items()}
        for node, facts, why in self.fleet.more_from(nodes, timeout_s, lambda names: None):
            host = hosts[node.name]
            if why is None:
                try:
                    self.answers.told.setdefault(host, []).append(decode(facts, Told, host))
                except DistdiagError as error:
                    self.answers.missing[host] = str(error)
                continue
            self._busy.discard(node.name)
            if why:
                self.answers.missing[host] = why
                del self._by_host[host]

    def _wait(self, seconds: float) -> None:
        """Let time pass, and notice who goes away."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.progress.now(f"tracing, {left:.0f} s left")
            for _ in self.fleet.records(min(left, _TURN_S)):
                pass
            gone = [host for host, node in self._by_host.items() if node.stage is not NodeStage.UP]
            for host in gone:
                self.answers.missing[host] = "it went away while it was traced"
                del self._by_host[host]


def _reader() -> str:
    sources = bundle.sources("distdiag.node.strace.log")
    return reader_text({name: text for name, text in sources.items() if name.startswith("distdiag.node.strace.")})


def _pids(chosen: Sequence[Chosen]) -> dict[str, list[int]]:
    """List whom to attach to, by host; not more than a node can bear."""
    found: dict[str, list[int]] = {}
    for one in chosen:
        if one.process is not None and one.process.state not in _DEAD:
            found.setdefault(one.host, []).append(one.process.pid)
    return {host: pids[:MAX_PROCESSES] for host, pids in found.items()}
