"""Runs a job with its models watched, reads the records of its processes, and exits as the job did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, TypeVar

import typer

from distdiag import child_job
from distdiag.commands.overflow.report import COMMAND, Overflow, diagnose, overflow_view
from distdiag.facts.process.rank_identity import identify
from distdiag.files import make_folder
from distdiag.output import Output, deliver, document, emit
from distdiag.training.overflow.report import Detection, WatchedProcess
from distdiag.training.overflow.session import VARIABLE, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.facts.process.rank_identity import Identity
    from distdiag.report import Report

Record = TypeVar("Record")
_MOST_LINES = 1_000_000


def run(argv: Sequence[str], settings: Settings, keep: str, *, quiet: bool) -> Overflow:
    """Run a job to its end; `keep`: folder for its frames; `quiet`: its stdout is sent to stderr.

    Raises:
        UsageError: the folder cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="distdiag-overflow-") as scratch:
        folder = os.path.abspath(keep) if keep else scratch
        make_folder("--save", folder)
        before = set(os.listdir(folder))
        env = child_job.watched(VARIABLE, replace(settings, folder=folder).to_text())
        with child_job.signals_for_the_job() as mask:
            out = sys.stderr.fileno() if quiet else None
            # The job may be a launcher: only by SIGTERM its ranks go with it.
            child = child_job.start(argv, mask, env=env, stdout=out, dies_by=signal.SIGTERM)
            status = child_job.wait(child, child_job.send)
            # torchrun ends the other ranks as soon as one has ended; the report is still to be made and printed.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        new = [os.path.join(folder, name) for name in os.listdir(folder) if name not in before]
        frames = tuple(sorted(path for path in new if _has_frames(path))) if keep else ()
        return Overflow(
            argv=tuple(argv),
            status=status,
            processes=tuple(sorted(_watched(new), key=lambda process: (process.rank or 0, process.pid))),
            detections=tuple({found.sentence: found for found in _detections(new)}.values()),
            frames=frames,
            folder=keep if not any(name.endswith(".jsonl") for name in before) else "",
        )


def report_and_leave(outcome: Overflow, program: str, *, as_json: bool) -> NoReturn:
    """Print the report and exit with the job's status, or 1; with --json, with the verdict's."""
    report = diagnose(outcome, program)
    identity = identify(os.environ)
    is_first = identity is None or identity.rank == 0
    status = _status(report, outcome)
    if as_json and is_first:
        status = report.exit_code()  # the document and the process agree; data.status is the job's own
        with contextlib.suppress(typer.Exit):
            emit(json.dumps(document(report), indent=2) + "\n")
    elif not as_json and _is_mine(outcome, identity):
        # stdout is the job's.
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(typer.Exit):
            deliver(COMMAND, lambda: report, overflow_view, Output())
    elif not as_json and is_first:
        sys.stderr.write(f"distdiag overflow: {report.verdict.upper()}: {report.summary}\n")
    child_job.leave_like(status)


def _is_mine(outcome: Overflow, identity: Identity | None) -> bool:
    """Return whether this process reports: under a launcher each rank has its own distdiag."""
    if identity is None or not outcome.detections:
        return identity is None or identity.rank == 0
    return any(found.rank in (None, identity.rank) for found in outcome.detections)


def _status(report: Report[Overflow], outcome: Overflow) -> int:
    if outcome.detections:
        return 1
    if outcome.was_aborted:
        return 0  # it was to end there
    return outcome.status or report.exit_code()


def _watched(paths: Sequence[str]) -> Iterator[WatchedProcess]:
    for path in paths:
        if os.path.basename(path).startswith("watched-") and path.endswith(".json"):
            with open(path, "rb") as file:
                yield from _read(file.read(), WatchedProcess)


def _detections(paths: Sequence[str]) -> Iterator[Detection]:
    for path in filter(_has_frames, sorted(paths)):
        with open(path, "rb") as file:
            for _, line in zip(range(_MOST_LINES), file, strict=False):
                if line.startswith(b'{"kind": "detection"'):
                    yield from _read(line, Detection)


def _has_frames(path: str) -> bool:
    return os.path.basename(path).startswith("frames-")


def _read(data: bytes, kind: type[Record]) -> list[Record]:
    """Parse a record; none if its process ended while writing."""
    import msgspec

    try:
        return [msgspec.json.decode(data, type=kind)]
    except msgspec.DecodeError:
        return []
