"""Compiled extensions: have they code for the GPUs that are here, and do they want the CUDA of this torch."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.archs import from_nvcc, how_it_runs
from distdiag.commands.cuda_env.model import RUN, Problem, Section
from distdiag.knowledge.cuda import major
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.archs import Arch
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.node.cuda.libraries import Extension


def about_extensions(facts: CudaFacts) -> Section:
    """Judge what is compiled."""
    found = facts.extensions
    skipped = "" if facts.extensions_complete else "not all files were looked at in time"
    if not found:
        return Section(name="Extensions", line="none with GPU code", skipped=skipped)
    packages = list(dict.fromkeys(_name(one) for one in found))
    more = f" and {len(packages) - 3} more" if len(packages) > 3 else ""
    archs = sorted({arch for one in found for arch in one.archs}, key=from_nvcc)
    code = " ".join(fixes.as_code(one) for one in archs) or "no own GPU code"
    return Section(
        name="Extensions",
        line=f"{', '.join(packages[:3])}{more}: {code}",
        problems=tuple(one for one in (_code(facts), _soname(facts)) if one),
        skipped=skipped,
        details=tuple(_described(one) for one in found),
    )


def _name(one: Extension) -> str:
    return one.package or os.path.basename(one.path)


def _described(one: Extension) -> str:
    archs = " ".join(fixes.as_code(arch) for arch in one.archs) or "none"
    ptx = f", PTX {' '.join(fixes.as_code(arch) for arch in one.ptx)}" if one.ptx else ""
    needs = f", needs {' '.join(one.needs)}" if one.needs else ""
    return f"{one.path}: code for {archs}{ptx}{needs}" + ("" if one.complete else " (not read to the end)")


def _code(facts: CudaFacts) -> Problem | None:
    """Name the files that have no code for a GPU that is here."""
    lacking: list[tuple[Extension, list[Arch]]] = []
    for one in facts.extensions:
        missing = [gpu for gpu in fixes.gpu_archs(facts) if not how_it_runs(one.archs, one.ptx, gpu)]
        if missing and one.complete and (one.archs or one.ptx):
            lacking.append((one, missing))
    if not lacking:
        return None
    first, missing = lacking[0]
    return Problem(
        id="arch.ext",
        goals=RUN,
        level=Level.FAIL,
        title=f"{_name(first)} has no code for the GPU of {', '.join(gpu.torch for gpu in missing)}",
        breaks=f'{_name(first)}: "no kernel image is available for execution on the device"',
        evidence=tuple(_described(one) for one, _ in lacking),
        fix=_how_again(first, "these GPUs"),
        commands=tuple(filter(None, (_rebuild(facts, first),))),
    )


def _rebuild(facts: CudaFacts, one: Extension) -> str:
    """Give the command that builds a package again, for these GPUs too, or removes a file of torch's cache."""
    if not one.package:
        return _remove(one)
    own = {from_nvcc(arch) for arch in one.archs}
    wanted = ";".join(arch.torch for arch in sorted(own | set(fixes.gpu_archs(facts))))
    return f'TORCH_CUDA_ARCH_LIST="{wanted}" {_again(facts, one)}'


def _how_again(one: Extension, target: str) -> str:
    if one.package:
        return f"build it again for {target}"
    cached = "torch_extensions" in one.path
    return (
        "remove it: torch builds it again at its next use"
        if cached
        else f"build it again for {target}, from its sources"
    )


def _remove(one: Extension) -> str:
    return f"rm -rf {shlex.quote(os.path.dirname(one.path))}" if "torch_extensions" in one.path else ""


def _again(facts: CudaFacts, one: Extension) -> str:
    name, _, version = one.package.partition(" ")
    return fixes.rebuild(facts, name, version)


def _soname(facts: CudaFacts) -> Problem | None:
    """Name the files that want another CUDA runtime than torch's."""
    torch = facts.torch
    if torch is None or not torch.cuda:
        return None
    own = f"libcudart.so.{major(torch.cuda)}"
    wrong = [
        (one, need)
        for one in facts.extensions
        for need in one.needs
        if need.startswith("libcudart.so.") and major(need.rpartition(".so.")[2]) != major(torch.cuda)
    ]
    if not wrong:
        return None
    first, need = wrong[0]
    return Problem(
        id="libs.ext-soname",
        goals=RUN,
        level=Level.FAIL,
        title=f"{_name(first)} was built for another CUDA: it needs {need}, torch {torch.version} brings {own}",
        cause=f"A link from {need} to {own} would load, and crash.",
        breaks=f'{_name(first)}: "{need}: cannot open shared object file"',
        evidence=tuple(_described(one) for one, _ in wrong),
        fix=_how_again(first, "this torch"),
        commands=tuple(filter(None, (_again(facts, first) if first.package else _remove(first),))),
    )
