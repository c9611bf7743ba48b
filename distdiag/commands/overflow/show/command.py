"""What you type for overflow show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.commands.overflow.show.model import COMMAND, Request
from distdiag.errors import UsageError
from distdiag.options import JsonOpt, StrictOpt, called_as

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from distdiag.commands.overflow.show.choose import Chosen
    from distdiag.commands.overflow.show.compare import Compared
    from distdiag.commands.overflow.show.result import OverflowShow
    from distdiag.report import Report


def parse_batches(text: str) -> tuple[int, ...]:
    """Read numbers of batches with commas; none for an empty text. Raises UsageError."""
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
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="Draw abs max over the modules: into FILE.svg or .png; - draws here.")
    ] = "",
    all_: Annotated[bool, typer.Option("--all", "--verbose", "-v", help="Every row, of every batch.")] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
) -> None:
    """Show where the numbers of a model grew, what was detected, and where two batches or two ranks begin to diverge.

    Reads frames that DebugUnderflowOverflow(model, save=...) kept. Nothing in the files is run.

    Exit status: 0 nothing was detected, 1 nan or inf was, 2 wrong usage, 3 the files cannot tell, 130 interrupted.
    """
    from distdiag.deliver import Output, Progress, deliver

    seen: list[tuple[Chosen, Compared | None]] = []

    def asked() -> Request:
        return Request(
            program=called_as(),
            paths=tuple(files),
            module=module,
            batches=parse_batches(batch),
            factor=factor,
            everything=all_,
            plot=plot,
        )

    def run() -> Report[OverflowShow]:
        from distdiag.commands.overflow.show.check import check

        with Progress() as progress:
            report, chosen, compared = check(asked(), progress)
        seen.append((chosen, compared))
        return report

    def view(report: Report[OverflowShow]) -> Iterable[RenderableType]:
        from distdiag.commands.overflow.show.view import overflow_show_view

        return overflow_show_view(asked(), *seen[0])

    deliver(COMMAND, run, view, Output(json=as_json, strict=strict))
