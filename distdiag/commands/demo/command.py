"""`distdiag demo`: a small job with a real fault, to see a diagnosis of it."""

from __future__ import annotations

import contextlib
import shlex
from typing import Annotated, Literal

import typer

from distdiag.program_name import called_as

_SYMPTOMS = {
    "hang": "hangs after step 2",
    "crash": "crashed: all ranks printed an error",
    "nan": "finished, but its loss is nan from step 3 on",
    "slow": "is slow: a step takes 0.4 s instead of 0.02 s",
}


def demo(
    fault: Annotated[
        Literal["hang", "crash", "nan", "slow"], typer.Argument(metavar="hang|crash|nan|slow", help="The fault.")
    ],
    auto: Annotated[bool, typer.Option("--auto", help="Run the diagnosis here, then end.")] = False,
) -> None:
    """Start a small job with a real fault, and print the command that diagnoses it.

    The job is four Gloo ranks on the CPU; its script and log are in a new folder in /tmp. Ctrl-C ends the job and
    removes the folder. With `hang`, the fix that the report prints works: paste it, and the job finishes.

    Exit status: 0 the demo ended, or --auto found the fault, 2 wrong usage, 3 the job could not start or --auto did not
    find the fault, 130 interrupted during the start.

    \b
    Examples:
      distdiag demo hang          # prints the command for a second terminal
      distdiag demo crash --auto  # job, diagnosis and clean-up at once
    """
    from distdiag.commands.demo.job import Demo
    from distdiag.errors import DistdiagError
    from distdiag.output import emit, fail

    try:
        with Demo(fault) as job:
            job.wait_for_fault()
            command = job.command()
            emit(f"A job of 4 ranks {_SYMPTOMS[fault]}.\nlog: {job.log}\n\n")
            typed = f"{called_as()} {shlex.join(command)}"
            if auto:
                emit(f"$ {typed}\n")
                is_found = job.run([*shlex.split(called_as()), *command]) == (0 if fault == "slow" else 1)
                raise typer.Exit(0 if is_found else 3)
            emit(f"In a second terminal:\n\n    {typed}\n\nCtrl-C ends the demo and removes its folder.\n")
            with contextlib.suppress(KeyboardInterrupt):
                job.wait_for_fix()
                emit("The fix worked: all ranks have finished.\n")
    except DistdiagError as error:
        fail("demo", error, as_json=False)
