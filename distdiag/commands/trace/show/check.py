"""collect -> diagnose, for trace show."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag.cluster.access import Agent, open_fleet
from distdiag.cluster.node import decode
from distdiag.cluster.targets import find_targets
from distdiag.commands.trace import nodes as all_nodes
from distdiag.commands.trace.show.collect import NodeLines
from distdiag.commands.trace.show.diagnose import diagnose
from distdiag.commands.trace.show.runs import find_runs, newest
from distdiag.commands.trace.show.standing import stand_of
from distdiag.commands.trace.show.words import clock, does
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.targets import Targets
    from distdiag.commands.trace.show.model import Request
    from distdiag.commands.trace.show.result import TraceShow
    from distdiag.deliver import Progress
    from distdiag.report import Report

_AGENT = Agent(collect="distdiag.commands.trace.show.collect")
_PATIENCE_S = 60.0
_FOLLOW_S = 0.5
_LINES_FOR_PLACE = 5


def check(request: Request, progress: Progress) -> tuple[Report[TraceShow], list[NodeLines]]:
    """Read what was kept, here or on all hosts that are asked for; the facts are given back for the view.

    Raises:
        UsageError: the request contradicts itself.
        DistdiagError: this machine's node side failed.
    """
    targets = find_targets(request.cluster, os.environ)
    nodes: list[NodeLines] = []
    missing: dict[str, str] = {}
    with open_fleet(request.cluster, targets, _AGENT) as fleet:
        interrupted = False
        try:
            all_nodes.reach(fleet, targets, progress)
            nodes, missing = _read(fleet, targets, request)
        except KeyboardInterrupt:
            interrupted = True
        rows = () if targets.launcher is None else fleet.rows
        report = diagnose(request, nodes, (rows, dict(fleet.refusals), missing), interrupted=interrupted)
    return report, nodes


def follow(request: Request, progress: Progress, tell: Callable[[str], None]) -> None:
    """Tell each rank's last line whenever it is another one, until all have ended. Ctrl-C comes out of here.

    Raises:
        DistdiagError: this machine's node side failed.
    """
    targets = find_targets(request.cluster, os.environ)
    told: dict[tuple[str, int], tuple[object, ...]] = {}
    with open_fleet(request.cluster, targets, _AGENT) as fleet:
        all_nodes.reach(fleet, targets, progress)
        while True:
            nodes, _ = _read(fleet, targets, request)
            states = list(_news(nodes, told, tell))
            if states and "running" not in states:
                return
            time.sleep(_FOLLOW_S)


def explain(request: Request) -> list[str]:
    """Write how the hosts would be reached."""
    return all_nodes.explain(request.cluster, _AGENT)


def _news(
    nodes: list[NodeLines], told: dict[tuple[str, int], tuple[object, ...]], tell: Callable[[str], None]
) -> Iterator[str]:
    for run in newest(find_runs(nodes)):
        for member in run.members:
            stand = stand_of(member)
            line = stand.user or stand.library
            process = member.process
            if line is not None:
                place = (line.file, line.line, process.state, line.at_s)
                if told.get((member.host, process.pid)) != place:
                    told[member.host, process.pid] = place
                    rank = f"rank {member.rank}" if member.rank is not None else f"pid {process.pid}"
                    state = "" if process.state == "running" else f" ({process.state})"
                    tell(f"{clock(line.at_s)}  {rank}  {does(stand)}{state}")
            yield process.state


def _read(fleet: Fleet, targets: Targets, request: Request) -> tuple[list[NodeLines], dict[str, str]]:
    local = targets.launcher is None
    busy = list(fleet.machines(local=local))
    for node in busy:
        node.order("collect", ask=_ask(request, local=local))
    nodes: list[NodeLines] = []
    missing: dict[str, str] = {}
    for node, facts, why in fleet.more_from(busy, _PATIENCE_S, lambda names: None):
        if why:
            missing[node.host] = why
        elif facts is not None:
            try:
                lines = decode(facts, NodeLines, node.host)
            except DistdiagError as error:
                missing[node.host] = str(error)
            else:
                nodes.append(lines if local else replace(lines, host=node.host))
    return nodes, missing


def _ask(request: Request, *, local: bool) -> dict[str, Any]:
    paths = [os.path.abspath(path) if local else path for path in request.paths]
    # Who is where is also told by the library lines behind the last one of the user's, however few are to be shown.
    return {"paths": paths, "last": max(request.last, _LINES_FOR_PLACE), "grep": request.grep, "count": request.count}
