"""The command line of cuda-env."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.commands.cuda_env.types import COMMAND, Goal, Request
from distdiag.options import FromOpt, JsonOpt, SaveOpt, StrictOpt, answer_as, called_as, on_hosts


@on_hosts
def cuda_env(
    ctx: typer.Context,
    for_: Annotated[
        Goal | None,
        typer.Option(
            "--goal",
            help="What to check: running CUDA programs, building extensions, or both. [default: all; build with --gpu]",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Show only these findings: an id or its prefix. Repeatable."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="ID[=REASON]", help="Ignore a finding, with an optional reason. Repeatable."),
    ] = None,
    explain: Annotated[
        str, typer.Option(metavar="LOGFILE", help="Explain the errors in the log of a build or a run; - reads stdin.")
    ] = "",
    export: Annotated[
        bool, typer.Option("--export", help='Print only the variables to set: eval "$(distdiag cuda-env --export)".')
    ] = False,
    prebuild: Annotated[
        bool, typer.Option("--prebuild", help="Print the commands to build DeepSpeed for these nodes.")
    ] = False,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help='Build for this GPU instead of the local GPUs: "RTX 3090", H100 or 8.6. Repeatable.'
        ),
    ] = None,
    ops: Annotated[
        str, typer.Option(metavar="LIST", help="DeepSpeed ops to build with --prebuild: cpu_adam,aio or all.")
    ] = "",
    read_timeout: Annotated[
        float,
        typer.Option(
            min=1.0, max=3600.0, metavar="SECONDS", help="Time limit for querying the driver, and for importing torch."
        ),
    ] = 20.0,
    save: SaveOpt = "",
    from_: FromOpt = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show all evidence, details and informational findings.")
    ] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Show why CUDA does not run or build here, and how to fix it on this machine.

    The environment is that of --python, else the active one, else distdiag's own. Nothing is changed.

    Exit status: 0 OK (perhaps with warnings), 1 something will break, 2 wrong usage, 3 unknown,
    130 interrupted.

    \b
    Examples:
      distdiag cuda-env --goal build          # can CUDA extensions be built here?
      distdiag cuda-env --hosts gpu[01-08]   # check eight nodes and compare them
      distdiag cuda-env --explain build.log  # find the cause in a failed build
    """
    from distdiag import runner
    from distdiag.commands.cuda_env.check import SUBCOMMAND, export_lines
    from distdiag.errors import UsageError
    from distdiag.output import Output, deliver, deliver_lines, fail

    def request() -> Request:
        from distdiag.commands.cuda_env.archs import capability
        from distdiag.commands.cuda_env.problems import checks
        from distdiag.diagnosis.finding_ids import chosen

        if gpu and for_ is Goal.RUN:
            raise UsageError(
                "--gpu names GPUs to build for, and --goal run builds nothing", hint="--goal build, or leave --gpu out"
            )
        # These GPUs are elsewhere, so running on this machine is not checked.
        usual = Goal.BUILD if gpu and not explain else Goal.ALL
        pairs = [text.partition("=") for text in ignore or ()]
        return Request(
            cluster=cluster,
            goal=for_ or usual,
            python=cluster.python,
            only=tuple(chosen(id_, COMMAND, checks()) for id_ in only or ()),
            ignore=tuple((chosen(id_, COMMAND, checks()), reason.strip()) for id_, _, reason in pairs),
            timeout_s=read_timeout,
            verbose=verbose,
            program=called_as(),
            gpus=tuple(capability(name) for name in gpu or ()),
        )

    options = runner.Options(as_json, strict, save, from_)
    if explain and (prebuild or export or only):
        fail(
            COMMAND,
            UsageError(
                "--explain cannot be combined with --prebuild, --export or --only", hint="run them one after the other"
            ),
            as_json=as_json,
        )
    if prebuild:
        from distdiag.commands.cuda_env.prebuild import build_commands

        deliver_lines(COMMAND, lambda: build_commands(request(), options, ops), as_json=as_json)
    if export:
        deliver_lines(COMMAND, lambda: export_lines(request(), options), as_json=as_json)
    if explain:
        from distdiag.commands.cuda_env.explain import judge_log
        from distdiag.commands.cuda_env.view import cuda_env_view
        from distdiag.files import log_text
        from distdiag.knowledge.logs import content

        try:
            log = log_text(explain)
        except UsageError as error:
            fail(COMMAND, error, as_json=as_json)
        if content(log[0]) == "job":
            flags = [*(["--json"] if as_json else []), *(["--strict"] if strict else [])]
            answer_as(ctx, ["logs", explain, *flags], log[0] if explain == "-" else None)
            return
        deliver(
            COMMAND,
            lambda: judge_log(request(), options, log),
            lambda report: cuda_env_view(report, request()),
            Output(json=as_json, strict=strict, findings_in_view=True),
        )
    runner.run(SUBCOMMAND, request, options)
