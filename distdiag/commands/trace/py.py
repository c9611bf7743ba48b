"""trace py: run a job with the tracer inside. The process becomes the job: pid, stdout, exit status."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from distdiag.child_job import argv_of, execute, say_python, watched
from distdiag.errors import UsageError
from distdiag.options import called_as
from distdiag.output import fail, say
from distdiag.training.line_trace.recorder import LINES, THREADS, VARIABLE, Settings


def trace_py(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- SCRIPT ARGS...", help="A script, -m MODULE, or any program that starts Python."),
    ],
    include: Annotated[
        str,
        typer.Option(
            metavar="PACKAGES",
            help="Also trace these packages: torch,mypkg.sub,json; all: all packages; stdlib: the standard library.",
        ),
    ] = "",
    exclude: Annotated[
        str, typer.Option(metavar="NAMES", help="Do not trace these: packages, or your own files and directories.")
    ] = "",
    lines: Annotated[
        int,
        typer.Option(min=2, max=100_000, metavar="N", help="Lines to keep per thread; each takes 136 bytes of disk."),
    ] = LINES,
    threads: Annotated[
        int,
        typer.Option(
            "--max-threads", min=1, max=4096, metavar="N", help="Maximum threads recorded at a time, per process."
        ),
    ] = THREADS,
    dir_: Annotated[
        str,
        typer.Option("--dir", metavar="DIR", help="Directory for the lines, on a local disk. [default: in /tmp]"),
    ] = "",
) -> None:
    """Run a job and keep the last lines of Python that each thread of each process executed.

    They survive kill -9, a crash and the OOM killer; `distdiag trace show` reads them, also while the job runs. Under
    torchrun, srun and mpirun, put `-m distdiag trace py --` before the script. Exit status: that of the job.

    \b
    Examples:
      distdiag trace py -- train.py --epochs 3
      torchrun --nproc-per-node 8 -m distdiag trace py -- train.py
      distdiag trace py --include torch -- train.py  # torch's own lines too
    """
    from distdiag.facts.recorder.line_trace_file import default_folder

    folder = os.path.abspath(dir_ or default_folder())
    settings = Settings(folder, lines, threads, tuple(_names(include)), tuple(_names(exclude)))
    try:
        argv = argv_of(command, example=f"{called_as()} trace py -- train.py")
    except UsageError as error:
        fail("trace py", error, as_json=False)
    if os.environ.get("RANK", "0") == "0" and os.environ.get("SLURM_PROCID", "0") == "0":
        shown = "" if folder == default_folder() else f" {folder}"
        typer.echo(
            f"distdiag trace py: the last lines of each thread go to {folder}; to read them: "
            f"{called_as()} trace show{shown}",
            err=True,
        )
    say_python(argv, command, say)
    sys.stdout.flush()
    sys.stderr.flush()
    execute(argv, watched(VARIABLE, settings.to_text()))


def _names(text: str) -> list[str]:
    return [name for name in map(str.strip, text.split(",")) if name]
