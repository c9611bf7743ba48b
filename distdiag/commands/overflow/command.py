"""Command line of overflow. The job keeps its output; the report follows on stderr."""

from __future__ import annotations

import os
from difflib import get_close_matches
from shutil import which
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.errors import UsageError
from distdiag.options import JsonOpt, called_as, parse_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence


def overflow(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- SCRIPT ARGS...", help="A script, -m MODULE, or any program that starts Python."),
    ],
    trace: Annotated[
        str,
        typer.Option(
            "--trace-batches",
            metavar="BATCHES",
            help="Print all frames of these batches, counted from 0: 1,3 or 149-150.",
        ),
    ] = "",
    abort_after: Annotated[
        int | None, typer.Option(min=0, metavar="BATCH", help="Stop the job after this batch.")
    ] = None,
    frames: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Frames (module calls) to show at a detection.")
    ] = 21,
    full: Annotated[
        bool, typer.Option("--full", help="Read every tensor of every module: for forwards that cannot be replayed.")
    ] = False,
    grads: Annotated[
        str,
        typer.Option(
            metavar="each|step|off",
            help="When to check gradients: each as it is computed (finds the first bad gradient), before each "
            "step, or never.",
        ),
    ] = "each",
    ignore: Annotated[
        str, typer.Option(metavar="PATTERNS", help="Modules where NaN and Inf are expected: 'lm_head,*.mask:output'.")
    ] = "",
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Report the first detection and let the job continue.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, max=4096, metavar="N", help="Run the script as N ranks, under torchrun.")
    ] = None,
    save: Annotated[str, typer.Option(metavar="DIR", help="Save the frames there, for `overflow show DIR`.")] = "",
    as_json: JsonOpt = False,
) -> None:
    """Run a script and report where its first nan or inf appears: rank, batch, module and tensor.

    Models are found when they are called; nothing they compute changes. Under torchrun, srun or mpirun put
    `-m distdiag overflow --` before the script. `distdiag overflow show DIR` reads the frames that --save wrote.

    Exit status: 1 nan or inf detected, else that of the script; 3 no model was called. With --json, that of the
    verdict; the script's own is data.status.

    \b
    Examples:
      distdiag overflow -- train.py --epochs 1
      distdiag overflow --nproc 4 --save frames -- train.py
      torchrun --nproc-per-node 8 -m distdiag overflow -- train.py
    """
    from distdiag.commands.overflow import job
    from distdiag.output import fail
    from distdiag.training.overflow.session import Settings

    program = called_as()
    try:
        argv = parse_command(command, nproc, program)
        if grads not in ("each", "step", "off"):
            raise UsageError(f"--grads {grads!r}: unknown value", hint="use each, step or off")
        settings = Settings(
            folder="",
            max_frames_to_save=frames,
            trace_batch_nums=parse_numbers([trace] if trace.strip() else [], "--trace-batches", "batch", "batches"),
            abort_after_batch_num=abort_after,
            mode="full" if full else "step",
            gradients=grads,
            ignore=tuple(pattern.strip() for pattern in ignore.split(",") if pattern.strip()),
            on_detect="report" if go_on else "raise",
            quiet=True,
        )
        outcome = job.run(argv, settings, save, quiet=as_json)
    except UsageError as error:
        fail("overflow", error, as_json=as_json)
    job.report_and_leave(outcome, program, as_json=as_json)


def parse_command(command: Sequence[str], nproc: int | None, program: str) -> list[str]:
    """Return the command to run: the job, under torchrun if `nproc` is given. Raises UsageError."""
    from distdiag.child_job import argv_of, say_python
    from distdiag.output import say

    if command and get_close_matches(command[0], ["show"]) and not (os.path.exists(command[0]) or which(command[0])):
        raise UsageError(f"no script or program {command[0]!r}", hint=f"did you mean: {program} overflow show FILE")
    argv = argv_of(command, example=f"{program} overflow -- train.py")
    say_python(argv, command, say)
    if nproc is None:
        return argv
    if len(argv) == len(command):
        raise UsageError(f"--nproc needs a script or -m MODULE; {argv[0]} is neither", hint="remove --nproc")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc))
    return [argv[0], *torchrun, *argv[1:]]
