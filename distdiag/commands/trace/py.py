"""trace py: run a job with the tracer inside. The process becomes the job: pid, stdout, exit status."""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from distdiag.child_job import argv_of, watched
from distdiag.options import called_as
from distdiag.training.line_trace.session import LINES, THREADS, VARIABLE, Settings


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
        int,
        typer.Option(
            "--max-threads", min=1, max=4096, metavar="N", help="Threads of a process to record at the same time."
        ),
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
    from distdiag.facts.line_trace_file import default_folder

    folder = os.path.abspath(dir_ or default_folder())
    settings = Settings(folder, lines, threads, tuple(_names(include)), tuple(_names(exclude)))
    argv = argv_of(command, example=f"{called_as()} trace py -- train.py")
    for name in settings.include:
        if why := _unknown(name, argv[0]):
            typer.echo(f"distdiag trace: {why}", err=True)
    if os.environ.get("RANK", "0") == "0" and os.environ.get("SLURM_PROCID", "0") == "0":
        shown = "" if folder == default_folder() else f" {folder}"
        typer.echo(
            f"distdiag trace: each thread's last lines go to {folder}; to read them: {called_as()} trace show{shown}",
            err=True,
        )
    _become(argv, watched(VARIABLE, settings.to_text()))


def _names(text: str) -> list[str]:
    return [name for name in map(str.strip, text.split(",")) if name]


def _become(argv: list[str], env: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(argv[0], argv, env)
    except OSError as error:
        raise typer.BadParameter(f"{argv[0]} cannot be run: {error.strerror}") from error


def _unknown(name: str, python: str) -> str:
    """Format that nothing has this name, and what was meant; empty if something has, or another Python runs the job."""
    from importlib import machinery

    top, _, below = name.partition(".")
    if name in ("all", "stdlib") or os.path.realpath(python) != os.path.realpath(sys.executable):
        return ""
    spec = machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None:
        if top in sys.stdlib_module_names:
            return f"--include {name} traces nothing: it has no lines of Python"
        close = _close(top)
        hint = f"; did you mean --include {close}?" if close else "; a package is named as it is imported"
        return f"--include {name} traces nothing: there is no package of that name here{hint}"
    folders = list(spec.submodule_search_locations or ())
    if not folders and not (spec.origin or "").endswith(".py"):
        return f"--include {name} traces nothing: it has no lines of Python"
    paths = [os.path.join(folder, *below.split(".")) for folder in folders] if below else []
    if below and not any(os.path.exists(path) or os.path.exists(f"{path}.py") for path in paths):
        return f"--include {name} traces nothing: there is no {below} in {top}"
    return ""


def _close(name: str) -> str:
    """Name the package that is imported otherwise than it is installed (pillow is PIL), or spelled alike."""
    import difflib
    from importlib import metadata

    found = metadata.packages_distributions()
    wanted = name.lower().replace("_", "-")
    for package, names in found.items():
        if not package.startswith("_") and wanted in {name.lower().replace("_", "-") for name in names}:
            return package
    return next(iter(difflib.get_close_matches(name, [*found, *sys.stdlib_module_names], 1)), "")
