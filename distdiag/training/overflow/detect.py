"""detect_overflow: check one tensor, anywhere in a script."""

from __future__ import annotations

from threading import get_ident

import torch

from distdiag.training.overflow import extrema, replay
from distdiag.training.overflow.report import is_one_of_many
from distdiag.training.printflock import printflock


def detect_overflow(var: torch.Tensor, ctx: str) -> bool:
    """Return whether a tensor contains nan or inf; if so, print what and where: `after layer_norm has infs`.

    Args:
        var: a tensor of any shape, dtype and layout; a tensor without values (meta, empty) counts as finite.
        ctx: name of the tensor in the printed line.
    """
    with torch.no_grad():
        found = extrema.start(var.detach())
        if isinstance(found, str) or not extrema.any_bad(extrema.fetch(found[1])):
            return False
        if get_ident() in replay.running:  # printed when this forward ran for the script
            return True
        tally = extrema.tally(var.detach())
    kinds = [("nans", tally.nan), ("infs", tally.inf + tally.minus_inf)] if tally is not None else [("nans or infs", 1)]
    lines = [f"{ctx} has {kind}" for kind, count in kinds if count]
    if tally is not None:
        at = ", ".join(map(str, tally.first or ()))
        shape = ", ".join(map(str, tally.shape))
        bad = tally.nan + tally.inf + tally.minus_inf
        lines.append(f"{ctx}: {tally.dtype} of shape [{shape}], {bad:,} of {tally.of:,} bad, the first at [{at}]")
    printflock("\n".join(lines), prefix=is_one_of_many())
    return True
