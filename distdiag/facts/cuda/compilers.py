"""C++ compilers on this machine: all in PATH, the one requested by torch, and their versions."""

from __future__ import annotations

import os
import re

from distdiag.facts import machine, programs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.facts.cuda.places import Places

_NAME = re.compile(r"(gcc|g\+\+|clang|clang\+\+)(-\d+(\.\d+)?)?|c\+\+|cc")


@record
class Compiler:
    """One compiler; `family`: gcc, clang, or empty for any other; `version`: empty if unknown."""

    path: str
    real: str
    family: str
    version: str

    @property
    def major(self) -> int:
        """Its major version; 0 if unknown."""
        first = self.version.partition(".")[0]
        return int(first) if first.isdigit() else 0


@record
class Compilers:
    """All compilers, and torch's choice: `cxx` ($CXX or c++), None if missing.

    `installable`: major versions of g++ available from apt.
    """

    found: tuple[Compiler, ...]
    cxx_asked: str
    cxx: Compiler | None
    installable: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.cxx is not None and not self.cxx_asked.strip():
            raise ValueError("a C++ compiler that no setting names")


def find(places: Places, more: Iterable[str], *, newest_gcc: int, timeout_s: float) -> Compilers:
    """Find compilers by their names on PATH; `more`: others in use.

    apt is queried for installable versions only without a gcc up to `newest_gcc` (major version): that takes a second.
    """
    asked = (places.env.get("CXX") or "c++").strip()
    word = asked.split()[0] if asked else "c++"
    paths = dict.fromkeys([*_on_path(places), *(path for path in more if path)])
    chosen = places.which(word)
    if chosen:
        paths[chosen] = None
    files = [path for path in paths if os.path.isfile(path)]
    known = {compiler.path: compiler for compiler in _versions(files, timeout_s=timeout_s)}
    has = any(compiler.family == "gcc" and 0 < compiler.major <= newest_gcc for compiler in known.values())
    return Compilers(tuple(known.values()), asked, known.get(chosen), () if has else _installable(places, timeout_s))


def _installable(places: Places, timeout_s: float) -> tuple[int, ...]:
    apt = places.which("apt-cache")
    if not apt:
        return ()
    done = programs.run([apt, "pkgnames", "g++-"], timeout_s=timeout_s)
    names = done.stdout.decode("utf-8", "replace").split()
    return tuple(sorted(int(name[4:]) for name in names if re.fullmatch(r"g\+\+-\d+", name)))


def _on_path(places: Places) -> list[str]:
    found = []
    for folder in dict.fromkeys(places.path):
        names = sorted(machine.names_in(folder or "."))
        found += [os.path.join(folder, name) for name in names if _NAME.fullmatch(name)]
    return [path for path in found if os.access(path, os.X_OK)]


def _versions(paths: list[str], *, timeout_s: float) -> list[Compiler]:
    """Query each program once, under all its names."""
    names = {path: os.path.realpath(path) for path in paths}
    asked = {
        **{(real, "version"): [real, "--version"] for real in dict.fromkeys(names.values())},
        **{(real, "number"): [real, "-dumpfullversion", "-dumpversion"] for real in dict.fromkeys(names.values())},
    }
    answers = {
        key: done.stdout.decode("utf-8", "replace").strip()
        for key, done in programs.run_many(asked, timeout_s)
        if done is not None and not done.timed_out and done.status == 0
    }
    found = []
    for path, real in names.items():
        words = answers.get((real, "version"), "")
        family = "clang" if "clang" in words else "gcc" if re.search(r"GCC|g\+\+|gcc|Free Software", words) else ""
        number = re.search(r"clang version (\d[\d.]*)", words) if family == "clang" else None
        version = number[1] if number else answers.get((real, "number"), "")
        found.append(Compiler(path, real, family, version.splitlines()[0] if version else ""))
    return found
