"""The sources that travel to a node: the whole of distdiag.node, and what one command runs there."""

from __future__ import annotations

from importlib import resources


def sources(*modules: str) -> dict[str, str]:
    """Read every module of distdiag.node and the named ones as text, by name; a package stands for all in it."""
    names = _modules_of("distdiag.node")
    for module in modules:
        names += _modules_of(module) if _is_package(module) else [module]
    return {name: _read(name) for name in names}


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
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")
