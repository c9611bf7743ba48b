"""Facts of one node -> its sections; each fix is simulated, and dropped if it has no effect. Pure."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.about.archlist import about_arch_list
from distdiag.commands.cuda_env.about.building import about_building, about_deepspeed, about_system
from distdiag.commands.cuda_env.about.compilers import about_compilers
from distdiag.commands.cuda_env.about.driver import about_driver
from distdiag.commands.cuda_env.about.extensions import about_extensions
from distdiag.commands.cuda_env.about.gpus import about_gpus
from distdiag.commands.cuda_env.about.libraries import about_libraries
from distdiag.commands.cuda_env.about.toolkits import about_toolkits
from distdiag.commands.cuda_env.about.torch import about_torch
from distdiag.commands.cuda_env.about.versions import about_versions
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Goal, Problem, Section
from distdiag.facts.cuda.toolkits import Use
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distdiag.commands.cuda_env.archs import Arch
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.compilers import Compilers
    from distdiag.facts.cuda.driver import Driver
    from distdiag.facts.cuda.toolkits import Nvcc

_MOST_ROUNDS = 4
_HOST_COMPILER = {"CC", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "TMPDIR"}


def sections_of(facts: CudaFacts, goal: Goal, everywhere: Sequence[Arch] = ()) -> list[Section]:
    """Judge one node for running, building, or both; `everywhere`: the GPUs of all nodes.

    Each fix that sets variables is simulated on the facts and dropped if it has no effect.
    """
    found = _judged(facts, goal, everywhere)
    count = _counted(found)

    def tried(problem: Problem) -> Problem:
        if not (problem.exports or problem.unset):
            return problem
        again = _judged(after(facts, problem.exports, problem.unset), goal, everywhere)
        if _counted(again)[problem.id, problem.level] < count[problem.id, problem.level]:
            return problem
        return replace(problem, text=f"no environment variable fixes it here; {problem.text}", exports=(), unset=())

    return [replace(section, problems=tuple(map(tried, section.problems))) for section in found]


def _counted(sections: Iterable[Section]) -> Counter[tuple[str, Level]]:
    return Counter((problem.id, problem.level) for section in sections for problem in section.problems)


def apply_fixes(
    facts: CudaFacts, goal: Goal, chosen: Callable[[Problem], bool]
) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """Apply fixes of variables repeatedly, including those for problems uncovered by earlier fixes.

    Returns all variables (empty: to be unset), and the remaining problems. `chosen`: which problems count.
    """
    found: dict[str, str] = {}
    for _ in range(_MOST_ROUNDS):
        problems = [each for section in sections_of(facts, goal) for each in section.problems if chosen(each)]
        new: dict[str, str] = {}
        for name, value in (pair for each in problems for pair in each.exports if pair[0] not in found):
            new.setdefault(name, value)
        gone = [name for each in problems for name in each.unset if name not in {**found, **new}]
        if not new and not gone:
            break
        found |= {**new, **dict.fromkeys(gone, "")}
        facts = after(facts, new.items(), gone)
    return found, tuple(problems)


def _judged(facts: CudaFacts, goal: Goal, everywhere: Sequence[Arch]) -> list[Section]:
    if facts.torch is not None and facts.torch.hip:
        return [_rocm(facts), about_versions(facts)]
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
    return [*found, about_versions(facts)]


def _rocm(facts: CudaFacts) -> Section:
    """Report an unsupported torch; with an NVIDIA driver it is the wrong build."""
    torch = facts.torch
    assert torch is not None
    line = f"{torch.version}, built for ROCm {torch.hip}"
    if not facts.driver.kernel and not facts.driver.answer.cuda_version:
        return Section(name="PyTorch", line=line, skipped="cuda-env checks CUDA only; nothing else was checked")
    found = problem("torch.rocm", version=torch.version, evidence=(f"{torch.source}: hip = {torch.hip}",))
    return Section(name="PyTorch", line=line, problems=(found,))


def is_ready(problems: Iterable[Problem], part: Goal, goal: Goal) -> bool | None:
    """Return whether running (or building) will work; None if not requested, or too little is known."""
    if part not in goal.parts:
        return None
    levels = {problem.level for problem in problems if part in problem.goals}
    if Level.FAIL in levels:
        return False
    return None if Level.UNKNOWN in levels else True


def after(facts: CudaFacts, exports: Iterable[tuple[str, str]], unset: Iterable[str]) -> CudaFacts:
    """Return the facts as if these variables were set, each value in shell syntax, and others unset.

    Facts that would need a new query (nvcc's reply to another compiler, another driver's answers) become unknown.
    """
    new = {name: _expanded(value, facts.variables) for name, value in exports}
    gone = set(unset)
    variables = {**{name: value for name, value in facts.variables.items() if name not in gone}, **new}
    changed = gone | new.keys()
    by_text = {entry.text: entry for entry in facts.loader_path}
    loader = [text for text in variables.get("LD_LIBRARY_PATH", "").split(":") if "LD_LIBRARY_PATH" in variables]
    found = replace(
        facts,
        variables=variables,
        uses=_uses(facts, variables),
        compilers=_compilers(facts, variables) if "CXX" in changed else facts.compilers,
        nvccs=tuple(_nvcc(nvcc, facts, variables, changed) for nvcc in facts.nvccs),
        loader_path=tuple(by_text[text] for text in loader if text in by_text),
        driver=_driver(facts, changed, loader),
    )
    return _imported(
        found,
        changed,
        {os.path.realpath(path) for path in fixes.preloaded(facts) if path not in fixes.preloaded(found)},
    )


def _expanded(value: str, variables: Mapping[str, str]) -> str:
    """Expand a value like a shell, for the syntax used by fixes."""
    value = re.sub(
        r"\$\{(\w+):\+:\$\1\}", lambda name: f":{variables[name[1]]}" if variables.get(name[1]) else "", value
    )
    value = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], ""), value)
    return "".join(shlex.split(value))


def _uses(facts: CudaFacts, variables: Mapping[str, str]) -> dict[str, Use]:
    """Reapply the rules of torch, CMake and the shell (facts.cuda.toolkits), among known nvccs."""
    known = {nvcc.path for nvcc in facts.nvccs}
    folders = variables.get("PATH", "").split(":")
    nvcc = next((f"{folder}/nvcc" for folder in folders if f"{folder}/nvcc" in known), "")
    above = nvcc.removesuffix("/bin/nvcc")
    first = Use(above, nvcc, "first on PATH" if nvcc else "no nvcc on PATH")
    home = next((name for name in ("CUDA_HOME", "CUDA_PATH") if variables.get(name)), "")
    if home:
        torch = Use(variables[home], f"{variables[home].rstrip('/')}/bin/nvcc", home)
    elif nvcc:
        torch = Use(above, nvcc, f"the toolkit of {nvcc}, the first nvcc on PATH")
    else:
        torch = facts.uses["torch"]
    given = variables.get("CUDACXX", "")
    cmake = Use(given.removesuffix("/bin/nvcc"), given, "CUDACXX") if given in known else facts.uses["cmake"]
    by_path = "PATH" in cmake.rule and cmake.rule != "CUDA_PATH"
    same = facts.uses["nvcc"].nvcc == nvcc
    return {
        "torch": torch,
        "cmake": first if by_path and not same else cmake,
        "nvcc": facts.uses["nvcc"] if same else first,
    }


def _compilers(facts: CudaFacts, variables: Mapping[str, str]) -> Compilers:
    cxx = variables.get("CXX") or "c++"
    return replace(facts.compilers, cxx_asked=cxx, cxx=fixes.compiler_called(facts, cxx))


def _nvcc(nvcc: Nvcc, facts: CudaFacts, variables: Mapping[str, str], changed: set[str]) -> Nvcc:
    known = set(nvcc.broken_by)  # the other facts were collected without these
    nvcc = replace(nvcc, broken_by=tuple(name for name in nvcc.broken_by if name not in changed))
    if not (changed - known) & _HOST_COMPILER:
        return nvcc
    name = variables.get("CC") or variables.get("NVCC_CCBIN") or ""
    named = fixes.compiler_called(facts, name) if name else None
    return replace(nvcc, compiler=named.path if named is not None else nvcc.compiler, complaint=None)


def _driver(facts: CudaFacts, changed: set[str], loader: list[str]) -> Driver:
    driver, answer = facts.driver, facts.driver.answer
    folder = driver.library_path.rpartition("/")[0]
    listed = [entry.text.rstrip("/") for entry in facts.loader_path]
    if folder and folder in listed and folder not in [text.rstrip("/") for text in loader]:
        driver = replace(driver, library="", library_path="", answer=replace(answer, cuda_status=None))
    if "CUDA_VISIBLE_DEVICES" in changed:
        driver = replace(
            driver,
            answer=replace(driver.answer, visible=answer.present, cuda_status=None, cuda_count=len(answer.present)),
        )
    return driver


def _imported(facts: CudaFacts, changed: set[str], gone: set[str]) -> CudaFacts:
    imported = facts.imported
    if imported is None or not changed & {"LD_PRELOAD", "LD_LIBRARY_PATH"}:
        return facts
    if imported.fixed_without in changed:
        imported = replace(imported, error="", fixed_without="")
    imported = replace(imported, loaded=tuple(library for library in imported.loaded if library.path not in gone))
    return replace(facts, imported=imported)
