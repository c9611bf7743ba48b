"""The GPUs: which a program sees, and whether torch has code for them."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.archs import from_capability, how_it_runs
from distdiag.commands.cuda_env.fixes import as_code, driver_carries, gpu_archs, install_torch
from distdiag.commands.cuda_env.types import RUN, Problem, Section
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.driver import Gpu


def about_gpus(facts: CudaFacts) -> Section:
    """Judge what can be seen, and what torch can do with it."""
    answer = facts.driver.answer
    gpus = answer.visible or answer.present
    if not gpus:
        problem = _blocked(facts) if answer.nvml_status in (15, 17) or answer.cuda_status in (100, 101) else None
        if problem is not None:
            return Section(name="GPUs", line="none visible", problems=(problem,))
        return Section(name="GPUs", line="none visible", skipped="nothing to check")
    checks = (_lost(facts), _visible(facts), _torch_sees(facts), _torch_code(facts), _mig(answer.present))
    problems = [problem for problem in checks if problem]
    flawed = any(problem.level is not Level.INFO for problem in problems)
    covered = "" if flawed or facts.torch is None or not torch_archs(facts) else "; torch has code for them"
    return Section(name="GPUs", line=names(gpus) + covered, problems=tuple(problems))


def names(gpus: Sequence[Gpu]) -> str:
    """Count GPUs by kind: 8 x NVIDIA H100 (9.0)."""
    kinds: dict[str, int] = {}
    for gpu in gpus:
        kind = f"{gpu.name} ({gpu.capability})" if gpu.capability else gpu.name
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def torch_archs(facts: CudaFacts) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return torch's own code as (cubins, PTX) in nvcc's writing; None if it is not known."""
    torch, imported = facts.torch, facts.imported
    if imported is not None and imported.archs:
        cubins = tuple(arch[3:] for arch in imported.archs if arch.startswith("sm_"))
        return cubins, tuple(arch[8:] for arch in imported.archs if arch.startswith("compute_"))
    if torch is not None and (torch.archs or torch.ptx):
        return torch.archs, torch.ptx
    return None


def _visible(facts: CudaFacts) -> Problem | None:
    answer = facts.driver.answer
    chosen = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if answer.cuda_status in (100, 101) or (answer.cuda_status == 0 and answer.cuda_count == 0 and answer.present):
        return _blocked(facts)
    if answer.cuda_count is None or answer.cuda_status != 0:
        return None
    if chosen is None:
        return _fewer(facts)
    if re.search(r"\d\s*[-;: ]\s*\d", chosen) and not re.search("[A-Za-z]", chosen):
        return _misread(facts, chosen)
    wanted = [name for name in chosen.split(",") if name.strip()]
    if len(wanted) <= answer.cuda_count:
        return None
    return Problem(
        id="gpu.visible",
        goals=RUN,
        level=Level.WARN,
        title=f"CUDA_VISIBLE_DEVICES={chosen} lists {len(wanted)} GPUs, but CUDA sees {answer.cuda_count}",
        cause="CUDA stops at the first invalid entry and ignores the rest.",
        breaks="ranks that use the other GPUs",
        evidence=(f"{len(answer.present)} GPUs present: 0-{len(answer.present) - 1}",) if answer.present else (),
        fix="list only GPUs that exist",
        commands=("nvidia-smi -L",),
    )


def _fewer(facts: CudaFacts) -> Problem | None:
    """Report that CUDA sees fewer GPUs than NVML, with nothing that hides any."""
    answer = facts.driver.answer
    if not answer.present or answer.cuda_count is None or answer.cuda_count >= len(answer.present):
        return None
    mig = any(gpu.mig for gpu in answer.present)
    return Problem(
        id="gpu.visible",
        goals=RUN,
        level=Level.WARN,
        title=f"CUDA sees {answer.cuda_count} of the {len(answer.present)} GPUs present; no variable hides any",
        cause="A process sees a single instance of the GPUs in MIG mode." if mig else "A cgroup may block devices.",
        breaks="ranks that use the other GPUs",
        evidence=(f"NVML: {len(answer.present)}, cuDeviceGetCount: {answer.cuda_count}",),
        fix="find the missing GPUs, and check the kernel log",
        commands=("nvidia-smi -L", "dmesg | grep -iE 'nvrm|xid' | tail -20"),
    )


def _misread(facts: CudaFacts, chosen: str) -> Problem:
    first, last = (int(number) for number in re.findall(r"\d+", chosen)[:2])
    several = range(first, last + 1) if "-" in chosen and last > first else (first, last)
    return Problem(
        id="gpu.visible",
        goals=RUN,
        level=Level.WARN,
        title=f"CUDA reads CUDA_VISIBLE_DEVICES={chosen!r} as {re.findall('[0-9]+', chosen)[0]} only",
        cause="CUDA expects numbers or UUIDs separated by commas and stops at anything else.",
        breaks="ranks that use the other GPUs",
        fix="separate the numbers by commas",
        exports=(("CUDA_VISIBLE_DEVICES", ",".join(map(str, several))),),
    )


def _lost(facts: CudaFacts) -> Problem | None:
    """Name GPUs that NVML counts and cannot open; a fault only where NVML itself calls them lost or broken."""
    answer = facts.driver.answer
    silent = [index for index in answer.lost if index not in answer.blocked]
    if not silent:
        return _share(facts)
    broken = [index for index in silent if index in answer.broken]
    names = ", ".join(map(str, broken or silent))
    return Problem(
        id="gpu.visible",
        goals=RUN,
        level=Level.FAIL if broken else Level.UNKNOWN,
        title=f"GPU {names} does not respond: NVML reports it as lost or broken"
        if broken
        else f"GPU {names} cannot be opened: it does not respond, or this job or container may not use it",
        breaks="jobs that use it; often every program that queries all GPUs" if broken else "",
        fix="check the kernel log; a GPU that fell off the bus needs a reset, or the node a reboot"
        if broken
        else "check the kernel log of the host: without an Xid error the GPU is only blocked",
        commands=("dmesg | grep -iE 'nvrm|xid' | tail -20", "nvidia-smi -L"),
    )


