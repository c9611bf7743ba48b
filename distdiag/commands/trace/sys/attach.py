"""trace sys on processes that run: attach strace on all nodes at the same time, wait, detach, judge."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distdiag import runner
from distdiag.agent.protocol import Collect
from distdiag.cluster.node import NodeStage
from distdiag.cluster.start_fleet import open_fleet
from distdiag.cluster.targets import find_targets
from distdiag.commands.trace import ranks
from distdiag.commands.trace.nodes import NodeAnswer, answers_of, finder
from distdiag.commands.trace.sys.collect import Reply
from distdiag.commands.trace.sys.diagnose import diagnose
from distdiag.commands.trace.sys.types import COMMAND, MAX_LOG_BYTES, MAX_PROCESSES, Request
from distdiag.commands.trace.sys.view import trace_sys_view
from distdiag.commands.trace.sys.wording import format_duration, log_name
from distdiag.gathered import Gathered
from distdiag.jobs.types import NodeStacks
from distdiag.runner import Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.cluster.targets import Targets
    from distdiag.commands.trace.ranks import Chosen
    from distdiag.commands.trace.sys.types import TraceSys
    from distdiag.jobs.collect import Processes
    from distdiag.output import Progress
    from distdiag.report import Report

_COLLECT = "distdiag.commands.trace.sys.collect"
_TURN_S = 0.1
_ATTACH_S, _EACH_S = 25.0, 1.0
_FINISH_S = 180.0
"""Logs of MAX_LOG_BYTES are read in some 20 s, on a node whose processors are busy in a multiple of that."""
_DEAD = ("Z", "X", "")


def _collect(request: Request, progress: Progress) -> Gathered[NodeAnswer[Reply]]:
    targets = find_targets(request.cluster, os.environ)
    with open_fleet(request.cluster, targets, finder(_COLLECT, request.wanted)) as fleet:
        session = _Session(request, fleet, targets, progress)
        session.go()
        return Gathered(
            facts=[
                NodeAnswer(host=host, processes=processes, replies=tuple(session.replies.get(host, ())))
                for host, processes in session.processes.items()
            ],
            missing=session.missing,
            rows=() if targets.launcher is None else fleet.rows,
            refusals=dict(fleet.refusals),
            interrupted=session.interrupted,
        )


def _diagnose(request: Request, gathered: Gathered[NodeAnswer[Reply]]) -> Report[TraceSys]:
    answers = answers_of(gathered)
    return diagnose(request, answers, ranks.choose(answers.nodes, request.wanted))


@dataclass
class _Session:
    """From reaching the nodes to their last reply. Ctrl-C ends the tracing early; the trace until then is judged."""

    request: Request
    fleet: Fleet
    targets: Targets
    progress: Progress
    processes: dict[str, Processes] = field(default_factory=dict)
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    chosen: Sequence[Chosen] = ()
    _by_host: dict[str, Node] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)

    def go(self) -> None:
        runner.reach(self.fleet, self.targets, self.progress)
        local = self.targets.launcher is None
        self._by_host = runner.named(self.fleet.machines(local=local), local=local)
        self.processes = {host: node.told for host, node in self._by_host.items()}
        nodes = [NodeStacks(host, processes, ()) for host, processes in self.processes.items()]
        self.chosen = ranks.choose(nodes, self.request.wanted)
        if not self.chosen and not self.fleet.refusals:
            raise ranks.none_found(nodes, self.request.wanted, f"{self.request.program} trace sys")
        ranks.refuse_several_jobs(self.chosen, self.request.wanted)
        pids = _pids(self.chosen)
        if not pids:
            return
        self._warn(sum(map(len, pids.values())))
        requests = {host: self._request(host, pids.get(host, ())) for host in self._by_host}
        timeout_s = _ATTACH_S + _EACH_S * max(map(len, pids.values()))
        attaching = [self._order(host, ask) for host, ask in requests.items()]
        try:
            self._take(attaching, timeout_s)
            if any(not attached.why for parts in self.replies.values() for part in parts for attached in part.attached):
                self._wait(self.request.for_s)
        except KeyboardInterrupt:
            self.interrupted = True
            # A node that is still attaching has to finish that first.
            self._take([node for node in attaching if node.name in self._busy], timeout_s)
        self.progress.news("detaching and reading the traces")
        self._take([self._order(host, {"do": "finish"}) for host in pids if host in self._by_host], _FINISH_S)

    def _warn(self, count: int) -> None:
        what = "1 process" if count == 1 else f"{count} processes"
        self.progress.news(
            f"tracing {what} for {format_duration(self.request.for_s)}: each system call takes 75-190 times as "
            "long meanwhile"
        )

    def _request(self, host: str, pids: Sequence[int]) -> dict[str, Any]:
        ranks_by_pid = {
            chosen.process.pid: chosen.rank
            for chosen in self.chosen
            if chosen.process is not None and chosen.host == host
        }
        local = self.targets.launcher is None
        return {
            "do": "attach",
            "pids": list(pids),
            "only": list(self.request.only),
            "limit_bytes": MAX_LOG_BYTES,
            "folder": os.path.abspath(self.request.logs) if self.request.logs and local else self.request.logs,
            "names": {str(pid): log_name(ranks_by_pid[pid], host, pid) for pid in pids},
            "near": [process.pid for process in self.processes[host].processes],
        }

    def _order(self, host: str, ask: Mapping[str, Any]) -> Node:
        node = self._by_host[host]
        node.order(Collect(ask=ask))
        self._busy.add(node.name)
        return node

    def _take(self, nodes: Sequence[Node], timeout_s: float) -> None:
        """Collect all replies of nodes."""
        hosts = {node.name: host for host, node in self._by_host.items()}
        for node, facts, why in self.fleet.more_from(nodes, Reply, timeout_s, lambda names: None):
            host = hosts[node.name]
            if facts is not None:
                self.replies.setdefault(host, []).append(facts)
                continue
            self._busy.discard(node.name)
            if why:
                self.missing[host] = why
                del self._by_host[host]

    def _wait(self, seconds: float) -> None:
        """Wait, and record the hosts that are lost meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.progress.now(f"tracing, {left:.0f} s left")
            for _ in self.fleet.records(min(left, _TURN_S)):
                pass
            gone = [host for host, node in self._by_host.items() if node.stage is not NodeStage.UP]
            for host in gone:
                self.missing[host] = "lost contact during tracing"
                del self._by_host[host]


def _pids(chosen: Sequence[Chosen]) -> dict[str, list[int]]:
    """List the pids to attach to, by host, at most MAX_PROCESSES each."""
    found: dict[str, list[int]] = {}
    for choice in chosen:
        if choice.process is not None and choice.process.state not in _DEAD:
            found.setdefault(choice.host, []).append(choice.process.pid)
    return {host: pids[:MAX_PROCESSES] for host, pids in found.items()}


SUBCOMMAND: Subcommand[Request, NodeAnswer[Reply], TraceSys] = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodeAnswer[Reply],
    collect=_collect,
    diagnose=_diagnose,
    view=lambda _, __, report: trace_sys_view(report.data),
    explain=lambda request: runner.explain(request.cluster, finder(_COLLECT, request.wanted)),
)
