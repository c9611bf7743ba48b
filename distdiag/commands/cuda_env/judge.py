"""Facts of one node -> its sections. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.about.archlist import about_arch_list
from distdiag.commands.cuda_env.about.building import about_building, about_deepspeed, about_system
from distdiag.commands.cuda_env.about.compilers import about_compilers
from distdiag.commands.cuda_env.about.driver import about_driver
from distdiag.commands.cuda_env.about.extensions import about_extensions
from distdiag.commands.cuda_env.about.gpus import about_gpus
from distdiag.commands.cuda_env.about.libraries import about_libraries
from distdiag.commands.cuda_env.about.toolkits import about_toolkits
from distdiag.commands.cuda_env.about.torch import about_torch
from distdiag.commands.cuda_env.applied import after
from distdiag.commands.cuda_env.model import Goal, Problem, Section
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from distdiag.commands.cuda_env.archs import Arch
    from distdiag.commands.cuda_env.collect import CudaFacts

_MOST_ROUNDS = 4


def sections_of(facts: CudaFacts, goal: Goal, everywhere: Sequence[Arch] = ()) -> list[Section]:
    """Judge one node for running, building, or both; `everywhere` are the GPUs of all nodes.

    Each fix that sets variables is tried on the facts: one that mends nothing is not told.
    """
    found = _judged(facts, goal, everywhere)
    count = _counted(found)

    def tried(problem: Problem) -> Problem:
        if not (problem.exports or problem.unset):
            return problem
        again = _judged(after(facts, problem.exports, problem.unset), goal, everywhere)
        if _counted(again)[problem.id, problem.level] < count[problem.id, problem.level]:
            return problem
        return replace(problem, fix=f"no variable mends it here; {problem.fix}", exports=(), unset=())

    return [replace(section, problems=tuple(map(tried, section.problems))) for section in found]


def _counted(sections: Iterable[Section]) -> Counter[tuple[str, Level]]:
    return Counter((one.id, one.level) for section in sections for one in section.problems)


def mended_by(
    facts: CudaFacts, goal: Goal, chosen: Callable[[Problem], bool]
) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """Follow the fixes that set variables to their end: what one of them uncovers is mended, too.

    Returns all variables, an empty value being one to take away, and what they do not mend. `chosen`: what counts.
    """
    found: dict[str, str] = {}
    for _ in range(_MOST_ROUNDS):
        problems = [one for section in sections_of(facts, goal) for one in section.problems if chosen(one)]
        new: dict[str, str] = {}
        for name, value in (pair for one in problems for pair in one.exports if pair[0] not in found):
            new.setdefault(name, value)
        gone = [name for one in problems for name in one.unset if name not in {**found, **new}]
        if not new and not gone:
            break
        found |= {**new, **dict.fromkeys(gone, "")}
        facts = after(facts, new.items(), gone)
    return found, tuple(problems)


def _judged(facts: CudaFacts, goal: Goal, everywhere: Sequence[Arch]) -> list[Section]:
    if facts.torch is not None and facts.torch.hip:
        return [_rocm(facts)]
    found = [about_torch(facts)]
    if Goal.RUN in goal.parts:
        found += [about_driver(facts), about_gpus(facts)]
    if Goal.BUILD in goal.parts:
        found += [about_toolkits(facts), about_compilers(facts), about_arch_list(facts, everywhere)]
    if Goal.RUN in goal.parts:
        found += [about_libraries(facts), about_extensions(facts)]
    deepspeed = about_deepspeed(facts)
    found += [deepspeed] if deepspeed is not None else []
    if Goal.BUILD in goal.parts:
        found.append(about_building(facts))
    if Goal.RUN in goal.parts:
        found.append(about_system(facts))
    return found


def _rocm(facts: CudaFacts) -> Section:
    """Say that nothing here is about this torch; on a machine with an NVIDIA driver it is the wrong build."""
    torch = facts.torch
    assert torch is not None
    line = f"{torch.version}, built for ROCm {torch.hip}"
    if not facts.driver.kernel and not facts.driver.answer.cuda_version:
        return Section(name="PyTorch", line=line, skipped="cuda-env is about CUDA; nothing else was judged")
    problem = Problem(
        id="torch.build",
        goals=frozenset({Goal.RUN, Goal.BUILD}),
        level=Level.FAIL,
        title=f"torch {torch.version} is built for AMD's ROCm, and this machine has an NVIDIA driver",
        breaks="running on GPUs; building CUDA extensions",
        evidence=(f"{torch.source}: hip = {torch.hip}",),
        fix="install a CUDA build",
    )
    return Section(name="PyTorch", line=line, problems=(problem,))


def is_ready(problems: Iterable[Problem], part: Goal, goal: Goal) -> bool | None:
    """Tell whether running (or building) will work; None if it was not asked, or too little is known."""
    if part not in goal.parts:
        return None
    levels = {one.level for one in problems if part in one.goals}
    if Level.FAIL in levels:
        return False
    return None if Level.UNKNOWN in levels else True
