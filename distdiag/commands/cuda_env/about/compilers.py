"""The host compilers: nvcc's, judged by the toolkit's own header, and the one checked by torch."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.facts.cuda.nvcc_variables import FLAGS
from distdiag.knowledge.cuda import minor, version
from distdiag.knowledge.logs import shortened
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.compilers import Compiler
    from distdiag.facts.cuda.toolkits import Nvcc, Toolkit
    from distdiag.facts.cuda.torchfiles import Bounds

_NOT_BUILT = "building CUDA extensions; running is fine"
_BY_OTHERS = "builds from a shell or with CMake; torch uses another nvcc"
_NO_HOST = re.compile(r"Failed to preprocess host compiler")
_REFUSED = re.compile(r"unsupported (GNU|clang)")


def about_compilers(facts: CudaFacts) -> Section:
    """Judge both compilers, for the toolkit in use after all fixes."""
    own, toolkit = facts.compilers.cxx, fixes.target_toolkit(facts)
    called = _host(facts, _nvcc_of(facts, toolkit))
    parts = [f"torch calls {_named(own)}" if own else f"torch does not find {facts.compilers.cxx_asked}"]
    parts += [f"nvcc calls {_named(called)}"] if called and (own is None or called.real != own.real) else []
    limit = fixes.newest_host_gcc(facts, toolkit) if toolkit is not None else None
    parts += [f"gcc <= {limit} is supported"] if limit else []
    checks = (_nvcc(facts, toolkit), _torch(facts, toolkit), _flags(facts, toolkit), _for_cmake(facts))
    problems = tuple(found for found in checks if found)
    details = tuple(
        f"{compiler.path}: {f'{compiler.family} {compiler.version}'.strip() or 'unknown'}"
        for compiler in fixes.distinct_compilers(facts)
    )
    return Section(name="Compiler", line="; ".join(parts), problems=problems, details=details)


def _named(compiler: Compiler | None) -> str:
    if compiler is None:
        return "none"
    return f"{os.path.basename(compiler.path)} ({compiler.family} {compiler.version})".replace("( ", "(")


def _nvcc_of(facts: CudaFacts, toolkit: Toolkit | None) -> Nvcc | None:
    of_toolkit = [nvcc for nvcc in facts.nvccs if nvcc.top and toolkit is not None and nvcc.top == toolkit.real]
    return of_toolkit[0] if of_toolkit else None


def _host(facts: CudaFacts, nvcc: Nvcc | None) -> Compiler | None:
    """Return the host compiler that nvcc calls for torch: as reported by nvcc, else by its search rules."""
    if nvcc is not None and nvcc.compiler:
        return fixes.compiler_at(facts, nvcc.compiler)
    name = facts.variables.get("CC") or facts.variables.get("NVCC_CCBIN") or "gcc"
    return fixes.compiler_called(facts, name)


def _nvcc(facts: CudaFacts, toolkit: Toolkit | None) -> Problem | None:
    """Judge nvcc's compiler: by nvcc's message in a trial run, else by the limit in its header."""
    nvcc = _nvcc_of(facts, toolkit)
    nvcc = nvcc or next((other for other in facts.nvccs if other.complaint and _NO_HOST.search(other.complaint)), None)
    compiler = _host(facts, nvcc)
    complaint = nvcc.complaint if nvcc is not None else None
    if (complaint and _REFUSED.search(complaint)) or (complaint is None and _is_too_new(compiler, toolkit)):
        return _too_new(facts, nvcc, compiler, toolkit)
    if nvcc is not None and complaint and _NO_HOST.search(complaint):
        return _no_host(facts, nvcc, toolkit)
    return None


def _is_too_new(compiler: Compiler | None, toolkit: Toolkit | None) -> bool:
    if compiler is None or toolkit is None or toolkit.limit is None or not compiler.major:
        return False
    if compiler.family == "clang":
        return toolkit.limit.clang_below is not None and compiler.major >= toolkit.limit.clang_below
    return toolkit.limit.gcc_max is not None and compiler.major > toolkit.limit.gcc_max


def _too_new(facts: CudaFacts, nvcc: Nvcc | None, compiler: Compiler | None, toolkit: Toolkit | None) -> Problem:
    limit = toolkit.limit if toolkit is not None else None
    clang = compiler is not None and compiler.family == "clang"
    most = "an older version"
    if limit:
        most = f"clang < {limit.clang_below}" if clang else f"gcc <= {limit.gcc_max}"
    evidence = [f"called: {compiler.path}"] if compiler else []
    if limit is not None and limit.gcc_max and not clang:
        evidence.append(f"{limit.path}:{limit.gcc_line}: gcc versions later than {limit.gcc_max} are refused")
    if nvcc is not None and nvcc.complaint:
        evidence.append(f"{nvcc.path} -x cu -E /dev/null: {_message(nvcc.complaint)}")
    own = facts.compilers.cxx
    differ = own is not None and compiler is not None and own.major != compiler.major
    return problem(
        "cc.nvcc",
        version=toolkit.version if toolkit else "of unknown version",
        compiler=_named(compiler),
        most=most,
        other=_named(own) if differ else "",
        evidence=evidence,
        remedy=_remedy(facts, toolkit),
    )


def _message(complaint: str) -> str:
    """Reduce a compiler's message to the error, without location and advice."""
    return shortened(complaint.rpartition("error: ")[2].partition(" The nvcc flag")[0])


