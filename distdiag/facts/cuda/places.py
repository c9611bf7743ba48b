"""System paths, optionally below another root (a copy of a system, or a test's tree)."""

from __future__ import annotations

import glob
import os

from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@record
class Places:
    """The examined system: its root ("" for this one) and the caller's environment."""

    root: str
    env: Mapping[str, str]

    def at(self, path: str) -> str:
        """Return the path of a system file below the root."""
        return self.root + path

    def glob(self, pattern: str) -> list[str]:
        """List the matching paths, sorted."""
        return sorted(glob.glob(self.at(pattern)))

    @property
    def path(self) -> list[str]:
        """The directories of PATH, as written."""
        return self.env.get("PATH", os.defpath).split(os.pathsep)

    def which(self, name: str) -> str:
        """Find a program like a shell; empty if missing."""
        return next(iter(self.which_all(name)), "")

    def which_all(self, name: str) -> list[str]:
        """Find a program in all directories of PATH, in order, each directory once."""
        if os.sep in name:
            return [name] if _is_program(name) else []
        found = (os.path.join(folder or ".", name) for folder in dict.fromkeys(self.path))
        return [path for path in found if _is_program(path)]


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)
