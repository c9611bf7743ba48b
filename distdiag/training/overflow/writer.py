"""Prints frames and detections, and keeps them in a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from distdiag.facts import private_files
from distdiag.facts.machine import host_name
from distdiag.facts.process.rank_identity import own_rank
from distdiag.training.overflow.frames import Frame, Recorder
from distdiag.training.overflow.report import SCHEMA, is_one_of_many
from distdiag.training.printflock import printflock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Module

    from distdiag.training.overflow.frames import Found

HEADING = "abs min  abs max  metadata"
"""The heading of transformers' detector; COLUMNS is ours."""
COLUMNS = "abs min  abs max  module, class, and its tensors"


class ReportWriter:
    """Prints, and keeps frames in a file of JSON lines, created with the first record.

    `classic`: frames are printed in the format of transformers' detector.
    """

    def __init__(self, path: str, model: str) -> None:
        self._path, self._model = path, model
        self._begun = False
        self._traced = -1
        self.classic = True

    def frames(self, batch: int, frames: Iterable[Frame]) -> None:
        """Print and keep the frames of a traced batch, with a heading before its first."""
        frames = list(frames)
        texts = [frame.text(classic=self.classic) for frame in frames]
        if frames and frames[0].number == 0:
            head = f"\n\n{'':17} *** Starting batch number={batch} ***\n{HEADING}"
            texts.insert(0, head if self.classic else f"\nFrames of batch {batch}:\n{COLUMNS}")
        _print("\n".join(texts))
        self._keep([frame.to_json(batch) for frame in frames])
        self._traced = batch

    def detection(self, found: Found, *, show: bool) -> None:
        """Keep a detection, and its frames unless those of its batch were kept; print it if `show`."""
        batch = found.detection.batch
        frames = () if self._traced == batch else found.frames
        self._keep([*(frame.to_json(batch) for frame in frames), {"kind": "detection", **asdict(found.detection)}])
        if show:
            _print(self._text(found))

    def _text(self, found: Found) -> str:
        lines, told, count = [], found.detection, len(found.frames)
        if found.frames:
            last = "The last frame" if count == 1 else f"The last {count} frames"
            head = [f"{last} of batch {told.batch}, up to the detection:", COLUMNS]
            if self.classic:
                head = [f"Detected inf/nan during batch_number={told.batch}", f"Last {count} forward frames:", HEADING]
            lines = ["", *head, *(frame.text(classic=self.classic) for frame in found.frames), ""]
        lines += [f"distdiag: {told.sentence}", *(told.tally.lines() if told.tally else ()), *told.hints]
        return "\n".join([*lines, f"fix: {told.fix}"] if told.fix else lines) + "\n"

    def note(self, text: str) -> None:
        """Print a remark on stderr."""
        printflock(f"distdiag: {text}", file=sys.stderr, prefix=is_one_of_many())

    def _keep(self, records: list[dict[str, object]]) -> None:
        if not self._path:
            return
        rank = own_rank()
        path = self._path.replace("{rank}", str(rank or 0))
        if not self._begun:
            head: dict[str, object] = {
                "kind": "head",
                "schema": SCHEMA,
                "model": self._model,
                "rank": rank,
                "host": host_name(),
            }
            records = [head, *records]
        try:
            private_files.make_folder(os.path.dirname(path))
            flags = os.O_WRONLY | (os.O_APPEND if self._begun else 0)
            with open(private_files.open_file(path, flags), "w", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as error:  # never fail the job
            self._path = ""
            self.note(f"the frames are not saved: {error}")
        self._begun = True


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stdout is closed; the detection counts all the same
        printflock(text, prefix=is_one_of_many())


class TracedBatches:
    """Batches whose frames are all printed; `last` is -1 without any."""

    def __init__(self, model: Module, batches: Iterable[int] | None, output: ReportWriter) -> None:
        self._model, self._output = model, output
        self._batches = set(batches or ())
        self._recorder: Recorder | None = None
        self.last = max(self._batches, default=-1)

    def __contains__(self, batch: int) -> bool:
        return batch in self._batches

    def begin(self, batch: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Begin a forward of this batch."""

        def show(frame: Frame) -> None:
            self._output.frames(batch, [frame])

        self._recorder = Recorder(self._model, 1, ("*",), exact=True, on_frame=show)
        self._recorder.attach()
        self._recorder.begin(args, kwargs)

    def end(self, output: object) -> None:
        """End it."""
        if self._recorder is not None:
            self._recorder.end(output)
        self.stop()

    def stop(self) -> None:
        """Remove the hooks, also where the forward was left by an exception."""
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None
