"""The versions usually requested in a ticket, in one line, without judgement. -v lists all packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.types import Section

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts

_PACKAGES = {"triton": "Triton", "deepspeed": "DeepSpeed", "flash-attn": "flash-attn", "numpy": "numpy"}
_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_MODULE_LOADING")


def about_versions(facts: CudaFacts) -> Section:
    """List the system first, then tools, libraries and packages; -v adds the processor and all NVIDIA wheels."""
    found, compiler = facts.versions, facts.compilers.cxx
    named = {
        "kernel": found.kernel,
        "CMake": found.cmake,
        (compiler.family or "compiler") if compiler else "": compiler.version if compiler else "",
        **found.libraries,
        **{name: facts.packages.get(package, "") for package, name in _PACKAGES.items()},
    }
    parts = [found.os, found.libc, *(f"{name} {version}" for name, version in named.items() if version)]
    details = (
        f"{found.processor or facts.machine}, {facts.building.processors} CPUs, {facts.machine}",
        f"driver {fixes.driver_version(facts) or 'none'}, Python {facts.python.version}",
        *(f"{name} {version}" for name, version in sorted(facts.packages.items())),
        *(f"{name} {version} (conda)" for name, version in found.conda.items()),
        *(f"{name}={facts.variables[name]}" for name in _SETTINGS if name in facts.variables),
    )
    return Section(name="Versions", line=", ".join(filter(None, parts)), details=details)
