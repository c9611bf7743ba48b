"""What the detector reports, in memory and on disk. Standard library only: `distdiag overflow` reads the same records.

A process writes `watched-*.json` (WatchedProcess) and frame files: JSON lines of kind head, frame and detection.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from distdiag.facts import private_files
from distdiag.facts.process.rank_identity import torch_distributed
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = "distdiag-frames/1"
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
    """`batch` counts forwards from 0, `step` completed optimizer steps.

    `phase`: "training" or "evaluation"; forwards count in both.
    """

    batch: int
    step: int
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


@record
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


@record
class Detection:
    """The first bad tensor of a job, in `module`; code of `made_by` produced it.

    `batch`, `step` and `phase` as in When; `origin`: HERE or another of the origins. `what`: counts of nan and
    inf; `operation`: produced them from finite inputs, if that was observed. `number`: of the frame, or the order of
    the gradient; the rank with the lowest was first.
    """

    sentence: str
    batch: int
    step: int = 0
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
    hints: tuple[str, ...] = ()
    fix: str = ""
    tally: Tally | None = None
    number: int = 0

    def as_sentence(self) -> str:
        """Describe rank, time, tensor, and where it was produced."""
        who = "" if self.rank is None else f"rank {self.rank} ({self.host}), "
        others = f" (also on rank{'s' * (len(self.other_ranks) > 1)} {_ranks(self.other_ranks)})"
        where = f"`{self.tensor}` of {Place(self.module, self.module_class)}"
        where = "the loss that backward was called on" if self.origin == LOSS else where
        when = When(self.batch, self.step, self.phase)
        why = self.why or _BY_DEFAULT.get(self.origin, "")
        return f"{who}{when}: {self.what or 'nan or inf'} in {where}{others * bool(self.other_ranks)}. {why}".rstrip()


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


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def is_of_script(file: str) -> bool:
    """Return whether a source file is the user's: not installed, and not distdiag's."""
    return not file.startswith(_NOT_THE_SCRIPT) and f"{os.sep}site-packages{os.sep}" not in file
