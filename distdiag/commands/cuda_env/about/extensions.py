"""Compiled extensions: code for the local GPUs, and linked to the CUDA of this torch."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.archs import from_nvcc, how_it_runs
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.fold import by_key
from distdiag.knowledge.cuda import major, version
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.archs import Arch
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.libraries import Extension
    from distdiag.facts.cuda.torchfiles import Torch

_FOR_CUDA = re.compile(r"(_cuda_?|_cu)(\d{3})(?=[^/]*\.so)")
"""The CUDA version in a file's name: 130 is 13.0."""


def about_extensions(facts: CudaFacts) -> Section:
    """Judge the compiled extensions."""
    found = facts.extensions
    skipped = "" if facts.extensions_complete else "not all files were checked in time"
    if not found:
        return Section(name="Extensions", line="no compiled CUDA extensions found", skipped=skipped)
    packages = list(dict.fromkeys(_name(extension) for extension in found))
    more = f" and {len(packages) - 3} more" if len(packages) > 3 else ""
    archs = sorted({arch for extension in found for arch in extension.archs}, key=from_nvcc)
    code = " ".join(fixes.as_code(arch) for arch in archs) or "no GPU code of its own"
    return Section(
        name="Extensions",
        line=f"{', '.join(packages[:3])}{more}: {code}",
        problems=tuple(each for each in (_code(facts), _soname(facts)) if each),
        skipped=skipped,
        details=tuple(_described(extension) for extension in found),
    )


def _name(extension: Extension) -> str:
    return extension.package or os.path.basename(extension.path)


def _described(extension: Extension) -> str:
    archs = " ".join(fixes.as_code(arch) for arch in extension.archs) or "none"
    ptx = f", PTX {' '.join(fixes.as_code(arch) for arch in extension.ptx)}" if extension.ptx else ""
    needs = f", needs {' '.join(extension.needs)}" if extension.needs else ""
    return f"{extension.path}: code for {archs}{ptx}{needs}" + ("" if extension.complete else " (not fully read)")


def loaded(facts: CudaFacts) -> list[Extension]:
    """List the files that this torch would load; from a package with one file per CUDA, the matching one.

    libbitsandbytes_cuda128.so and ..._cuda130.so are such a family. If none matches, the first represents all.
    """
    families = by_key((_FOR_CUDA.sub(r"\1", extension.path), extension) for extension in facts.extensions)
    return [_chosen(facts, family) for family in families.values()]


def _chosen(facts: CudaFacts, family: list[Extension]) -> Extension:
    """Choose like bitsandbytes: the same version, else in the same major the next older, else the next newer."""
    chosen_cuda = facts.variables.get("BNB_CUDA_VERSION", "")
    if chosen_cuda.isdigit() and family[0].package.startswith("bitsandbytes"):
        return next((extension for extension in family if _code_of(extension) == int(chosen_cuda)), family[0])
    own = version(facts.torch.cuda)[:2] if facts.torch is not None and facts.torch.cuda else ()
    wanted = own[0] * 10 + own[1] if len(own) == 2 else 0
    same = [extension for extension in family if _code_of(extension) // 10 == wanted // 10]
    older = [extension for extension in same if _code_of(extension) <= wanted]
    return max(older, key=_code_of) if older else min(same or family, key=_code_of)


def _code_of(extension: Extension) -> int:
    """Return the CUDA in a file's name, 13.0 as 130; 0 if absent."""
    found = _FOR_CUDA.search(extension.path)
    return int(found[2]) if found else 0


def _code(facts: CudaFacts) -> Problem | None:
    """Report files without code for a local GPU, unless another file of the package has it."""
    lacking: list[tuple[Extension, list[Arch]]] = []
    files = [extension for extension in loaded(facts) if extension.archs or extension.ptx]
    for extension in files:
        whole = [
            other for other in files if other is extension or (extension.package and other.package == extension.package)
        ]
        missing = [
            gpu
            for gpu in fixes.gpu_archs(facts)
            if not any(how_it_runs(other.archs, other.ptx, gpu) or not other.complete for other in whole)
        ]
        if missing:
            lacking.append((extension, missing))
    if not lacking:
        return None
    first, missing = lacking[0]
    command = _rebuild(facts, first)
    return problem(
        "arch.ext",
        extension=_name(first),
        archs=", ".join(gpu.torch for gpu in missing),
        evidence=(_described(extension) for extension, _ in lacking),
        remedy=Remedy(text=_how_again(first, "these GPUs"), commands=(command,) if command else ()),
    )


def _rebuild(facts: CudaFacts, extension: Extension) -> str:
    """Return the command to rebuild a package for these GPUs too, or to remove a file of torch's cache."""
    if not extension.package:
        return _remove(extension)
    own = {from_nvcc(arch) for arch in extension.archs}
    wanted = ";".join(arch.torch for arch in sorted(own | set(fixes.gpu_archs(facts))))
    return f'TORCH_CUDA_ARCH_LIST="{wanted}" {_again(facts, extension)}'


def _how_again(extension: Extension, target: str) -> str:
    if extension.package:
        return f"rebuild it for {target}"
    cached = "torch_extensions" in extension.path
    return "remove it: torch rebuilds it at its next use" if cached else f"rebuild it for {target}, from its sources"


def _remove(extension: Extension) -> str:
    return f"rm -rf {shlex.quote(os.path.dirname(extension.path))}" if "torch_extensions" in extension.path else ""


def _again(facts: CudaFacts, extension: Extension) -> str:
    name, _, number = extension.package.partition(" ")
    return fixes.rebuild(facts, name, number)


def _soname(facts: CudaFacts) -> Problem | None:
    """Report files that need another CUDA runtime than torch's.

    A file outside torch may use its own runtime beside torch's, if the loader finds it.
    """
    torch = facts.torch
    if torch is None or not torch.cuda:
        return None
    wheels = {wheel.soname for wheel in facts.wheels}
    wrong = [
        (library, need)
        for library in loaded(facts)
        for need in library.needs
        if need.startswith("libcudart.so.")
        and major(need.rpartition(".so.")[2]) != major(torch.cuda)
        and (library.torch or (need in library.lost and need not in wheels))
    ]
    if not wrong:
        return None
    first, need = max(wrong, key=lambda pair: pair[0].torch)
    if _code_of(first) and not first.torch:
        return _no_variant(facts, torch, first, need)
    command = _again(facts, first) if first.package else _remove(first)
    return problem(
        "libs.ext-soname",
        level=Level.FAIL if first.torch else Level.WARN,
        extension=_name(first),
        need=need,
        torch=torch.version,
        own=f"libcudart.so.{major(torch.cuda)}",
        evidence=(_described(extension) for extension, _ in wrong),
        remedy=Remedy(text=_how_again(first, "this torch"), commands=(command,) if command else ()),
    )


def _no_variant(facts: CudaFacts, torch: Torch, first: Extension, need: str) -> Problem:
    """Report a package without a library for torch's CUDA, or a variable that selects another."""
    chosen, name = facts.variables.get("BNB_CUDA_VERSION", ""), first.package.partition(" ")[0]
    words = {"chosen": chosen, "extension": _name(first), "need": need, "name": name, "torch": torch.version}
    if chosen and first.package.startswith("bitsandbytes"):
        return problem(
            "libs.ext-chosen", words, evidence=(_described(first),), remedy=Remedy(unset=("BNB_CUDA_VERSION",))
        )
    remedy = Remedy(commands=(f"{fixes.pip(facts)} --upgrade --no-deps {name}",) if name else ())
    return problem("libs.ext-no-variant", words, cuda=major(torch.cuda), evidence=(_described(first),), remedy=remedy)
