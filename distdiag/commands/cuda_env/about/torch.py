"""The torch of the environment: installed, built for CUDA, importable."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.fixes import install_torch
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.knowledge.logs import shortened

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.torchfiles import Torch


def about_torch(facts: CudaFacts) -> Section:
    """Judge the installed torch."""
    python, torch = facts.python, facts.torch
    if python.error:
        unknown = problem("python", python=python.executable, error=python.error)
        return Section(name="PyTorch", line="unknown", problems=(unknown,))
    if torch is None:
        missing = problem(
            "torch.missing",
            python=python.executable,
            evidence=(f"searched: {', '.join(python.paths[-4:])}",),
            remedy=Remedy(commands=install_torch(facts)),
        )
        return Section(name="PyTorch", line="none", problems=(missing,))
    if not torch.version:
        return Section(name="PyTorch", line="unknown", problems=(problem("torch.unreadable", source=torch.source),))
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    details = (torch.folder, f"cubins {' '.join(torch.archs)}" if torch.archs else "")
    wrong = _without_cuda(facts, torch) if not torch.cuda and not torch.hip else _import(facts)
    return Section(
        name="PyTorch",
        line=f"{torch.version}, built for {built}",
        problems=(wrong,) if wrong else (),
        details=tuple(filter(None, details)),
    )


def _without_cuda(facts: CudaFacts, torch: Torch) -> Problem:
    """Report a CPU build as the cause; torch's own message then (CUDA_HOME is not set) is misleading."""
    commands = install_torch(facts)
    text = "no CUDA build of torch supports these GPUs with this driver"
    if commands:
        cuda = commands[0].rpartition("/cu")[2]
        text = f"install the build for CUDA {cuda[:-1]}.{cuda[-1]}"
    return problem(
        "torch.cpu",
        version=torch.version,
        home=facts.variables.get("CUDA_HOME"),
        evidence=(f"{torch.source}: cuda = None",),
        remedy=Remedy(text=text, commands=commands),
    )


def _import(facts: CudaFacts) -> Problem | None:
    imported = facts.imported
    if imported is None or not (imported.error or imported.stage):
        return None
    name, libraries = imported.fixed_without, imported.libraries[:8]
    words = {"error": shortened(imported.error), "python": shlex.quote(facts.python.executable)}
    if imported.stage:
        return problem("torch.import-slow", words, stage=imported.stage)
    if imported.came_in:
        return problem("torch.import-gpus", words, evidence=libraries)
    if name:
        set_to = f"{name}={facts.variables.get(name, '')}"
        return problem("torch.import-variable", words, variable=name, evidence=(set_to,), remedy=Remedy(unset=(name,)))
    return problem(
        "torch.import",
        words,
        cause="The libraries loaded before the failure are listed below." if libraries else "",
        evidence=libraries,
        remedy=Remedy(commands=install_torch(facts, prefer=facts.torch.cuda if facts.torch else "")),
    )
