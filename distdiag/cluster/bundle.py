"""The sources that travel to a node: the whole of distdiag.node, and what one command runs there."""

from __future__ import annotations

from importlib import resources


def sources(*modules: str) -> dict[str, str]:
    """Read the named modules and every module of distdiag.node as text, by module name."""
    names = [
        f"distdiag.node.{path.name[:-3]}"
        for path in resources.files("distdiag.node").iterdir()
        if _is_module(path.name)
    ]
    return {name: _read(name) for name in (*sorted(names), *modules)}


def _is_module(name: str) -> bool:
    return name.endswith(".py") and name != "__init__.py"


def _read(module: str) -> str:
    package, _, name = module.rpartition(".")
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")
