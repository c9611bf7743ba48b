"""Replays a forward with the same inputs, random numbers, buffers and autocast, without torch.compile.

The replay must leave no trace in the job. The forward writes into copies; writing into any other tensor of the job,
drawing from its generators or waiting for its ranks refuses the replay, and its result is unknown.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import deque
from functools import lru_cache, partial
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from distdiag.training.overflow import extrema, modules
from distdiag.training.overflow.frames import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.nn import Module

    from distdiag.training.overflow.frames import Recorder

    _Place = tuple[Module, str]


_NOTHING = contextlib.nullcontext()
_SMALL_BYTES = 1 << 20
"""Larger buffers are not copied before each forward: a forward that changes them cannot be replayed."""


class Terms(NamedTuple):
    """Conditions of a replay.

    `ranks`: those that replay together; `is_shared`: the weights are sharded over ranks; `goes_on`: the job continues
    whatever the replay finds, so that it may leave no side effect.
    """

    ranks: frozenset[int] = frozenset()
    is_shared: bool = False
    goes_on: bool = True


class Buffers:
    """The buffers that a forward of this model changes, such as the running means of BatchNorm."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._places: list[_Place] = []
        self._moving: dict[bool, set[_Place]] = {}
        """Buffers that the first forward changed, by training mode."""

    def save(self) -> tuple[dict[_Place, Tensor], list[tuple[Tensor, int]]]:
        """Copy buffers that a forward may change, at first all small ones; return the others with their versions."""
        moving = self._moving.get(self._model.training)
        if moving is None:
            self._places = [(module, name) for module in self._model.modules() for name in module._buffers]
        copies: dict[_Place, Tensor] = {}
        others = []
        for place in self._places:
            buffer = place[0]._buffers.get(place[1])
            if buffer is not None and (moving is None or place in moving) and _can_be_kept(buffer):
                copies[place] = buffer.detach().clone()
            elif buffer is not None:
                others.append((buffer, version_of(buffer)))
        return copies, others

    def learn(self, copies: dict[_Place, Tensor]) -> dict[_Place, Tensor]:
        """Return the copies of the buffers that the forward changed.

        Values are compared once per training mode: batch_norm updates its buffers without bumping torch's version
        counter.
        """
        if self._model.training in self._moving:
            return copies
        moved = {place: old for place, old in copies.items() if _has_changed(old, place[0]._buffers.get(place[1]))}
        self._moving[self._model.training] = set(moved)
        return moved

    def swap(self, known: dict[_Place, Tensor]) -> list[Tensor]:
        """Replace all buffers by copies, with the saved values if known; return the copies.

        Restoring swaps the tensors back, not their values: autograd may need them as saved.
        """
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
    """Return whether the values changed; False for a replaced buffer, which cannot be restored."""
    if now is None or now.shape != before.shape or now.dtype != before.dtype or now.device != before.device:
        return False
    return not torch.equal(before, now)


class State:
    """State that a forward changes beside its outputs; `steps` counts optimizer steps."""

    def __init__(self, model: Module) -> None:
        self.model, self.buffers = model, Buffers(model)
        self.steps = 0


