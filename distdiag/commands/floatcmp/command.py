"""What you type for floatcmp; a process with a deadline reads the files with torch, which this one never imports."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, StrictOpt, called_as

if TYPE_CHECKING:
    from distdiag.commands.floatcmp.compare_files import Answer, FloatCmp, Request
    from distdiag.errors import DistdiagError
    from distdiag.facts import programs
    from distdiag.output import Progress
    from distdiag.report import Report


def floatcmp(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A file by torch.save, .npy or .safetensors, or the folder of a checkpoint."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="What should hold the same numbers.")],
    reference: Annotated[
        str, typer.Option(metavar="FILE", help="The same calculated in float64: who is nearer to it?")
    ] = "",
    key: Annotated[str, typer.Option(metavar="PATTERN", help="Only tensors of such names: 'layers.*.weight'.")] = "",
    worst: Annotated[int, typer.Option(min=0, max=1000, metavar="N", help="How many places to show of a tensor.")] = 5,
    exact: Annotated[bool, typer.Option("--exact", help="Any difference is a fault, rounding and dtypes too.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, max=86400.0, metavar="SECONDS", help="Longest time for all of it.")
    ] = 600.0,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Tell whether two files or checkpoints hold the same numbers but for rounding, and where they begin to differ.

    Nothing in the files is run: they are read with weights_only. Of a sharded checkpoint name the folder, or its index.

    Exit status: 0 the same, or within rounding, 1 they differ by more, 2 wrong usage, 3 a file cannot be read,
    130 interrupted.
    """
    from distdiag.commands.floatcmp.compare_files import COMMAND, Request
    from distdiag.commands.floatcmp.diagnose import floatcmp_view
    from distdiag.output import Output, Progress, deliver

    request = Request(
        program=called_as(),
        a=a,
        b=b,
        reference=reference,
        key=key,
        worst=worst,
        timeout_s=timeout,
        exact=exact,
    )

    def run() -> Report[FloatCmp]:
        with Progress() as progress:
            return _check(request, progress)

    deliver(COMMAND, run, floatcmp_view, Output(json=as_json, strict=strict))


def _check(request: Request, progress: Progress) -> Report[FloatCmp]:
    """Compare two files of tensors.

    Raises:
        UsageError: a file is not there, or no name fits the pattern.
        DistdiagError: a file cannot be read, or the comparison did not come to its end.
    """
    from distdiag.commands.floatcmp.diagnose import diagnose
    from distdiag.errors import DistdiagError, UsageError

    for path in (request.a, request.b, request.reference):
        if path and not os.path.isfile(path) and not os.path.isdir(path):
            kind = "is no file and no folder but a device" if os.path.exists(path) else "there is no such file"
            raise UsageError(f"{path}: {kind}", hint="name files by torch.save, .npy or .safetensors, or checkpoints")
        if not path.isascii() and path.encode("utf-8", "replace") != os.fsencode(path):
            raise UsageError(f"{path}: its name is not UTF-8", hint="compare a link to it that has another name")
    progress.news(f"comparing {request.a} with {request.b}")
    answer = _ask(request)
    if answer.unreadable:
        raise DistdiagError(answer.unreadable, hint=answer.hint)
    if answer.found is None:
        names = ", ".join(name or "(one tensor without a name)" for name in answer.no_match)
        raise UsageError(f"--key {request.key}: no name is like that", hint=f"there are: {names or 'none'}")
    return diagnose(request, answer.found)


def _ask(request: Request) -> Answer:
    """Run the comparison in a process of its own."""
    import msgspec

    from distdiag.commands.floatcmp.compare_files import ANSWER, STAGE, Answer
    from distdiag.errors import DistdiagError
    from distdiag.facts import programs

    order = msgspec.json.encode(request).decode()
    with tempfile.TemporaryDirectory(prefix="distdiag-") as folder:
        argv = [sys.executable, "-P", "-m", "distdiag.commands.floatcmp.compare_files", order, folder]
        try:
            done = programs.run(argv, timeout_s=request.timeout_s)
        except programs.CannotRun as error:
            raise DistdiagError(str(error), hint="see whether this Python is still there") from error
        except KeyboardInterrupt:
            programs.kill_all()
            raise
        try:
            with open(os.path.join(folder, ANSWER), "rb") as file:
                return msgspec.json.decode(file.read(), type=Answer)
        except (OSError, msgspec.DecodeError) as error:
            raise _no_answer(request, done, os.path.join(folder, STAGE)) from error


def _no_answer(request: Request, done: programs.Done, stage_file: str) -> DistdiagError:
    from distdiag.errors import DistdiagError
    from distdiag.facts.cuda.driver import how_it_died

    try:
        with open(stage_file, encoding="utf-8", errors="replace") as file:
            stage = file.read()
    except OSError:
        stage = "starting Python"
    if done.timed_out:
        return DistdiagError(
            f"no answer in {request.timeout_s:g} s; it was {stage}",
            hint="give it more time: " + request.again("--timeout", f"{4 * request.timeout_s:g}"),
        )
    return DistdiagError(
        f"the process that compares ended while {stage}: {how_it_died(done)}",
        hint="if it was killed, memory may have run out: compare fewer tensors with --key",
    )
