"""The torch of the environment: is there one, was it built for CUDA, can it be imported."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.fixes import install_torch
from distdiag.commands.cuda_env.types import BOTH, RUN, Problem, Section
from distdiag.knowledge.logs import shortened
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts


def about_torch(facts: CudaFacts) -> Section:
    """Judge the torch that is there."""
    python = facts.python
    if python.error:
        problem = Problem(
            id="python",
            goals=BOTH,
            level=Level.UNKNOWN,
            title=f"{python.executable} does not run, so its environment is unknown: {python.error}",
            fix="give the interpreter of your job: --python PATH",
        )
        return Section(name="PyTorch", line="unknown", problems=(problem,))
    torch = facts.torch
    if torch is None:
        return Section(name="PyTorch", line="none", problems=(_missing(facts),))
    if not torch.version:
        problem = Problem(
            id="torch.build",
            goals=BOTH,
            level=Level.UNKNOWN,
            title=f"{torch.source} cannot be read: the CUDA version of this torch is unknown",
            fix="reinstall torch",
        )
        return Section(name="PyTorch", line="unknown", problems=(problem,))
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    details = (f"{torch.folder}", f"cubins {' '.join(torch.archs)}" if torch.archs else "")
    wrong = _build(facts) if not torch.cuda and not torch.hip else _import(facts)
    return Section(
        name="PyTorch",
        line=f"{torch.version}, built for {built}",
        problems=(wrong,) if wrong else (),
        details=tuple(filter(None, details)),
    )


def _missing(facts: CudaFacts) -> Problem:
    return Problem(
        id="torch.build",
        goals=BOTH,
        level=Level.FAIL,
        title=f"torch is not installed in the environment of {facts.python.executable}",
        breaks="every program that imports torch",
        evidence=(f"searched: {', '.join(facts.python.paths[-4:])}",),
        fix="install it there, or give the interpreter of your job: --python PATH",
        commands=install_torch(facts),
    )


def _build(facts: CudaFacts) -> Problem:
    """Name a CPU build as the cause; what torch says then (CUDA_HOME is not set) is not true."""
    torch = facts.torch
    assert torch is not None
    commands = install_torch(facts)
    text = "no CUDA build of torch supports these GPUs with this driver"
    if commands:
        cuda = commands[0].rpartition("/cu")[2]
        text = f"install the build for CUDA {cuda[:-1]}.{cuda[-1]}"
    home = facts.variables.get("CUDA_HOME")
    here = f" (here it is {home})" if home else ""
    return Problem(
        id="torch.build",
        goals=BOTH,
        level=Level.FAIL,
        title=f"torch {torch.version} was built without CUDA: it can neither use a GPU nor build CUDA extensions",
        cause="Building a CUDA extension fails with 'CUDA_HOME environment variable is not set'. Setting CUDA_HOME "
        f"does not help{here}: this torch ignores it.",
        breaks="running on GPUs; building CUDA extensions",
        evidence=(f"{torch.source}: cuda = None",),
        fix=text,
        commands=commands,
    )


def _import(facts: CudaFacts) -> Problem | None:
    """Report that torch cannot be imported, or that it does not come back."""
    imported = facts.imported
    if imported is None or not (imported.error or imported.stage):
        return None
    if imported.stage:
        return Problem(
            id="torch.import",
            goals=RUN,
            level=Level.UNKNOWN,
            title=f"`{imported.stage}` did not return in time",
            cause="A hung driver and a slow file system look the same from here.",
            breaks="whether torch works is unknown",
            fix="increase --timeout, and find out where the import spends its time",
            commands=(f"{shlex.quote(facts.python.executable)} -X importtime -c 'import torch' 2>&1 | tail -5",),
        )
    if imported.came_in:
        return Problem(
            id="torch.import",
            goals=RUN,
            level=Level.FAIL,
            title=f"torch imports, but fails when it queries the GPUs: {shortened(imported.error)}",
            breaks="running on GPUs",
            evidence=imported.libraries[:8],
            fix="see Driver: torch calls the driver's libraries at that point",
            commands=(f"{shlex.quote(facts.python.executable)} -X faulthandler -c 'import torch; torch.cuda.init()'",),
        )
    if imported.mended_without:
        name = imported.mended_without
        return Problem(
            id="torch.import",
            goals=BOTH,
            level=Level.FAIL,
            title=f"torch cannot be imported because of {name}: {shortened(imported.error)}",
            cause=f"Without {name} the import works.",
            breaks="every program that imports torch",
            evidence=(f"{name}={facts.variables.get(name, '')}",),
            fix="unset it",
            unset=(name,),
        )
    return Problem(
        id="torch.import",
        goals=BOTH,
        level=Level.FAIL,
        title="torch cannot be imported: " + shortened(imported.error),
        cause="The libraries loaded before the failure are listed below." if imported.libraries else "",
        breaks="every program that imports torch",
        evidence=imported.libraries[:8],
        fix="see Libraries below; if no problem is listed there, reinstall torch",
        commands=install_torch(facts, prefer=facts.torch.cuda if facts.torch else ""),
    )
