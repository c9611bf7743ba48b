"""detect_overflow: one look at one tensor, anywhere in a script."""

from __future__ import annotations

from threading import get_ident

import torch

from distdiag.training.overflow import numbers, ranks, replay
from distdiag.training.printflock import printflock


def detect_overflow(var: torch.Tensor, ctx: str) -> bool:
    """Tell whether a tensor holds nan or inf, and print what it is if so: `after layer_norm has infs`.

    Args:
        var: any tensor: of any shape, dtype and layout; what holds no numbers (meta, empty) is fine.
        ctx: what to call it.
    """
    with torch.no_grad():
        found = numbers.start(var.detach())
        if isinstance(found, str) or not numbers.any_bad(numbers.fetch(found[1])):
            return False
        if get_ident() in replay.running:  # it was said when this forward ran for the script
            return True
        told = numbers.tally(var.detach())
    kinds = [("nans", told.nan), ("infs", told.inf + told.minus_inf)] if told is not None else [("nans or infs", 1)]
    lines = [f"{ctx} has {kind}" for kind, count in kinds if count]
    if told is not None:
        at = ", ".join(map(str, told.first or ()))
        shape = ", ".join(map(str, told.shape))
        bad = told.nan + told.inf + told.minus_inf
        lines.append(f"{ctx}: {told.dtype} of shape [{shape}], {bad:,} of {told.of:,} bad, the first at [{at}]")
    printflock("\n".join(lines), prefix=ranks.count() > 1)
    return True
