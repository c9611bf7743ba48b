"""Shared libraries: what LD_LIBRARY_PATH puts before torch's own, and wheels that overwrite each other."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.model import RUN, Problem, Section
from distdiag.knowledge.cuda import major, version
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.node.cuda.libraries import Library

_MUST_FIT = re.compile(r"lib(nvJitLink|cudnn|cusparse|nccl)")
"""Libraries whose other minor version is known to break torch: missing symbols, or cuDNN's own refusal."""


def about_libraries(facts: CudaFacts) -> Section:
    """Judge the loader's path and the wheels."""
    path = facts.variables.get("LD_LIBRARY_PATH")
    found = [one for one in (_shadow(facts), _elsewhere(facts), _doubles(facts), _empty(facts), _missing(facts)) if one]
    line = (
        "LD_LIBRARY_PATH is not set"
        if path is None
        else f"LD_LIBRARY_PATH has {_count(len(facts.loader_path), 'directory', 'directories')}"
    )
    if facts.wheels:
        line += f", {_count(len(facts.wheels), 'CUDA library', 'CUDA libraries')} in wheels"
    details = [f"{entry.text or '(empty)'}: {_contents(entry.libraries)}" for entry in facts.loader_path]
    return Section(name="Libraries", line=line, problems=tuple(found), details=tuple(details))


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _contents(libraries: tuple[Library, ...]) -> str:
    return ", ".join(one.soname for one in libraries) or "no CUDA library"


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
    names = ", ".join(other.soname for other, _ in shown[:3])
    return Problem(
        id="libs.shadow",
        goals=RUN,
        level=Level.FAIL if bad else Level.WARN,
        title=f"LD_LIBRARY_PATH replaces {len(pairs)} of torch's own libraries: {names}"
        + (", ..." if len(shown) > 3 else ""),
        cause="torch from a wheel brings its own, and needs no LD_LIBRARY_PATH.",
        breaks='importing torch, or its first use ("undefined symbol", versions of cuDNN)' if bad else "",
        evidence=tuple(f"{one.path} ({one.version or '?'}) before {own.path} ({own.version})" for one, own in shown),
        fix=f"take {', '.join(folders)} out",
        exports=(("LD_LIBRARY_PATH", rest),) if rest != "''" else (),
        unset=("LD_LIBRARY_PATH",) if rest == "''" else (),
    )


def _replaced(facts: CudaFacts) -> list[tuple[Library, Library]]:
    """Pair what the loader would take with what torch's wheels bring, the first on the path of each name."""
    found: dict[str, tuple[Library, Library]] = {}
    for entry in facts.loader_path:
        for one, mine in fixes.stand_ins(facts, entry) if not entry.stubs else ():
            found.setdefault(one.soname, (one, mine))
    return list(found.values())


def _breaks(other: Library, own: Library) -> bool:
    """Tell whether a replacement is known to break torch: a delicate library, of an older minor version."""
    delicate = _MUST_FIT.match(own.soname) is not None and bool(other.version)
    return delicate and version(other.version)[:2] < version(own.version)[:2]


def _elsewhere(facts: CudaFacts) -> Problem | None:
    """Find libraries that torch did load from outside its environment, for another reason than LD_LIBRARY_PATH."""
    own = {one.soname: os.path.realpath(one.path) for one in facts.wheels}
    loaded = facts.imported.libraries if facts.imported is not None else ()
    listed = [entry.text.rstrip("/") for entry in facts.loader_path if entry.text]
    strangers = [
        path
        for path in loaded
        if os.path.basename(path) in own
        and path != own[os.path.basename(path)]
        and not path.startswith(facts.python.prefix + "/")
        and os.path.dirname(path) not in listed
    ]
    if not strangers:
        return None
    return Problem(
        id="libs.shadow",
        goals=RUN,
        level=Level.WARN,
        title=f"torch loaded {len(strangers)} CUDA libraries that are not those of its wheels: "
        + ", ".join(os.path.basename(path) for path in strangers[:3]),
        evidence=tuple(strangers[:4])
        + tuple(f"LD_PRELOAD={value}" for value in (facts.variables.get("LD_PRELOAD"),) if value),
        fix="see LD_PRELOAD, and the files below /etc/ld.so.conf.d",
        commands=("grep -rn cuda /etc/ld.so.conf /etc/ld.so.conf.d",),
    )


def _doubles(facts: CudaFacts) -> Problem | None:
    """Find two wheels that own the same file: whichever came last has overwritten the other."""
    if not facts.conflicts:
        return None
    first = facts.conflicts[0]
    packages = list(dict.fromkeys(name for one in facts.conflicts for name in one.packages))
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
        title=f"{' and '.join(first.packages)} both own {first.file}: one has overwritten the other",
        breaks='importing torch or its first collective ("undefined symbol")',
        evidence=tuple(f"{one.file}: {', '.join(one.packages)}" for one in facts.conflicts[:4]),
        fix="remove the wrong one, and install the right one again: removing deletes the shared files"
        if commands
        else "keep the one that your torch asks for",
        commands=commands,
    )


def _empty(facts: CudaFacts) -> Problem | None:
    if not any(not entry.text for entry in facts.loader_path):
        return None
    return Problem(
        id="libs.path-empty",
        goals=RUN,
        level=Level.WARN,
        title="LD_LIBRARY_PATH has an empty element: libraries are also taken from the working directory",
        evidence=(f"LD_LIBRARY_PATH={facts.variables.get('LD_LIBRARY_PATH', '')}",),
        fix="write it without double, leading or trailing colons",
        exports=(("LD_LIBRARY_PATH", fixes.loader_path_without(facts, [])),),
    )


def _missing(facts: CudaFacts) -> Problem | None:
    """Find directories that are not there: of a toolkit, often lib for lib64."""
    gone = [one.text for one in facts.loader_path if one.text and not one.exists]
    if not gone:
        return None
    roots = [one for one in facts.toolkits if one.libraries]
    twins = {f"{one.root}/{name}": one.libraries for one in roots for name in ("lib", "lib64")}
    meant = next((twins[text.rstrip("/")] for text in gone if text.rstrip("/") in twins), "")
    return Problem(
        id="libs.path-missing",
        goals=RUN,
        level=Level.INFO,
        title=f"LD_LIBRARY_PATH names what is not there: {', '.join(gone[:3])}"
        + (f"; the libraries of that toolkit are in {meant}" if meant else ""),
        fix="leave them out",
        exports=(("LD_LIBRARY_PATH", fixes.loader_path_without(facts, gone)),),
    )
