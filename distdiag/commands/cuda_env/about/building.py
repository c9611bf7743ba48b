"""What builds need beside nvcc and compilers, what earlier builds left, and DeepSpeed's own wheel."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.types import BUILD, RUN, Problem, Section
from distdiag.knowledge.cuda import minor
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.building import Cache

_JOB_BYTES = 4 * 2**30
"""What one nvcc of a large kernel file takes; flash-attn's and DeepSpeed's own advice is 4 GB and more."""
_SHM_BYTES = 512 * 2**20
"""Below this DeepSpeed's own report warns: NCCL's and the data loaders' shared memory."""


def about_building(facts: CudaFacts) -> Section:
    """Judge the rest of what a build needs."""
    build = facts.building
    problems = [
        problem for problem in (_ninja(facts), _header(facts), _aio(facts), _jobs(facts), _cache(facts)) if problem
    ]
    memory = build.memory_available_bytes
    room = f", {memory / 2**30:.0f} GiB free" if memory is not None else ""
    ninja = "ninja" if build.ninja else "no ninja"
    header = "Python.h" if build.python_header else "no Python.h"
    details = (
        build.ninja,
        build.python_header,
        build.aio_header,
        *(f"{cache.path}: {' '.join(cache.built)}" for cache in build.caches),
    )
    return Section(
        name="Building",
        line=f"{ninja}, {header}, {build.processors} CPUs{room}",
        problems=tuple(problems),
        details=tuple(filter(None, details)),
    )


def _warn(id_: str, title: str, **rest: object) -> Problem:
    return Problem(id=id_, goals=BUILD, level=Level.WARN, title=title, **rest)  # type: ignore[arg-type]


def _ninja(facts: CudaFacts) -> Problem | None:
    if facts.building.ninja:
        return None
    return _warn(
        "build.ninja",
        "ninja is not installed: torch.utils.cpp_extension.load fails, and setup.py builds file by file",
        breaks="extensions built at first use (DeepSpeed's ops)",
        fix="install it into the environment",
        commands=(f"{fixes.pip(facts)} ninja",),
    )


def _header(facts: CudaFacts) -> Problem | None:
    python = facts.python
    if facts.building.python_header or python.error:
        return None
    number = minor(python.version)
    return _warn(
        "build.python-h",
        f"{python.include}/Python.h is missing: extensions for this Python cannot be compiled",
        breaks="building any extension; running is fine",
        fix="install Python's headers",
        commands=fixes.install_system(
            facts, apt=f"python{number}-dev", dnf=f"python{number}-devel", zypper="python3-devel"
        ),
    )


def _aio(facts: CudaFacts) -> Problem | None:
    return libaio(facts) if facts.deepspeed is not None else None


def libaio(facts: CudaFacts) -> Problem | None:
    """Report that libaio is missing, which DeepSpeed's async_io and gds are built with."""
    build = facts.building
    if build.aio_header and build.aio_library:
        return None
    return _warn(
        "build.libaio",
        "libaio development files are missing: DeepSpeed's async_io (NVMe offload) cannot be built",
        breaks="DS_BUILD_AIO, NVMe offload of ZeRO-Infinity",
        fix="install its headers, if you need NVMe offload",
        commands=fixes.install_system(
            facts, apt="libaio-dev", dnf="libaio-devel", zypper="libaio-devel", pacman="libaio"
        ),
    )


