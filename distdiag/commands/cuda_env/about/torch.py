"""The torch of the environment: is there one, was it built for CUDA, can it be imported."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.fixes import install_torch
from distdiag.commands.cuda_env.types import BOTH, RUN, Problem, Section
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
            title=f"{python.executable} does not run, so its environment is not known: {python.error}",
            fix="name the interpreter of your job: --python PATH",
        )
        return Section(name="PyTorch", line="not known", problems=(problem,))
    torch = facts.torch
    if torch is None:
        return Section(name="PyTorch", line="none", problems=(_missing(facts),))
    if not torch.version:
        problem = Problem(
            id="torch.build",
            goals=BOTH,
            level=Level.UNKNOWN,
            title=f"{torch.source} cannot be read, so it is not known what this torch was built for",
            fix="install it again",
        )
        return Section(name="PyTorch", line="not known", problems=(problem,))
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "the CPU only"
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
        title=f"there is no torch in the environment of {facts.python.executable}",
        breaks="everything that imports torch",
        evidence=(f"searched: {', '.join(facts.python.paths[-4:])}",),
        fix="install it there, or name the interpreter of your job: --python PATH",
        commands=install_torch(facts),
    )


def _build(facts: CudaFacts) -> Problem:
    """Name a CPU build as the cause; what torch says then (CUDA_HOME is not set) is not true."""
    torch = facts.torch
    assert torch is not None
    commands = install_torch(facts)
    text = "no CUDA build of torch serves these GPUs and this driver"
    if commands:
        cuda = commands[0].rpartition("/cu")[2]
        text = f"install the build for CUDA {cuda[:-1]}.{cuda[-1]}"
    home = facts.variables.get("CUDA_HOME")
    ignored = f" (CUDA_HOME={home} is ignored by it)" if home else ""
    return Problem(
        id="torch.build",
        goals=BOTH,
        level=Level.FAIL,
        title=f"torch {torch.version} was built without CUDA: it can neither use a GPU nor build CUDA extensions",
        cause="Its message for builds, 'CUDA_HOME environment variable is not set', comes whatever CUDA_HOME says"
        f"{ignored}: this build does not look at it.",
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
            title=f"`{imported.stage}` did not come back in time",
            cause="A driver that hangs and a slow file system look the same from here.",
            breaks="whether torch works is not known",
            fix="give it longer (--timeout SECONDS), and see what it waits for",
            commands=(f"{shlex.quote(facts.python.executable)} -X importtime -c 'import torch' 2>&1 | tail -5",),
        )
    if imported.came_in:
        return Problem(
            id="torch.import",
            goals=RUN,
            level=Level.FAIL,
            title=f"torch is imported, and fails when it asks for the GPUs: {imported.error[:200]}",
            breaks="running on GPUs",
            evidence=imported.libraries[:8],
            fix="see Driver: it is the driver's libraries that are asked then",
            commands=(f"{shlex.quote(facts.python.executable)} -X faulthandler -c 'import torch; torch.cuda.init()'",),
        )
    if imported.mended_without:
        name = imported.mended_without
        return Problem(
            id="torch.import",
            goals=BOTH,
            level=Level.FAIL,
            title=f"torch cannot be imported because of {name}: {imported.error[:200]}",
            cause=f"It was tried without {name}, too: then the import works.",
            breaks="everything that imports torch",
            evidence=(f"{name}={facts.variables.get(name, '')}",),
            fix="take it away",
            unset=(name,),
        )
    return Problem(
        id="torch.import",
        goals=BOTH,
        level=Level.FAIL,
        title="torch cannot be imported: " + imported.error[:200],
        cause="The libraries that were loaded up to then are listed." if imported.libraries else "",
        breaks="everything that imports torch",
        evidence=imported.libraries[:8],
        fix="see Libraries below; if nothing is wrong there, install torch again",
        commands=install_torch(facts, prefer=facts.torch.cuda if facts.torch else ""),
    )
