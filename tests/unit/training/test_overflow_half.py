"""What float16 is too coarse or too short for: gradients that are lost; and healthy jobs."""

# ruff: noqa: ANN401 - modules take and give anything

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from loops import each
from torch import nn

from distdiag import DebugUnderflowOverflow

if TYPE_CHECKING:
    from collections.abc import Callable

HALF = torch.float16


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        self.base.requires_grad_(requires_grad=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.b(self.a(x))


class Gamma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.gamma, self.head = nn.Linear(16, 16), nn.Parameter(torch.zeros(16)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x + self.gamma * self.branch(x))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


def warnings(
    model: nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    *,
    autocast: torch.dtype | None = None,
    steps: int = 9,
    lr: float = 1e-4,
    given: torch.Tensor | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> list[str]:
    """Train under a detector, and give what it warned of."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=lr)
    dtype = next(model.parameters()).dtype
    with DebugUnderflowOverflow(model) as detector:
        for _ in range(steps):
            optimizer.zero_grad()
            x = torch.randn(8, 16, dtype=dtype) if given is None else given
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                out = loss(model(x))
            (out if scaler is None else scaler.scale(out)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        assert (detector.found, detector.counts.off) == (0, "")
        return detector.counts.warnings


def tiny(out: torch.Tensor) -> torch.Tensor:
    return out.float().mean() * 1e-9


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


def test_gradients_that_are_all_lost_under_autocast_are_told_with_the_scaler() -> None:
    (said,) = warnings(mlp(), tiny, autocast=HALF)
    assert said.startswith("step 1: all 4 gradients are exactly 0, as in the step before: nothing is learned. ")
    assert "they underflow: float16 has no number below 6e-08" in said
    assert "scaler = torch.amp.GradScaler('cpu'); scaler.scale(loss).backward()" in said


def test_with_weights_in_float16_which_no_scaler_takes_another_mend_is_told() -> None:
    (said,) = warnings(mlp().half(), tiny)
    assert "GradScaler with float32 weights, or bfloat16: model.to(torch.bfloat16)" in said


@pytest.mark.parametrize("case", ["a constant loss", "a clamped loss", "dead units"])
def test_a_float16_job_that_learns_nothing_for_another_reason_is_told_of_both(case: str) -> None:
    loss: Callable[[torch.Tensor], torch.Tensor] = {
        "a constant loss": lambda out: (out.float() * 0).sum() + 1,
        "a clamped loss": lambda out: out.float().clamp(min=100).mean(),
        "dead units": lambda out: (out * 0).sum(),
    }[case]
    (said,) = warnings(mlp().half(), loss)
    assert "Either the loss does not depend on the weights, or they underflow" in said


HEALTHY: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "lora": (lambda: Lora().half(), {}),
    "gamma": (lambda: Gamma().half(), {}),
    "lora, autocast": (Lora, {"autocast": HALF}),
    "gamma, autocast": (Gamma, {"autocast": HALF}),
    "bfloat16": (lambda: mlp().bfloat16(), {"loss": tiny, "lr": 1e9}),
    "bfloat16, autocast": (mlp, {"loss": tiny, "autocast": torch.bfloat16}),
    "float32": (mlp, {"loss": lambda out: out.float().mean() * 1e-30}),
    "a scaler": (mlp, {"loss": tiny, "autocast": HALF, "scaler": torch.amp.GradScaler("cpu")}),
    "an embedding": (
        lambda: nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 16)).half(),
        {"given": torch.arange(8)},
    ),
}


@each("case", HEALTHY)
def test_healthy_jobs_are_not_warned_of(case: str) -> None:
    make, how = HEALTHY[case]
    assert warnings(make(), how.get("loss", mean_square), **{k: v for k, v in how.items() if k != "loss"}) == []
