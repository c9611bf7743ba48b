"""What of a node's facts goes into the JSON answer. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.about.gpus import torch_archs
from distdiag.commands.cuda_env.about.matching import who_uses
from distdiag.commands.cuda_env.result import NodeEnv

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.commands.cuda_env.result import Ready
    from distdiag.node.cuda.toolkits import Toolkit


def node_env(facts: CudaFacts, ready: Ready) -> NodeEnv:
    """Choose what is of use to a program."""
    return NodeEnv(
        host=facts.host,
        python={"executable": facts.python.executable, "version": facts.python.version, "error": facts.python.error},
        torch=_torch(facts),
        driver=_driver(facts),
        gpus=[asdict(gpu) for gpu in facts.driver.answer.visible or facts.driver.answer.present],
        toolkits=[_toolkit(one) for one in facts.toolkits if one.exists],
        users=who_uses(facts),
        compilers=_compilers(facts),
        extensions=[asdict(one) for one in facts.extensions],
        variables=facts.variables,
        ready=ready,
    )


def _torch(facts: CudaFacts) -> dict[str, Any] | None:
    torch = facts.torch
    if torch is None:
        return None
    code = torch_archs(facts)
    return {
        "version": torch.version,
        "cuda": torch.cuda or None,
        "hip": torch.hip or None,
        "folder": torch.folder,
        "cubins": [fixes.as_code(one) for one in code[0]] if code else [],
        "ptx": [fixes.as_code(one) for one in code[1]] if code else [],
        "imports": None if facts.imported is None else not (facts.imported.error or facts.imported.stage),
        "sees_gpus": None if facts.imported is None else facts.imported.available,
    }


def _driver(facts: CudaFacts) -> dict[str, Any]:
    driver = facts.driver
    return {
        "version": fixes.driver_version(facts) or None,
        "cuda": fixes.driver_cuda(facts) or None,
        "kernel": driver.kernel or None,
        "library": driver.library or None,
        "library_path": driver.library_path or None,
        "gpus_on_the_bus": driver.hardware,
        "container": driver.container or None,
        "wsl": driver.wsl,
    }


def _toolkit(one: Toolkit) -> dict[str, Any]:
    return {
        "root": one.root,
        "version": one.version or None,
        "found_by": list(one.found_by),
        "sources": [{"source": source, "version": version} for source, version in one.sources],
        "nvcc": one.nvcc or None,
        "headers": one.headers or None,
        "libraries": one.libraries or None,
        "gcc_max": one.limit.gcc_max if one.limit is not None else None,
        "clang_below": one.limit.clang_below if one.limit is not None else None,
    }


def _compilers(facts: CudaFacts) -> dict[str, Any]:
    nvcc = fixes.nvcc_at(facts, facts.uses["torch"].nvcc)
    called = fixes.compiler_at(facts, nvcc.compiler) if nvcc is not None and nvcc.compiler else None
    own = facts.compilers.cxx
    return {
        "torch": {"path": own.path, "family": own.family, "version": own.version} if own is not None else None,
        "nvcc": {"path": called.path, "family": called.family, "version": called.version}
        if called is not None
        else None,
        "installed": [
            {"path": one.path, "family": one.family, "version": one.version} for one in facts.compilers.found
        ],
    }
