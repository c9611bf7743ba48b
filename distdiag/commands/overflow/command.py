"""What you type for overflow. The job's output is its own; what was found stands on stderr after it."""

from __future__ import annotations

from typing import Annotated

import typer

from distdiag.options import JsonOpt, called_as


def overflow(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- SCRIPT ARGS...", help="A script, -m MODULE, or any program that runs Python below."),
    ],
    trace: Annotated[
        str, typer.Option(metavar="BATCHES", help="Print all frames of these batches, from 0: 1,3 or 149-150.")
    ] = "",
    abort_after: Annotated[
        int | None, typer.Option(min=0, metavar="BATCH", help="End the job when this batch is over.")
    ] = None,
    frames: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Frames to show at a hit.")] = 21,
    full: Annotated[
        bool, typer.Option("--full", help="Read every tensor of every module: for what cannot be run a second time.")
    ] = False,
    grads: Annotated[
        str,
        typer.Option(
            metavar="each|step|off",
            help="When to look at gradients: as each is made, which names the first bad one; before a step; never.",
        ),
    ] = "each",
    unit: Annotated[str, typer.Option(metavar="forward|step", help="What a batch is.")] = "forward",
    ignore: Annotated[
        str, typer.Option(metavar="PATTERNS", help="Modules that may hold nan and inf: 'lm_head,*.mask:output'.")
    ] = "",
    go_on: Annotated[bool, typer.Option("--go-on", help="Report the first hit, and let the job run on.")] = False,
    nproc: Annotated[
        int | None, typer.Option(min=1, max=4096, metavar="N", help="Run the script as N ranks, below torchrun.")
    ] = None,
    save: Annotated[
        str, typer.Option(metavar="DIR", help="Keep the frames there, for `overflow show DIR/frames-*.jsonl`.")
    ] = "",
    as_json: JsonOpt = False,
) -> None:
    """Run a script, and name the first nan or inf: its batch, rank, module and tensor. Nothing in it is changed.

    Its models are found when they are called. Works below torchrun, srun and mpirun too: put
    `-m distdiag overflow --` before the script. `distdiag overflow show FILE` reads what --save kept.

    Exit status: 1 something was found, else the script's own; 3 no model was called.
    """
    from distdiag.commands.overflow.ask import Typed, become

    become(
        Typed(
            command=command,
            program=called_as(),
            trace=trace,
            abort_after=abort_after,
            frames=frames,
            full=full,
            grads=grads,
            unit=unit,
            ignore=ignore,
            go_on=go_on,
            nproc=nproc,
            save=save,
            as_json=as_json,
        )
    )