def jobs(facts: CudaFacts) -> int:
    """Return how many compilers memory and processors carry."""
    memory = facts.building.memory_available_bytes
    by_memory = facts.building.processors if memory is None else max(1, int(memory // _JOB_BYTES))
    return max(1, min(facts.building.processors, by_memory))


def _jobs(facts: CudaFacts) -> Problem | None:
    """Warn where ninja would start more compilers than memory carries: the kernel then kills one of them."""
    memory, told = facts.building.memory_available_bytes, facts.variables.get("MAX_JOBS", "")
    if memory is None or not fixes.usable_toolkits(facts):
        return None
    started = int(told) if told.isdigit() else facts.building.processors + 2  # ninja's own default
    if started * _JOB_BYTES <= memory or started <= jobs(facts) + 2:
        return None
    return _warn(
        "build.jobs",
        f"a build would start {started} compilers; {memory / 2**30:.0f} GiB of free memory suffice for "
        f"about {jobs(facts)}",
        breaks='large builds (flash-attn): "Killed", or nvcc "died due to signal 9"',
        evidence=(f"MAX_JOBS={told}" if told else f"MAX_JOBS is not set, {facts.building.processors} CPUs",),
        fix="limit the parallel jobs",
        exports=(("MAX_JOBS", str(jobs(facts))),),
    )


def _cache(facts: CudaFacts) -> Problem | None:
    """Find extensions in torch's cache that another torch built."""
    stale = [cache for cache in facts.building.caches if _is_stale(facts, cache)]
    other = [cache for cache in facts.building.caches if cache not in stale and _is_of_another(facts, cache)]
    if stale:
        first = stale[0]
        return _warn(
            "build.cache-stale",
            f"{first.path} was built before this torch was installed",
            cause="torch reuses a cached build as long as its sources have not changed.",
            breaks=f"{', '.join(first.built[:4])}: undefined symbols, wrong results or crashes",
            fix="remove it; torch rebuilds it at its next use",
            commands=tuple(f"rm -rf {shlex.quote(cache.path)}" for cache in stale),
        )
    if other:
        return Problem(
            id="build.cache-stale",
            goals=BUILD,
            level=Level.INFO,
            title=f"{', '.join(cache.name for cache in other)}: extensions built for another torch or "
            "Python; unused now",
            evidence=tuple(cache.path for cache in other),
        )
    return None


def _tag(facts: CudaFacts) -> str:
    """Name torch's cache as torch.utils.cpp_extension does: py311_cu128."""
    torch, python = facts.torch, facts.python
    if torch is None:
        return ""
    number = "".join(python.version.split(".")[:2])
    return f"py{number}_" + (f"cu{torch.cuda.replace('.', '')}" if torch.cuda else "cpu")


def _is_of_another(facts: CudaFacts, cache: Cache) -> bool:
    return bool(re.match(r"py\d+_(cu\d+|cpu)", cache.name)) and cache.name != _tag(facts)


def _is_stale(facts: CudaFacts, cache: Cache) -> bool:
    torch = facts.torch
    return torch is not None and not _is_of_another(facts, cache) and cache.changed_s < torch.installed_s


def about_deepspeed(facts: CudaFacts) -> Section | None:
    """Judge DeepSpeed, if it is there: was its wheel built for this torch."""
    deepspeed, torch = facts.deepspeed, facts.torch
    if deepspeed is None:
        return None
    ops = f"{len(deepspeed.built_ops)} ops prebuilt" if deepspeed.built_ops else "no prebuilt ops; built at first use"
    problem = None
    if deepspeed.built_torch and torch is not None:
        differs = minor(deepspeed.built_torch) != minor(torch.version)
        cuda = deepspeed.built_cuda if deepspeed.built_cuda not in ("", "0.0") else ""
        if differs or (cuda and torch.cuda and minor(cuda) != minor(torch.cuda)):
            problem = Problem(
                id="deepspeed.wheel",
                goals=RUN,
                level=Level.FAIL,
                title=f"DeepSpeed's ops were built for torch {deepspeed.built_torch} with CUDA {cuda or '?'}; "
                f"this is torch {torch.version} with CUDA {torch.cuda or 'none'}",
                breaks=f"DeepSpeed's prebuilt ops: {', '.join(deepspeed.built_ops[:4])}",
                evidence=(f"{deepspeed.folder}/git_version_info_installed.py",),
                fix="rebuild it for this torch",
                commands=(fixes.rebuild(facts, "deepspeed", deepspeed.version),),
            )
    return Section(name="DeepSpeed", line=f"{deepspeed.version}, {ops}", problems=(problem,) if problem else ())


def about_system(facts: CudaFacts) -> Section:
    """Judge shared memory."""
    total = facts.building.shm_total_bytes
    if total is None:
        return Section(name="System", line="no /dev/shm", skipped="this system has no /dev/shm")
    if total >= _SHM_BYTES:
        return Section(name="System", line=f"/dev/shm has {total / 2**30:.1f} GiB")
    grow = "docker run --shm-size 8g, or --ipc host" if facts.driver.container else "remount it with a larger size"
    problem = Problem(
        id="sys.shm",
        goals=RUN,
        level=Level.WARN,
        title=f"/dev/shm has only {total / 2**20:.0f} MiB",
        breaks="NCCL shared memory; DataLoader workers (bus error)",
        fix=grow,
        commands=() if facts.driver.container else ("sudo mount -o remount,size=8G /dev/shm",),
    )
    return Section(name="System", line=f"/dev/shm has {total / 2**20:.0f} MiB", problems=(problem,))
