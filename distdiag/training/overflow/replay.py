"""Runs a forward again as it was: the same inputs, random numbers, buffers and autocast, without torch.compile.

The job must not notice. What the forward writes into are copies; whatever else of the job's it would write into, draw
from or wait for, refuses it: then it is not known what the forward would have shown.
"""

from __future__ import annotations

import contextlib
import sys
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from distdiag.training.overflow import random_numbers, walk
from distdiag.training.overflow.frames import version_of
from distdiag.training.overflow.guard import Guard
from distdiag.training.overflow.random_numbers import RandomNumbers
from distdiag.training.overflow.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module

    from distdiag.training.overflow.recorder import Recorder

    _Place = tuple[Module, str]

_NOTHING = contextlib.nullcontext()
running: set[int] = set()
"""The threads in which a forward is run again."""
_SMALL_BYTES = 1 << 20
"""Larger buffers are not copied before each forward: one that changes them cannot be run again."""


class Terms(NamedTuple):
    """On what terms a forward may be run again.

    `ranks` all run it together; `is_shared`: the weights are shared out over them. `goes_on`: the job does, whatever is
    found, so that nothing at all may be left of it.
    """

    ranks: frozenset[int] = frozenset()
    is_shared: bool = False
    goes_on: bool = True


class Buffers:
    """The buffers that a forward of this model changes, such as the running means of BatchNorm."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._moving: dict[bool, list[_Place]] = {}
        """By whether the model is in training."""
        self._still: dict[bool, list[_Place]] = {}
        """The others: those that the first forward left alone, and large ones."""

    def save(self) -> list[tuple[_Place, Tensor]]:
        """Copy those that a forward may change: at first all, later those that were seen to change."""
        places = self._moving.get(self._model.training)
        if places is None:
            places = [(module, name) for module in self._model.modules() for name in module._buffers]
        found = ((place, place[0]._buffers.get(place[1])) for place in places)
        return [(place, one.detach().clone()) for place, one in found if one is not None and _can_be_kept(one)]

    def watch(self) -> list[tuple[Tensor, int]]:
        """Give those that are not copied, each with torch's count of its changes."""
        places = self._still.get(self._model.training)
        if places is None:
            places = [(module, name) for module in self._model.modules() for name in module._buffers]
            known = set(self._moving.get(self._model.training, ()))
            places = [(module, name) for module, name in places if (module, name) not in known]
            if self._model.training in self._moving:
                self._still[self._model.training] = places
            else:
                found = ((one, one[0]._buffers[one[1]]) for one in places)
                places = [place for place, one in found if one is not None and not _can_be_kept(one)]
        buffers = (module._buffers.get(name) for module, name in places)
        return [(one, version_of(one)) for one in buffers if one is not None]

    def learn(self, saved: list[tuple[_Place, Tensor]]) -> list[tuple[_Place, Tensor]]:
        """Look which of them the forward has changed, and give the copies of those.

        They are compared, once: batch_norm changes its buffers without torch's count of changes knowing of it.
        """
        if self._model.training in self._moving:
            return saved
        moved = [(place, before) for place, before in saved if _has_changed(before, place[0]._buffers.get(place[1]))]
        self._moving[self._model.training] = [place for place, _ in moved]
        return moved

    def swap(self, saved: list[tuple[_Place, Tensor]]) -> list[Tensor]:
        """Put copies in the places of all buffers, as they were where that is known; gives the copies.

        Not the numbers are put back later but the tensors: autograd may need them as they are.
        """
        known = dict(saved)
        copies: dict[int, Tensor] = {}
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or is_lazy(buffer) or buffer.is_meta:
                    continue
                if id(buffer) not in copies:
                    copies[id(buffer)] = known.get((module, name), buffer).detach().clone()
                module._buffers[name] = copies[id(buffer)]
        return list(copies.values())


def _can_be_kept(buffer: Tensor) -> bool:
    if is_lazy(buffer) or buffer.is_meta or buffer.layout is not torch.strided:
        return False
    return buffer.nbytes <= _SMALL_BYTES


def _has_changed(before: Tensor, now: Tensor | None) -> bool:
    """Tell whether a buffer has other numbers than before; one that became something else cannot be put back."""
    if now is None or now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    return not torch.equal(before, now)


class State:
    """What a forward of a model changes beside its outputs; `steps` counts those of the optimizers."""

    def __init__(self, model: Module) -> None:
        self.model, self.buffers, self.numbers = model, Buffers(model), RandomNumbers()
        self.steps = 0


