"""What you type for cuda-env."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.cuda_env.model import COMMAND, Goal, Request
from distdiag.options import JsonOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.cuda_env.result import CudaEnv
    from distdiag.report import Report


@on_hosts
def cuda_env(
    for_: Annotated[
        Goal, typer.Option("--for", help="What must work: running CUDA programs, building extensions, or both.")
    ] = Goal.ALL,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Only these findings: an id or its beginning; can be repeated."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="ID[=REASON]", help="Leave a finding out, and say why; can be repeated.")
    ] = None,
    explain: Annotated[
        str, typer.Option(metavar="LOGFILE", help="Say what went wrong in the log of a build or a run; - is stdin.")
    ] = "",
    export: Annotated[
        bool, typer.Option("--export", help='Print only the variables to set: eval "$(distdiag cuda-env --export)".')
    ] = False,
    prebuild: Annotated[
        bool, typer.Option("--prebuild", help="Print the commands that build DeepSpeed for these nodes.")
    ] = False,
    ops: Annotated[str, typer.Option(metavar="LIST", help="DeepSpeed's ops for --prebuild: cpu_adam,aio or all.")] = "",
    timeout: Annotated[
        float,
        typer.Option(
            min=1.0, max=3600.0, metavar="SECONDS", help="Longest time for the driver, and for importing torch."
        ),
    ] = 20.0,
    save: Annotated[str, typer.Option(metavar="DIR", help="Keep the facts, a file for each host.")] = "",
    from_: Annotated[
        list[str] | None, typer.Option("--from", metavar="PATH", help="Judge facts that --save wrote; can be repeated.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show all evidence, and what was found elsewhere.")
    ] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Say why CUDA does not run or build here, and the line that mends it on this machine.

    It examines the environment of --python, or of the Python that distdiag runs in. Nothing is changed.

    Exit status: 0 all is well (warnings too), 1 something will break, 2 wrong usage, 3 it cannot be known,
    130 interrupted.
    """
    from distdiag.deliver import Output, deliver, deliver_lines, fail
    from distdiag.errors import UsageError

    def asked() -> Request:
        from distdiag.commands.cuda_env.catalogue import chosen

        pairs = [one.partition("=") for one in ignore or ()]
        return Request(
            cluster=cluster,
            goal=for_,
            python=cluster.python,
            only=tuple(chosen(one) for one in only or ()),
            ignore=tuple((chosen(id_), reason.strip()) for id_, _, reason in pairs),
            timeout_s=timeout,
            verbose=verbose,
            program=called_as(),
        )

    def run() -> Report[CudaEnv]:
        from distdiag.commands.cuda_env import keep
        from distdiag.deliver import is_done_by_another

        if not from_ and is_done_by_another():
            raise typer.Exit(0)
        return keep.answer(asked(), keep.Files(save=save, saved=tuple(from_ or ()), log=explain))

    def lines() -> list[str]:
        from distdiag.commands.cuda_env import keep

        if cluster.explain:
            return keep.transport(asked())
        if prebuild:
            return keep.prebuild(asked(), keep.Files(save=save, saved=tuple(from_ or ())), ops)
        return keep.exports(run())

    def view(report: Report[CudaEnv]) -> Iterable[RenderableType]:
        from distdiag.commands.cuda_env.view import cuda_env_view

        return cuda_env_view(report, asked())

    if explain and (prebuild or export or only):
        fail(
            COMMAND,
            UsageError("--explain tells what a log says", hint="leave out --prebuild, --export and --only"),
            as_json=as_json,
        )
    if cluster.explain or prebuild or export:
        deliver_lines(COMMAND, lines, as_json=as_json)
    deliver(COMMAND, run, view, Output(json=as_json, strict=strict, findings_in_view=True))
