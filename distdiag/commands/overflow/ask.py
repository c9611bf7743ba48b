"""From what was typed to the end of the job: its exit status is ours, unless something was found."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import typer

from distdiag.commands.overflow import job
from distdiag.commands.overflow.diagnose import diagnose
from distdiag.commands.overflow.model import COMMAND
from distdiag.commands.overflow.view import overflow_view
from distdiag.deliver import Output, deliver, document, emit, fail
from distdiag.errors import UsageError
from distdiag.foreground import argv_of, leave_like
from distdiag.node.identity import identify
from distdiag.training.overflow.session import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.model import Overflow
    from distdiag.report import Report

_MOST_BATCHES = 100_000


@dataclass(frozen=True, kw_only=True)
class Typed:
    """The options, as they were typed."""

    command: Sequence[str]
    program: str
    trace: str
    abort_after: int | None
    frames: int
    full: bool
    grads: str
    unit: str
    ignore: str
    go_on: bool
    nproc: int | None
    save: str
    as_json: bool


def become(typed: Typed) -> NoReturn:
    """Run the job; say what was found; end as it did, or with 1."""
    try:
        argv = _argv(typed)
        seen = job.run(argv, _settings(typed), typed.save, quiet=typed.as_json)
    except UsageError as error:
        fail(COMMAND, error, as_json=typed.as_json)
    # torchrun ends the other ranks as soon as one has ended: what is left here is to say what was found.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    report = diagnose(seen, typed.program)
    me = identify(os.environ)
    status = _status(report, seen)
    if typed.as_json:
        if me is None or me.rank == 0:
            code = status if status >= 0 else 128 - status  # as a shell tells of a signal
            with contextlib.suppress(typer.Exit):
                emit(json.dumps({**document(report), "exit_code": code}, indent=2) + "\n")
    elif me is None or me.rank == 0 or seen.detections:
        # stdout is the job's.
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(typer.Exit):
            deliver(COMMAND, lambda: report, overflow_view, Output())
    leave_like(status)


def _status(report: Report[Overflow], seen: Overflow) -> int:
    if seen.detections:
        return 1
    if seen.status and any(model.aborted for one in seen.processes for model in one.models):
        return 0  # it was to end there
    return seen.status or report.exit_code()


def _argv(typed: Typed) -> list[str]:
    argv = argv_of(typed.command, example=f"{typed.program} overflow -- train.py")
    if typed.nproc is None:
        return argv
    if argv[0] != sys.executable:
        raise UsageError(f"--nproc runs a script or -m MODULE, and {argv[0]} is neither", hint="leave --nproc out")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(typed.nproc))
    return [sys.executable, *torchrun, *argv[1:]]


def _settings(typed: Typed) -> Settings:
    if typed.unit not in ("forward", "step"):
        raise UsageError(f"--unit {typed.unit!r}: a batch is a forward or a step", hint="write --unit forward or step")
    if typed.grads not in ("each", "step", "off"):
        raise UsageError(f"--grads {typed.grads!r} is not known", hint="write --grads each, step or off")
    return Settings(
        folder="",
        frames=typed.frames,
        trace=_batches(typed.trace),
        abort_after=typed.abort_after,
        mode="full" if typed.full else "step",
        unit=typed.unit,
        gradients=typed.grads,
        ignore=tuple(one.strip() for one in typed.ignore.split(",") if one.strip()),
        on_detect="report" if typed.go_on else "raise",
    )


def _batches(text: str) -> tuple[int, ...]:
    found: set[int] = set()
    for word in text.split(",") if text.strip() else []:
        match = re.fullmatch(r"\s*(\d{1,12})(?:-(\d{1,12}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + _MOST_BATCHES:
            raise UsageError(f"--trace {text!r}: {word!r} is no number of a batch", hint="write 3, or 0,3, or 149-150")
        found.update(range(first, last + 1))
    return tuple(sorted(found))
