"""What you type for trace py. The process becomes the job: pid, stdout, signals and exit status are the job's own."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from distdiag.foreground import argv_of, watched
from distdiag.options import called_as
from distdiag.training.lines.settings import LINES, THREADS, VARIABLE, Settings


def trace_py(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- SCRIPT ARGS...", help="A script, -m MODULE, or any program that runs Python below."),
    ],
    include: Annotated[
        str,
        typer.Option(
            metavar="PACKAGES",
            help="Trace these too: torch,mypkg.sub,json; all: all packages; stdlib: all of the standard library.",
        ),
    ] = "",
    exclude: Annotated[
        str, typer.Option(metavar="NAMES", help="Leave these out: packages, or files and directories of your own.")
    ] = "",
    lines: Annotated[
        int, typer.Option(min=2, max=100_000, metavar="N", help="Lines to keep of each thread; 136 bytes of disk each.")
    ] = LINES,
    threads: Annotated[
        int, typer.Option(min=1, max=4096, metavar="N", help="Threads of a process to keep lines of, at a time.")
    ] = THREADS,
    dir_: Annotated[
        str,
        typer.Option("--dir", metavar="DIR", help="Where to keep them: the node's own disk. [default: below /tmp]"),
    ] = "",
) -> None:
    """Run a job and keep the last lines of Python that each thread of each process executed.

    They survive kill -9, a crash and the OOM killer; `distdiag trace show` reads them, also while the job runs. Works
    below torchrun, srun and mpirun: put `-m distdiag trace py --` before the script. Exit status: the job's own.
    """
    from distdiag.node.rings import default_folder

    folder = os.path.abspath(dir_ or default_folder())
    settings = Settings(folder, lines, threads, tuple(_names(include)), tuple(_names(exclude)))
    argv = argv_of(command, example=f"{called_as()} trace py -- train.py")
    from distdiag.commands.trace.py.names import why_unknown

    for name in settings.include:
        if why := why_unknown(name, argv[0]):
            typer.echo(f"distdiag trace: {why}", err=True)
    if os.environ.get("RANK", "0") == "0" and os.environ.get("SLURM_PROCID", "0") == "0":
        shown = "" if folder == default_folder() else f" {folder}"
        typer.echo(
            f"distdiag trace: each thread's last lines go to {folder}; to read them: {called_as()} trace show{shown}",
            err=True,
        )
    _become(argv, watched(VARIABLE, settings.to_text()))


def _names(text: str) -> list[str]:
    return [name for name in (one.strip() for one in text.split(",")) if name]


def _become(argv: list[str], env: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(argv[0], argv, env)
    except OSError as error:
        raise typer.BadParameter(f"{argv[0]} cannot be run: {error.strerror}") from error
