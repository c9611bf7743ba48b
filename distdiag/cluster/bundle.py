"""The sources sent to a node: a command's modules, and every module of distdiag they import."""

from __future__ import annotations

import ast
import os
from importlib import resources

AGENT = "distdiag.agent.agent"
CONNECT_BACK = "distdiag.agent.connect_back"


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
    nodes: list[ast.AST] = [ast.parse(text)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distdiag"):
            module = str(node.module)
            found += [f"{module}.{alias.name}" for alias in node.names] if _is_package(module) else [module]
        for_checkers = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not for_checkers:
            nodes += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
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