class Call:
    """One call of a model, with all that it takes to make it again; the inputs are kept, not copied."""

    def __init__(self, state: State, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args, self.kwargs = args, dict(kwargs)
        self._state, self._steps, self._training = state, state.steps, state.model.training
        self._forgotten = False
        self._saved = state.buffers.save()
        leaves = [one for _, one in walk.leaves((args, self.kwargs), "")]
        self._versions = [(one, version_of(one)) for one in leaves if isinstance(one, torch.Tensor)]
        self._drawn = [(one, one.get_state()) for one in leaves if isinstance(one, torch.Generator)]
        self._watched = state.buffers.watch()
        self._random = state.numbers.save()
        self._autocast = _autocast()

    def casts_to(self, dtype: torch.dtype) -> bool:
        """Tell whether autocast to this dtype was on."""
        return any(enabled and to is dtype for _, enabled, to in self._autocast)

    def returned(self) -> None:
        """Say that the forward is over."""
        self._saved = self._state.buffers.learn(self._saved)
        self._state.numbers.learn(self._random)

    @property
    def kept_bytes(self) -> int:
        """How much memory its inputs take."""
        return sum(tensor.nbytes for tensor, _ in self._versions if tensor.layout is torch.strided)

    def forget(self) -> None:
        """Let go of the inputs."""
        self.args, self.kwargs, self._versions, self._watched, self._drawn = (), {}, [], [], []
        self._forgotten = True

    def why_not(self, terms: Terms) -> str:
        """Say why it cannot be made again; empty if it can."""
        if self._forgotten:
            return "its inputs were too large to be kept"
        if terms.is_shared and not terms.ranks:
            return "other ranks have a part of its weights, and do not run it"
        if terms.is_shared and terms.goes_on:
            return "its weights are shared out over the ranks, and the job goes on"
        now = [one for _, one in walk.leaves((self.args, self.kwargs), "") if isinstance(one, torch.Tensor)]
        same = len(now) == len(self._versions) and all(a is b for a, (b, _) in zip(now, self._versions, strict=True))
        if not same or any(version_of(tensor) != version for tensor, version in self._versions):
            return "its inputs were changed in place since"
        opaque = walk.opaque((self.args, self.kwargs))
        if opaque:
            return f"it may have changed the {opaque} that it was given"
        if any(version_of(buffer) != version for buffer, version in self._watched):
            return "it changed a buffer of which there is no copy"
        if self._state.steps != self._steps or self._state.model.training != self._training:
            return "a step of an optimizer has changed the weights since"
        hooked = _hook_of(self._state.model) if terms.goes_on else ""
        return f"a hook of the script's own would be called twice, on {hooked}" if hooked else ""

    def again(
        self, recorder: Recorder, terms: Terms, also: contextlib.AbstractContextManager[object] = _NOTHING
    ) -> str:
        """Make the call once more under a recorder, and `also` this; gives the reason if that was not to be, or failed.

        What it gives back then is the recorder's `output`.
        """
        why = self.why_not(terms)
        if why:
            return why
        for grad in (torch.no_grad, torch.enable_grad):  # some models need gradients in their forward
            refused = ""
            recorder.attach()
            try:
                with self._as_it_was(terms) as (guard, args, kwargs):
                    try:
                        with guard, also, grad():
                            recorder.begin(args, kwargs)
                            recorder.end(self._state.model(*args, **kwargs))
                    finally:
                        refused = guard.refused
            except Exception as error:  # noqa: BLE001 - the user's own forward: anything may be wrong with it
                why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            else:
                why = ""
            finally:
                recorder.unhook()
            if refused or recorder.failed:
                return refused or recorder.failed
            if not why:
                return ""
        return f"its forward failed the second time: {why}"

    @contextlib.contextmanager
    def _as_it_was(self, terms: Terms) -> Iterator[tuple[Guard, tuple[object, ...], dict[str, object]]]:
        now = random_numbers.save_all()
        with contextlib.ExitStack() as stack:
            stack.callback(random_numbers.put, now)
            running.add(get_ident())
            stack.callback(running.discard, get_ident())
            ours: list[object] = []
            if not terms.is_shared:  # fully_shard moves the weights itself, and keeps account of it
                stack.callback(Snapshot(self._state.model).put_back)
                ours += self._state.buffers.swap(self._saved)
            drawn = {id(one): _generator_like(one, state) for one, state in self._drawn}
            args, kwargs = walk.copied((self.args, self.kwargs), lambda one: drawn.get(id(one), one))
            guard = Guard(terms.ranks, writes=terms.is_shared, ours=[*ours, *drawn.values()])
            for device, enabled, dtype in self._autocast:
                # What autocast makes of the weights here has no gradients: it must not keep it for later.
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(_eagerly())
            random_numbers.put(self._random)
            yield guard, args, kwargs


def _generator_like(one: torch.Generator, state: Tensor) -> torch.Generator:
    made = torch.Generator(one.device)
    made.set_state(state)
    return made


def _hook_of(model: Module) -> str:
    """Name a module of which the script wants to hear when it is called."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            where = getattr(hook, "__module__", None) or type(hook).__module__
            if not where.startswith(("torch.", "distdiag.", "contextlib")):  # the last: see hook.py
                return f"`{name}`" if name else "the model"
    return ""


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
