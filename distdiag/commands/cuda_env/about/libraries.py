"""Shared libraries: those in LD_LIBRARY_PATH that override torch's own, and wheels that overwrite each other."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.knowledge.cuda import major, minor, version
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.libraries import Library
    from distdiag.facts.cuda.requirements import Unmet

_ORDER = [Level.FAIL, Level.WARN, Level.INFO]
_DELICATE = re.compile("nvjitlink|cusparse|nccl")
_MUST_FIT = re.compile(r"lib(nvJitLink|cudnn|cusparse|nccl)")
"""Libraries whose other minor versions are known to break torch: missing symbols, or refused by cuDNN."""


def about_libraries(facts: CudaFacts) -> Section:
    """Judge the loader's path and the wheels."""
    path = facts.variables.get("LD_LIBRARY_PATH")
    checks = (_shadow(facts), _elsewhere(facts), _versions(facts), _doubles(facts), _empty(facts), _missing(facts))
    found = [each for each in checks if each]
    line = (
        "LD_LIBRARY_PATH is not set"
        if path is None
        else f"LD_LIBRARY_PATH has {_count(len(facts.loader_path), 'directory', 'directories')}"
    )
    if facts.wheels:
        line += f", {_count(len(facts.wheels), 'CUDA library', 'CUDA libraries')} in wheels"
    details = [f"{entry.text or '(empty)'}: {_contents(entry.libraries)}" for entry in facts.loader_path]
    return Section(name="Libraries", line=line, problems=tuple(found), details=tuple(details))


def _count(number: int, singular: str, many: str) -> str:
    return f"{number} {singular if number == 1 else many}"


def _contents(libraries: tuple[Library, ...]) -> str:
    return ", ".join(library.soname for library in libraries) or "no CUDA library"


def _shadow(facts: CudaFacts) -> Problem | None:
    """Find libraries of torch's wheels overridden by LD_LIBRARY_PATH."""
    if facts.torch is None or facts.torch.rpath_first or not facts.torch.cuda:
        return None
    pairs = _replaced(facts)
    if not pairs:
        return None
    bad = [pair for pair in pairs if _breaks(*pair)]
    shown = bad or pairs
    folders = list(dict.fromkeys(os.path.dirname(other.path) for other, _ in pairs))
    gone = [entry.text for entry in facts.loader_path if entry.text.rstrip("/") in folders]
    rest = fixes.loader_path_without(facts, gone)
    remedy = Remedy(unset=("LD_LIBRARY_PATH",)) if rest == "''" else Remedy(exports=(("LD_LIBRARY_PATH", rest),))
    names = ", ".join(f"{other.soname} {other.version} for {own.version}" for other, own in shown[:3])
    return problem(
        "libs.shadow",
        level=Level.FAIL if bad else Level.WARN,
        count=len(pairs),
        names=names + (", ..." if len(shown) > 3 else ""),
        breaks='importing torch, or its first use ("undefined symbol", cuDNN version mismatch)' if bad else "",
        folders=", ".join(folders),
        evidence=(f"{other.path} ({other.version or '?'}) before {own.path} ({own.version})" for other, own in shown),
        remedy=remedy,
    )


def _replaced(facts: CudaFacts) -> list[tuple[Library, Library]]:
    """Pair the loader's choice with torch's wheel, for each overridden library."""
    found: dict[str, tuple[Library, Library]] = {}
    for entry in facts.loader_path:
        for stand_in, mine in fixes.stand_ins(facts, entry) if not entry.stubs else ():
            found.setdefault(stand_in.soname, (stand_in, mine))
    return list(found.values())


def _breaks(other: Library, own: Library) -> bool:
    """Return whether a replacement is known to break torch: a delicate library, of an older minor version."""
    delicate = _MUST_FIT.match(own.soname) is not None
    known = (
        min(len(version(other.version)), len(version(own.version))) >= 2
    )  # a file name may have the major version only
    return delicate and known and version(other.version)[:2] < version(own.version)[:2]


