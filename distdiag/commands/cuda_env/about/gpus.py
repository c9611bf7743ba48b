"""The GPUs: which are visible to programs, and whether torch has code for them."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.archs import from_capability, how_it_runs
from distdiag.commands.cuda_env.fixes import as_code, driver_carries, gpu_archs, install_torch
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.driver import Gpu


def about_gpus(facts: CudaFacts) -> Section:
    """Judge the visible GPUs, and torch's support for them."""
    answer = facts.driver.answer
    gpus = answer.visible or answer.present
    if not gpus:
        if answer.nvml_status in (15, 17) or answer.cuda_status in (100, 101):
            return Section(name="GPUs", line="none visible", problems=(_blocked(facts),))
        return Section(name="GPUs", line="none visible", skipped="nothing to check")
    checks = (_lost(facts), _visible(facts), _torch_sees(facts), _torch_code(facts), _mig(answer.present))
    problems = tuple(found for found in checks if found)
    flawed = any(found.level is not Level.INFO for found in problems)
    covered = "" if flawed or facts.torch is None or not torch_archs(facts) else "; torch has code for them"
    return Section(name="GPUs", line=names(gpus) + covered, problems=problems)


def names(gpus: Sequence[Gpu]) -> str:
    """Count GPUs by kind: 8 x NVIDIA H100 (9.0)."""
    kinds = Counter(f"{gpu.name} ({gpu.capability})" if gpu.capability else gpu.name for gpu in gpus)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def torch_archs(facts: CudaFacts) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return torch's own code as (cubins, PTX) in nvcc's notation; None if unknown."""
    torch, imported = facts.torch, facts.imported
    if imported is not None and imported.archs:
        cubins = tuple(arch[3:] for arch in imported.archs if arch.startswith("sm_"))
        return cubins, tuple(arch[8:] for arch in imported.archs if arch.startswith("compute_"))
    if torch is not None and (torch.archs or torch.ptx):
        return torch.archs, torch.ptx
    return None


def _visible(facts: CudaFacts) -> Problem | None:
    answer = facts.driver.answer
    chosen, count = facts.variables.get("CUDA_VISIBLE_DEVICES"), answer.cuda_count
    if answer.cuda_status in (100, 101) or (answer.cuda_status == 0 and count == 0 and answer.present):
        return _blocked(facts)
    if count is None or answer.cuda_status != 0:
        return None
    if chosen is None:
        return _fewer(facts, count)
    if re.search(r"\d\s*[-;: ]\s*\d", chosen) and not re.search("[A-Za-z]", chosen):
        return _misread(chosen)
    wanted = [name for name in chosen.split(",") if name.strip()]
    if len(wanted) <= count:
        return None
    present = len(answer.present)
    evidence = (f"{present} GPUs present: 0-{present - 1}" if present else "",)
    return problem("gpu.listed", chosen=chosen, listed=len(wanted), count=count, evidence=evidence)


def _fewer(facts: CudaFacts, count: int) -> Problem | None:
    present = facts.driver.answer.present
    if count >= len(present):
        return None
    mig = any(gpu.mig for gpu in present)
    return problem(
        "gpu.fewer",
        count=count,
        present=len(present),
        cause="A process sees a single instance of the GPUs in MIG mode." if mig else "A cgroup may block devices.",
        evidence=(f"NVML: {len(present)}, cuDeviceGetCount: {count}",),
    )


def _misread(chosen: str) -> Problem:
    first, last = (int(number) for number in re.findall(r"\d+", chosen)[:2])
    several = range(first, last + 1) if "-" in chosen and last > first else (first, last)
    remedy = Remedy(exports=(("CUDA_VISIBLE_DEVICES", ",".join(map(str, several))),))
    return problem("gpu.misread", chosen=repr(chosen), first=re.findall("[0-9]+", chosen)[0], remedy=remedy)


def _lost(facts: CudaFacts) -> Problem | None:
    """Report GPUs that NVML counts but cannot open; a fault only if NVML calls them lost or broken."""
    answer = facts.driver.answer
    silent = [index for index in answer.lost if index not in answer.blocked]
    broken = [index for index in silent if index in answer.broken]
    if silent:
        return problem("gpu.broken" if broken else "gpu.unopened", gpus=", ".join(map(str, broken or silent)))
    usable = len(answer.present)
    return problem("gpu.share", usable=usable, count=usable + len(answer.blocked)) if answer.blocked else None


def _torch_sees(facts: CudaFacts) -> Problem | None:
    imported, count = facts.imported, facts.driver.answer.cuda_count or 0
    if imported is None or imported.error or imported.stage or not count or imported.count == count:
        return None
    none = not imported.available
    return problem(
        "gpu.torch",
        level=Level.FAIL if none else Level.WARN,
        seen="no GPU" if none else f"{imported.count} GPUs",
        count=count,
        cause=" ".join(imported.warnings[:1]),
        breaks="running on GPUs" if none else "ranks that use the other GPUs",
        python=shlex.quote(facts.python.executable),
        evidence=imported.libraries[:6],
    )


def _blocked(facts: CudaFacts) -> Problem:
    answer = facts.driver.answer
    chosen = facts.variables.get("CUDA_VISIBLE_DEVICES")
    row, remedy = "gpu.visible", Remedy(commands=("nvidia-smi -L",))
    if chosen is not None and re.match("GPU-|MIG-", chosen):
        row = "gpu.hidden-uuid"
    elif chosen is not None:
        row, remedy = "gpu.hidden", replace(remedy, unset=("CUDA_VISIBLE_DEVICES",))
    elif any(gpu.mig for gpu in answer.present):
        row, remedy = "gpu.mig-empty", Remedy(commands=("sudo nvidia-smi mig -lgip", "nvidia-smi -L"))
    return problem(
        row,
        chosen=repr(chosen),
        evidence=(f"{len(answer.present)} GPUs present", f"cuInit: {answer.cuda_status}"),
        remedy=remedy if answer.present else replace(remedy, commands=()),
    )


def _torch_code(facts: CudaFacts) -> Problem | None:
    """Report GPUs without code in torch (a wrong build), or with PTX only, which the driver must compile."""
    code = torch_archs(facts)
    if code is None or facts.torch is None or not facts.torch.cuda:
        return None
    cubins, ptx = code
    how = {gpu: how_it_runs(cubins, ptx, gpu) for gpu in gpu_archs(facts)}
    without = [gpu for gpu, way in how.items() if not way]
    if without:
        kinds = sorted({gpu.name for gpu in facts.driver.answer.visible if from_capability(gpu.capability) in without})
        commands = install_torch(facts, archs=gpu_archs(facts))
        another = "no build of this torch version has code for it: install another version"
        return problem(
            "arch.torch",
            torch=facts.torch.version,
            gpus=", ".join(kinds) or "the GPU",
            archs=", ".join(gpu.torch for gpu in without),
            evidence=(f"compiled for: {' '.join(as_code(arch) for arch in cubins)}",),
            remedy=Remedy(text="install a build that has code for it" if commands else another, commands=commands),
        )
    compiled = [gpu for gpu, way in how.items() if way == "ptx"]
    if not compiled:
        return None
    return problem(
        "arch.torch-ptx",
        level=Level.WARN if driver_carries(facts, facts.torch.cuda) is not False else Level.FAIL,
        archs=", ".join(gpu.torch for gpu in compiled),
        evidence=(f"PTX for: {' '.join(as_code(arch) for arch in ptx)}",),
        remedy=Remedy(commands=install_torch(facts, archs=gpu_archs(facts))),
    )


def _mig(gpus: Sequence[Gpu]) -> Problem | None:
    parts = [gpu.index for gpu in gpus if gpu.mig]
    return problem("gpu.mig", gpus=", ".join(map(str, parts))) if parts else None
