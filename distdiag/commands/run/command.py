"""The command line of run."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from distdiag.options import FromOpt, JsonOpt, StrictOpt, called_as, parse_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.commands.run.supervise import Plan
    from distdiag.commands.run.switches import Switches
    from distdiag.commands.run.types import NodeRun, Request, Run
    from distdiag.runner import Subcommand


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- LAUNCHER ARGS...", help="The command that starts the job."),
    ] = None,
    save: Annotated[
        str, typer.Option("--save", metavar="DIR", help="Keep the output of each rank and all facts there.")
    ] = "",
    stall: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="If no rank writes anything for this long, diagnose with hang; 0: never."
        ),
    ] = 300.0,
    on_stall: Annotated[str, typer.Option(metavar="report|kill", help="What to do when the job hangs.")] = "report",
    pictures: Annotated[
        bool,
        typer.Option(help="Capture stacks when a rank dies, and hang before forwarding SIGTERM."),
    ] = True,
    sync: Annotated[
        bool, typer.Option("--sync", help="CUDA_LAUNCH_BLOCKING=1: errors at the right line. Slow; hides races.")
    ] = False,
    gpus: Annotated[str, typer.Option(metavar="none|0,2", help="GPUs visible to the ranks.")] = "",
    nccl_debug: Annotated[
        str, typer.Option(metavar="SUBSYS", help="Log NCCL's INIT,NET,COLL... to a file per process.")
    ] = "",
    cores: Annotated[bool, typer.Option("--cores", help="Raise the limit of core dumps to the hard limit.")] = False,
    recorder: Annotated[
        bool, typer.Option("--recorder", help="Turn on PyTorch's flight recorder; dump on timeout and on request.")
    ] = False,
    check_collectives: Annotated[
        bool, typer.Option("--check-collectives", help="TORCH_DISTRIBUTED_DEBUG=DETAIL: find mismatches. Slow.")
    ] = False,
    trace_py: Annotated[
        bool, typer.Option("--trace-py", help="Keep each thread's last Python lines (trace py). Slow.")
    ] = False,
    overflow: Annotated[
        bool, typer.Option("--overflow", help="Stop at the first nan or inf, and report its module (overflow).")
    ] = False,
    sanitizer: Annotated[
        str,
        typer.Option(metavar="TOOL", help="Run each rank under compute-sanitizer: memcheck, racecheck... Very slow."),
    ] = "",
    rank: Annotated[
        str, typer.Option(metavar="RANKS", help="Apply the switches above to these ranks only: 3, or 0,4-7.")
    ] = "",
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Label each line [host:rank]; lines of ranks are never torn.")
    ] = False,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Print the variables set by these switches, and exit.")
    ] = False,
    from_: FromOpt = None,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Start a job as usual; report which rank failed first, why, and where the others were.

    stdout, stderr, stdin, signals and the exit status are the job's own; the verdict follows on stderr if it fails.
    Under srun, start it on every node with the same --save DIR; `distdiag run --from DIR` then reports on all nodes.

    Exit status: the job's own.

    \b
    Examples:
      distdiag run -- torchrun --nproc-per-node 8 train.py
      distdiag run --stall 600 --on-stall kill --save run42 -- torchrun train.py
      distdiag run --sync --recorder --rank 3 -- torchrun train.py
    """
    from distdiag.commands.run.sanitizer import TOOLS
    from distdiag.commands.run.switches import Switches, parse, parse_subsystems
    from distdiag.errors import UsageError
    from distdiag.output import fail

    if from_:
        _judge_again(from_, as_json=as_json, strict=strict)
    try:
        if on_stall not in ("report", "kill"):
            raise UsageError(f"--on-stall {on_stall!r} is not known", hint="write --on-stall report or kill")
        if as_json and not print_env:
            raise UsageError("--json: stdout is the job's", hint="--save DIR, and then: distdiag run --json --from DIR")
        switches = Switches(
            sync=sync,
            gpus=parse(gpus, r"none|[\w.,-]+", "--gpus", "use --gpus none, or --gpus 0,2"),
            nccl_debug=parse_subsystems(nccl_debug),
            cores=cores,
            recorder=recorder,
            check_collectives=check_collectives,
            trace_py=trace_py,
            overflow=overflow,
            sanitizer=parse(sanitizer, "|".join(TOOLS), "--sanitizer", f"use {', '.join(TOOLS)}"),
            ranks=parse_ranks([rank]) if rank else None,
        )
        if print_env:
            _print_variables(switches, save, as_json=as_json)
        if not command:
            raise UsageError("no command given", hint=f"{called_as()} run -- torchrun --nproc-per-node 8 train.py")
        from distdiag.commands.run.supervise import Plan

        plan = functools.partial(Plan, stall_s=stall, on_stall=on_stall, pictures=pictures, prefix=prefix)
        _run(command, switches, save, plan)
    except UsageError as error:
        fail("run", error, as_json=as_json)


