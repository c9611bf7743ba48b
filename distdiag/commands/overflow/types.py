"""What came of a watched job. The records of its processes are those that the detector writes."""

from __future__ import annotations

from dataclasses import dataclass

from distdiag.training.overflow.report import (  # noqa: TC001 - msgspec reads the annotations
    Detection,
    WatchedModel,
    WatchedProcess,
)

COMMAND = "overflow"


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """`status`: the job's own exit status, negative for a signal.

    `frames`: the files that were kept; `folder`, as it was typed, where it has no other frames.
    """

    argv: tuple[str, ...]
    status: int
    processes: tuple[WatchedProcess, ...]
    detections: tuple[Detection, ...]
    frames: tuple[str, ...] = ()
    folder: str = ""

    @property
    def models(self) -> list[WatchedModel]:
        """All models of all processes."""
        return [model for process in self.processes for model in process.models]

    @property
    def was_aborted(self) -> bool:
        """Whether the job ended after the batch of --abort-after."""
        return self.status != 0 and any(model.aborted for model in self.models)
