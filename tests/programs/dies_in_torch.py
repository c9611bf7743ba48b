"""Reads from an address that is not mapped in a hook that autograd calls in the middle of backward()."""

import ctypes
import gc

gc.disable()  # imports make no garbage, and to look for it takes a third of their time

import torch  # noqa: E402


def clip_gradient(gradient: torch.Tensor) -> torch.Tensor:
    ctypes.string_at(0xDEAD0)
    return gradient


def train() -> None:
    weights = torch.ones(64, 64, requires_grad=True)
    activations = weights @ weights
    activations.register_hook(clip_gradient)
    activations.sum().backward()


print("ready", flush=True)
train()