def _share(facts: CudaFacts) -> Problem | None:
    """Report that some of the GPUs are not for this process: that is no fault."""
    answer = facts.driver.answer
    if not answer.blocked:
        return None
    return Problem(
        id="gpu.visible",
        goals=RUN,
        level=Level.INFO,
        title=f"{len(answer.present)} of {len(answer.present) + len(answer.blocked)} GPUs may be used here: "
        "a cgroup or the container blocks the others",
    )


def _torch_sees(facts: CudaFacts) -> Problem | None:
    """Compare what torch itself says with what the driver says."""
    imported, count = facts.imported, facts.driver.answer.cuda_count or 0
    if imported is None or imported.error or imported.stage or not count or imported.count == count:
        return None
    none = not imported.available
    return Problem(
        id="gpu.torch",
        goals=RUN,
        level=Level.FAIL if none else Level.WARN,
        title=f"torch sees {'no GPU' if none else f'{imported.count} GPUs'}, the driver sees {count}",
        cause=" ".join(imported.warnings[:1]),
        breaks="running on GPUs" if none else "ranks that use the other GPUs",
        evidence=imported.libraries[:6],
        fix="see torch's own error",
        commands=(f"{shlex.quote(facts.python.executable)} -c 'import torch; torch.cuda.init()'",),
    )


def _blocked(facts: CudaFacts) -> Problem:
    answer = facts.driver.answer
    chosen = facts.variables.get("CUDA_VISIBLE_DEVICES")
    mig = any(gpu.mig for gpu in answer.present)
    title, cause = (
        "the driver is installed, but no GPU is visible",
        ("A cgroup or the container's device list blocks them, or the scheduler assigned none."),
    )
    fix = "request GPUs from the scheduler, or pass them to the container"
    unset: tuple[str, ...] = ()
    commands: tuple[str, ...] = ("nvidia-smi -L",)
    if chosen is not None:
        title, cause = f"CUDA_VISIBLE_DEVICES={chosen!r} hides all GPUs", ""
        fix, unset = "unset the variable, or list only GPUs that exist", ("CUDA_VISIBLE_DEVICES",)
        if re.match("GPU-|MIG-", chosen):
            fix, unset = "list UUIDs that exist: they change when a GPU is replaced or MIG instances are recreated", ()
    elif mig:
        title, cause = "the GPUs are in MIG mode, but no MIG instance exists", ""
        fix, commands = "create instances, or disable MIG mode", ("sudo nvidia-smi mig -lgip", "nvidia-smi -L")
    return Problem(
        id="gpu.visible",
        goals=RUN,
        level=Level.FAIL,
        title=title,
        cause=cause,
        breaks="running on GPUs",
        evidence=(f"{len(answer.present)} GPUs present", f"cuInit: {answer.cuda_status}"),
        fix=fix,
        unset=unset,
        commands=commands if answer.present else (),
    )


def _torch_code(facts: CudaFacts) -> Problem | None:
    """Report which GPUs torch has no code for: that is a wrong build, or PTX that the driver must compile."""
    code = torch_archs(facts)
    if code is None or facts.torch is None or not facts.torch.cuda:
        return None
    cubins, ptx = code
    how = {gpu: how_it_runs(cubins, ptx, gpu) for gpu in gpu_archs(facts)}
    without = [gpu for gpu, way in how.items() if not way]
    if without:
        kinds = sorted({gpu.name for gpu in facts.driver.answer.visible if from_capability(gpu.capability) in without})
        commands = install_torch(facts, archs=gpu_archs(facts))
        return Problem(
            id="arch.torch",
            goals=RUN,
            level=Level.FAIL,
            title=f"torch {facts.torch.version} has no code for {', '.join(kinds) or 'the GPU'} "
            f"({', '.join(gpu.torch for gpu in without)})",
            breaks='every kernel: "no kernel image is available for execution on the device"',
            evidence=(f"compiled for: {' '.join(as_code(arch) for arch in cubins)}",),
            fix="install a build that has code for it"
            if commands
            else "no build of this torch version has code for it: install another version",
            commands=commands,
        )
    compiled = [gpu for gpu, way in how.items() if way == "ptx"]
    if not compiled:
        return None
    enough = driver_carries(facts, facts.torch.cuda) is not False
    return Problem(
        id="arch.torch",
        goals=RUN,
        level=Level.WARN if enough else Level.FAIL,
        title=f"torch has only PTX for {', '.join(gpu.torch for gpu in compiled)}: the driver compiles it at first use",
        cause="The first launch of each kernel is slow, and the driver must be at least as new as the PTX's toolkit.",
        evidence=(f"PTX for: {' '.join(as_code(arch) for arch in ptx)}",),
        fix="install a build compiled for these GPUs",
        commands=install_torch(facts, archs=gpu_archs(facts)),
    )


def _mig(gpus: Sequence[Gpu]) -> Problem | None:
    parts = [gpu.index for gpu in gpus if gpu.mig]
    if not parts:
        return None
    return Problem(
        id="gpu.mig",
        goals=RUN,
        level=Level.INFO,
        title=f"GPU {', '.join(map(str, parts))} is split into MIG instances: a process sees one, and NCCL "
        "cannot combine them",
    )
