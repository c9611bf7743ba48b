"""What the overflow detector costs, beside transformers' detector, in one process, interleaved.

The model is a decoder of 49 modules (4 layers, d = 256, 512 tokens), and a tiny one (d = 64, 32 tokens): one forward
without gradients, and a step of training, on one thread, in processor time. Each variant has a model of its own with
the same weights; rounds are interleaved, and the median of the ratios to the bare model of the same round is told.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from distdiag import DebugUnderflowOverflow

if TYPE_CHECKING:
    from collections.abc import Callable


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(0.0)
        self.heads = max(1, d // 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (one(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.o(y.transpose(1, 2).flatten(-2)))
        out: Tensor = x + self.drop(self.down(self.act(self.up(self.norm2(x)))))
        return out


class Model(nn.Module):
    def __init__(self, d: int, layers: int = 4, words: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def build(d: int, dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model(d).to(dtype)


def theirs(model: nn.Module) -> None:
    from transformers.debug_utils import DebugUnderflowOverflow as Theirs

    Theirs(model)  # type: ignore[no-untyped-call]


VARIANTS: dict[str, Callable[[nn.Module], object]] = {
    "bare": lambda model: None,
    "step": lambda model: DebugUnderflowOverflow(model),
    "full": lambda model: DebugUnderflowOverflow(model, mode="full"),
    "transformers": theirs,
}


class Counts(TorchDispatchMode):
    """Counts operations, and those that make Python wait for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
        self.operations += 1
        self.waits += func in (torch.ops.aten._local_scalar_dense.default,)
        return func(*args, **(kwargs or {}))


def waits_of(model: nn.Module, given: Tensor) -> tuple[int, int]:
    """Count operations and waits of one forward; our own waits are calls of tolist, which no dispatcher sees."""
    fetched = 0
    before = Tensor.tolist

    def counted(tensor: Tensor) -> object:
        nonlocal fetched
        fetched += 1
        return before(tensor)

    Tensor.tolist = counted  # type: ignore[assignment, method-assign]
    try:
        with Counts() as counts:
            model(given)
    finally:
        Tensor.tolist = before  # type: ignore[method-assign]
    return counts.operations, counts.waits + fetched


def allocated(model: nn.Module, given: Tensor) -> int:
    """Count the bytes that one forward asks of torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(given)
    assert seen.profiler is not None
    events = seen.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


def measure(d: int, tokens: int, dtype: torch.dtype, rounds: int, *, backward: bool = False) -> dict[str, list[float]]:
    models = {name: build(d, dtype) for name in VARIANTS}
    given = torch.randint(0, 2048, (1, tokens), generator=torch.Generator().manual_seed(1))
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.0) for name, model in models.items()}
    for name, attach in VARIANTS.items():
        attach(models[name])
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order = list(VARIANTS)
    for number in range(rounds + 2):
        for name in order[number % 4 :] + order[: number % 4]:
            began = time.process_time()
            if backward:
                models[name](given).float().logsumexp(-1).mean().backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            else:
                with torch.no_grad():
                    models[name](given)
            if number > 1:
                times[name].append(time.process_time() - began)
    with torch.no_grad():
        for name, model in models.items():
            operations, waits = waits_of(model, given)
            bytes_ = allocated(model, given)
            print(f"    {name:13} {operations:6} operations, {waits:4} waits, {bytes_:12,} bytes", file=sys.stderr)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = [
        ("49 modules, float32", (256, 512, torch.float32, rounds), False),
        ("49 modules, bfloat16", (256, 512, torch.bfloat16, rounds), False),
        ("tiny, float32", (64, 32, torch.float32, 10 * rounds), False),
        ("forward, backward, step", (256, 512, torch.float32, rounds), True),
    ]
    print(f"{'':25}{'bare':>9}{'step':>8}{'full':>8}{'transformers':>14}")
    for title, (d, tokens, dtype, many), backward in rows:
        times = measure(d, tokens, dtype, many, backward=backward)
        ratios = {
            name: statistics.median(a / b for a, b in zip(times[name], times["bare"], strict=True)) for name in VARIANTS
        }
        bare = statistics.median(times["bare"])
        print(
            f"{title:25}{1e3 * bare:6.1f} ms"
            + f"{ratios['step']:7.3f}x{ratios['full']:7.3f}x{ratios['transformers']:13.2f}x"
        )


if __name__ == "__main__":
    main()
