"""Runs a forward again as it was: the same inputs, random numbers, buffers and autocast, without torch.compile."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from distdiag.training.overflow import walk
from distdiag.training.overflow.frames import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module

    from distdiag.training.overflow.recorder import Recorder

    _Place = tuple[Module, str]

_SMALL_BYTES = 1 << 20
"""Buffers larger than this are tables, and not what a forward changes."""


class Buffers:
    """The buffers that a forward of this model changes, such as the running means of BatchNorm."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._moving: dict[bool, list[_Place]] = {}
        """By whether the model is in training."""

    def save(self) -> list[tuple[_Place, Tensor]]:
        """Copy those that a forward may change: at first all, later those that were seen to change."""
        places = self._moving.get(self._model.training)
        if places is None:
            places = [(module, name) for module in self._model.modules() for name in module._buffers]
        found = ((place, place[0]._buffers.get(place[1])) for place in places)
        return [(place, one.detach().clone()) for place, one in found if one is not None and _can_be_kept(one)]

    def learn(self, saved: list[tuple[_Place, Tensor]]) -> list[tuple[_Place, Tensor]]:
        """Look which of them the forward has changed, and give the copies of those.

        They are compared, once: batch_norm changes its buffers without torch's count of changes knowing of it.
        """
        if self._model.training in self._moving:
            return saved
        moved = [(place, before) for place, before in saved if _has_changed(before, place[0]._buffers.get(place[1]))]
        self._moving[self._model.training] = [place for place, _ in moved]
        return moved

    @contextlib.contextmanager
    def as_they_were(self, saved: list[tuple[_Place, Tensor]]) -> Iterator[None]:
        """Put the copies in their places for a while."""
        now = [(place, _at(place).detach().clone()) for place, _ in saved]
        _put(saved)
        try:
            yield
        finally:
            _put(now)


def _can_be_kept(buffer: Tensor) -> bool:
    if is_lazy(buffer) or buffer.is_meta or buffer.layout is not torch.strided:
        return False
    return buffer.nbytes <= _SMALL_BYTES


def _has_changed(before: Tensor, now: Tensor | None) -> bool:
    """Tell whether a buffer has other numbers than before; one that became something else cannot be put back."""
    if now is None or now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    return not torch.equal(before, now)


def _at(place: _Place) -> Tensor:
    buffer = place[0]._buffers[place[1]]
    assert buffer is not None
    return buffer


def _put(values: list[tuple[_Place, Tensor]]) -> None:
    with torch.no_grad():
        for place, value in values:
            _at(place).copy_(value)


class State:
    """What a forward of a model changes beside its outputs."""

    def __init__(self, model: Module) -> None:
        self.model, self.buffers, self.numbers = model, Buffers(model), RandomNumbers()


class Call:
    """One call of a model, with all that it takes to make it again; the inputs are kept, not copied."""

    def __init__(self, state: State, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args, self.kwargs = args, dict(kwargs)
        self._model, self._buffers, self._numbers = state.model, state.buffers, state.numbers
        self._forgotten = False
        self._saved = self._buffers.save()
        self._versions = [(tensor, version_of(tensor)) for _, tensor in _tensors(args, kwargs)]
        self._random = self._numbers.save()
        self._autocast = _autocast()

    def returned(self) -> None:
        """Say that the forward is over."""
        self._saved = self._buffers.learn(self._saved)
        self._numbers.learn(self._random)

    @property
    def kept_bytes(self) -> int:
        """How much memory its inputs take."""
        return sum(tensor.nbytes for tensor, _ in self._versions if tensor.layout is torch.strided)

    def forget(self) -> None:
        """Let go of the inputs."""
        self.args, self.kwargs, self._versions = (), {}, []
        self._forgotten = True

    @property
    def why_not(self) -> str:
        """Why it cannot be made again; empty if it can."""
        if self._forgotten:
            return "its inputs were too large to be kept"
        changed = any(version_of(tensor) != version for tensor, version in self._versions)
        return "its inputs were changed in place since" if changed else ""

    def again(self, recorder: Recorder) -> str:
        """Make the call once more under a recorder; gives the reason if that failed."""
        why = self.why_not
        if why:
            return why
        for grad in (torch.no_grad, torch.enable_grad):  # some models need gradients in their forward
            recorder.attach()
            try:
                with self._as_it_was(), grad():
                    recorder.begin(self.args, self.kwargs)
                    recorder.end(self._model(*self.args, **self.kwargs))
            except Exception as error:  # noqa: BLE001 - the user's own forward: anything may be wrong with it
                why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            else:
                return ""
            finally:
                recorder.unhook()
        return f"its forward failed the second time: {why}"

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        now = self._numbers.save()
        with contextlib.ExitStack() as stack:
            stack.callback(self._numbers.put, now)
            stack.enter_context(self._buffers.as_they_were(self._saved))
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            stack.enter_context(_eagerly())
            self._numbers.put(self._random)
            yield


def _tensors(args: tuple[object, ...], kwargs: dict[str, object]) -> list[tuple[str, Tensor]]:
    return [(label, leaf) for label, leaf in walk.inputs(args, kwargs) if isinstance(leaf, torch.Tensor)]


class RandomNumbers:
    """The states of the random number generators that this model's forward uses."""

    def __init__(self) -> None:
        self._python = self._numpy = True
        self._used = [False, False]
        self._learns = 2

    def save(self) -> dict[str, Any]:
        """Copy the states: torch's, and, unless the first forwards did without them, Python's and numpy's."""
        states: dict[str, Any] = {"torch": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        if self._python:
            states["python"] = random.getstate()
        if self._numpy and _numpy_random() is not None:
            states["numpy"] = _numpy_random().get_state(legacy=False)
        return states

    def learn(self, before: dict[str, Any]) -> None:
        """Look, after each of the first forwards, whether they were used: to copy them takes longer than the rest."""
        if not self._learns:
            return
        self._learns -= 1
        self._used[0] |= before["python"] != random.getstate()
        numpy = _numpy_random()
        self._used[1] |= numpy is not None and str(before.get("numpy")) != str(numpy.get_state(legacy=False))
        if not self._learns:
            self._python, self._numpy = self._used

    def put(self, states: dict[str, Any]) -> None:
        """Set the states."""
        torch.set_rng_state(states["torch"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
        if "python" in states:
            random.setstate(states["python"])
        if "numpy" in states:
            _numpy_random().set_state(states["numpy"])


def _numpy_random() -> Any:  # noqa: ANN401 - a module that is not ours to import
    return getattr(sys.modules.get("numpy"), "random", None)


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    if not hasattr(torch, "get_autocast_dtype"):  # before 2.4
        return [
            ("cpu", torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()),
            ("cuda", torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()),
        ]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]
    return [(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices]


def _eagerly() -> contextlib.AbstractContextManager[object]:
    """Let compiled parts run as they were written, so that their modules are called; only if something is compiled."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
    return contextlib.nullcontext()