def _elsewhere(facts: CudaFacts) -> Problem | None:
    """Find libraries that torch loaded from outside its environment, for another reason than LD_LIBRARY_PATH."""
    own = {wheel.soname: wheel for wheel in facts.wheels}
    loaded = facts.imported.loaded if facts.imported is not None else ()
    listed = [os.path.realpath(entry.text) for entry in facts.loader_path if entry.text]
    strangers = [
        library
        for library in loaded
        if library.soname in own
        and library.path != os.path.realpath(own[library.soname].path)
        and os.path.dirname(library.path) not in listed
    ]
    preloaded = {os.path.realpath(path) for path in fixes.preloaded(facts) if "/" in path}
    first = [stranger for stranger in strangers if stranger.path in preloaded]
    if first:
        return _preloaded(facts, first)
    prefix = os.path.realpath(facts.python.prefix) + "/"
    strangers = [stranger for stranger in strangers if not stranger.path.startswith(prefix)]
    if not strangers:
        return None
    names, paths = ([stranger.soname for stranger in strangers[:3]], [stranger.path for stranger in strangers[:4]])
    return problem("libs.outside", count=len(strangers), names=", ".join(names), evidence=paths)


def _preloaded(facts: CudaFacts, before: list[Library]) -> Problem:
    """Report libraries in LD_PRELOAD that precede those of torch's wheels; both may be loaded then."""
    own = {wheel.soname: wheel for wheel in facts.wheels}
    loaded = facts.imported.loaded if facts.imported is not None else ()
    first = before[0]
    twice = [library for library in loaded if library.soname == first.soname]
    gone = {library.path for library in before}
    rest = [path for path in fixes.preloaded(facts) if os.path.realpath(path) not in gone]
    others = (("LD_PRELOAD", shlex.quote(":".join(rest))),)
    return problem(
        "libs.preloaded",
        level=Level.FAIL if any(_breaks(library, own[library.soname]) for library in before) else Level.WARN,
        names=", ".join(f"{library.soname} {library.version}".strip() for library in before[:3]),
        own=own[first.soname].version,
        copies=len(twice) if len(twice) > 1 else "",
        first=first.soname,
        paths=", ".join(library.path for library in before[:3]),
        evidence=(
            f"LD_PRELOAD={facts.variables.get('LD_PRELOAD', '')}",
            *(f"loaded: {library.path} ({library.version or '?'})" for library in twice),
        ),
        remedy=Remedy(exports=others) if rest else Remedy(unset=("LD_PRELOAD",)),
    )


def _versions(facts: CudaFacts) -> Problem | None:
    """Find packages incompatible with torch, like pip check; only the worst gets a fix.

    torch refuses an older cuDNN at first use; a torchvision for another torch fails at import; other older packages may
    lack functions, newer ones do not.
    """
    judged = sorted(((_level_of(facts, unmet), unmet) for unmet in facts.unmet), key=lambda pair: _ORDER.index(pair[0]))
    if not judged or facts.torch is None:
        return None
    level, first = judged[0]
    newer = level is Level.INFO
    return problem(
        "libs.versions-newer" if newer else "libs.versions",
        level=level,
        package=first.package,
        wanted=f"{first.name}{first.wants}",
        has=first.has,
        breaks="" if newer else _affected_by(first),
        evidence=(f"{unmet.package}: {unmet.name}{unmet.wants}, installed: {unmet.has}" for _, unmet in judged[:6]),
        remedy=Remedy() if newer else Remedy(commands=(_fitting(facts, first),)),
    )


