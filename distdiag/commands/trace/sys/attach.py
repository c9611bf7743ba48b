"""trace sys on processes that run: attach strace on all nodes at the same time, wait, detach, judge."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.agent.protocol import Collect
from distdiag.cluster.node import NodeStage
from distdiag.commands.trace import ranks
from distdiag.commands.trace.nodes import NodeAnswer, answers_of, chosen_of, gather
from distdiag.commands.trace.sys.collect import Ask, Reply
from distdiag.commands.trace.sys.diagnose import diagnose
from distdiag.commands.trace.sys.types import COMMAND, MAX_LOG_BYTES, MAX_PROCESSES, Request
from distdiag.commands.trace.sys.view import trace_sys_view
from distdiag.commands.trace.sys.wording import log_name
from distdiag.diagnosis.wait_reasons import ENDED
from distdiag.diagnosis.wording import counted, format_duration
from distdiag.jobs.types import NodeStacks
from distdiag.runner import Asks, Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.commands.trace.sys.types import TraceSys
    from distdiag.jobs.collect import Processes
    from distdiag.output import Progress
    from distdiag.report import Report
    from distdiag.saved_facts import Gathered

_COLLECT = "distdiag.commands.trace.sys.collect"
_TURN_S = 0.1
_ATTACH_S, _EACH_S = 25.0, 1.0
_FINISH_S = 180.0
"""A log of MAX_LOG_BYTES takes about 20 s to read, on busy processors a multiple of that."""


class _Session:
    """Attaches strace to the selected processes and collects the logs. Ctrl-C ends the tracing, not the diagnosis."""

    def __init__(self, request: Request, progress: Progress) -> None:
        self._request, self._progress = request, progress
        self.missing: dict[str, str] = {}
        self.interrupted = False

    def plan(self, hosts: Mapping[str, Processes], local: bool) -> Asks:
        """Choose the processes to attach to."""
        request = self._request
        chosen = ranks.choose([NodeStacks(host, processes, ()) for host, processes in hosts.items()], request.wanted)
        ranks.refuse_several_jobs(chosen, request.wanted)
        names: dict[str, dict[str, str]] = {}
        for each in chosen:
            own = names.setdefault(each.host, {})
            if each.process is not None and each.process.state not in ENDED and len(own) < MAX_PROCESSES:
                own[str(each.process.pid)] = log_name(each.rank, each.host, each.process.pid)
        if count := sum(map(len, names.values())):
            self._progress.news(
                f"tracing {counted(count, 'process', 'processes')} for {format_duration(request.for_s)}: each system "
                "call takes 75-190 times as long meanwhile"
            )
        most = max(map(len, names.values()), default=0)
        folder = os.path.abspath(request.logs) if request.logs and local else request.logs
        asks = {
            host: Ask(
                pids=list(map(int, names.get(host, ()))),
                limit_bytes=MAX_LOG_BYTES,
                folder=folder,
                names=names.get(host, {}),
                near=[process.pid for process in processes.processes],
            )
            for host, processes in hosts.items()
        }
        return Asks(by_host=asks if most else {}, timeout_s=_ATTACH_S + _EACH_S * most)

    def finish(
        self, fleet: Fleet, nodes: Mapping[str, Node], answers: Sequence[NodeAnswer[Reply]]
    ) -> list[NodeAnswer[Reply]]:
        """Wait, detach, and add the traces."""
        parts = [(answer.host, part) for answer in answers for reply in answer.replies for part in reply.attached]
        traced = {host: nodes[host] for host, part in parts if not part.why}
        if not traced:
            return list(answers)
        try:
            deadline = time.monotonic() + self._request.for_s
            while (left := deadline - time.monotonic()) > 0:
                self._progress.now(f"tracing, {left:.0f} s left")
                for _ in fleet.records(min(left, _TURN_S)):  # notices lost nodes
                    pass
        except KeyboardInterrupt:
            self.interrupted = True
        self._progress.news("detaching and reading the traces")
        for host in [host for host, node in traced.items() if node.stage is not NodeStage.UP]:
            self.missing[host] = "lost contact during tracing"
            del traced[host]
        for node in traced.values():
            node.order(Collect(ask=Ask(finish=True)))
        hosts = {node.name: host for host, node in traced.items()}
        seen: dict[str, list[Reply]] = {}
        for node, reply, why in fleet.more_from(traced.values(), Reply, _FINISH_S, lambda names: None):
            if reply is not None:
                seen.setdefault(hosts[node.name], []).append(reply)
            elif why:
                self.missing[hosts[node.name]] = why
        return [replace(answer, replies=(*answer.replies, *seen.get(answer.host, ()))) for answer in answers]


def _collect(request: Request, progress: Progress) -> Gathered[NodeAnswer[Reply]]:
    session = _Session(request, progress)
    gathered = gather(request, progress, _COLLECT, Reply, session.plan, session.finish)
    missing = {**gathered.missing, **session.missing}
    return replace(gathered, missing=missing, interrupted=gathered.interrupted or session.interrupted)


def _diagnose(request: Request, gathered: Gathered[NodeAnswer[Reply]]) -> Report[TraceSys]:
    answers = answers_of(gathered)
    return diagnose(request, answers, chosen_of(answers, request.wanted, f"{request.program} {COMMAND}"))


SUBCOMMAND: Subcommand[Request, NodeAnswer[Reply], TraceSys] = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodeAnswer[Reply],
    collect=_collect,
    diagnose=_diagnose,
    view=lambda _, __, report: trace_sys_view(report.data),
)
