"""What the detector reports, in memory and on disk. Standard library only: `distdiag overflow` reads the same records.

A process writes `watched-*.json` (WatchedProcess) and frame files: JSON lines of kind head, frame and detection.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from distdiag.facts import private_files
from distdiag.facts.machine import host_name
from distdiag.facts.rank_identity import own_rank, torch_distributed
from distdiag.training.printflock import printflock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.training.overflow.frames import Frame

SCHEMA = "distdiag-frames/1"
HEADING = "abs min  abs max  metadata"
"""The heading of transformers' detector; COLUMNS is ours."""
COLUMNS = "abs min  abs max  module, class, and its tensors"
MODEL = "the model"
"""The outermost module, without a name."""

HERE, BETWEEN, GIVEN, WEIGHTS = "here", "between", "given", "weights"
LOSS, BACKWARD, UNSEEN = "loss", "backward", "unseen"
"""Origins: the module itself; code of the parent module, before it called this module; before the model was called; an
earlier step (weights, buffers); between the model and the argument of backward; the backward; unknown."""
_NOT_THE_SCRIPT = (
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    os.path.dirname(os.__file__),
    "<frozen ",
)
_BY_DEFAULT = {
    GIVEN: "It was in the model's input: check the data, or the code before the model.",
    WEIGHTS: "It was there before the forward: an optimizer step produced it, or the checkpoint contains it.",
}


@dataclass
class WatchedModel:
    """One model: its class, the forwards (`batches`) and optimizer steps seen, and the detections.

    `found` counts detections, `began` those that began on this rank. `aborted`: by --abort-after. `off`: why the
    detector gave up. `unread` forwards had no readable output; the last output was a `kind`.
    """

    model: str
    batches: int = 0
    steps: int = 0
    found: int = 0
    began: int = 0
    aborted: bool = False
    off: str = ""
    unread: int = 0
    kind: str = ""
    warnings: list[str] = field(default_factory=list)


@dataclass
class WatchedProcess:
    """One process. `ended`: it exited normally; else the counts are partial. `left_out`: why models are not watched."""

    rank: int | None
    host: str
    pid: int
    models: list[WatchedModel] = field(default_factory=list)
    ended: bool = False
    left_out: list[str] = field(default_factory=list)

    def write(self, folder: str) -> None:
        """Write watched-PID-HOST.json. Raises OSError."""
        private_files.make_folder(folder)
        path = os.path.join(folder, f"watched-{self.pid}-{self.host}.json")
        private_files.write_whole(path, json.dumps(asdict(self)).encode())


class When(NamedTuple):
    """`batch` counts forwards or steps (`unit`) from 0, `step` completed optimizer steps.

    `phase`: "training" or "evaluation"; forwards count in both.
    """

    batch: int
    step: int
    unit: str = "forward"
    phase: str = "training"

    def __str__(self) -> str:
        parts = [] if self.step == self.batch else [f"optimizer step {self.step}"]
        parts += ["evaluation"] if self.phase == "evaluation" else []
        return f"batch {self.batch}" + (f" ({', '.join(parts)})" if parts else "")


class Place(NamedTuple):
    """A module: its name, empty for the model itself, and its class."""

    module: str
    kind: str

    def __str__(self) -> str:
        return f"`{self.module}` ({self.kind})" if self.module else f"{MODEL} ({self.kind})"


@dataclass(frozen=True)
class Tally:
    """Value counts of a bad tensor of `of` elements. `first`: index of the first nan or inf.

    `zeros` and `subnormals` underflowed; `abs_max` is over finite values, None without any.
    """

    shape: tuple[int, ...] = ()
    dtype: str = ""
    of: int = 0
    nan: int = 0
    inf: int = 0
    minus_inf: int = 0
    zeros: int = 0
    subnormals: int = 0
    first: tuple[int, ...] | None = None
    abs_max: float | str | None = None

    @property
    def kinds(self) -> str:
        """Count nan, inf and -inf: "15 inf and 17 -inf"."""
        counts = ((self.nan, "nan"), (self.inf, "inf"), (self.minus_inf, "-inf"))
        return " and ".join(f"{count:,} {kind}" for count, kind in counts if count)

    def lines(self) -> list[str]:
        """Describe the tensor, with the underflowed share from 0.1 % up."""
        at = "" if not self.first else f", first at [{', '.join(map(str, self.first))}]"
        most = f"; largest finite value {self.abs_max:.2e}" if isinstance(self.abs_max, float) else ""
        numbers = f"{self.of:,} number{'s' * (self.of != 1)}"
        lines = [f"{self.dtype} of shape [{', '.join(map(str, self.shape))}], {numbers}{at}{most}."]
        if self.zeros + self.subnormals >= self.of / 1000 > 0:
            zeros, subnormals = 100 * self.zeros / self.of, 100 * self.subnormals / self.of
            lines.append(f"{zeros:.1f}% are zero, {subnormals:.1f}% subnormal.")
        return lines


