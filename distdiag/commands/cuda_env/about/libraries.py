"""Shared libraries: what LD_LIBRARY_PATH puts before torch's own, and wheels that overwrite each other."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.types import RUN, Problem, Section
from distdiag.knowledge.cuda import major, minor, version
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.libraries import Library
    from distdiag.facts.cuda.requirements import Unmet

_ORDER = [Level.FAIL, Level.WARN, Level.INFO]
_DELICATE = re.compile("nvjitlink|cusparse|nccl")
_MUST_FIT = re.compile(r"lib(nvJitLink|cudnn|cusparse|nccl)")
"""Libraries whose other minor version is known to break torch: missing symbols, or cuDNN's own refusal."""


def about_libraries(facts: CudaFacts) -> Section:
    """Judge the loader's path and the wheels."""
    path = facts.variables.get("LD_LIBRARY_PATH")
    checks = (_shadow(facts), _elsewhere(facts), _versions(facts), _doubles(facts), _empty(facts), _missing(facts))
    found = [problem for problem in checks if problem]
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
    """Find libraries of torch's wheels that LD_LIBRARY_PATH replaces with others."""
    if facts.torch is None or facts.torch.rpath_first or not facts.torch.cuda:
        return None
    pairs = _replaced(facts)
    if not pairs:
        return None
    bad = [pair for pair in pairs if _breaks(*pair)]
    shown = bad or pairs
    folders = list(dict.fromkeys(os.path.dirname(other.path) for other, _ in pairs))
    rest = fixes.loader_path_without(
        facts, [entry.text for entry in facts.loader_path if entry.text.rstrip("/") in folders]
    )
    names = ", ".join(f"{other.soname} {other.version} for {own.version}" for other, own in shown[:3])
    return Problem(
        id="libs.shadow",
        goals=RUN,
        level=Level.FAIL if bad else Level.WARN,
        title=f"LD_LIBRARY_PATH overrides {len(pairs)} of torch's own libraries: {names}"
        + (", ..." if len(shown) > 3 else ""),
        cause="A torch wheel ships its own CUDA libraries and needs no LD_LIBRARY_PATH.",
        breaks='importing torch, or its first use ("undefined symbol", cuDNN version mismatch)' if bad else "",
        evidence=tuple(
            f"{stand_in.path} ({stand_in.version or '?'}) before {own.path} ({own.version})" for stand_in, own in shown
        ),
        fix=f"remove {', '.join(folders)} from LD_LIBRARY_PATH",
        exports=(("LD_LIBRARY_PATH", rest),) if rest != "''" else (),
        unset=("LD_LIBRARY_PATH",) if rest == "''" else (),
    )


def _replaced(facts: CudaFacts) -> list[tuple[Library, Library]]:
    """Pair what the loader would take with what torch's wheels bring, the first on the path of each name."""
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
    )  # a file name may hold the major version only
    return delicate and known and version(other.version)[:2] < version(own.version)[:2]


def _elsewhere(facts: CudaFacts) -> Problem | None:
    """Find libraries that torch did load from outside its environment, for another reason than LD_LIBRARY_PATH."""
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
    guilty = [stranger for stranger in strangers if stranger.path in preloaded]
    if guilty:
        return _preloaded(facts, guilty)
    strangers = [
        stranger for stranger in strangers if not stranger.path.startswith(os.path.realpath(facts.python.prefix) + "/")
    ]
    if not strangers:
        return None
    return Problem(
        id="libs.shadow",
        goals=RUN,
        level=Level.WARN,
        title=f"torch loaded {len(strangers)} CUDA libraries from outside its wheels: "
        + ", ".join(stranger.soname for stranger in strangers[:3]),
        evidence=tuple(stranger.path for stranger in strangers[:4]),
        fix="find out where they come from: a file in /etc/ld.so.conf.d, or a package that loads its own copy",
        commands=("grep -rn cuda /etc/ld.so.conf /etc/ld.so.conf.d",),
    )


def _preloaded(facts: CudaFacts, guilty: list[Library]) -> Problem:
    """Name the libraries that LD_PRELOAD puts before those of torch's wheels; both may be loaded then."""
    own = {wheel.soname: wheel for wheel in facts.wheels}
    loaded = facts.imported.loaded if facts.imported is not None else ()
    first = guilty[0]
    twice = [library for library in loaded if library.soname == first.soname]
    names = [f"{library.soname} {library.version}".strip() for library in guilty[:3]]
    gone = {library.path for library in guilty}
    rest = [path for path in fixes.preloaded(facts) if os.path.realpath(path) not in gone]
    return Problem(
        id="libs.shadow",
        goals=RUN,
        level=Level.FAIL if any(_breaks(library, own[library.soname]) for library in guilty) else Level.WARN,
        title=f"LD_PRELOAD loads {', '.join(names)} before torch's own {own[first.soname].version}"
        + (f": {len(twice)} copies of {first.soname} are loaded" if len(twice) > 1 else ""),
        cause="Symbols of a preloaded library override those of every other library in the process.",
        breaks='torch\'s first use of it ("undefined symbol", wrong results, crash)',
        evidence=(
            f"LD_PRELOAD={facts.variables.get('LD_PRELOAD', '')}",
            *(f"loaded: {library.path} ({library.version or '?'})" for library in twice),
        ),
        fix=f"remove {', '.join(library.path for library in guilty[:3])} from LD_PRELOAD",
        exports=(("LD_PRELOAD", shlex.quote(":".join(rest))),) if rest else (),
        unset=() if rest else ("LD_PRELOAD",),
    )


