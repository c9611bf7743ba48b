"""Whether there is anything by a name that was given to --include."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import machinery, metadata

_ALL = ("all", "stdlib")


def why_unknown(name: str, python: str) -> str:
    """Say that nothing has this name, and what was meant; empty if something has, or another Python runs the job."""
    top, _, below = name.partition(".")
    if name in _ALL or os.path.realpath(python) != os.path.realpath(sys.executable):
        return ""
    spec = machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None:
        if top in sys.stdlib_module_names:
            return f"--include {name} traces nothing: it has no lines of Python"
        close = _close(top)
        hint = f"; did you mean --include {close}?" if close else "; a package is named as it is imported"
        return f"--include {name} traces nothing: there is no package of that name here{hint}"
    folders = list(spec.submodule_search_locations or ())
    if not folders and not (spec.origin or "").endswith(".py"):
        return f"--include {name} traces nothing: it has no lines of Python"
    paths = [os.path.join(folder, *below.split(".")) for folder in folders] if below else []
    if below and not any(os.path.exists(path) or os.path.exists(f"{path}.py") for path in paths):
        return f"--include {name} traces nothing: there is no {below} in {top}"
    return ""


def _close(name: str) -> str:
    """Name the package that is imported otherwise than it is installed (pillow is PIL), or spelled alike."""
    found = metadata.packages_distributions()
    wanted = name.lower().replace("_", "-")
    for package, distributions in found.items():
        if wanted in {one.lower().replace("_", "-") for one in distributions} and not package.startswith("_"):
            return package
    return next(iter(difflib.get_close_matches(name, [*found, *sys.stdlib_module_names], 1)), "")