class Call:
    """One call of a model with everything needed to replay it; inputs are kept by reference."""

    def __init__(self, state: State, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args, self.kwargs = args, dict(kwargs)
        self._state, self._steps, self._training = state, state.steps, state.model.training
        self._forgotten = False
        self._saved, self._watched = state.buffers.save()
        leaves = [leaf for _, leaf in modules.leaves((args, self.kwargs), "")]
        self._versions = [(leaf, version_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._drawn = [(leaf, leaf.get_state()) for leaf in leaves if isinstance(leaf, torch.Generator)]
        self._random = _random_states(all_devices=False)
        self._autocast = _autocast()

    def casts_to(self, dtype: torch.dtype) -> bool:
        """Return whether autocast to this dtype was on."""
        return any(enabled and to is dtype for _, enabled, to in self._autocast)

    def returned(self) -> None:
        """Note the end of the forward."""
        self._saved = self._state.buffers.learn(self._saved)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the input tensors."""
        return sum(tensor.nbytes for tensor, _ in self._versions if tensor.layout is torch.strided)

    def forget(self) -> None:
        """Release the inputs."""
        self.args, self.kwargs, self._versions, self._watched, self._drawn = (), {}, [], [], []
        self._forgotten = True

    def why_not(self, terms: Terms) -> str:
        """Return why the call cannot be replayed; empty if it can."""
        if self._forgotten:
            return "its inputs were too large to keep"
        if terms.is_shared and not terms.ranks:
            return "other ranks hold part of its weights and do not replay it"
        if terms.is_shared and terms.goes_on:
            return "its weights are sharded over the ranks, and the job continues"
        now = [leaf for _, leaf in modules.leaves((self.args, self.kwargs), "") if isinstance(leaf, torch.Tensor)]
        same = len(now) == len(self._versions) and all(a is b for a, (b, _) in zip(now, self._versions, strict=True))
        if not same or any(version_of(tensor) != version for tensor, version in self._versions):
            return "its inputs have been changed in place"
        opaque = modules.opaque((self.args, self.kwargs))
        if opaque:
            return f"it may have changed its {opaque} input"
        if any(version_of(buffer) != version for buffer, version in self._watched):
            return "it changed a buffer that was not copied"
        if self._state.steps != self._steps or self._state.model.training != self._training:
            return "an optimizer step has changed the weights"
        hooked = _hook_of(self._state.model) if terms.goes_on else ""
        return f"a hook of the script would run twice, on {hooked}" if hooked else ""

    def again(
        self, recorder: Recorder, terms: Terms, also: contextlib.AbstractContextManager[object] = _NOTHING
    ) -> str:
        """Replay the call under a recorder and the context `also`; return why it was not possible, or "".

        The output of the replay is `recorder.output`.
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
        return f"its forward failed on replay: {why}"

    @contextlib.contextmanager
    def _as_it_was(self, terms: Terms) -> Iterator[tuple[Guard, tuple[object, ...], dict[str, object]]]:
        now = _random_states(all_devices=True)
        with contextlib.ExitStack() as stack:
            stack.callback(_set_random_states, now)
            extrema.replaying.add(get_ident())
            stack.callback(extrema.replaying.discard, get_ident())
            ours: list[object] = []
            if not terms.is_shared:  # fully_shard moves the weights itself, and keeps account of it
                stack.callback(Snapshot(self._state.model).put_back)
                ours += self._state.buffers.swap(self._saved)
            drawn = {id(generator): _generator_like(generator, state) for generator, state in self._drawn}
            args, kwargs = modules.copied((self.args, self.kwargs), lambda leaf: drawn.get(id(leaf), leaf))
            guard = Guard(terms.ranks, writes=terms.is_shared, ours=[*ours, *drawn.values()])
            for device, enabled, dtype in self._autocast:
                # What autocast makes of the weights here has no gradients: it must not keep it for later.
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(_eagerly())
            _set_random_states(self._random)
            yield guard, args, kwargs


def _generator_like(generator: torch.Generator, state: Tensor) -> torch.Generator:
    made = torch.Generator(generator.device)
    made.set_state(state)
    return made


def _hook_of(model: Module) -> str:
    """Name a module with a hook of the script."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            where = getattr(hook, "__module__", None) or type(hook).__module__
            if not where.startswith(("torch.", "distdiag.", "contextlib")):  # the last: see modules.Hook
                return f"`{name}`" if name else "the model"
    return ""


def _autocast() -> list[tuple[str, bool, torch.dtype]]:
    if not hasattr(torch, "get_autocast_dtype"):  # before 2.4
        return [
            ("cpu", torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()),
            ("cuda", torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()),
        ]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]


def _eagerly() -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled parts run eagerly, so that their modules' hooks run."""
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
    return contextlib.nullcontext()


COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem")
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")
"""Operations that write into their running mean and variance, which torch's schemas do not mark as mutated."""


class Refused(Exception):
    """The forward attempted an operation that must not be repeated."""


class OfReplay(TorchDispatchMode):
    """A mode that sees the operations of a replay."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the job 1.5 s, in which torch would import its compiler to keep it out: nothing is compiled then."""
        return False


class Guard(OfReplay):
    """Refuses operations of a replay with side effects on the job; `refused` is the reason, or "".

    Writes are allowed only into memory allocated while the mode is active and into `ours`, or anywhere with `writes`.
    Collectives are allowed only among `ranks`, which all replay.
    """

    supports_higher_order_operators = True

    def __init__(self, ranks: frozenset[int], *, writes: bool, ours: Iterable[object] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused = ""
        self._ranks, self._writes = ranks, writes
        self._made = {_memory_of(value) for value in ours if isinstance(value, Tensor)}
        self._generators = {id(value) for value in ours if isinstance(value, torch.Generator)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
        """Run an operation unless it is refused."""
        kwargs = kwargs or {}
        if any(kind not in (Tensor, Parameter) for kind in types):
            return NotImplemented  # a subclass: its inner operations dispatch here again
        self._check(func, args, kwargs)
        made = func(*args, **kwargs)
        if not self._writes and _makes_anew(func):
            self._made |= {_memory_of(value) for value in _flat((made,)) if isinstance(value, Tensor)}
        return made

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> None:  # noqa: ANN401
        if getattr(func, "namespace", "") in COLLECTIVES and not _ranks_of_collective(args, kwargs) <= self._ranks:
            self._refuse("it communicates with other ranks, which do not replay it")
        if self._writes:
            return
        for value in _written(func, args, kwargs):
            if isinstance(value, Tensor) and _memory_of(value) not in self._made:
                self._refuse(f"it changes a tensor that outlives it ({func})")
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self._generators:
                self._refuse("it draws from the script's own torch.Generator")

    def _refuse(self, why: str) -> None:
        self.refused = self.refused or why
        raise Refused(why)


def _memory_of(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse: made of several tensors
        return id(tensor)


def _flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


@lru_cache(maxsize=4096)
def _arguments_written(func: Any) -> tuple[tuple[int, str], ...]:  # noqa: ANN401
    """Return position and name of each argument that an operation mutates."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    if schema.name.partition("::")[2] in _BATCH_NORMS:
        return tuple(
            (at, argument.name) for at, argument in enumerate(schema.arguments) if argument.name.startswith("running_")
        )
    found = (
        (at, argument)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    )
    return tuple((at, argument.name) for at, argument in found)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> Iterator[object]:  # noqa: ANN401
    places = _arguments_written(func)
    if places and places[0][1].startswith("running_") and _is_off(func, args, kwargs):
        return
    for at, name in places:
        yield from _flat((args[at] if at < len(args) else kwargs.get(name),))


def _is_off(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> bool:  # noqa: ANN401
    """Return whether a batch norm runs with training=False."""
    at = next(
        (at for at, argument in enumerate(func._schema.arguments) if argument.name in ("training", "train")), None
    )
    if at is None:
        return False
    given = args[at] if at < len(args) else kwargs.get(func._schema.arguments[at].name)
    return given is False


@lru_cache(maxsize=4096)
def _makes_anew(func: Any) -> bool:  # noqa: ANN401
    """Return whether the result of an operation is newly allocated memory."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    return schema.name == "aten::lift_fresh" or all(value.alias_info is None for value in schema.returns)


def _ranks_of_collective(args: tuple[Any, ...], kwargs: Mapping[str, object]) -> frozenset[int]:
    """Return the ranks of a collective, with -1 among them if unknown."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    found: set[int] = set()
    for value in _flat((*args, *kwargs.values())):
        try:
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                found |= set(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
            elif isinstance(value, str):
                found |= set(dist.get_process_group_ranks(_resolve_process_group(value)))  # type: ignore[arg-type]
        except (RuntimeError, ValueError, KeyError, AttributeError):  # "sum", or a group without a name
            if not isinstance(value, str):
                found.add(-1)
    return frozenset(found)


_SNAPSHOT_DEPTH = 6
_SNAPSHOT_OBJECTS = 200_000
"""Limit on the objects recorded: a model that holds more holds data."""
_NO_STATE = (str, bytes, int, float, complex, type, Tensor, FunctionType, MethodType, BuiltinFunctionType, ModuleType)


class Snapshot:
    """Records the object references held by a model's modules, not tensor contents.

    Globals, and objects reachable only through a closure, are not covered.
    """

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: set[int] = set()
        self._gradients = [(weight, weight.grad) for weight in model.parameters()]
        self._modules = set(model.modules())
        for module in self._modules:
            self._keep(vars(module), 0)

    def put_back(self) -> None:
        """Restore the recorded state."""
        for undo in self._undo:
            undo()
        for weight, grad in self._gradients:
            if weight.grad is not grad:
                weight.grad = grad

    def _keep(self, value: object, depth: int) -> None:
        if value is None or isinstance(value, _NO_STATE) or depth > _SNAPSHOT_DEPTH:
            return
        if id(value) in self._seen or len(self._seen) > _SNAPSHOT_OBJECTS:
            return
        if isinstance(value, nn.Module) and value in self._modules:
            return
        self._seen.add(id(value))
        undo, inside = _undo_of(value)
        if undo is not None:
            self._undo.append(undo)
        for part in inside:
            self._keep(part, depth + 1)


def _undo_of(value: Any) -> tuple[Callable[[], object] | None, Iterable[object]]:  # noqa: ANN401
    """Return a function that restores an object's attributes or items, and the objects that it references."""
    if isinstance(value, (dict, list, deque, bytearray, set)):
        before, content = _parts(value), dict(value) if isinstance(value, dict) else list(value)

        def undo() -> None:
            now = _parts(value)
            if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
                value.clear()
                (value.update if isinstance(value, (dict, set)) else value.extend)(content)

        return undo, [] if isinstance(value, (set, bytearray)) else before
    if isinstance(value, tuple):
        return None, value
    generator = _undo_of_generator(value)
    held = getattr(value, "__dict__", None) if generator is None else None
    return generator, [held] if isinstance(held, dict) else []


def _parts(value: Any) -> list[object]:  # noqa: ANN401
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _undo_of_generator(value: Any) -> Callable[[], object] | None:  # noqa: ANN401
    numpy = _numpy_random()
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if numpy is not None and isinstance(value, numpy.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, torch.Generator) or (numpy is not None and isinstance(value, numpy.RandomState)):
        return partial(value.set_state, value.get_state())
    return None


def _random_states(*, all_devices: bool) -> dict[str, object]:
    """Copy the states of the global generators; of the GPUs that of the current one, which the forward uses, or all."""
    return {name: get() for name, (get, _) in _generators().items() if all_devices or name != "devices"}


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Map the global generators to functions that get and set their states."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "torch": (torch.get_rng_state, torch.set_rng_state),
        "python": (random.getstate, random.setstate),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state, torch.cuda.set_rng_state
        found["devices"] = torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    numpy = _numpy_random()
    if numpy is not None:
        found["numpy"] = partial(numpy.get_state, legacy=False), numpy.set_state
    return found


def _set_random_states(states: dict[str, object]) -> None:
    known = _generators()
    for name, state in states.items():
        known[name][1](state)


def _numpy_random() -> Any:  # noqa: ANN401 - a module that is not ours to import
    return getattr(sys.modules.get("numpy"), "random", None)
