"""No module needs itself to be imported, or to be checked: imports under TYPE_CHECKING and in functions count, too."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_there_are_no_circles_of_imports() -> None:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "distdiag").rglob("*.py")}
    left = {module: _imports(path) & paths.keys() - {module} for module, path in paths.items()}
    while leaves := {module for module, needed in left.items() if not needed & left.keys()}:
        left = {module: needed for module, needed in left.items() if module not in leaves}
    while tops := left.keys() - set().union(*left.values()):  # these only lead to a circle
        left = {module: needed for module, needed in left.items() if module not in tops}
    assert sorted(left) == []


def _imports(path: Path) -> set[str]:
    froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    return {
        name for node in froms for name in (f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names))
    }
