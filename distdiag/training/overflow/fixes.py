"""What helps against nan and inf, by where they were made, by which operation and in which dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distdiag.training.overflow.detection import BACKWARD, BETWEEN, GIVEN, HERE, LOSS, WEIGHTS

if TYPE_CHECKING:
    from distdiag.training.overflow.detection import Place
    from distdiag.training.overflow.origins import Maker


_LOGS = {"log": 0, "log2": 0, "log10": 0, "log1p": -1, "logit": 0, "xlogy": 0}
"""With the largest input for which each is not finite, or not a number."""
_ROOTS = ("sqrt", "pow", "acos", "asin", "acosh", "atanh")
_DIVISIONS = ("div", "reciprocal", "rsqrt", "remainder", "fmod")
_BY_ORIGIN = {
    GIVEN: "check the batch: the data, or the code before the model",
    WEIGHTS: "check the previous step: clip gradients, lower the learning rate, skip steps whose gradients are bad",
    LOSS: "check the loss: a log of 0, a division by 0, an exp of large values?",
    BACKWARD: "check the loss and its scale; gradients='each' names the first bad gradient",
}


def fix_of(origin: str, maker: Maker | None, dtype: torch.dtype | None, place: Place, made_by: Place) -> str:
    """Return what helps, or what to check where that is not certain; empty if nothing is known."""
    if origin == HERE:
        return of_operation(maker) or _of_dtype(dtype, "this module")
    if origin == BETWEEN:
        by, module = f"`{made_by.module}`" if made_by.module else "the model", f"`{place.module}`"
        where = f"in the forward of {by}, before it calls {module}"
        if maker is None:
            return f"check the code {where}: a division, log, exp or scale"
        return f"{of_operation(maker) or _of_dtype(dtype, f'`{maker.operation}`')} ({where})"
    return _BY_ORIGIN.get(origin, "")


def of_operation(maker: Maker | None) -> str:
    """Return what helps against an operation; empty for one that only large numbers make overflow."""
    if maker is None:
        return ""
    name = f"`{maker.operation}`"
    if maker.masked_row:
        return (
            f"leave at least one position unmasked in each row, or set the rows that are all masked to 0 after {name}"
        )
    if maker.operation in _LOGS:
        lowest = _LOGS[maker.operation]
        if maker.least is not None and maker.least <= lowest:
            return f"{name} read {maker.least:.3g}: clamp its input, or add an epsilon"
        return f"an input of {name} at or below {lowest}? clamp it, or add an epsilon"
    if maker.operation in _ROOTS:
        return f"an input of {name} out of its range? clamp it"
    return f"{name} by 0? clamp the divisor, or add an epsilon" if maker.operation in _DIVISIONS else ""


def depends_on_min(maker: Maker) -> bool:
    """Return whether it is the least number that an operation fails on."""
    return maker.operation in (*_LOGS, *_ROOTS, "reciprocal", "rsqrt")


def _of_dtype(dtype: torch.dtype | None, what: str) -> str:
    if dtype is torch.float16:
        return f"if the inputs of {what} are near 65504, run it in bfloat16 or float32; else check its formula"
    return f"check the formula of {what} and the size of its inputs"


def in_float32(name: str, device: str) -> str:
    """Write what lets a module run without autocast."""
    module = f"model.get_submodule({name!r})" if name else "model"
    return (
        f"In float32, without autocast: m = {module}; "
        "m.register_forward_pre_hook(lambda m, a: tuple(x.float() if x.is_floating_point() else x for x in a)); "
        f'm.forward = torch.autocast("{device}", enabled=False)(m.forward)'
    )