def _print_variables(switches: Switches, save: str, *, as_json: bool) -> NoReturn:
    import shlex

    from distdiag.commands.run.switches import variables
    from distdiag.output import deliver_lines
    from distdiag.users_python import installed

    chosen = variables(switches, os.path.abspath(save) if save else "$DIR", installed("torch"))
    of_ranks = f" (ranks {','.join(map(str, switches.ranks))})" if switches.ranks is not None else ""

    def lines() -> list[str]:
        nccl = installed("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
        beside = [("PyTorch", installed("torch")), ("NCCL", nccl)]
        names = [f"{name} {version[0]}.{version[1]}" if version else f"no {name}" for name, version in beside]
        return [f"# next to this Python: {', '.join(names)}"] + [
            f"export {each.name}={shlex.quote(each.value)}  # {each.why}{of_ranks}" for each in chosen
        ]

    deliver_lines("run", lines, as_json=as_json)


def _run(command: list[str], switches: Switches, save: str, plan: Callable[..., Plan]) -> NoReturn:
    import glob

    from distdiag import child_job
    from distdiag.commands.run import sanitizer, supervise
    from distdiag.commands.run.switches import LINES_FOLDER, environment, variables
    from distdiag.facts.private_files import temporary_folder
    from distdiag.files import make_folder
    from distdiag.output import say
    from distdiag.training.recorded_output import VARIABLE
    from distdiag.users_python import installed

    program = called_as()
    argv = child_job.argv_of(command, example=f"{program} run -- torchrun train.py")
    folder = os.path.abspath(save) if save else tempfile.mkdtemp(prefix="", dir=temporary_folder("run"))
    make_folder("--save", folder)
    child_job.say_python(argv, command, say)
    chosen = variables(switches, folder, installed("torch"))
    words = sanitizer.words(switches.sanitizer, folder)
    env, asked = environment(chosen, switches, words, child_job.watched(VARIABLE, ""))
    node = supervise.run(plan(argv=argv, env=env, asked=asked, folder=folder, cores=switches.cores), say=say)
    if switches.recorder and not glob.glob(os.path.join(glob.escape(folder), "recorder_*")):
        say("distdiag run: --recorder: no dump and no pipe: PyTorch records NCCL's collectives only")
    wrote = switches.nccl_debug or switches.recorder or switches.trace_py or switches.sanitizer
    _report(node, program, folder, keep=bool(save or wrote))
    if switches.sanitizer and (clean := sanitizer.clean(node.sanitizer, switches.sanitizer)):
        say(f"distdiag run: {clean}")
    if wrote and not save:
        say(f"distdiag run: what the switches recorded is in {folder}")
    if switches.trace_py and os.path.isdir(os.path.join(folder, LINES_FOLDER)):
        say(f"distdiag run: the last lines of each thread: {program} trace show {os.path.join(folder, LINES_FOLDER)}")
    child_job.leave_like(node.status or 0)


def _report(node: NodeRun, program: str, folder: str, *, keep: bool) -> None:
    """Save the facts; write the verdict to stderr unless the job is fine."""
    import json
    import shutil

    from distdiag.cluster.targets import Cluster
    from distdiag.commands.run.diagnose import diagnose
    from distdiag.commands.run.types import COMMAND, Request
    from distdiag.errors import DistdiagError
    from distdiag.files import write_whole
    from distdiag.output import Output, deliver, document, say
    from distdiag.report import Verdict
    from distdiag.saved_facts import Gathered, save

    request = Request(program=program, cluster=Cluster(), argv=node.argv, folder=folder)
    gathered = Gathered(facts=[node])
    report = diagnose(request, gathered)
    is_fine = report.verdict is Verdict.OK
    if is_fine and not keep:
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        save(folder, COMMAND, request, gathered)
        write_whole(os.path.join(folder, f"report.{node.host}.json"), json.dumps(document(report), indent=2).encode())
    except DistdiagError as error:
        say(f"distdiag run: {error}")
    if not is_fine:
        from distdiag.commands.run.view import run_view

        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(typer.Exit):  # stdout is the job's
            deliver(COMMAND, lambda: report, lambda made: run_view(made.data, program), Output())


def _judge_again(paths: list[str], *, as_json: bool, strict: bool) -> NoReturn:
    from distdiag import runner
    from distdiag.cluster.targets import Cluster
    from distdiag.commands.run.types import Request

    def request() -> Request:
        return Request(program=called_as(), cluster=Cluster())

    runner.run(subcommand(), request, runner.Options(as_json, strict, "", paths))


def subcommand() -> Subcommand[Request, NodeRun, Run]:
    """Return the Subcommand that judges saved facts."""
    from distdiag import runner
    from distdiag.commands.run.diagnose import diagnose
    from distdiag.commands.run.types import COMMAND, NodeRun, Request
    from distdiag.commands.run.view import run_view
    from distdiag.errors import UsageError

    def nothing(*_: object) -> NoReturn:
        raise UsageError("no command given", hint="distdiag run -- torchrun train.py")

    return runner.Subcommand(
        name=COMMAND,
        request=Request,
        facts=NodeRun,
        collect=nothing,
        diagnose=diagnose,
        view=lambda request, _, report: run_view(report.data, request.program),
    )
