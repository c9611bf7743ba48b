"""detect_overflow: one look at one tensor, anywhere in a script."""

from __future__ import annotations

from threading import get_ident

import torch

from distdiag.training.overflow import extrema, ranks, replay
from distdiag.training.printflock import printflock


def detect_overflow(var: torch.Tensor, ctx: str) -> bool:
    """Return whether a tensor holds nan or inf, and print what it is if so: `after layer_norm has infs`.

    Args:
        var: any tensor: of any shape, dtype and layout; what holds no numbers (meta, empty) is fine.
        ctx: what to call it.
    """
    with torch.no_grad():
        found = extrema.start(var.detach())
        if isinstance(found, str) or not extrema.any_bad(extrema.fetch(found[1])):
            return False
        if get_ident() in replay.running:  # it was said when this forward ran for the script
            return True
        tally = extrema.tally(var.detach())
    kinds = [("nans", tally.nan), ("infs", tally.inf + tally.minus_inf)] if tally is not None else [("nans or infs", 1)]
    lines = [f"{ctx} has {kind}" for kind, count in kinds if count]
    if tally is not None:
        at = ", ".join(map(str, tally.first or ()))
        shape = ", ".join(map(str, tally.shape))
        bad = tally.nan + tally.inf + tally.minus_inf
        lines.append(f"{ctx}: {tally.dtype} of shape [{shape}], {bad:,} of {tally.of:,} bad, the first at [{at}]")
    printflock("\n".join(lines), prefix=ranks.count() > 1)
    return True
