"""What you type for overflow show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.errors import UsageError
from distdiag.options import JsonOpt, StrictOpt, called_as

if TYPE_CHECKING:
    from distdiag.commands.overflow.show.diagnose import OverflowShow
    from distdiag.report import Report


def parse_batches(text: str) -> tuple[int, ...]:
    """Parse numbers of batches with commas; none for an empty text. Raises UsageError."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and len(word) < 16 for word in words):
        raise UsageError(f"--batch {text!r} is no number of a batch", hint="write 3, or 0,3 to compare two")
    return tuple(dict.fromkeys(map(int, words)))


def overflow_show(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help='What the detector wrote: save="frames-{rank}.jsonl".')
    ],
    module: Annotated[str, typer.Option(metavar="PATTERN", help="Only modules of such names: '*.wo'.")] = "",
    batch: Annotated[str, typer.Option(metavar="N[,M]", help="Only these batches; two of a file are compared.")] = "",
    factor: Annotated[
        float, typer.Option(min=1.001, max=1e9, metavar="TIMES", help="Numbers diverge that differ by more than this.")
    ] = 2.0,
    all_: Annotated[bool, typer.Option("--all", "--verbose", "-v", help="Every row, of every batch.")] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Show where the numbers of a model grew, what was detected, and where two batches or two ranks begin to diverge.

    Reads frames that DebugUnderflowOverflow(model, save=...) kept. Nothing in the files is run.

    Exit status: 0 nothing was detected, 1 nan or inf was, 2 wrong usage, 3 the files cannot tell, 130 interrupted.
    """
    from distdiag.commands.overflow.show.view import overflow_show_view
    from distdiag.output import Output, Progress, deliver

    def run() -> Report[OverflowShow]:
        from distdiag.commands.overflow.show.diagnose import examine
        from distdiag.commands.overflow.show.selection import Request

        request = Request(
            program=called_as(),
            paths=tuple(files),
            module=module,
            batches=parse_batches(batch),
            factor=factor,
            everything=all_,
        )
        with Progress() as progress:
            return examine(request, progress.news)

    deliver("overflow show", run, overflow_show_view, Output(json=as_json, strict=strict))
