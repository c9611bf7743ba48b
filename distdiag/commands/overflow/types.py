"""What the watched processes of a job wrote, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

COMMAND = "overflow"


@dataclass(frozen=True, kw_only=True)
class WatchedModel:
    """One model that was watched: its class, how many forwards and optimizer steps were seen, and what was found.

    `found` counts detections that this process was stopped by or reported, `began` those that began in it.
    `off`: why the detector gave up. Of `unread` forwards no output could be read; the last was a `kind`.
    """

    model: str
    batches: int
    steps: int
    found: int
    began: int
    aborted: bool
    off: str = ""
    unread: int = 0
    kind: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WatchedProcess:
    """One process of the job. `ended`: it came to its own end; else the counts are those of its beginning.

    `left_out`: why models, or the process itself, were not watched.
    """

    rank: int | None
    host: str
    pid: int
    models: tuple[WatchedModel, ...]
    ended: bool = False
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The first bad tensor of a process: `sentence` says it; see the detector's Detection for the parts."""

    sentence: str
    batch: int
    step: int
    rank: int | None
    host: str
    module: str
    tensor: str
    origin: str
    made_by: str
    other_ranks: tuple[int, ...] = ()
    operation: str = ""
    hints: tuple[str, ...] = ()
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """What came of a job. `status`: its own exit status, negative for a signal.

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
