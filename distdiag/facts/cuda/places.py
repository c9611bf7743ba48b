"""Where to look: the paths of this system, or those below another root (a copy of one, or the tree of a test)."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Places:
    """The system that is looked at: its root ("" for this one's own) and the environment of who asks."""

    root: str
    env: Mapping[str, str]

    def at(self, path: str) -> str:
        """Give an absolute path of the system."""
        return self.root + path

    def glob(self, pattern: str) -> list[str]:
        """List what is there, sorted."""
        return sorted(glob.glob(self.at(pattern)))

    @property
    def path(self) -> list[str]:
        """The directories of PATH, as they are written."""
        return self.env.get("PATH", os.defpath).split(os.pathsep)

    def which(self, name: str) -> str:
        """Find a program as a shell does; empty if there is none."""
        return next(iter(self.which_all(name)), "")

    def which_all(self, name: str) -> list[str]:
        """Find a program in all directories of PATH, in order; a directory that is named twice counts once."""
        if os.sep in name:
            return [name] if _is_program(name) else []
        found = (os.path.join(folder or ".", name) for folder in dict.fromkeys(self.path))
        return [path for path in found if _is_program(path)]


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def first_line(text: str) -> str:
    """Give the first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