def _level_of(facts: CudaFacts, unmet: Unmet) -> Level:
    if unmet.name == "torch":
        wanted = re.match(r"== *([\d.]+)", unmet.wants)
        other = wanted is not None and minor(wanted[1]) != minor(unmet.has)
        return Level.FAIL if other and unmet.package.startswith("torchvision ") else Level.WARN
    wanted = re.search(r"[\d.]+", unmet.wants)
    older = wanted is not None and version(unmet.has)[:2] < version(wanted[0].rstrip("."))[:2]
    if not older:
        return Level.WARN if "triton" in unmet.name else Level.INFO
    came_in = facts.imported is not None and facts.imported.came_in
    # A missing function in the others would have failed the import of torch.
    return Level.FAIL if "cudnn" in unmet.name or (_DELICATE.search(unmet.name) and not came_in) else Level.WARN


def _affected_by(unmet: Unmet) -> str:
    if unmet.name == "torch":
        return (
            f"{unmet.package.partition(' ')[0]} (its compiled code was built for another torch)"
            if unmet.compiled
            else ""
        )
    return "torch's first use of cuDNN (version incompatibility)" if "cudnn" in unmet.name else "parts of torch"


def _fitting(facts: CudaFacts, unmet: Unmet) -> str:
    """Return the command to install the matching version; for a package that needs torch, the build for this torch."""
    assert facts.torch is not None
    if unmet.name != "torch":
        return f"{fixes.pip(facts)} --no-deps {shlex.quote(unmet.name + unmet.wants.replace(' ', ''))}"
    return fixes.beside_torch(facts, unmet.package.partition(" ")[0])


def _doubles(facts: CudaFacts) -> Problem | None:
    """Find two wheels with the same file: the later install has overwritten the other."""
    if not facts.conflicts:
        return None
    first = facts.conflicts[0]
    packages = list(dict.fromkeys(name for conflict in facts.conflicts for name in conflict.packages))
    wanted = f"cu{major(facts.torch.cuda)}" if facts.torch is not None and facts.torch.cuda else ""
    right = [name for name in packages if wanted and name.split()[0].endswith(wanted)]
    wrong = [name for name in packages if right and name not in right]
    commands: tuple[str, ...] = ()
    if right and wrong:
        again = " ".join("==".join(name.split()) for name in right)
        force = fixes.reinstall(facts)
        commands = (
            fixes.pip_uninstall(facts, (name.split()[0] for name in wrong)),
            f"{fixes.pip(facts)} {force} --no-deps {again}",
        )
    both = "uninstall the wrong package, then reinstall the right package: the uninstall deletes their shared files"
    return problem(
        "libs.duplicate-wheels",
        packages=" and ".join(first.packages),
        file=first.file,
        evidence=(f"{conflict.file}: {', '.join(conflict.packages)}" for conflict in facts.conflicts[:4]),
        remedy=Remedy(text=both if commands else "keep the package that your torch requires", commands=commands),
    )


def _without(facts: CudaFacts, gone: list[str]) -> Remedy:
    return Remedy(exports=(("LD_LIBRARY_PATH", fixes.loader_path_without(facts, gone)),))


def _empty(facts: CudaFacts) -> Problem | None:
    if all(entry.text for entry in facts.loader_path):
        return None
    evidence = (f"LD_LIBRARY_PATH={facts.variables.get('LD_LIBRARY_PATH', '')}",)
    return problem("libs.path-empty", evidence=evidence, remedy=_without(facts, []))


def _missing(facts: CudaFacts) -> Problem | None:
    """Find missing directories: of a toolkit, often lib for lib64."""
    gone = [entry.text for entry in facts.loader_path if entry.text and not entry.exists]
    if not gone:
        return None
    roots = [toolkit for toolkit in facts.toolkits if toolkit.libraries]
    twins = {f"{toolkit.root}/{name}": toolkit.libraries for toolkit in roots for name in ("lib", "lib64")}
    meant = next((twins[text.rstrip("/")] for text in gone if text.rstrip("/") in twins), "")
    return problem("libs.path-missing", folders=", ".join(gone[:3]), meant=meant, remedy=_without(facts, gone))
