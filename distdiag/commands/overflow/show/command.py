"""What you type for overflow show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, StrictOpt, called_as, parse_numbers

if TYPE_CHECKING:
    from distdiag.commands.overflow.show.diagnose import OverflowShow
    from distdiag.report import Report


def overflow_show(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|DIR...",
            help="Frame files (*.jsonl) that the detector saved, or a directory of them.",
        ),
    ],
    module: Annotated[str, typer.Option(metavar="PATTERN", help="Show only modules whose names match: '*.wo'.")] = "",
    batch: Annotated[str, typer.Option(metavar="N[,M]", help="Show only these batches.")] = "",
    all_: Annotated[bool, typer.Option("--verbose", "-v", help="Show every row of every batch.")] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Show what was detected, and where a model's values grow.

    Read the frames that `distdiag overflow --save DIR` or DebugUnderflowOverflow(model, save=...) wrote. No code in the
    files is executed.

    Exit status: 0 nothing detected, 1 nan or inf detected, 2 wrong usage, 3 unknown, 130 interrupted.

    \b
    Examples:
      distdiag overflow show frames        # what `overflow --save frames` wrote
      distdiag overflow show frames-0.jsonl --batch 0,3
    """
    from distdiag.commands.overflow.show.view import overflow_show_view
    from distdiag.output import Output, Progress, deliver

    def run() -> Report[OverflowShow]:
        from distdiag.commands.overflow.show.diagnose import examine
        from distdiag.commands.overflow.show.forwards import Request

        request = Request(
            program=called_as(),
            paths=tuple(files),
            module=module,
            batches=parse_numbers([batch] if batch.strip() else [], "--batch", "batch", "batches"),
            everything=all_,
        )
        with Progress() as progress:
            return examine(request, progress.news)

    deliver("overflow show", run, overflow_show_view, Output(json=as_json, strict=strict))
