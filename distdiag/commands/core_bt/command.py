"""Command line of core-bt, and its way to a report."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.core_bt.types import COMMAND, Request, Threads
from distdiag.errors import DistdiagError, UsageError
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts, split_pids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distdiag.commands.core_bt.collect import Ask, NodeCores
    from distdiag.commands.core_bt.types import CoreBt
    from distdiag.runner import Asks, Subcommand

_SPARE_S = 30.0
_CORES_AT_LEAST = 4


@on_hosts
def core_bt(
    cores: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CORE|DIR]...",
            help="Core files (also .gz .xz .zst .lz4) or directories. [default: the newest core]",
        ),
    ] = None,
    exe: Annotated[str, typer.Option(metavar="PATH", help="The program that crashed. [default: from the core]")] = "",
    threads: Annotated[Threads, typer.Option(help="Which threads to show; equal stacks once.")] = Threads.CRASHED,
    check_setup: Annotated[
        bool,
        typer.Option("--check-setup", help="Check whether a crash of the ranks on this machine would leave a core."),
    ] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
    tool_timeout: Annotated[
        float, typer.Option(min=1.0, max=3600.0, metavar="SECONDS", help="Time limit for each tool and core.")
    ] = 60.0,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show what crashed and why: the signal and its meaning, the thread, its Python and C frames in one stack.

    Exit status: 0 no crash, 1 crash found, 2 wrong usage, 3 no readable core, 130 interrupted.

    \b
    Examples:
      distdiag core-bt                             # the newest core on this host
      distdiag core-bt core.4711 --threads all
      distdiag core-bt --check-setup               # would a crash leave a core?
    """
    from distdiag import runner
    from distdiag.cluster.targets import check_paths

    paths, pids = split_pids(cores or ())

    def request() -> Request:
        if pids:
            raise UsageError(f"{pids[0]} is no core", hint=f"a live process: distdiag pyspy-all --native {pids[0]}")
        if paths and check_setup:
            raise UsageError("CORE and --check-setup are mutually exclusive", hint="pass one of them")
        if not from_:
            check_paths(cluster, paths, hint="give a core file, or its folder")
        return Request(
            program=called_as(),
            cluster=cluster,
            paths=tuple(paths),
            exe=exe,
            all_threads=threads is Threads.ALL,
            setup=check_setup,
            timeout_s=tool_timeout,
        )

    options = runner.Options(as_json, strict, save, from_)
    runner.run(_subcommand(), request, options)


def _subcommand() -> Subcommand[Request, NodeCores, CoreBt]:
    from distdiag import runner
    from distdiag.cluster.start_fleet import Agent
    from distdiag.commands.core_bt.collect import NodeCores
    from distdiag.commands.core_bt.diagnose import diagnose
    from distdiag.commands.core_bt.view import core_bt_view

    agent = Agent(collect="distdiag.commands.core_bt.collect", facts=NodeCores)

    def question(request: Request) -> runner.Question[NodeCores, NodeCores, NodeCores]:
        def plan(hosts: Mapping[str, NodeCores], local: bool) -> Asks:
            return _plan(request, hosts, local=local)

        return runner.Question(
            part=NodeCores,
            plan=plan,
            join=_join,
            doing="checking the setup" if request.setup else "reading cores",
        )

    return runner.Subcommand(
        name=COMMAND,
        request=Request,
        facts=NodeCores,
        collect=lambda request, progress: runner.gather(request.cluster, agent, question(request), progress),
        diagnose=diagnose,
        view=lambda request, _, report: core_bt_view(report, all_threads=request.all_threads),
        shown_as_typed=("all_threads",),
    )


def _check_working_directory() -> None:
    """Relative paths and the search for cores depend on it."""
    try:
        os.getcwd()
    except OSError as error:
        raise DistdiagError(f"the working directory: {error.strerror}", hint="cd to an existing directory") from error


def _plan(request: Request, hosts: Mapping[str, NodeCores], *, local: bool) -> Asks:
    from distdiag.runner import Asks

    if local:
        _check_working_directory()
    timeout_s = _SPARE_S + 2 * request.timeout_s * max(_CORES_AT_LEAST, len(request.paths))
    return Asks(by_host=dict.fromkeys(hosts, _ask(request, local=local)), timeout_s=timeout_s)


def _ask(request: Request, *, local: bool) -> Ask:
    from distdiag.commands.core_bt.collect import Ask

    return Ask(
        paths=[os.path.abspath(path) if local else path for path in request.paths],
        exe=os.path.realpath(request.exe) if local and request.exe else request.exe,
        timeout_s=request.timeout_s,
        setup=request.setup,
    )


def _join(host: str, first: NodeCores, parts: Sequence[NodeCores], why: str) -> NodeCores | None:
    from dataclasses import replace

    return replace(parts[-1], host=host) if parts else None
