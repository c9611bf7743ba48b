"""A job that goes on after a hit goes on as if nobody had looked: bit for bit what it is without a detector."""

# ruff: noqa: ANN401 - modules take and give anything

from __future__ import annotations

import math
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from distdiag import DebugUnderflowOverflow, OverflowDetected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from distdiag.training.overflow.report import Detection

BAD = 1
"""The batch that has nan in one of its rows; the others stay worth comparing."""


class Does(nn.Module):
    def __init__(self, what: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.what = what

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.what(self, self.linear(x), *args, **kwargs)


class Cache:
    """Keeps keys and values as transformers' caches do: neither a dict nor a dataclass."""

    def __init__(self, length: int = 0) -> None:
        self.kept = torch.zeros(length, 4)
        self.at = 0

    def grows(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = torch.cat([self.kept, x.detach()])
        return self.kept

    def fills(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[self.at : self.at + len(x)] = x.detach()
        self.at += len(x)
        return self.kept[: self.at]


def ema(self: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        self.table.mul_(0.9).add_(1.0)
    return x + self.table[:4].mean()


def weight_by_data(self: Any, x: torch.Tensor) -> Any:
    self.linear.weight.data.mul_(0.99)
    return x


def python_state(self: Any, x: torch.Tensor) -> Any:
    self.calls += 1
    self.seen.append(float(x.detach().nan_to_num(0, 0, 0).sum()))
    self.deep["in"][0] += 1
    self.aux = x * self.calls
    return x * self.calls


def draws(self: Any, x: torch.Tensor) -> Any:
    mine = torch.rand(x.shape, generator=self.gen)
    return x * mine * self.rng.random() * random.random()


def own_gradient(self: Any, x: torch.Tensor) -> Any:
    with torch.enable_grad():
        y = x.detach().nan_to_num(0, 0, 0).requires_grad_()
        (self.linear.weight * y.sum()).sum().backward()
    return x


def with_a_list(self: Any, x: torch.Tensor, past: list[torch.Tensor]) -> Any:
    past.append(x.detach())
    return x + torch.stack(past).sum(0)


def with_a_dict(self: Any, x: torch.Tensor, state: dict[str, Any]) -> Any:
    state["x"] = state.get("x", 0) + x.detach()
    return x + state["x"]


def trained(model: nn.Module, more: Callable[[], tuple[Any, ...]] = tuple) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    out = []
    for batch in range(4):
        x = torch.randn(6, 4)
        if batch == BAD:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        y = model(x, *more())
        out.append(y.detach().clone())
        y.nan_to_num(0, 0, 0).square().mean().backward()
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.nan_to_num_(0, 0, 0)
        optimizer.step()
    return out


def norm() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    return [trained(model), model.state_dict()]


def buffer(numbers: int) -> list[Any]:
    model = Does(ema, table=torch.ones(numbers))
    return [trained(model), model.state_dict()]


def does(what: Callable[..., Any], more: Callable[[], tuple[Any, ...]] = tuple, **held: Any) -> list[Any]:
    model = Does(what, **held)
    out = trained(model, more)
    plain = {name: value for name, value in vars(model).items() if isinstance(value, (int, list, dict, torch.Tensor))}
    return [out, model.state_dict(), {name: plain[name] for name in plain if not name.startswith("_")}]


def cached(how: str) -> list[Any]:
    cache = Cache(40)
    out = does(lambda self, x, cache: getattr(cache, how)(x).sum() + x, lambda: (cache,))
    return [out, cache.kept, cache.at]


def given(value: Any, what: Callable[..., Any]) -> list[Any]:
    return [does(what, lambda: (value,)), value]


def drawn() -> list[Any]:
    gen, rng = torch.Generator().manual_seed(3), random.Random(5)
    return [does(draws, gen=gen, rng=rng), gen.get_state(), rng.getstate(), random.getstate()]


def drawn_as_an_argument() -> list[Any]:
    gen = torch.Generator().manual_seed(3)
    out = does(lambda self, x, gen: x * torch.rand(x.shape, generator=gen), lambda: (gen,))
    return [out, gen.get_state()]


def hooked() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    features: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, out: features.append(out))
    return [trained(model), features, [one.requires_grad for one in features]]


def two_optimizers() -> list[Any]:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizers = [torch.optim.AdamW(model[at].parameters(), lr=0.1) for at in (0, 2)]
    out = []
    for batch in range(4):
        x = torch.randn(6, 4)
        y = model(x)
        out.append(y.detach().clone())
        y.sum().backward()
        if batch == BAD:
            model[2].weight.grad[0, 0] = math.inf
        for optimizer in optimizers:
            for weight in model.parameters():
                assert weight.grad is not None
            optimizer.step()
            model[2].weight.data.nan_to_num_(0, 0, 0)
        model.zero_grad()
    return [out, model.state_dict()]


def autocast() -> list[Any]:
    """Let autocast make two forwards of one weight: the second must have a gradient all the same."""
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.full((2, 4), math.inf)
        first, second = model(x), model(torch.ones(2, 4))
    second.sum().backward()
    return [first, second, model.weight.grad]


def evaluated() -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with torch.inference_mode():
        out = [model(torch.full((2, 4), math.inf if batch == BAD else 1.0)) for batch in range(3)]
    return [[one.clone() for one in out], model.state_dict()]


CASES: dict[str, Callable[[], list[Any]]] = {
    "BatchNorm and dropout": norm,
    "a small buffer": lambda: buffer(8),
    "a buffer above 1 MB": lambda: buffer(1 << 19),
    "weights by .data": lambda: does(weight_by_data),
    "counters and lists": lambda: does(python_state, calls=0, seen=[], deep={"in": [0]}, aux=None),
    "a backward of its own": lambda: does(own_gradient),
    "a cache that grows": lambda: cached("grows"),
    "a cache that fills": lambda: cached("fills"),
    "a list": lambda: given([], with_a_list),
    "a dict": lambda: given({}, with_a_dict),
    "generators": drawn,
    "a generator as an argument": drawn_as_an_argument,
    "hooks of the script": hooked,
    "two optimizers": two_optimizers,
    "autocast": autocast,
    "inference": evaluated,
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7, 8, 9), b.nan_to_num(7, 8, 9))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def watched_models(seen: list[Detection], mode: Any) -> Callable[..., None]:
    """Watch each model from its first call on, as `distdiag overflow --go-on` does."""
    detectors: list[DebugUnderflowOverflow] = []
    busy = threading.local()

    def watch(module: nn.Module) -> None:
        root = not getattr(busy, "depth", 0)
        if root and not any(one._root is module for one in detectors):
            detectors.append(DebugUnderflowOverflow(module, mode=mode, gradients="each", on_detect=seen.append))

    call = nn.Module.__call__

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watch(self)
        busy.depth = getattr(busy, "depth", 0) + 1
        try:
            return call(self, *args, **kwargs)
        finally:
            busy.depth -= 1

    nn.Module.__call__ = called  # type: ignore[method-assign]

    def end() -> None:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        for one in detectors:
            one.detach()

    return end


def nothing() -> None:
    return


@pytest.mark.parametrize("mode", ["step", "full"])
@pytest.mark.parametrize("case", CASES)
def test_what_goes_on_after_a_hit_is_bit_identical(case: str, mode: Any) -> None:
    results = []
    seen: list[Detection] = []
    for watched in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        end = watched_models(seen, mode) if watched else nothing
        try:
            results.append([CASES[case](), torch.get_rng_state(), random.random()])
        finally:
            end()
    assert seen, "nothing was found, so that nothing was run again"
    assert same(*results)


def test_what_cannot_be_run_again_is_said() -> None:
    refused = {
        "a buffer above 1 MB": "it changed a buffer that was not copied",
        "weights by .data": "it changes a tensor that outlives it",
        "a cache that grows": "it may have changed its Cache input",
        "hooks of the script": "a hook of the script would run twice, on `0`",
    }
    for case, why in refused.items():
        seen: list[Detection] = []
        end = watched_models(seen, "step")
        try:
            CASES[case]()
        finally:
            end()
        assert (seen[0].origin, why in seen[0].hints[0]) == ("unseen", True), (case, seen[0])


def in_threads(work: Iterable[Callable[[], None]]) -> list[BaseException]:
    raised: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 - it is what is looked for
            raised.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("mode", ["step", "full"])
def test_threads_that_share_a_model_are_each_judged_by_what_they_did(mode: Any) -> None:
    """Two threads call it again and again, one of them with inf: that one hears of it, and of its own module."""
    model = Does(lambda self, x, by: x * by)
    calls = 60
    meet = threading.Barrier(2)

    def work(by: float) -> None:
        meet.wait()
        for _ in range(calls):
            with torch.no_grad():
                model(torch.ones(3, 4), by)

    with DebugUnderflowOverflow(model, mode=mode) as detector:
        raised = in_threads([lambda: work(1.0), lambda: work(math.inf)])
        assert [type(one) for one in raised] == [OverflowDetected], raised
        told = raised[0].detection  # type: ignore[attr-defined]
        assert (told.module_class, told.origin in ("here", "unseen")) == ("Does", True)
        assert detector.counts.off == ""


def test_of_four_threads_in_one_model_the_module_is_named() -> None:
    """Three are on their way in it whenever the fourth has a bad output: they end before it is run again."""
    model = Does(lambda self, x, by: x * by)
    meet = threading.Barrier(4)

    def work(by: float) -> None:
        meet.wait()
        for _ in range(40):
            with torch.no_grad():
                model(torch.ones(3, 4), by)

    for _ in range(3):
        with DebugUnderflowOverflow(model):
            raised = in_threads([lambda: work(1.0)] * 3 + [lambda: work(math.inf)])
        told = [one.detection for one in raised if isinstance(one, OverflowDetected)]
        assert [(one.origin, one.module_class) for one in told] == [("here", "Does")], raised


def test_other_threads_wait_while_a_forward_is_run_again() -> None:
    """The buffer is as it was only in the second run; a thread that calls the model then sees it as it is."""
    inside, called = threading.Event(), threading.Event()
    values: list[float] = []
    runs: list[int] = []

    def what(self: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
        if by != 1:
            runs.append(1)
            if len(runs) == 2:  # the second run
                inside.set()
                called.wait(0.2)  # the other thread must not get there: it times out
        else:
            values.append(float(self.count))
            called.set()
        return x * by

    model = Does(what, count=torch.zeros(1))

    def other() -> None:
        inside.wait(30)
        with torch.no_grad():
            model(torch.ones(3, 4), 1.0)

    with DebugUnderflowOverflow(model, on_detect="report"), torch.no_grad():
        model(torch.ones(3, 4), 1.0)
        called.clear()
        raised = in_threads([lambda: model(torch.ones(3, 4), math.inf), other])
    assert not raised
    assert (len(runs), values) == (2, [1.0, 3.0])
