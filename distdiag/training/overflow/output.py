"""Where reports and frames go: stdout, whole and labelled where there are many ranks, and a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from distdiag.node import private
from distdiag.training import whoami
from distdiag.training.overflow import ranks
from distdiag.training.printflock import printflock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.training.overflow.detection import Detection
    from distdiag.training.overflow.frames import Frame

SCHEMA = "distdiag-frames/1"


class Output:
    """Prints, and keeps frames in a file of JSON lines; the file is made when there is something to keep."""

    def __init__(self, path: str, model: str) -> None:
        self._path, self._model = path, model
        self._begun = False

    def frames(self, heading: str, batch: int, frames: Iterable[Frame]) -> None:
        """Print and keep the frames of a batch that is traced."""
        frames = list(frames)
        _print("\n".join([*([heading] if heading else []), *map(str, frames)]))
        self._keep([frame.to_json(batch) for frame in frames])

    def detection(self, found: Detection, *, show: bool) -> None:
        """Keep what was found, and print it if it is for this rank to do so."""
        self._keep([*(frame.to_json(found.when.batch) for frame in found.frames), found.to_json()])
        if show:
            _print(found.text())

    def note(self, text: str) -> None:
        """Say something that is no fault."""
        printflock(f"distdiag: {text}", file=sys.stderr, prefix=ranks.count() > 1)

    def _keep(self, records: list[dict[str, Any]]) -> None:
        if not self._path:
            return
        rank = whoami.rank()
        path = self._path.replace("{rank}", str(rank or 0))
        if not self._begun:
            head = {"kind": "head", "schema": SCHEMA, "model": self._model, "rank": rank, "host": whoami.host()}
            records = [head, *records]
        try:
            private.make_folder(os.path.dirname(path))
            flags = os.O_WRONLY | (os.O_APPEND if self._begun else 0)
            with open(private.open_file(path, flags), "w", encoding="utf-8") as file:
                file.write("".join(json.dumps(one) + "\n" for one in records))
        except OSError as error:  # the job is what matters
            self._path = ""
            self.note(f"the frames are not kept: {error}")
        self._begun = True


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it: what was found counts all the same
        printflock(text, prefix=ranks.count() > 1)
