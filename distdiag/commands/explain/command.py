"""`distdiag explain`: a line, a file or a finding's id, answered by the command that its content asks for."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.errors import UsageError
from distdiag.options import JsonOpt  # noqa: TC001 - typer reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.report import Report

COMMAND = "explain"
_MOST_BYTES = 16 << 20
"""Of a text, so much decides what it is."""
_ID = re.compile(r"[a-z][a-z-]{1,30}(?:\.[a-z0-9-]{1,60}){1,3}")
_OF_JOB = re.compile(
    r"\[rank\d|\[[Rr]ank \d|torchrun|ChildFailedError|Watchdog|NCCL (?:WARN|INFO)|exitcode|srun: error|slurmstepd|NVRM|"
    r"mpirun|DataLoader worker|Gloo|TCPStore|\bpid=\d"
)
_OF_BUILD = re.compile(
    r"\bnvcc\b|\b(?:g\+\+|gcc|cc1plus|clang|ninja|cmake|make)(?:\[\d+\])?: |CMake Error|pip(?:3)? install|"
    r"[Bb]uilding wheel|subprocess-exited|cpp_extension|fatal error: \S+\.h|undefined (?:symbol|reference)|"
    r"cannot open shared object|\bld: |setup\.py"
)
_PATH = re.compile(r"\S*/\S*|\S+\.(?:log|out|err|txt)")
"""What can only be meant as a file."""
_OF_ANY = {"out-of-memory"}
"""Rows of builds that a line of any program matches: "Killed"."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What a finding's id means."""

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
    """Explain an error line, a log, or the id of a finding.

    A log of a job or of a kernel is answered as `distdiag logs` does, one of a build or a start of CUDA as
    `distdiag cuda-env --explain FILE` does; - reads stdin. Quote a line, so that it is one word.

    Exit status: that of the command that answers; 0 for an id.

    \b
    Examples:
      distdiag explain 'RuntimeError: CUDA error: invalid device ordinal'
      distdiag explain slurm-4711.out
      distdiag explain logs.first-failure
    """
    from distdiag.output import Output, deliver, fail

    files = [name for name in what if name == "-" or os.path.exists(name)]
    try:
        if not files and len(what) == 1 and _ID.fullmatch(what[0]):
            deliver(COMMAND, lambda: of_id(what[0]), lambda _: (), Output(json=as_json))
        elif missing := [name for name in what if _PATH.fullmatch(name) and name not in files]:
            raise UsageError(f"{missing[0]}: no such file", hint="name an existing log, or quote a whole line")
        elif files and len(files) < len(what):
            raise UsageError("files and a line at once", hint="explain one of them at a time")
        elif files and files != ["-"]:
            _answer(ctx, _read(files), files, as_json=as_json)
        else:
            text = sys.stdin.buffer.read(_MOST_BYTES) if files else " ".join(what).encode() + b"\n"
            with tempfile.TemporaryFile() as file:
                file.write(text)
                file.seek(0)
                os.dup2(file.fileno(), 0)
                _answer(ctx, text.decode("utf-8", "replace"), ["-"], as_json=as_json)
    except UsageError as error:
        fail(COMMAND, error, as_json=as_json)


def _read(paths: Sequence[str]) -> str:
    """Read the beginning of files; a folder is of a job."""
    text = ""
    for path in paths:
        if os.path.isdir(path):
            return ""
        try:
            with open(path, "rb") as file:
                text += file.read(_MOST_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", hint="name logs that can be read") from error
    return text


def _answer(ctx: typer.Context, text: str, paths: Sequence[str], *, as_json: bool) -> None:
    """Answer as the command for this text does."""
    root = ctx.find_root()
    words = ["cuda-env", "--explain", paths[0]] if len(paths) == 1 and is_of_build(text) else ["logs", *paths]
    typed = [*words, *(["--json"] if as_json else [])]
    root.obj.command, root.obj.words = "", typed
    name, command, rest = root.command.resolve_command(root, typed)  # type: ignore[attr-defined]
    with command.make_context(name, rest, parent=root) as context:
        command.invoke(context)


def is_of_build(text: str) -> bool:
    """Return whether a text is of a build or a start of CUDA, rather than of a job or a kernel."""
    from distdiag.knowledge.known_lines import recognise
    from distdiag.knowledge.logs import read_log

    if _OF_JOB.search(text):
        return False
    if _OF_BUILD.search(text):
        return True
    causes = {match.known.id for match in read_log(text) if match.known.role == "cause"}
    return bool(causes - _OF_ANY) and recognise(text) is None


def of_id(id_: str) -> Report[Explained]:
    """Explain the id of a finding, from the table that the documentation is made from. Raises UsageError."""
    from difflib import get_close_matches

    from distdiag.report import Finding, Level, Report

    text = resources.files("distdiag.knowledge").joinpath("finding_ids.toml").read_text("utf-8")
    table = tomllib.loads(text)
    if id_ not in table:
        near = get_close_matches(id_, table, 1)
        raise UsageError(f"no finding has the id {id_}", hint=f"did you mean {near[0]}?" if near else "distdiag --help")
    levels, *means = table[id_]
    found = Explained(id=id_, levels=tuple(levels.split(", ")), means=tuple(means))
    finding = Finding(id=id_, level=Level.INFO, title="; ".join(means), detail=f"Its level: {levels}.")
    return Report(command=COMMAND, data=found, findings=(finding,), summary=finding.title)
