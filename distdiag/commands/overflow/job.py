"""Runs a job with its models watched, and reads what its processes told."""

from __future__ import annotations

import glob
import os
import signal
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from distdiag import foreground
from distdiag.commands.overflow.model import Detection, Overflow, Watched
from distdiag.files import make_folder
from distdiag.training.overflow.session import VARIABLE, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Told = TypeVar("Told")
_MOST_LINES = 1_000_000


def run(argv: Sequence[str], settings: Settings, keep: str, *, quiet: bool) -> Overflow:
    """Run a job to its end; `keep` is the folder for frames, `quiet` sends its stdout to stderr.

    Raises:
        UsageError: the folder cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="distdiag-overflow-") as scratch:
        folder = os.path.abspath(keep) if keep else scratch
        make_folder("--save", folder)
        before = set(os.listdir(folder))
        env = foreground.watched(VARIABLE, replace(settings, folder=folder).to_text())
        with foreground.signals_for_the_job() as mask:
            out = sys.stderr.fileno() if quiet else None
            # The job may be a launcher: only by SIGTERM its ranks go with it.
            child = foreground.start(argv, mask, env=env, stdout=out, dies_by=signal.SIGTERM)
            status = foreground.wait(child, foreground.send)
        new = [path for path in glob.glob(os.path.join(folder, "*")) if os.path.basename(path) not in before]
        return Overflow(
            argv=tuple(argv),
            status=status,
            processes=tuple(sorted(_watched(new), key=lambda one: (one.rank or 0, one.pid))),
            detections=tuple({one.sentence: one for one in _detections(new)}.values()),
            frames=tuple(sorted(path for path in new if _has_frames(path))) if keep else (),
        )


def _watched(paths: Sequence[str]) -> Iterator[Watched]:
    for path in paths:
        if os.path.basename(path).startswith("watched-") and path.endswith(".json"):
            with open(path, "rb") as file:
                told = _read(file.read(), Watched)
            if told is not None:
                yield told


def _detections(paths: Sequence[str]) -> Iterator[Detection]:
    for path in sorted(paths):
        if not _has_frames(path):
            continue
        with open(path, "rb") as file:
            for _, line in zip(range(_MOST_LINES), file, strict=False):
                if line.startswith(b'{"kind": "detection"'):
                    told = _read(line, Detection)
                    if told is not None:
                        yield told


def _has_frames(path: str) -> bool:
    return os.path.basename(path).startswith("frames-")


def _read(data: bytes, kind: type[Told]) -> Told | None:
    """Read what a process wrote; None if that was cut off by its end."""
    import msgspec

    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError:
        return None
