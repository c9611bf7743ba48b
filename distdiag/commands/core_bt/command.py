"""What you type for core-bt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.core_bt.model import Request
from distdiag.errors import UsageError
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
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
    text: Annotated[
        str, typer.Option(metavar="FILE", help="Write a short text for an issue, without what looks like a secret.")
    ] = "",
    save: SaveOpt = "",
    from_: FromOpt = None,
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
    from distdiag import runner
    from distdiag.commands.core_bt.check import SUBCOMMAND

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

    def write_text(report: Report[CoreBt]) -> Report[CoreBt]:
        from distdiag.commands.core_bt.view import lines_of
        from distdiag.files import write_whole

        if text:
            write_whole(text, "\n".join([report.summary, "", *lines_of(report)]).encode())
        return report

    options = runner.Options(as_json, strict, save, from_, cluster.explain)
    runner.run(SUBCOMMAND, asked, options, write_text)
