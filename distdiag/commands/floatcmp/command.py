"""What you type for floatcmp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.commands.floatcmp.model import COMMAND, Request
from distdiag.options import JsonOpt, StrictOpt, called_as

if TYPE_CHECKING:
    from distdiag.commands.floatcmp.result import FloatCmp
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
    from distdiag.commands.floatcmp.view import floatcmp_view
    from distdiag.deliver import Output, Progress, deliver

    def run() -> Report[FloatCmp]:
        from distdiag.commands.floatcmp.check import check

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
        with Progress() as progress:
            return check(request, progress)

    deliver(COMMAND, run, floatcmp_view, Output(json=as_json, strict=strict))
