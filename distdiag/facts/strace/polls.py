"""Paths that a thread looks for again and again, asleep in between: it waits for a file to appear or to vanish."""

from __future__ import annotations

import os
from typing import NamedTuple

from distdiag.facts.strace import errors
from distdiag.facts.strace.types import Poll

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FEWEST = 3
"""Tries, each after a sleep: fewer may be chance."""
_MAX_HELD = 4000
"""More paths are not kept at a time."""
_NO_FILES = ("/proc/", "/sys/")


class _Path(NamedTuple):
    """`tries`: calls, those between two sleeps counted once; `sleeps` and `slept_s`: when first and last tried."""

    exists: bool
    tries: int
    sleeps: int
    slept_s: float


class Polls:
    """The paths that one thread looked for."""

    def __init__(self) -> None:
        self._held: dict[str, _Path] = {}
        self._sleeps = 0
        self._slept_s = 0.0

    def slept(self, took_s: float) -> None:
        """Count a sleep."""
        self._sleeps += 1
        self._slept_s += took_s

    def tried(self, target: str, error: str) -> None:
        """Count a call that looked for a path; another result than before begins anew."""
        exists = error in ("", "EEXIST")
        if exists:  # likely a lock, to be removed by another process: torch's FileBaton, SoftFileLock
            is_awaited = "lock" in os.path.basename(target).lower()
        else:  # on purpose, not by an import or the library loader
            is_sought = error in ("ENOENT", "ENOTDIR") and not target.startswith(_NO_FILES)
            is_awaited = is_sought and errors.weight("", error, target) > 1
        if not is_awaited:
            self._held.pop(target, None)
            return
        path = self._held.get(target)
        if path is None or path.exists != exists:
            if len(self._held) >= _MAX_HELD:
                self._held = {name: held for name, held in self._held.items() if held.tries >= FEWEST}
            self._held[target] = _Path(exists, 1, self._sleeps, self._slept_s)
        elif path.sleeps != self._sleeps:
            self._held[target] = path._replace(tries=path.tries + 1, sleeps=self._sleeps)

    def found(self) -> Iterator[Poll]:
        """List the polled paths, the most tries first."""
        for target, path in sorted(self._held.items(), key=lambda item: -item[1].tries):
            if path.tries >= FEWEST:
                yield Poll(target, path.exists, path.tries, self._slept_s - path.slept_s)
