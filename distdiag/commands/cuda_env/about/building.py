"""Requirements of builds besides nvcc and compilers, leftovers of earlier builds, and DeepSpeed's own wheel."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.knowledge.cuda import minor

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.building import Cache

_JOB_BYTES = 4 * 2**30
"""Memory for one nvcc of a large kernel file; flash-attn and DeepSpeed advise 4 GB and more."""
_SHM_BYTES = 512 * 2**20
"""DeepSpeed's own report warns below this: NCCL's and the data loaders' shared memory."""


def about_building(facts: CudaFacts) -> Section:
    """Judge a build's other requirements."""
    build = facts.building
    ninja = None if build.ninja else problem("build.ninja", pip=fixes.pip(facts))
    aio = libaio(facts) if facts.deepspeed is not None else None
    checks = (ninja, _header(facts), aio, _jobs(facts), _cache(facts))
    memory = build.memory_available_bytes
    room = f", {memory / 2**30:.0f} GiB free" if memory is not None else ""
    header = "Python.h" if build.python_header else "no Python.h"
    details = (
        build.ninja,
        build.python_header,
        build.aio_header,
        *(f"{cache.path}: {' '.join(cache.built)}" for cache in build.caches),
    )
    return Section(
        name="Building",
        line=f"{'ninja' if build.ninja else 'no ninja'}, {header}, {build.processors} CPUs{room}",
        problems=tuple(found for found in checks if found),
        details=tuple(filter(None, details)),
    )


def _header(facts: CudaFacts) -> Problem | None:
    python = facts.python
    if facts.building.python_header or python.error:
        return None
    number = minor(python.version)
    names = {"apt": f"python{number}-dev", "dnf": f"python{number}-devel", "zypper": "python3-devel"}
    return problem(
        "build.python-h", include=python.include, remedy=Remedy(commands=fixes.install_system(facts, **names))
    )


def libaio(facts: CudaFacts) -> Problem | None:
    """Report missing libaio, required to build DeepSpeed's async_io and gds."""
    build = facts.building
    if build.aio_header and build.aio_library:
        return None
    names = {"apt": "libaio-dev", "dnf": "libaio-devel", "zypper": "libaio-devel", "pacman": "libaio"}
    return problem("build.libaio", remedy=Remedy(commands=fixes.install_system(facts, **names)))


def jobs(facts: CudaFacts) -> int:
    """Return how many compilers fit memory and processors."""
    memory = facts.building.memory_available_bytes
    by_memory = facts.building.processors if memory is None else max(1, int(memory // _JOB_BYTES))
    return max(1, min(facts.building.processors, by_memory))


def _jobs(facts: CudaFacts) -> Problem | None:
    """Warn if ninja would start more compilers than fit in memory: the kernel would kill one of them."""
    memory, limit = facts.building.memory_available_bytes, facts.variables.get("MAX_JOBS", "")
    if memory is None or not fixes.usable_toolkits(facts):
        return None
    started = int(limit) if limit.isdigit() else facts.building.processors + 2  # ninja's own default
    if started * _JOB_BYTES <= memory or started <= jobs(facts) + 2:
        return None
    return problem(
        "build.jobs",
        started=started,
        free=f"{memory / 2**30:.0f} GiB",
        jobs=jobs(facts),
        evidence=(f"MAX_JOBS={limit}" if limit else f"MAX_JOBS is not set, {facts.building.processors} CPUs",),
        remedy=Remedy(exports=(("MAX_JOBS", str(jobs(facts))),)),
    )


def _cache(facts: CudaFacts) -> Problem | None:
    stale = [cache for cache in facts.building.caches if _is_stale(facts, cache)]
    other = [cache for cache in facts.building.caches if cache not in stale and _is_of_another(facts, cache)]
    if stale:
        first, paths = stale[0], [shlex.quote(cache.path) for cache in stale]
        remedy = Remedy(commands=tuple(f"rm -rf {path}" for path in paths))
        return problem("build.cache-stale", path=first.path, built=", ".join(first.built[:4]), remedy=remedy)
    names = ", ".join(cache.name for cache in other)
    return problem("build.cache-other", names=names, evidence=(cache.path for cache in other)) if other else None


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
    """Judge whether an installed DeepSpeed's wheel was built for this torch."""
    deepspeed, torch = facts.deepspeed, facts.torch
    if deepspeed is None:
        return None
    ops = f"{len(deepspeed.built_ops)} ops prebuilt" if deepspeed.built_ops else "no prebuilt ops; built at first use"
    found = None
    if deepspeed.built_torch and torch is not None:
        differs = minor(deepspeed.built_torch) != minor(torch.version)
        cuda = deepspeed.built_cuda if deepspeed.built_cuda not in ("", "0.0") else ""
        if differs or (cuda and torch.cuda and minor(cuda) != minor(torch.cuda)):
            found = problem(
                "deepspeed.wheel",
                built_torch=deepspeed.built_torch,
                built_cuda=cuda,
                torch=torch.version,
                cuda=torch.cuda or "none",
                ops=", ".join(deepspeed.built_ops[:4]),
                evidence=(f"{deepspeed.folder}/git_version_info_installed.py",),
                remedy=Remedy(commands=(fixes.rebuild(facts, "deepspeed", deepspeed.version),)),
            )
    return Section(name="DeepSpeed", line=f"{deepspeed.version}, {ops}", problems=(found,) if found else ())


def about_system(facts: CudaFacts) -> Section:
    """Judge shared memory."""
    total = facts.building.shm_total_bytes
    if total is None:
        return Section(name="System", line="no /dev/shm", skipped="this system has no /dev/shm")
    if total >= _SHM_BYTES:
        return Section(name="System", line=f"/dev/shm has {total / 2**30:.1f} GiB")
    size = f"{total / 2**20:.0f} MiB"
    remedy = Remedy(text="remount it with a larger size", commands=("sudo mount -o remount,size=8G /dev/shm",))
    if facts.driver.container:
        remedy = Remedy(text="docker run --shm-size 8g, or --ipc host")
    return Section(name="System", line=f"/dev/shm has {size}", problems=(problem("sys.shm", size=size, remedy=remedy),))
