"""collect -> diagnose, for core-bt."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag import deliver
from distdiag.cluster import access
from distdiag.cluster.access import Agent, open_fleet
from distdiag.cluster.node import decode
from distdiag.cluster.targets import describe, find_targets
from distdiag.errors import DistdiagError

if TYPE_CHECKING:
    from distdiag.cluster.fleet import Fleet
    from distdiag.commands.core_bt.collect import NodeCores
    from distdiag.commands.core_bt.model import Request
    from distdiag.commands.core_bt.result import CoreBt
    from distdiag.deliver import Progress
    from distdiag.report import Report

_SPARE_S = 30.0
_CORES_AT_LEAST = 4


def check(request: Request, progress: Progress) -> Report[CoreBt]:
    """Look at cores here or on all hosts that are asked for.

    Raises:
        UsageError: the request contradicts itself.
        DistdiagError: this machine's node side failed.
    """
    targets = find_targets(request.cluster, os.environ)
    nodes: list[NodeCores] = []
    missing: dict[str, str] = {}
    local = targets.launcher is None
    if local:
        _check_working_directory()
    with open_fleet(request.cluster, targets, _AGENT) as fleet:
        interrupted = False
        try:
            if not local:
                progress.news(f"reaching {describe(targets)}")
            fleet.gather(lambda now: progress.now(f"{len(now.up)} of {len(now.hosts)} hosts reached"))
            _ask_all(fleet, request, progress, (nodes, missing), local=local)
        except KeyboardInterrupt:
            interrupted = True
        from distdiag.commands.core_bt.diagnose import diagnose

        rows = () if local else fleet.rows
        return diagnose(request, nodes, (rows, dict(fleet.refusals), missing), interrupted=interrupted)


def explain(request: Request) -> list[str]:
    """Write how the hosts would be reached."""
    return access.explain(request.cluster, find_targets(request.cluster, os.environ), _AGENT)


_AGENT = Agent(collect="distdiag.commands.core_bt.collect")


def _check_working_directory() -> None:
    """Paths are meant from there, and it is searched for cores."""
    try:
        os.getcwd()
    except OSError as error:
        raise DistdiagError(f"the working directory: {error.strerror}", hint="cd to one that is there") from error


def _ask(request: Request, *, local: bool) -> dict[str, Any]:
    return {
        "paths": [os.path.abspath(path) if local else path for path in request.paths],
        "exe": os.path.realpath(request.exe) if local and request.exe else request.exe,
        "gdb": request.gdb,
        "all": request.all_threads,
        "timeout_s": request.timeout_s,
        "pid": request.pid,
        "setup": request.setup,
    }


def _ask_all(
    fleet: Fleet,
    request: Request,
    progress: Progress,
    told: tuple[list[NodeCores], dict[str, str]],
    *,
    local: bool,
) -> None:
    nodes, missing = told
    busy = {node.name: node for node in fleet.machines(local=local)}
    for node in busy.values():
        node.order("collect", ask=_ask(request, local=local))
    progress.news("reading" if local else f"reading on {len(busy)} hosts")
    # What judges and draws is loaded while they read.
    import distdiag.commands.core_bt.diagnose
    import distdiag.commands.core_bt.view  # noqa: F401
    from distdiag.commands.core_bt.collect import NodeCores
    from distdiag.knowledge import crashes

    deliver.load()
    crashes.load()
    timeout_s = _SPARE_S + 2 * request.timeout_s * max(_CORES_AT_LEAST, len(request.paths))
    for node, facts, why in fleet.more_from(list(busy.values()), timeout_s, lambda names: None):
        if why:
            missing[node.host] = why
        elif facts is not None:
            try:
                cores = decode(facts, NodeCores, node.host)
                nodes.append(cores if local else replace(cores, host=node.host))
            except DistdiagError as error:
                missing[node.host] = str(error)
