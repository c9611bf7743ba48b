"""bfloat16 weights that an optimizer step does not change: reported once, with the share; numbers are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from distdiag import DebugUnderflowOverflow
from distdiag.training.overflow.advice import LostUpdates

if TYPE_CHECKING:
    from collections.abc import Callable


def trained(
    lr: float,
    dtype: torch.dtype = torch.bfloat16,
    *,
    schedule: Callable[[int], float] | None = None,
    steps: int = 6,
    watched: bool = True,
) -> tuple[list[str], list[torch.Tensor]]:
    """Train with AdamW; return the warnings, and the losses with the weights at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule or (lambda step: 1.0))
    detector = DebugUnderflowOverflow(model) if watched else None
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randint(0, 8, (16,))).float().square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    if detector is not None:
        detector.detach()
        assert (detector.found, detector.counts.off) == (0, "")
    return detector.counts.warnings if detector is not None else [], [*losses, *model.parameters()]


def test_most_weights_that_do_not_change_are_reported_once_with_the_share() -> None:
    (said,) = trained(1e-6)[0]
    assert said.startswith("step 1: ")
    share = int(said.partition("%")[0].rpartition(" ")[2])
    assert share > 90
    # 1024 weights of the linear layer, its 64 biases, and the rows of the embedding that were looked up.
    assert 1024 + 64 < int(said.partition("of a sample of ")[2].partition(":")[0].replace(",", "")) <= 1024 + 64 + 128
    assert "at a learning rate of 1e-06 the update is smaller than half the spacing of bfloat16" in said


@pytest.mark.parametrize(("lr", "dtype"), [(1e-2, torch.bfloat16), (1e-6, torch.float32)])
def test_updates_that_arrive_are_no_warning(lr: float, dtype: torch.dtype) -> None:
    assert trained(lr, dtype)[0] == []


def test_small_steps_of_a_warmup_are_meant() -> None:
    assert trained(1e-2, schedule=lambda step: 1e-4 * 2**step, steps=6)[0] == []
    (said,) = trained(1e-6, schedule=lambda step: min(step, 3) / 3, steps=8)[0]
    assert said.startswith("step 4: ")


def test_losses_and_weights_are_bit_identical_beside_a_bare_run() -> None:
    assert all(torch.equal(a, b) for a, b in zip(trained(1e-6)[1], trained(1e-6, watched=False)[1], strict=True))


def test_an_optimizer_that_keeps_the_rest_elsewhere_is_left_out() -> None:
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)

    def said(**more: Any) -> str:  # noqa: ANN401
        optimizer = torch.optim.SGD([weight], lr=1e-6)
        vars(optimizer).update(more)
        lost = LostUpdates()
        text = ""
        for step in range(3):
            lost.before_step(optimizer)
            optimizer.step()
            text += lost.after_step(optimizer, step)
        return text

    assert "100%" in said()
    assert said(bf16_stochastic_round=True) == ""
    assert said(state={weight: {"master_param": torch.ones(64)}}) == ""
