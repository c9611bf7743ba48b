"""What the facts would be once the variables of a fix are set: a fix after which all is as before is none. Pure."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.node.cuda.toolkits import Use

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.node.cuda.compilers import Compilers
    from distdiag.node.cuda.driver import Driver
    from distdiag.node.cuda.toolkits import Nvcc

_HOST_COMPILER = {"CC", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "TMPDIR"}


def after(facts: CudaFacts, exports: Iterable[tuple[str, str]], unset: Iterable[str]) -> CudaFacts:
    """Give the facts with these variables set, each written as for a shell, and those taken away.

    What only a new look could tell (what nvcc says of another compiler, what another driver answers) is left unknown.
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
        nvccs=tuple(_nvcc(one, facts, variables) for one in facts.nvccs) if changed & _HOST_COMPILER else facts.nvccs,
        loader_path=tuple(by_text[text] for text in loader if text in by_text),
        driver=_driver(facts, changed, loader),
    )
    return _imported(
        found, changed, {os.path.realpath(one) for one in fixes.preloaded(facts) if one not in fixes.preloaded(found)}
    )


def _expanded(value: str, variables: Mapping[str, str]) -> str:
    """Read a value as a shell does: of its language only what fixes use."""
    value = re.sub(
        r"\$\{(\w+):\+:\$\1\}", lambda name: f":{variables[name[1]]}" if variables.get(name[1]) else "", value
    )
    value = re.sub(r"\$(\w+)", lambda name: variables.get(name[1], ""), value)
    return "".join(shlex.split(value))


def _uses(facts: CudaFacts, variables: Mapping[str, str]) -> dict[str, Use]:
    """Follow the rules of torch, CMake and the shell again (node.cuda.toolkits), among the nvccs that are known."""
    known = {one.path for one in facts.nvccs}
    folders = variables.get("PATH", "").split(":")
    nvcc = next((f"{folder}/nvcc" for folder in folders if f"{folder}/nvcc" in known), "")
    above = nvcc.removesuffix("/bin/nvcc")
    first = Use(above, nvcc, "first on PATH" if nvcc else "no nvcc on PATH")
    home = next((name for name in ("CUDA_HOME", "CUDA_PATH") if variables.get(name)), "")
    if home:
        torch = Use(variables[home], f"{variables[home].rstrip('/')}/bin/nvcc", home)
    elif nvcc:
        torch = Use(above, nvcc, f"above {nvcc}, the first nvcc on PATH")
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
    asked = variables.get("CXX") or "c++"
    return replace(facts.compilers, cxx_asked=asked, cxx=fixes.compiler_called(facts, asked))


def _nvcc(nvcc: Nvcc, facts: CudaFacts, variables: Mapping[str, str]) -> Nvcc:
    name = variables.get("CC") or variables.get("NVCC_CCBIN") or ""
    named = fixes.compiler_called(facts, name) if name else None
    return replace(nvcc, compiler=named.path if named is not None else nvcc.compiler, complaint=None)


def _driver(facts: CudaFacts, changed: set[str], loader: list[str]) -> Driver:
    driver, answer = facts.driver, facts.driver.answer
    folder = driver.library_path.rpartition("/")[0]
    listed = [one.text.rstrip("/") for one in facts.loader_path]
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
    if imported.mended_without in changed:
        imported = replace(imported, error="", mended_without="")
    imported = replace(imported, loaded=tuple(one for one in imported.loaded if one.path not in gone))
    return replace(facts, imported=imported)
