"""core-bt from its request to its report: what every node is asked, and how its answer is judged and shown."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag import runner
from distdiag.cluster.start_fleet import Agent
from distdiag.commands.core_bt.collect import NodeCores
from distdiag.commands.core_bt.diagnose import diagnose
from distdiag.commands.core_bt.model import COMMAND, Request
from distdiag.commands.core_bt.view import core_bt_view
from distdiag.errors import DistdiagError
from distdiag.runner import Asks, Question, Subcommand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.gathered import Gathered
    from distdiag.output import Progress

_SPARE_S = 30.0
_CORES_AT_LEAST = 4
_AGENT = Agent(collect="distdiag.commands.core_bt.collect", facts=NodeCores)


def _collect(request: Request, progress: Progress) -> Gathered[NodeCores]:
    question = Question(
        part=NodeCores, plan=lambda hosts, local: _plan(request, hosts, local=local), join=_join, doing="reading"
    )
    return runner.gather(request.cluster, _AGENT, question, progress)


def _check_working_directory() -> None:
    """Paths are meant from there, and it is searched for cores."""
    try:
        os.getcwd()
    except OSError as error:
        raise DistdiagError(f"the working directory: {error.strerror}", hint="cd to one that is there") from error


def _plan(request: Request, hosts: Mapping[str, NodeCores], *, local: bool) -> Asks:
    if local:
        _check_working_directory()
    timeout_s = _SPARE_S + 2 * request.timeout_s * max(_CORES_AT_LEAST, len(request.paths))
    return Asks(by_host=dict.fromkeys(hosts, _ask(request, local=local)), timeout_s=timeout_s)


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


def _join(host: str, first: NodeCores, parts: Sequence[NodeCores], why: str) -> NodeCores | None:
    return replace(parts[-1], host=host) if parts else None


SUBCOMMAND = Subcommand(
    name=COMMAND,
    request=Request,
    facts=NodeCores,
    collect=_collect,
    diagnose=diagnose,
    view=lambda request, _, report: core_bt_view(report, all_threads=request.all_threads),
    explain=lambda request: runner.explain(request.cluster, _AGENT),
    shown_as_typed=("all_threads",),
)