def _versions(facts: CudaFacts) -> Problem | None:
    """Find packages whose versions do not fit torch, as pip check does; the worst first, and only that is mended.

    An older cuDNN is refused by torch when it is first used, a torchvision of another torch when it is imported; what
    else is older may lack functions, and what is newer has them all.
    """
    judged = sorted(((_level_of(facts, unmet), unmet) for unmet in facts.unmet), key=lambda pair: _ORDER.index(pair[0]))
    if not judged or facts.torch is None:
        return None
    level, first = judged[0]
    return Problem(
        id="libs.versions",
        goals=RUN,
        level=level,
        title=f"{first.package} requires {first.name}{first.wants}, but {first.has} is installed",
        cause="A newer library of the same major version usually works." if level is Level.INFO else "",
        breaks="" if level is Level.INFO else _what_breaks(first),
        evidence=tuple(
            f"{unmet.package}: {unmet.name}{unmet.wants}, installed: {unmet.has}" for _, unmet in judged[:6]
        ),
        fix="" if level is Level.INFO else "install the matching version",
        commands=() if level is Level.INFO else (_fitting(facts, first),),
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
    # Without a function of the others torch would not have been imported.
    return Level.FAIL if "cudnn" in unmet.name or (_DELICATE.search(unmet.name) and not came_in) else Level.WARN


def _what_breaks(unmet: Unmet) -> str:
    if unmet.name == "torch":
        return (
            f"{unmet.package.partition(' ')[0]} (its compiled code was built for another torch)"
            if unmet.compiled
            else ""
        )
    return "torch's first use of cuDNN (version incompatibility)" if "cudnn" in unmet.name else "parts of torch"


def _fitting(facts: CudaFacts, unmet: Unmet) -> str:
    """Return the command that installs the version that fits; of a package that needs torch, that for this torch."""
    assert facts.torch is not None
    if unmet.name != "torch":
        return f"{fixes.pip(facts)} --no-deps {shlex.quote(unmet.name + unmet.wants.replace(' ', ''))}"
    return fixes.beside_torch(facts, unmet.package.partition(" ")[0])


def _doubles(facts: CudaFacts) -> Problem | None:
    """Find two wheels that own the same file: whichever came last has overwritten the other."""
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
    return Problem(
        id="libs.duplicate-wheels",
        goals=RUN,
        level=Level.FAIL,
        title=f"{' and '.join(first.packages)} both own {first.file}: the later install overwrote the file",
        breaks='importing torch or its first collective ("undefined symbol")',
        evidence=tuple(f"{conflict.file}: {', '.join(conflict.packages)}" for conflict in facts.conflicts[:4]),
        fix="uninstall the wrong package and reinstall the right package, whose shared files the uninstall deletes"
        if commands
        else "keep the package that your torch requires",
        commands=commands,
    )


def _empty(facts: CudaFacts) -> Problem | None:
    if not any(not entry.text for entry in facts.loader_path):
        return None
    return Problem(
        id="libs.path-empty",
        goals=RUN,
        level=Level.WARN,
        title="LD_LIBRARY_PATH has an empty element: the loader also searches the working directory",
        evidence=(f"LD_LIBRARY_PATH={facts.variables.get('LD_LIBRARY_PATH', '')}",),
        fix="remove double, leading and trailing colons",
        exports=(("LD_LIBRARY_PATH", fixes.loader_path_without(facts, [])),),
    )


def _missing(facts: CudaFacts) -> Problem | None:
    """Find directories that are not there: of a toolkit, often lib for lib64."""
    gone = [entry.text for entry in facts.loader_path if entry.text and not entry.exists]
    if not gone:
        return None
    roots = [toolkit for toolkit in facts.toolkits if toolkit.libraries]
    twins = {f"{toolkit.root}/{name}": toolkit.libraries for toolkit in roots for name in ("lib", "lib64")}
    meant = next((twins[text.rstrip("/")] for text in gone if text.rstrip("/") in twins), "")
    return Problem(
        id="libs.path-missing",
        goals=RUN,
        level=Level.INFO,
        title=f"LD_LIBRARY_PATH has directories that do not exist: {', '.join(gone[:3])}"
        + (f"; that toolkit's libraries are in {meant}" if meant else ""),
        fix="remove them",
        exports=(("LD_LIBRARY_PATH", fixes.loader_path_without(facts, gone)),),
    )
