"""Keeps the process groups of this rank from timing out for a while, and puts their timeouts back afterwards."""

from __future__ import annotations

import threading
from datetime import timedelta

from distdiag.training.whoami import torch_distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_lock = threading.Lock()
_holders = 0
_before: dict[int, tuple[Callable[[timedelta], None], timedelta]] = {}
"""How to set a timeout, and what it was, by the identity of its backend or store, whose method keeps it alive."""


class Held:
    """Timeouts raised; several may hold them at a time, and the last to let go puts back what was there first."""

    def __init__(self, timeout_s: float) -> None:
        """Raise the timeout of every process group and of the store to `timeout_s` seconds where it is less."""
        global _holders
        self._done = False
        wanted = timedelta(seconds=timeout_s)
        with _lock:
            _holders += 1
            for owner, now, change in _timeouts():
                if now < wanted:
                    _before.setdefault(id(owner), (change, now))
                    change(wanted)

    def let_go(self) -> None:
        """Put back what was there, if nobody else holds them; once."""
        global _holders
        with _lock:
            if self._done:
                return
            self._done = True
            _holders -= 1
            if _holders == 0:
                for change, timeout in _before.values():
                    change(timeout)
                _before.clear()


def _timeouts() -> Iterator[tuple[Any, timedelta, Callable[[timedelta], None]]]:
    """List what has a timeout that can be read and set: NCCL's and gloo's backends, and the store of the job."""
    dist = torch_distributed()
    if dist is None:
        return
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        for device in group._device_types:
            backend = group._get_backend(device)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a backend that checks arguments around the real one.
            backend = getattr(backend, "wrapped_pg", backend)
            now = getattr(getattr(backend, "options", None), "_timeout", None)
            if now is not None and hasattr(backend, "_set_default_timeout"):
                yield backend, now, backend._set_default_timeout
    store = world.pg_map[dist.group.WORLD][1]
    if hasattr(store, "timeout"):
        yield store, store.timeout, store.set_timeout
