"""What you type for core-bt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.core_bt.model import COMMAND, Request
from distdiag.errors import UsageError
from distdiag.options import JsonOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.core_bt.result import CoreBt
    from distdiag.report import Report


@on_hosts
def core_bt(
    cores: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CORE|FOLDER]...", help="Cores, also .gz .xz .zst .lz4. [default: the newest]"),
    ] = None,
    exe: Annotated[
        str, typer.Option(metavar="PATH", help="The program that crashed. [default: as the core says]")
    ] = "",
    all_threads: Annotated[
        bool, typer.Option("--all-threads", help="Show the stacks of all threads, one for each that differs.")
    ] = False,
    gdb: Annotated[
        bool | None,
        typer.Option("--gdb/--no-gdb", help="Ask gdb, too. [default: where pystack lacks the thread that crashed]"),
    ] = None,
    pid: Annotated[
        int | None, typer.Option(min=1, metavar="PID", help="Look at a live process instead; it is left running.")
    ] = None,
    setup: Annotated[
        bool, typer.Option("--setup", help="Say whether this machine, and the ranks on it, can leave a core at all.")
    ] = False,
    save: Annotated[
        str, typer.Option(metavar="FILE", help="Keep a short text for an issue, without what looks like a secret.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=1.0, max=3600.0, metavar="SECONDS", help="Longest time for each tool and core.")
    ] = 60.0,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Tell what crashed: the signal and what it means, the thread, its Python and C frames in one stack, and why.

    Exit status: 0 nothing crashed, 1 a crash was found, 2 wrong usage, 3 no core, or none that can be read,
    130 interrupted.
    """
    from distdiag.deliver import Output, Progress, deliver, deliver_lines

    def asked() -> Request:
        if sum((bool(cores), pid is not None, setup)) > 1:
            raise UsageError("cores, --pid and --setup are three questions", hint="ask one of them")
        return Request(
            program=called_as(),
            cluster=cluster,
            paths=tuple(cores or ()),
            exe=exe,
            all_threads=all_threads,
            gdb=gdb,
            pid=pid,
            setup=setup,
            timeout_s=timeout,
        )

    def run() -> Report[CoreBt]:
        from distdiag.commands.core_bt.check import check
        from distdiag.commands.core_bt.view import lines_of
        from distdiag.deliver import is_done_by_another
        from distdiag.files import write_whole

        if is_done_by_another():
            raise typer.Exit(0)
        with Progress() as progress:
            report = check(asked(), progress)
        if save:
            write_whole(save, "\n".join([report.summary, "", *lines_of(report)]).encode())
        return report

    def view(report: Report[CoreBt]) -> Iterable[RenderableType]:
        from distdiag.commands.core_bt.view import core_bt_view

        return core_bt_view(report, all_threads=all_threads)

    def commands() -> list[str]:
        from distdiag.commands.core_bt.check import explain

        return explain(asked())

    if cluster.explain:
        deliver_lines(COMMAND, commands, as_json=as_json)
    deliver(COMMAND, run, view, Output(json=as_json, strict=strict))