@dataclass(frozen=True)
class Became:
    """The output (`tensor` of `module`) that turned -inf, possibly intended, into nan or inf (`what`)."""

    module: str = ""
    module_class: str = ""
    tensor: str = ""
    what: str = ""


@dataclass(frozen=True)
class Detection:
    """The first bad tensor of a job, in `module`; code of `made_by` produced it.

    `batch`, `step`, `unit` and `phase` as in When; `origin`: HERE or another of the origins. `what`: counts of nan and
    inf; `operation`: produced them from finite inputs, if that was observed. `path`: the frame file read. `number`: of
    the frame, or the order of the gradient; the rank with the lowest was first.
    """

    sentence: str
    batch: int
    step: int = 0
    unit: str = "forward"
    phase: str = "training"
    rank: int | None = None
    host: str = ""
    other_ranks: tuple[int, ...] = ()
    module: str = ""
    module_class: str = ""
    tensor: str = ""
    origin: str = ""
    made_by: str = ""
    made_by_class: str = ""
    operation: str = ""
    what: str = ""
    why: str = ""
    became: Became | None = None
    hints: tuple[str, ...] = ()
    fix: str = ""
    tally: Tally | None = None
    path: str = ""
    number: int = 0

    def as_sentence(self) -> str:
        """Describe rank, time, tensor, and where it was produced."""
        who = "" if self.rank is None else f"rank {self.rank} ({self.host}), "
        others = f" (also on rank{'s' * (len(self.other_ranks) > 1)} {_ranks(self.other_ranks)})"
        where = f"`{self.tensor}` of {Place(self.module, self.module_class)}"
        where = "the loss that backward was called on" if self.origin == LOSS else where
        when = When(self.batch, self.step, self.unit, self.phase)
        why = self.why or _BY_DEFAULT.get(self.origin, "")
        return f"{who}{when}: {self.what or 'nan or inf'} in {where}{others * bool(self.other_ranks)}. {why}".rstrip()


class Found(NamedTuple):
    """A detection in the process that made it, and the frames up to it."""

    detection: Detection
    frames: tuple[Frame, ...] = ()

    def but(self, **changes: Any) -> Found:  # noqa: ANN401 - fields of the detection
        """Return it with changes in the detection."""
        return self._replace(detection=replace(self.detection, **changes))


class OverflowDetected(ValueError):
    """nan or inf was detected. `detection` has the details; of several ranks all raise it for the same tensor."""

    def __init__(self, detection: Detection, by: str = "DebugUnderflowOverflow") -> None:
        super().__init__(f"{by}: {detection.sentence}")
        self.detection, self._by = detection, by

    def __reduce__(self) -> tuple[type, tuple[Detection, str]]:
        return type(self), (self.detection, self._by)


class Aborted(ValueError):
    """The batch of `abort_after_batch_num` is over."""


def is_one_of_many() -> bool:
    """Return whether this process is one of several ranks."""
    dist = torch_distributed()
    return dist is not None and int(dist.get_world_size()) > 1


def finite_or_text(value: float | None) -> float | str | None:
    """Convert a number for JSON, which has no infinity and no nan."""
    return value if value is None or math.isfinite(value) else str(value)


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
        except OSError as error:  # never fail the job
            self._path = ""
            self.note(f"the frames are not saved: {error}")
        self._begun = True


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stdout is closed; the detection counts all the same
        printflock(text, prefix=is_one_of_many())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def is_of_script(file: str) -> bool:
    """Return whether a source file is the user's: not installed, and not distdiag's."""
    return not file.startswith(_NOT_THE_SCRIPT) and f"{os.sep}site-packages{os.sep}" not in file