def _no_host(facts: CudaFacts, nvcc: Nvcc, toolkit: Toolkit | None) -> Problem:
    name = next((variable for variable in ("CC", "NVCC_CCBIN") if facts.variables.get(variable)), "")
    compiler = f"{name}={facts.variables[name]}" if name else os.path.basename(nvcc.compiler or "gcc")
    evidence = (f"{nvcc.path} -x cu -E /dev/null: {nvcc.complaint}",)
    return problem("cc.nvcc-none", compiler=compiler, evidence=evidence, remedy=_remedy(facts, toolkit))


def _remedy(facts: CudaFacts, toolkit: Toolkit | None) -> Remedy:
    return fixes.use_gcc(facts, fixes.newest_host_gcc(facts, toolkit) if toolkit is not None else None)


def _torch(facts: CudaFacts, toolkit: Toolkit | None) -> Problem | None:
    """Judge the compilers checked by torch, with the installed torch's own table.

    load() uses $CXX or c++; setup.py builds with $CXX or the compiler of this Python's own build.
    """
    own, cxx = facts.compilers.cxx, facts.compilers.cxx_asked
    if own is None:
        where = f"CXX={facts.variables['CXX']}" if "CXX" in facts.variables else "CXX is not set; no c++ on PATH"
        return problem("cc.torch-none", asked=cxx, evidence=(where,), remedy=_remedy(facts, toolkit))
    if len(cxx.split()) > 1 and not own.family:
        evidence = (f"CXX={facts.variables.get('CXX', '')}",)
        first = os.path.basename(cxx.split()[0])
        return problem("cc.torch-wrapped", first=first, evidence=evidence, remedy=_remedy(facts, toolkit))
    bounds = _bounds(facts, toolkit, own)
    by_setup = None if "CXX" in facts.variables else fixes.compiler_called(facts, facts.python.cxx)
    wrong = [compiler for compiler in (own, by_setup) if compiler is not None and not _is_within(compiler, bounds)]
    if not wrong:
        return None
    both = by_setup is None or by_setup in wrong
    return _out_of_bounds(facts, toolkit, wrong[0], everywhere=both and own in wrong)


def _bounds(facts: CudaFacts, toolkit: Toolkit | None, own: Compiler) -> Bounds | None:
    torch = facts.torch
    if torch is None or toolkit is None or facts.variables.get("TORCH_DONT_CHECK_COMPILER_ABI"):
        return None
    table = torch.clang if own.family == "clang" and "clang" in os.path.basename(own.path) else torch.gcc
    return table.get(minor(toolkit.version))


def _is_within(compiler: Compiler, bounds: Bounds | None) -> bool:
    return bounds is None or not compiler.version or bounds.least <= version(compiler.version) < bounds.below


