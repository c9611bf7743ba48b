"""read -> diagnose, for overflow show."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.overflow.show import plot
from distdiag.commands.overflow.show.choose import Chosen, choose, wants
from distdiag.commands.overflow.show.compare import Compared, compare
from distdiag.commands.overflow.show.diagnose import diagnose
from distdiag.commands.overflow.show.read import NotFrames, Reader
from distdiag.errors import DistdiagError, UsageError
from distdiag.files import check_picture
from distdiag.report import Finding, Fix, Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.overflow.show.kept import Recording
    from distdiag.commands.overflow.show.model import Request
    from distdiag.commands.overflow.show.result import OverflowShow
    from distdiag.deliver import Progress
    from distdiag.report import Report

_SUFFIX = ".jsonl"
_NAMES = 8


def check(request: Request, progress: Progress) -> tuple[Report[OverflowShow], Chosen, Compared | None]:
    """Read files of frames; what was chosen of them is given back for the view.

    Raises:
        UsageError: a file is not there, or no batch or module is like that.
        DistdiagError: no file can be read, or a picture cannot be made.
    """
    check_picture(request.plot)
    reader = Reader(progress.news, frozenset(request.batches))
    unread: dict[str, str] = {}
    hint, interrupted = "", False
    try:
        for path in _files(request.paths):
            try:
                reader.read(path)
            except NotFrames as error:
                unread[path], hint = str(error), hint or error.hint
            except OSError as error:
                unread[path], hint = f"{path}: {error.strerror}", hint or "name a file that can be read"
    except KeyboardInterrupt:
        interrupted = True
    if unread and not reader.recordings:
        raise DistdiagError(next(iter(unread.values())), hint=hint)
    _check_choice(request, reader.recordings)
    chosen = choose(request, reader.recordings)
    compared = compare(request, chosen)
    report = diagnose(request, chosen, compared, unread, interrupted=interrupted)
    return _pictured(request, chosen, report), chosen, compared


def _files(paths: Sequence[str]) -> list[str]:
    """List the files, and those of folders that end in .jsonl. Raises UsageError."""
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            inside = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIX))
            if not inside:
                raise UsageError(f"{path}: there is no file *{_SUFFIX} in this folder", hint="name files of frames")
            found += [os.path.join(path, name) for name in inside]
        elif os.path.exists(path):
            found.append(path)
        else:
            raise UsageError(
                f"{path}: there is no such file",
                hint='name what DebugUnderflowOverflow(model, save="frames-{rank}.jsonl") wrote; it makes the file '
                "when there is something to keep",
            )
    return found


def _check_choice(request: Request, recordings: Sequence[Recording]) -> None:
    forwards = [forward for one in recordings for forward in one.forwards]
    batches = {number: None for one in recordings for number in one.batches}
    missing = [number for number in request.batches if number not in batches]
    if missing:
        raise UsageError(f"--batch {missing[0]}: there are no frames of it", hint=f"there are: {_some(batches)}")
    if not request.module or not forwards:
        return
    fits = wants(request)
    names = {name: None for forward in forwards for name in forward.modules}
    if not any(map(fits, names)):
        raise UsageError(f"--module {request.module}: no module is called like that", hint=f"there are: {_some(names)}")


def _some(names: dict[int, None] | dict[str, None]) -> str:
    shown = ", ".join(str(name) for name in list(names)[:_NAMES] if name != "")
    return (shown or "none") + (", ..." if len(names) > _NAMES else "")


def _pictured(request: Request, chosen: Chosen, report: Report[OverflowShow]) -> Report[OverflowShow]:
    """Save the picture; where that fails, the report says so, and is not lost with it."""
    if request.plot in ("", "-"):
        return report
    try:
        plot.save(request, chosen, request.plot)
    except DistdiagError as error:
        failed = Finding(id="overflow.not-saved", level=Level.UNKNOWN, title=str(error), fix=Fix(text=error.hint))
        return replace(report, findings=(*report.findings, failed), summary=f"{report.summary}; {error}")
    return report
