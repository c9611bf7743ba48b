"""`distdiag explain`: a line, a file or a finding's id, answered by the command that its content asks for."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.errors import UsageError
from distdiag.options import JsonOpt, answer_as
from distdiag.record import record

if TYPE_CHECKING:
    from distdiag.report import Report

COMMAND = "explain"
_ID = re.compile(r"[a-z][a-z-]{1,30}(?:\.[a-z0-9-]{1,60}){1,3}")
_PATH = re.compile(r"\S*/\S*|\S+\.(?:log|out|err|txt)")
"""Text that can only be a file."""


@record(kw_only=True)
class Explained:
    """The meaning of a finding's id."""

    id: str
    levels: tuple[str, ...]
    means: tuple[str, ...]


def explain(
    ctx: typer.Context,
    what: Annotated[
        list[str], typer.Argument(metavar="LINE|FILE|ID|-", help="An error line, log files, or a finding's id.")
    ],
    as_json: JsonOpt = False,
) -> None:
    """Explain an error line, a log, or a finding id.

    A log of a job or of a kernel is answered as `distdiag logs` does, one of a build or a start of CUDA as
    `distdiag cuda-env --explain FILE` does; - reads stdin. Quote a line, so that it is one word.

    Exit status: that of the command that answers; 0 for an id.

    \b
    Examples:
      distdiag explain 'RuntimeError: CUDA error: invalid device ordinal'
      distdiag explain slurm-4711.out
      distdiag explain logs.first-failure
    """
    from distdiag.files import log_text
    from distdiag.knowledge.logs import content
    from distdiag.output import Output, deliver, fail

    as_typed = ["--json"] if as_json else []
    files = [name for name in what if name == "-" or os.path.exists(name)]
    try:
        if not files and len(what) == 1 and _ID.fullmatch(what[0]):
            deliver(COMMAND, lambda: of_id(what[0]), lambda _: (), Output(json=as_json))
        elif missing := [name for name in what if _PATH.fullmatch(name) and name not in files]:
            raise UsageError(f"{missing[0]}: no such file", hint="name an existing log, or quote a whole line")
        elif files and len(files) < len(what):
            raise UsageError("files and a line at once", hint="explain one of them at a time")
        elif any(os.path.isdir(name) for name in files):
            answer_as(ctx, ["logs", *files, *as_typed])
        else:
            text = "".join(log_text(name)[0] for name in files) if files else " ".join(what) + "\n"
            logs = files or ["-"]
            of_build = len(logs) == 1 and content(text) == "build"
            words = ["cuda-env", "--explain", *logs] if of_build else ["logs", *logs]
            answer_as(ctx, [*words, *as_typed], text if logs == ["-"] else None)
    except UsageError as error:
        fail(COMMAND, error, as_json=as_json)


def of_id(id_: str) -> Report[Explained]:
    """Explain a finding's id from the table behind the documentation. Raises UsageError."""
    from difflib import get_close_matches

    from distdiag.diagnosis.finding_ids import declared
    from distdiag.report import Finding, Level, Report

    table = declared()
    if id_ not in table:
        near = get_close_matches(id_, table, 1)
        raise UsageError(f"no finding has the id {id_}", hint=f"did you mean {near[0]}?" if near else "distdiag --help")
    own = table[id_]
    found = Explained(id=id_, levels=own.levels, means=(own.means,))
    finding = Finding(id=own.id, level=Level.INFO, title=own.means, detail=f"Its level: {', '.join(own.levels)}.")
    return Report(command=COMMAND, data=found, findings=(finding,), summary=finding.title)
