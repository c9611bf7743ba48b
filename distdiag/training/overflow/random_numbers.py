"""The random number generators that a forward may draw from without being given one."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


class RandomNumbers:
    """The states of the random number generators that this model's forward uses."""

    def __init__(self) -> None:
        self._python = self._numpy = True
        self._used = [False, False]
        self._learns = 2

    def save(self) -> dict[str, Any]:
        """Copy the states: torch's, and, unless the first forwards did without them, Python's and numpy's."""
        states: dict[str, Any] = {"torch": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        if self._python:
            states["python"] = random.getstate()
        if self._numpy and numpy_random() is not None:
            states["numpy"] = numpy_random().get_state(legacy=False)
        return states

    def learn(self, before: dict[str, Any]) -> None:
        """Look, after each of the first forwards, whether they were used: to copy them takes longer than the rest."""
        if not self._learns or "python" not in before:
            return
        self._learns -= 1
        self._used[0] |= before["python"] != random.getstate()
        numpy = numpy_random()
        self._used[1] |= numpy is not None and str(before.get("numpy")) != str(numpy.get_state(legacy=False))
        if not self._learns:
            self._python, self._numpy = self._used


def save_all() -> dict[str, Any]:
    """Copy the states of all generators that are nobody's own, of all devices."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        states["devices"] = torch.cuda.get_rng_state_all()
    if numpy_random() is not None:
        states["numpy"] = numpy_random().get_state(legacy=False)
    return states


def put(states: dict[str, Any]) -> None:
    """Set the states."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    if "devices" in states:
        torch.cuda.set_rng_state_all(states["devices"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        numpy_random().set_state(states["numpy"])


def numpy_random() -> Any:  # noqa: ANN401 - a module that is not ours to import
    """Give numpy.random, if the script has imported it."""
    return getattr(sys.modules.get("numpy"), "random", None)
