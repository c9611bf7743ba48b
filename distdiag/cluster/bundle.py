"""The sources that travel to a node: what one command runs there, and whatever of distdiag that imports."""

from __future__ import annotations

import os
import re
from importlib import resources

_ALWAYS = ("distdiag.node.agent", "distdiag.node.call_home")
"""One of them is what is started."""
# Not by `ast`: parsing all of it would cost every command 50 ms.
_FOR_CHECKERS = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t].*\n|\n)*", re.MULTILINE)
# It takes any text that begins and ends a line for one: what a test holds against all of distdiag.
_DOCSTRING = re.compile(r'^([ \t]*)"""(?:[^"\\]|"(?!"")|\\.)*"""[ \t]*$', re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"^[ \t]*from (distdiag[\w.]*) import ([\w, ]+|\([^)]*\))", re.MULTILINE)


def sources(*modules: str) -> dict[str, str]:
    """Read modules, and all of distdiag that they import, as text by name; a package stands for all in it.

    Only these, and without docstrings, a quarter of all: where the payload has to be an argument, it may not be longer
    than the 128 KiB that Linux allows. Each line keeps its number, for tracebacks.
    """
    waiting = list(_ALWAYS)
    for module in modules:
        waiting += _modules_of(module) if _is_package(module) else [module]
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _read(name)
            waiting += _imports_of(found[name])
    return dict(sorted(found.items()))


def first(found: dict[str, str], *modules: str) -> list[str]:
    """List which of these sources are imported when these modules are: not what is imported only when it is needed."""
    waiting, names = [*modules], set[str]()
    while waiting:
        name = waiting.pop()
        if name in found and name not in names:
            names.add(name)
            waiting += _imports_of(re.sub(r"^[ \t].*\n", "", found[name], flags=re.MULTILINE))
    return sorted(names)


def only(module: str) -> dict[str, str]:
    """Read one module, without what it imports."""
    return {module: _read(module)}


def folder() -> str:
    """Tell where distdiag is installed; empty if it is not in a folder (but in a zip file)."""
    where = str(resources.files("distdiag"))
    return where if os.path.isdir(where) else ""


def _imports_of(text: str) -> list[str]:
    """List distdiag's modules that this one imports, also inside functions; not those for type checkers alone."""
    found = []
    for module, names in _IMPORT.findall(_FOR_CHECKERS.sub("", text)):
        words = re.findall(r"\w+", names)
        found += [f"{module}.{word}" for word in words] if _is_package(module) else [module]
    return found


def _modules_of(package: str) -> list[str]:
    names = (path.name for path in resources.files(package).iterdir())
    return sorted(f"{package}.{name[:-3]}" for name in names if _is_module(name))


def _is_package(name: str) -> bool:
    above, _, last = name.rpartition(".")
    return resources.files(above).joinpath(last).is_dir()


def _is_module(name: str) -> bool:
    return name.endswith(".py") and name != "__init__.py"


def _read(module: str) -> str:
    package, _, name = module.rpartition(".")
    text = resources.files(package).joinpath(f"{name}.py").read_text("utf-8")
    return _DOCSTRING.sub(lambda found: found[1] + '""' + "\n" * found[0].count("\n"), text)
