"""collect -> diagnose, for cuda-env: all nodes look at themselves at the same time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distdiag.cluster import access
from distdiag.cluster.access import Agent, open_fleet
from distdiag.cluster.node import decode
from distdiag.cluster.targets import describe, find_targets
from distdiag.commands.cuda_env.collect import CudaFacts
from distdiag.commands.cuda_env.diagnose import Reached
from distdiag.commands.cuda_env.model import Goal
from distdiag.errors import DistdiagError, UsageError

if TYPE_CHECKING:
    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.cluster.targets import Targets
    from distdiag.commands.cuda_env.model import Request
    from distdiag.deliver import Progress

_SPARE_S = 20.0


def look(request: Request, progress: Progress) -> tuple[list[CudaFacts], Reached]:
    """Take the facts of this node, or of all nodes that are asked for.

    Raises:
        UsageError: the options contradict each other, or there is no such interpreter.
        DistdiagError: the node side failed on this machine.
    """
    targets = find_targets(request.cluster, os.environ)
    with open_fleet(request.cluster, targets, _agent()) as fleet:
        if targets.launcher is not None:
            progress.news(f"reaching {describe(targets)}")
        told = _Told()
        interrupted = False
        try:
            fleet.gather(lambda now: progress.now(f"{len(now.up)} of {len(now.hosts)} hosts reached"))
            _ask_all(fleet, targets, request, progress, told)
        except KeyboardInterrupt:
            if not told.nodes:
                raise
            interrupted = True
        rows = () if targets.launcher is None else fleet.rows
        reached = Reached(rows=rows, refusals=dict(fleet.refusals), missing=told.missing, interrupted=interrupted)
        order = [host.name for host in targets.hosts]
        return [told.nodes[name] for name in sorted(told.nodes, key=order.index)], reached


def explain(request: Request) -> list[str]:
    """Write how the hosts would be reached."""
    return access.explain(request.cluster, find_targets(request.cluster, os.environ), _agent())


def _agent() -> Agent:
    folder = "distdiag.commands.cuda_env"
    return Agent(collect=f"{folder}.collect", carries=(f"{folder}.ask_torch", "distdiag.node.cuda"))


def _ask(request: Request, targets: Targets) -> dict[str, object]:
    """Say what to look at. On other hosts the node side itself runs in the interpreter that --python names."""
    python = ""
    if targets.launcher is None and request.python:
        import shutil

        python = shutil.which(request.python) or ""
        if not python:
            raise UsageError(f"--python {request.python}: there is no such program", hint="name a Python interpreter")
        python = os.path.abspath(python)
    return {"goal": str(request.goal), "python": python, "timeout_s": request.timeout_s, "root": ""}


@dataclass
class _Told:
    """What came so far; who is interrupted keeps it."""

    nodes: dict[str, CudaFacts] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def _ask_all(fleet: Fleet, targets: Targets, request: Request, progress: Progress, told: _Told) -> None:
    ask = _ask(request, targets)
    local = targets.launcher is None
    fleet.machines(local=local)  # raises if this machine alone cannot be used
    # A machine under two names is looked at twice: behind each name may be another environment.
    busy = {node.name: node for node in fleet.up}
    for node in busy.values():
        node.order("collect", ask=ask)
    import distdiag.commands.cuda_env.judge  # noqa: F401 - loaded while the nodes have their hands full

    if not local:
        progress.news(f"looking at {len(busy)} host{'' if len(busy) == 1 else 's'}")
    timeout_s = _SPARE_S + 2 * request.timeout_s
    for node, facts, why in fleet.more_from(busy.values(), timeout_s, lambda names: _tell(told, names, progress)):
        if why:
            told.missing[node.host] = why
        elif facts is not None:
            _take(node, facts, told, local=local)


def _tell(told: _Told, names: list[str], progress: Progress) -> None:
    progress.now(f"{len(told.nodes)} hosts looked at; waiting for {', '.join(names[:4])}")


def _take(node: Node, told_facts: object, told: _Told, *, local: bool) -> None:
    """Keep the facts of a node, or why they are of no use."""
    try:
        facts = decode(told_facts, CudaFacts, node.host)
        from distdiag.commands.cuda_env.judge import sections_of

        sections_of(facts, Goal.ALL)
        told.nodes[node.name] = facts if local else replace(facts, host=node.host)
    except DistdiagError as error:
        told.missing[node.host] = str(error)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        told.missing[node.host] = f"its facts make no sense: {error!r}"
