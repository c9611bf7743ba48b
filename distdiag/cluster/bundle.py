"""The sources sent to a node: a command's modules, and every module of distdiag they import."""

from __future__ import annotations

import os
import re
from importlib import resources

AGENT = "distdiag.agent.agent"
CONNECT_BACK = "distdiag.agent.connect_back"
# Our own text, formatted: parsing it would take half of the start of a command on hosts.
_IMPORT = re.compile(r"^ *from (distdiag[\w.]*) import (\([^)]*\)|[^(#\n]+)", re.MULTILINE)
_FOR_CHECKERS = re.compile(r"^( *)if TYPE_CHECKING:\n(?:(?:\1 +.*)?\n)+", re.MULTILINE)


def sources(*modules: str) -> dict[str, str]:
    """Read modules and their imports from distdiag as {name: source}; a package includes all of its modules."""
    waiting: list[str] = []
    for module in modules:
        waiting += _modules_of(module) if _is_package(module) else [module]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _read(name)
            waiting += _imports_of(found[name])
    return dict(sorted(found.items()))


def only(module: str) -> dict[str, str]:
    """Read one module without its imports."""
    return {module: _read(module)}


def folder() -> str:
    """Return distdiag's folder; empty if it is imported from a zip file."""
    where = str(resources.files("distdiag"))
    return where if os.path.isdir(where) else ""


def _imports_of(text: str) -> list[str]:
    """List the imports from distdiag, also inside functions, except those under TYPE_CHECKING."""
    found: list[str] = []
    for module, names in _IMPORT.findall(_FOR_CHECKERS.sub("", text)):
        imported = (name.split()[0] for name in names.strip("()").split(",") if name.strip())
        found += [f"{module}.{name}" for name in imported] if _is_package(module) else [module]
    return found


def _modules_of(package: str) -> list[str]:
    names = {path.name for path in resources.files(package).iterdir()} - {"__init__.py"}
    return sorted(f"{package}.{name[:-3]}" for name in names if name.endswith(".py"))


def _is_package(name: str) -> bool:
    above, _, last = name.rpartition(".")
    return not above or resources.files(above).joinpath(last).is_dir()


def _read(module: str) -> str:
    package, _, name = module.rpartition(".")
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")
