"""The Python of the user's environment: distdiag's own may be one apart (pipx, uvx, the zipapp)."""

from __future__ import annotations

import contextlib
import os
import re
import sys

from distdiag import program_name
from distdiag.facts import programs

_TORCH_S = 10.0
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def users_python() -> tuple[str, str]:
    """Return the Python that a bare script is started with, and by which rule; the rule is empty for distdiag's own.

    The active environment's; else that on PATH, if it has torch or distdiag's own is an environment apart; else ours.
    """
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        path = os.path.join(os.environ.get(name) or os.devnull, "bin", "python")
        if os.access(path, os.X_OK):
            return path, "" if _is_ours(path) else f"the active environment, {name}"
    apart = program_name.is_one_file() or _is_apart()
    on_path = _on_path(apart=apart)
    if on_path and (apart or programs.run([on_path, "-c", _HAS_TORCH], timeout_s=_TORCH_S).status == 0):
        return on_path, "the first on PATH"
    return sys.executable, ""


def _on_path(*, apart: bool) -> str:
    """Return the first Python on PATH; empty if it is distdiag's own, which uvx puts first: with `apart`, skip that."""
    for folder in os.get_exec_path():
        for name in ("python3", "python"):
            path = os.path.join(folder, name)
            if not os.access(path, os.X_OK):
                continue
            if program_name.is_one_file() or not _is_ours(path):
                return path
            if not apart:
                return ""
    return ""


def _is_ours(path: str) -> bool:
    """Return whether a Python is distdiag's own, by folder: environments may link to the same file."""
    folder, ours = os.path.dirname(path), os.path.dirname(sys.executable)
    return os.path.exists(folder) and os.path.exists(ours) and os.path.samefile(folder, ours)


def _is_apart() -> bool:
    """Return whether this is an environment of pipx, `uv tool install`, or the cache of uvx."""
    signs = ("pipx_metadata.json", "uv-receipt.toml")
    kept = any(os.path.exists(os.path.join(sys.prefix, name)) for name in signs)
    return kept or os.path.basename(os.path.dirname(sys.prefix)).startswith(("archive-v", "environments-v"))


def installed(*packages: str) -> tuple[int, int] | None:
    """Return (major, minor) of the first of these packages that is installed for distdiag, without importing it."""
    from importlib import metadata

    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            match = re.match(r"(\d+)\.(\d+)", metadata.version(package))
            return (int(match[1]), int(match[2])) if match else None
    return None
