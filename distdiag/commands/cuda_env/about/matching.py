"""Toolkits against torch and against each other: torch's rule, DeepSpeed's rule, and builds that do not agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.model import BUILD, Problem
from distdiag.knowledge.cuda import major, minor
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.node.cuda.toolkits import Toolkit


def who_uses(facts: CudaFacts) -> dict[str, str]:
    """Tell which toolkit each kind of build takes: name -> directory, empty for none."""
    torch = facts.torch
    own = facts.uses["torch"].home if torch is not None and torch.cuda else ""
    users = {"torch extensions": own, "CMake": _seen_through(facts, "cmake"), "nvcc": _seen_through(facts, "nvcc")}
    return {**users, "DeepSpeed": own} if facts.deepspeed is not None else users


def _seen_through(facts: CudaFacts, who: str) -> str:
    """See through a wrapper: what nvcc itself calls its TOP is what a shell and CMake get."""
    nvcc = fixes.nvcc_at(facts, facts.uses[who].nvcc)
    return nvcc.top if nvcc is not None and nvcc.top else facts.uses[who].home


def with_torch(facts: CudaFacts) -> Problem | None:
    """Compare the toolkit that would be used with torch's CUDA (torch: TE._check_cuda_version, exact major version)."""
    used, wanted = fixes.used_toolkit(facts), fixes.torch_cuda(facts)
    if used is None or not used.version or not wanted or minor(used.version) == wanted:
        return None
    have = minor(used.version)
    if major(have) != major(wanted):
        return _mismatch(facts, used, wanted)
    return _for_deepspeed(facts, have, wanted) or Problem(
        id="toolkit.torch-mismatch",
        goals=BUILD,
        level=Level.INFO,
        title=f"nvcc is {have}, torch was built with {wanted}: the same major version, torch only warns",
    )


def _mismatch(facts: CudaFacts, used: Toolkit, wanted: str) -> Problem:
    torch, use = facts.torch, facts.uses["torch"]
    assert torch is not None
    there = ", ".join(f"{one.version} in {one.root}" for one in fixes.usable_toolkits(facts))
    variable = use.rule if use.rule.startswith("CUDA_") else "PATH"
    best = fixes.best_toolkit(facts)
    name = f"cuda-toolkit-{wanted.replace('.', '-')}"
    return Problem(
        id="toolkit.torch-mismatch",
        goals=BUILD,
        level=Level.FAIL,
        title=f"nvcc is {minor(used.version)}, and torch {torch.version} was built with CUDA {wanted}",
        breaks='building CUDA extensions ("detected CUDA version mismatches"); running is fine',
        evidence=(
            f"torch and DeepSpeed -> {use.home} ({use.rule})",
            f"on disk: {there or 'no other'}",
            f"{torch.source}: cuda = {torch.cuda}",
            *set_in(facts, variable),
        ),
        fix=f"use the toolkit in {best.root} ({best.version})"
        if best
        else f"install toolkit {wanted}{fixes.from_repository(facts)}, or a torch for CUDA {minor(used.version)}",
        exports=fixes.choose_toolkit(facts, best) if best else (),
        commands=()
        if best
        else (
            *fixes.install_system(facts, apt=name, dnf=name, zypper=name),
            *fixes.install_torch(facts, prefer=minor(used.version), strict=True),
        ),
    )


def set_in(facts: CudaFacts, variable: str) -> tuple[str, ...]:
    """Say which start-up files set a variable."""
    lines = [
        f"{one.variable} is set in {one.file}:{one.line}" for one in facts.building.origins if one.variable == variable
    ]
    return tuple(lines[:3])


def _for_deepspeed(facts: CudaFacts, have: str, wanted: str) -> Problem | None:
    """Ask DeepSpeed's own list (builder.py, cuda_minor_mismatch_ok) whether two minor versions go together for it."""
    deepspeed = facts.deepspeed
    if deepspeed is None or facts.variables.get("DS_SKIP_CUDA_CHECK") == "1":
        return None
    same = deepspeed.minor_ok.get(str(major(have)), ())
    if have in same and wanted in same:
        return None
    return Problem(
        id="deepspeed.cuda13" if major(have) >= 13 else "deepspeed.cuda-minor",
        goals=BUILD,
        level=Level.WARN,
        title=f"DeepSpeed {deepspeed.version} refuses nvcc {have} with torch's CUDA {wanted}; torch itself takes it",
        cause="Its list of minor versions that go together does not have them.",
        breaks="building DeepSpeed's ops (CUDAMismatchException); running is fine",
        fix="tell it to go on; code of one major version works together",
        exports=(("DS_SKIP_CUDA_CHECK", "1"),),
    )


def with_each_other(facts: CudaFacts) -> Problem | None:
    """Say that builds here would use different toolkits, or how many there are."""
    users = {name: home for name, home in who_uses(facts).items() if home}
    found = {name: fixes.toolkit_at(facts, home) for name, home in users.items()}
    versions = {name: one.version for name, one in found.items() if one is not None and one.version}
    if len({minor(one) for one in versions.values()}) > 1:
        best = fixes.best_toolkit(facts) or fixes.used_toolkit(facts)
        return Problem(
            id="toolkit.multiple",
            goals=BUILD,
            level=Level.WARN,
            title="builds here use different toolkits: " + ", ".join(f"{name} {one}" for name, one in versions.items()),
            breaks="extensions that are partly built with each",
            evidence=tuple(f"{name} -> {home}" for name, home in users.items()),
            fix="let all use the same",
            exports=fixes.choose_toolkit(facts, best) if best else (),
        )
    whole = fixes.usable_toolkits(facts)
    contradiction = _variables_differ(facts)
    if contradiction is not None or len(whole) < 2:
        return contradiction
    return Problem(
        id="toolkit.multiple",
        goals=BUILD,
        level=Level.INFO,
        title=f"{len(whole)} toolkits are installed, and all builds use the same: "
        + ", ".join(one.root for one in whole),
    )


def _variables_differ(facts: CudaFacts) -> Problem | None:
    home, path = facts.variables.get("CUDA_HOME"), facts.variables.get("CUDA_PATH")
    if not home or not path:
        return None
    named = [fixes.toolkit_at(facts, home), fixes.toolkit_at(facts, path)]
    if named[0] is not None and named[1] is not None and named[0].real == named[1].real:
        return None
    return Problem(
        id="toolkit.multiple",
        goals=BUILD,
        level=Level.WARN,
        title=f"CUDA_HOME={home} and CUDA_PATH={path} name different toolkits",
        cause="torch takes CUDA_HOME; other tools take CUDA_PATH.",
        fix="let both name the same",
        exports=(("CUDA_PATH", '"$CUDA_HOME"'),),
    )
