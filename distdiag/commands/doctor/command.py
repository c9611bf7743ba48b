"""Command line of doctor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.errors import UsageError
from distdiag.options import FromOpt, HtmlOpt, JsonOpt, SaveOpt, StrictOpt, called_as, on_hosts

if TYPE_CHECKING:
    from distdiag.commands.doctor.types import Request


@on_hosts
def doctor(
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Also check this folder on the nodes, e.g. for checkpoints. Repeatable."),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="Print one line, for a SLURM prolog or a health check of nodes.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Show only these findings: an id or its prefix. Repeatable.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="ID[=REASON]", help="Ignore a finding, with an optional reason. Repeatable."),
    ] = None,
    read_timeout: Annotated[
        float, typer.Option(min=2.0, max=600.0, metavar="SECONDS", help="Time limit for reading a node.")
    ] = 20.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the details and fixes of INFO findings too.")
    ] = False,
    save: SaveOpt = "",
    from_: FromOpt = None,
    html: HtmlOpt = "",
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Check whether the nodes are ready for a job, and find the node that differs from the others.

    Reads limits inside the launcher's step, disks, clocks, network, GPU health, versions and the kernel's log on all
    nodes at once. Nothing is changed, and no work is put on a GPU.

    Exit status: 0 fit, also with warnings, 1 not fit, 2 wrong usage, 3 unknown for some node, 130 interrupted.

    \b
    Examples:
      distdiag doctor                     # this machine, or all nodes of the job
      distdiag doctor --hosts node[1-64] --path /scratch
      distdiag doctor --slurm-job 4711    # with the limits inside its steps
      distdiag doctor --brief --hosts localhost    # for a prolog
    """
    from distdiag import runner
    from distdiag.commands.doctor.subcommand import SUBCOMMAND

    def request() -> Request:
        from distdiag.commands.doctor.types import COMMAND, Request
        from distdiag.diagnosis.finding_ids import checks, chosen

        if brief and as_json:
            raise UsageError("--brief and --json exclude each other", hint="--json has the line as its summary")
        if any(not folder.startswith("/") for folder in path or ()):
            raise UsageError("--path takes an absolute path: it is looked up on each node", hint="--path /scratch")
        pairs = [text.partition("=") for text in ignore or ()]
        return Request(
            program=called_as(),
            cluster=cluster,
            paths=tuple(path or ()),
            only=tuple(chosen(id_, COMMAND, checks(COMMAND)) for id_ in only or ()),
            ignore=tuple((chosen(id_, COMMAND, checks(COMMAND)), reason.strip()) for id_, _, reason in pairs),
            timeout_s=read_timeout,
            verbose=verbose,
        )

    options = runner.Options(as_json, strict, save, from_, brief=brief, html=html)
    runner.run(SUBCOMMAND, request, options)
