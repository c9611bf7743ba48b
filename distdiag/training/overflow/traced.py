"""Batches of which all frames are printed, each frame as soon as it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.training.overflow.frames import batch_head
from distdiag.training.overflow.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.nn import Module

    from distdiag.training.overflow.frames import Frame
    from distdiag.training.overflow.output import Output
    from distdiag.training.overflow.replay import Call, Terms


class Traced:
    """The batches that are asked for; of one at a time the frames are on their way."""

    def __init__(self, model: Module, batches: Iterable[int] | None, output: Output) -> None:
        self._model, self._output = model, output
        self._batches = set(batches or ())
        self._recorder: Recorder | None = None

    @property
    def last(self) -> int:
        """The last batch to be traced; -1 if there is none."""
        return max(self._batches, default=-1)

    def __contains__(self, batch: int) -> bool:
        return batch in self._batches

    def begin(self, batch: int, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Begin with a forward of this batch."""
        self._recorder = self._new(batch)
        self._recorder.attach()
        self._recorder.begin(args, kwargs)

    def end(self, output: object) -> bool:
        """End it; False if none was on its way."""
        if self._recorder is None:
            return False
        self._recorder.end(output)
        self.stop()
        return True

    def stop(self) -> None:
        """Take the hooks off, also where the forward was left by an exception."""
        if self._recorder is not None:
            self._recorder.detach()
            self._recorder = None

    def again(self, call: Call, batch: int, terms: Terms, why: str) -> None:
        """Print the frames of a compiled model, by running it once more as it was written; or `why` that is not so."""
        why = why or call.again(self._new(batch), terms)
        if why:
            self._output.note(f"batch {batch} cannot be traced: {why}")

    def _new(self, batch: int) -> Recorder:
        def show(frame: Frame) -> None:
            self._output.frames("" if frame.number else batch_head(batch), batch, [frame])

        return Recorder(self._model, 1, ("*",), exact=True, on_frame=show)
