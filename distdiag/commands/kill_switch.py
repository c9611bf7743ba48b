"""`distdiag kill-switch on|off|status PATH`: write, remove or show the file that a KillSwitch watches."""

from __future__ import annotations

import contextlib
import getpass
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.options import JsonOpt, called_as
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from distdiag.report import Report

_Path = Annotated[str, typer.Argument(metavar="PATH", help="The file that the job watches.")]


@record(kw_only=True)
class Switch:
    """State of a kill switch; `reason` is the file's first line."""

    path: str
    on: bool
    reason: str


def on(
    path: _Path,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; the job logs it.")] = "",
    as_json: JsonOpt = False,
) -> None:
    """Turn the kill switch on: the job stops at its next step, on all ranks.

    The job must use `distdiag.KillSwitch`. A job that hangs never reads the file: `distdiag hang` shows why it hangs.

    Exit status: 0 it is on, 2 wrong usage, 3 the file cannot be written.

    \b
    Examples:
      distdiag kill-switch on /shared/train-7b.stop --reason maintenance
      distdiag kill-switch off /shared/train-7b.stop    # before the next job
    """
    _deliver("on", path, lambda whole: _turn_on(whole, reason), as_json=as_json)


def off(path: _Path, as_json: JsonOpt = False) -> None:
    """Turn the kill switch off, so that the next job does not stop at once.

    Exit status: 0 it is off, 2 wrong usage, 3 the file cannot be removed.

    \b
    Examples:
      distdiag kill-switch off /shared/train-7b.stop
    """
    _deliver("off", path, _turn_off, as_json=as_json)


def status(path: _Path, as_json: JsonOpt = False) -> None:
    """Show whether the kill switch is on, and why.

    Exit status: 0 on or off, 2 wrong usage, 3 the file cannot be read.

    \b
    Examples:
      distdiag kill-switch status /shared/train-7b.stop
    """
    _deliver("status", path, _state, as_json=as_json)


def _deliver(action: str, path: str, act: Callable[[str], Switch], *, as_json: bool) -> None:
    from distdiag.errors import DistdiagError
    from distdiag.output import Output, Whole, deliver
    from distdiag.report import Report, quoted

    name = f"kill-switch {action}"

    def report() -> Report[Switch]:
        try:
            switch = act(os.path.abspath(path))
        except OSError as error:
            raise DistdiagError(f"{path}: {error.strerror}", hint="check the path and its folder") from error
        because = f": {switch.reason}" if switch.on and switch.reason else ""
        return Report(command=name, data=switch, findings=(), summary=f"{'on' if switch.on else 'off'}{because}")

    def view(report: Report[Switch]) -> Iterator[RenderableType]:
        yield Whole(report.data.path)
        if report.data.on:
            yield "The job stops at its next step, on all ranks. Before the next job starts:"
            yield Whole(f"    {called_as()} kill-switch off {quoted(report.data.path)}")

    deliver(name, report, view, Output(json=as_json))


def _turn_on(path: str, reason: str) -> Switch:
    """Write the file atomically: a job never reads half a reason. It is world-readable: no secrets."""
    line = " ".join(reason.split()) or f"by {getpass.getuser()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    unfinished = f"{path}.{os.getpid()}.tmp"
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(f"{line}\n".encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    return _state(path)


def _turn_off(path: str) -> Switch:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return _state(path)


def _state(path: str) -> Switch:
    from distdiag.training.kill_switch import read_reason

    os.stat(os.path.dirname(path))  # no switch can be in a folder that does not exist: mistyped, or not mounted
    reason = read_reason(path)
    return Switch(path=path, on=reason is not None, reason=reason or "")
