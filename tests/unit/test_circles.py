"""No module needs itself to be imported, or to be checked: imports under TYPE_CHECKING and in functions count, too."""

from __future__ import annotations

from pathlib import Path

from distdiag.cluster import bundle

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
    """List what a module imports from distdiag; test_what_travels compares it with what the parser of Python finds."""
    return set(bundle._imports_of(path.read_text().replace("TYPE_CHECKING", "ALWAYS")))