def _out_of_bounds(facts: CudaFacts, toolkit: Toolkit | None, wrong: Compiler, *, everywhere: bool) -> Problem:
    torch, bounds = facts.torch, _bounds(facts, toolkit, wrong)
    assert torch is not None
    assert toolkit is not None
    assert bounds is not None
    high = version(wrong.version) >= bounds.below
    allowed = f"below {'.'.join(map(str, bounds.below))}" if high else f"{'.'.join(map(str, bounds.least))} or newer"
    jit = wrong is facts.compilers.cxx
    only = "extensions built at first use (torch.utils.cpp_extension.load)" if jit else "setup.py builds"
    return problem(
        "cc.torch",
        level=Level.FAIL if everywhere else Level.WARN,
        compiler=_named(wrong),
        cuda=minor(toolkit.version),
        allowed=allowed,
        breaks=_NOT_BUILT if everywhere else only,
        evidence=(f"{torch.folder}/utils/cpp_extension.py: compiler version table", f"called: {wrong.path}"),
        remedy=_remedy(facts, toolkit),
    )


def _flags(facts: CudaFacts, toolkit: Toolkit | None) -> Problem | None:
    """Report hidden flags added to every nvcc call, and variables that break nvcc."""
    for use in facts.uses.values():
        nvcc = fixes.nvcc_at(facts, use.nvcc)
        if nvcc is not None and nvcc.broken_by:
            return _broken(facts, nvcc)
    for name in FLAGS:
        value = facts.variables.get(name, "")
        if "allow-unsupported-compiler" in value:
            return _unchecked(facts, toolkit, name, value)
        if "ccbin" in value or "compiler-bindir" in value:
            return problem("cc.ccbin", variable=name, evidence=(f"{name}={value}",))
    return None


def _broken(facts: CudaFacts, nvcc: Nvcc) -> Problem:
    names, several = nvcc.broken_by, len(nvcc.broken_by) > 1
    used = nvcc.path == facts.uses["torch"].nvcc
    said = _message(nvcc.broken_how).partition("; nvcc fatal")[0].removeprefix("nvcc fatal").lstrip(" :")
    origins = [f"{origin.file}:{origin.line}" for origin in facts.building.origins if origin.variable in names]
    return problem(
        "cc.flags",
        level=Level.FAIL if used else Level.WARN,
        names=" and ".join(names),
        verb="break" if several else "breaks",
        release=nvcc.release,
        said=said,
        it="them" if several else "it",
        nvcc="" if nvcc.complaint else nvcc.path,
        files=", ".join(origins),
        breaks=_NOT_BUILT if used else _BY_OTHERS,
        evidence=(
            *(f"{name}={facts.variables.get(name, '')}" for name in names),
            f"{nvcc.path} -c -x cu: {nvcc.broken_how}",
            *(f"set in {origin}" for origin in origins),
        ),
        remedy=Remedy(unset=names),
    )


def _for_cmake(facts: CudaFacts) -> Problem | None:
    """Report CUDAHOSTCXX, which only CMake reads, in a new build folder; nvcc and torch do not."""
    value = facts.variables.get("CUDAHOSTCXX", "")
    others = [facts.variables.get(name, "") for name in ("CC", "NVCC_CCBIN")]
    return problem("cc.cmake-only", value=value, quoted=shlex.quote(value)) if value and value not in others else None


def _unchecked(facts: CudaFacts, toolkit: Toolkit | None, name: str, value: str) -> Problem:
    """Report that the check is disabled; if the compiler is too new, name an allowed one."""
    needed = _is_too_new(_host(facts, _nvcc_of(facts, toolkit)), toolkit)
    remedy = replace(_remedy(facts, toolkit) if needed else Remedy(), text="", unset=(name,))
    return problem(
        "cc.unchecked",
        level=Level.FAIL if needed else Level.WARN,
        variable=name,
        breaks=_NOT_BUILT if needed else "possibly building CUDA extensions",
        evidence=(f"{name}={value}",),
        remedy=remedy,
    )
