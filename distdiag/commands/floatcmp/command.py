"""`distdiag floatcmp`: its options, and the child with a deadline that imports torch; the parent never does."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, StrictOpt, called_as

if TYPE_CHECKING:
    from distdiag.commands.floatcmp.child import Answer, Request
    from distdiag.commands.floatcmp.operation import OpComparison
    from distdiag.errors import DistdiagError
    from distdiag.facts import programs
    from distdiag.report import Report
    from distdiag.training.floatcmp.result import Comparison


def floatcmp(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A file from torch.save, .npy or .safetensors, or the directory of a checkpoint; with --op: settings.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The file or checkpoint to compare with.")],
    reference: Annotated[
        str, typer.Option(metavar="FILE", help="The same values computed in float64, to see whether A or B is closer.")
    ] = "",
    key: Annotated[
        str, typer.Option(metavar="PATTERN", help="Compare only tensors whose names match: 'layers.*.weight'.")
    ] = "",
    worst: Annotated[
        int, typer.Option(min=0, max=1000, metavar="N", help="Number of differing elements to show per tensor.")
    ] = 5,
    exact: Annotated[
        bool, typer.Option("--exact", help="Fail on any difference, including rounding and dtype.")
    ] = False,
    op: Annotated[
        str,
        typer.Option(metavar="NAME", help="Compute this operation with the settings A and B: cpu cuda,tf32."),
    ] = "",
    size: Annotated[int, typer.Option(min=1, max=2**20, metavar="N", help="With --op: terms in each sum.")] = 1024,
    timeout: Annotated[
        float, typer.Option(min=1.0, max=86400.0, metavar="SECONDS", help="Overall time limit.")
    ] = 600.0,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Compare two files or checkpoints: are they equal up to rounding, and where do they first differ?

    With --op, compute one operation in two ways instead (device, dtype, threads=N, tf32, deterministic; separated by
    commas), and compare each result with float64: is its error that of its dtype?

    No code in the files is executed: they are loaded with weights_only. For safetensors of several files give their
    directory or index.

    Exit status: 0 equal up to rounding, 1 different, 2 wrong usage, 3 unknown: a file cannot be read,
    130 interrupted.

    \b
    Examples:
      distdiag floatcmp before.pt after.pt
      distdiag floatcmp cpu.safetensors gpu.safetensors --reference float64.pt
      distdiag floatcmp step100/ step100-resumed/ --key 'layers.0.*' --exact
      distdiag floatcmp --op matmul cpu cuda
      distdiag floatcmp --op matmul cuda,float32 cuda,float32,tf32
    """
    from distdiag.commands.floatcmp.child import COMMAND, Request
    from distdiag.commands.floatcmp.diagnose import floatcmp_view
    from distdiag.commands.floatcmp.operation import operation_view
    from distdiag.output import Output, deliver

    request = Request(
        program=called_as(),
        a=a,
        b=b,
        reference=reference,
        key=key,
        worst=worst,
        timeout_s=timeout,
        exact=exact,
        op=op,
        size=size,
    )
    output = Output(json=as_json, strict=strict)
    if op:
        deliver(COMMAND, lambda: _compute(request), operation_view, output)
    else:
        deliver(COMMAND, lambda: _compare(request), floatcmp_view, output)


def _compute(request: Request) -> Report[OpComparison]:
    """Compute an operation with the settings A and B. Raises UsageError, DistdiagError."""
    from distdiag.commands.floatcmp.operation import OPERATIONS, diagnose_operation, parse_side
    from distdiag.errors import UsageError

    given = {"--reference": request.reference, "--key": request.key, "--exact": request.exact}
    for name in (name for name, value in given.items() if value):
        raise UsageError(f"{name} is for files, not for --op", hint=f"leave out {name}")
    if request.op not in OPERATIONS:
        raise UsageError(f"--op {request.op}: no such operation", hint=f"one of: {', '.join(OPERATIONS)}")
    for side in (request.a, request.b):
        parse_side(side, request.op)
    found = _ask(request).operation
    assert found is not None
    return diagnose_operation(found, request.program)


def _compare(request: Request) -> Report[Comparison]:
    """Compare two files of tensors.

    Raises:
        UsageError: a file does not exist, or no name fits the pattern.
        DistdiagError: a file cannot be read, or the comparison did not finish.
    """
    from distdiag.commands.floatcmp.diagnose import diagnose
    from distdiag.errors import UsageError
    from distdiag.output import Progress

    for path in filter(None, (request.a, request.b, request.reference)):
        if not os.path.isfile(path) and not os.path.isdir(path):
            hint = "give files from torch.save, .npy or .safetensors, or checkpoints"
            raise UsageError(f"{path}: no such file or directory", hint=hint)
        if path.encode("utf-8", "replace") != os.fsencode(path):
            raise UsageError(f"{path}: its name is not UTF-8", hint="compare a symlink to it with another name")
    with Progress() as progress:
        progress.news(f"comparing {request.a} with {request.b}")
        found = _ask(request).files
    assert found is not None
    return diagnose(request, found)


def _ask(request: Request) -> Answer:
    """Run the child, which imports torch. Raises DistdiagError."""
    import msgspec

    from distdiag.commands.floatcmp.child import Answer
    from distdiag.errors import DistdiagError, UsageError
    from distdiag.facts import programs

    with tempfile.NamedTemporaryFile(prefix="distdiag-") as file:
        order = msgspec.json.encode(request).decode()
        argv = [sys.executable, "-X", "utf8", "-uP", "-m", "distdiag.commands.floatcmp.child", order, file.name]
        try:
            done = programs.run(argv, timeout_s=request.timeout_s)
            answer = msgspec.json.decode(file.read(), type=Answer)
        except programs.CannotRun as error:
            raise DistdiagError(str(error), hint="check that this Python still exists") from error
        except KeyboardInterrupt:
            programs.kill_all()
            raise
        except msgspec.DecodeError as error:
            raise _no_answer(request, done) from error
    if answer.failed:
        raise (UsageError if answer.is_usage else DistdiagError)(answer.failed, hint=answer.hint)
    return answer


def _no_answer(request: Request, done: programs.Done) -> DistdiagError:
    from distdiag.errors import DistdiagError
    from distdiag.facts.cuda.driver import how_it_died

    stage = (done.stdout.decode(errors="replace").splitlines() or ["starting Python"])[-1]
    if done.timed_out:
        return DistdiagError(
            f"no result within {request.timeout_s:g} s; it was still {stage}",
            hint="increase --timeout: " + request.again("--timeout", f"{4 * request.timeout_s:g}"),
        )
    smaller = "compute fewer terms with --size" if request.op else "compare fewer tensors with --key"
    return DistdiagError(
        f"the comparison process died while {stage}: {how_it_died(done)}",
        hint=f"if it was killed, it may have run out of memory: {smaller}",
    )
