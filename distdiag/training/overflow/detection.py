"""What was found: one bad tensor, where it was made, how that reads, and the files and streams that it goes to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from distdiag.facts import private_files
from distdiag.facts.machine import host_name
from distdiag.facts.rank_identity import own_rank
from distdiag.training.overflow import ranks
from distdiag.training.overflow.recorder import COLUMNS, HEADING, MODEL, batch_head, finite_or_text
from distdiag.training.printflock import printflock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.training.overflow.extrema import Tally
    from distdiag.training.overflow.recorder import Frame


HERE, BETWEEN, GIVEN, WEIGHTS = "here", "between", "given", "weights"
LOSS, BACKWARD, UNSEEN = "loss", "backward", "unseen"
"""Where it was made: in the module itself; in the forward of the module around it, before it called this one; before
the model was called; before this forward, in the weights; by the script, on the way to what it calls backward on; in
the backward; or that could not be seen."""


class OverflowDetected(ValueError):
    """nan or inf was detected. `detection` has the details; of several ranks all raise it for the same tensor."""

    def __init__(self, detection: Detection, by: str = "DebugUnderflowOverflow") -> None:
        super().__init__(f"{by}: {detection.sentence}")
        self.detection, self._by = detection, by

    def __reduce__(self) -> tuple[type, tuple[Detection, str]]:
        return type(self), (self.detection, self._by)


class Aborted(ValueError):
    """The batch of `abort_after_batch_num` is over."""


@dataclass(frozen=True)
class Place:
    """A module: its name, empty for the model itself, and its class."""

    module: str
    kind: str

    def __str__(self) -> str:
        return f"`{self.module}` ({self.kind})" if self.module else f"{MODEL} ({self.kind})"


@dataclass(frozen=True)
class When:
    """`batch` counts what `unit` says, forwards or steps, from 0; `step` the optimizer's steps that were complete.

    `phase`: "training" or "evaluation", as the model was set: forwards count in both.
    """

    batch: int
    step: int
    unit: str
    phase: str = "training"

    def __str__(self) -> str:
        parts = [] if self.step == self.batch else [f"optimizer step {self.step}"]
        parts += ["evaluation"] if self.phase == "evaluation" else []
        return f"batch {self.batch}" + (f" ({', '.join(parts)})" if parts else "")


@dataclass(frozen=True)
class Became:
    """Where -inf, which may have been meant, became nan or inf: `what` that is."""

    place: Place
    tensor: str
    what: str


@dataclass(frozen=True)
class Detection:
    """The first bad tensor, of the module at `place`; `made_by` is the module whose code made it.

    `operation` is what made it of finite numbers, where that was seen, in words `how`; `became`: what came of it, where
    it is -inf. `kinds` says which of nan, inf and -inf there are where they cannot be counted any more.
    """

    when: When
    place: Place
    tensor: str
    origin: str
    made_by: Place
    tally: Tally | None
    rank: int | None = None
    host: str = ""
    other_ranks: tuple[int, ...] = ()
    hints: tuple[str, ...] = ()
    number: int = 0
    """Which frame of the forward it was: of several ranks the lowest was the first."""
    seen: str = ""
    """What is known of what came before: of inputs, of outputs, of the forward, of other gradients."""
    operation: str = ""
    how: str = ""
    became: Became | None = None
    kinds: str = ""
    fix: str = ""
    frames: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def sentence(self) -> str:
        """Describe who, when, where and what, and where it was made."""
        who = "" if self.rank is None else f"rank {self.rank} ({self.host}), "
        others = ""
        if self.other_ranks:
            others = f" (also on rank{'s' if len(self.other_ranks) > 1 else ''} {_ranks(self.other_ranks)})"
        where = "the loss that backward was called on" if self.origin == LOSS else f"`{self.tensor}` of {self.place}"
        return f"{who}{self.when}: {self.what} in {where}{others}. {self.why}".rstrip()

    @property
    def what(self) -> str:
        """Name the kinds of bad numbers."""
        return kinds(self.tally) or self.kinds or "nan or inf"

    @property
    def why(self) -> str:
        """Describe where it was made, and what became of it."""
        how = f" ({self.how})" if self.how else ""
        then = "" if self.became is None else f", and {self.became.place} turned it into {self.became.what}"
        before = self.seen or "All outputs before it were finite"
        return {
            HERE: f"{self.seen or 'Inputs were finite'}; this module produced it{how}{then}.",
            BETWEEN: f"{before}: the forward of {self.made_by} produced it{how} and passed it on{then}.",
            GIVEN: "It was in the model's input: check the data, or the code before the model.",
            WEIGHTS: "It was there before the forward: an optimizer step produced it, or the checkpoint contains it.",
            LOSS: self.seen,
            BACKWARD: self.seen,
            UNSEEN: "",
        }[self.origin]

    def text(self, *, classic: bool = True) -> str:
        """Write the report: the frames, then the answer; `classic`: as transformers' detector has the frames."""
        lines = []
        if self.frames:
            count = len(self.frames)
            lines += [
                "",
                *(
                    [
                        f"Detected inf/nan during batch_number={self.when.batch}",
                        f"Last {count} forward frames:",
                        HEADING,
                    ]
                    if classic
                    else [f"The last {count} frames of batch {self.when.batch}, up to the detection:", COLUMNS]
                ),
                *(frame.text(classic=classic) for frame in self.frames),
                "",
            ]
        lines += [f"distdiag: {self.sentence}", *_of_tally(self.tally), *self.hints]
        lines += [f"fix: {self.fix}"] if self.fix else []
        return "\n".join(lines) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Write for a file of frames."""
        fields: dict[str, Any] = {"kind": "detection", "sentence": self.sentence}
        fields |= {**asdict(self.when), "rank": self.rank, "host": self.host}
        fields |= {"module": self.place.module, "class": self.place.kind, "tensor": self.tensor, "origin": self.origin}
        fields |= {"made_by": self.made_by.module, "made_by_class": self.made_by.kind}
        fields |= {"operation": self.operation, "became": None if self.became is None else asdict(self.became)}
        fields |= {"other_ranks": list(self.other_ranks), "hints": list(self.hints), "fix": self.fix}
        if self.tally is None:
            return {**fields, "tally": None}
        return {**fields, "tally": {**asdict(self.tally), "abs_max": finite_or_text(self.tally.abs_max)}}


def kinds(tally: Tally | None) -> str:
    """Count nan, inf and -inf: "15 inf and 17 -inf"; empty without a tally."""
    if tally is None:
        return ""
    counts = ((tally.nan, "nan"), (tally.inf, "inf"), (tally.minus_inf, "-inf"))
    return " and ".join(f"{count:,} {kind}" for count, kind in counts if count)


def _of_tally(tally: Tally | None) -> list[str]:
    if tally is None:
        return []
    at = "" if tally.first is None else f", first at [{', '.join(map(str, tally.first))}]"
    shape = ", ".join(map(str, tally.shape))
    most = "" if math.isnan(tally.abs_max) else f"; largest finite value {tally.abs_max:.2e}"
    lines = [f"{tally.dtype} of shape [{shape}], {tally.of:,} numbers{at}{most}."]
    if tally.zeros + tally.subnormals >= tally.of / 1000 > 0:
        lines.append(
            f"{100 * tally.zeros / tally.of:.1f}% are zero, {100 * tally.subnormals / tally.of:.1f}% subnormal."
        )
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


SCHEMA = "distdiag-frames/1"


class ReportWriter:
    """Prints, and keeps frames in a file of JSON lines; the file is made when there is something to keep."""

    def __init__(self, path: str, model: str) -> None:
        self._path, self._model = path, model
        self._begun = False
        self.classic = True
        """Whether frames read as those of transformers' detector do, which the script asked for by its name."""

    def frames(self, batch: int, frames: Iterable[Frame]) -> None:
        """Print and keep the frames of a batch that is traced, below a heading before its first."""
        frames = list(frames)
        is_first = bool(frames) and frames[0].number == 0
        heading = [batch_head(batch, classic=self.classic)] if is_first else []
        _print("\n".join([*heading, *(frame.text(classic=self.classic) for frame in frames)]))
        self._keep([frame.to_json(batch) for frame in frames])

    def detection(self, found: Detection, *, show: bool) -> None:
        """Keep what was found, and print it if it is for this rank to do so."""
        self._keep([*(frame.to_json(found.when.batch) for frame in found.frames), found.to_json()])
        if show:
            _print(found.text(classic=self.classic))

    def note(self, text: str) -> None:
        """Print something that is no fault."""
        printflock(f"distdiag: {text}", file=sys.stderr, prefix=ranks.count() > 1)

    def _keep(self, records: list[dict[str, Any]]) -> None:
        if not self._path:
            return
        rank = own_rank()
        path = self._path.replace("{rank}", str(rank or 0))
        if not self._begun:
            head = {"kind": "head", "schema": SCHEMA, "model": self._model, "rank": rank, "host": host_name()}
            records = [head, *records]
        try:
            private_files.make_folder(os.path.dirname(path))
            flags = os.O_WRONLY | (os.O_APPEND if self._begun else 0)
            with open(private_files.open_file(path, flags), "w", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as error:  # the job is what matters
            self._path = ""
            self.note(f"the frames are not saved: {error}")
        self._begun = True


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it: what was found counts all the same
        printflock(text, prefix=ranks.count() > 1)
