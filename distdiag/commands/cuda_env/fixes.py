"""Means available on a machine for fixes: toolkits, compilers, package tools. Fixes use nothing else."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env.archs import Arch, from_capability, from_nvcc, how_it_runs
from distdiag.commands.cuda_env.types import Remedy
from distdiag.knowledge.cuda import major, minor, newest_cuda, tables, version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.compilers import Compiler
    from distdiag.facts.cuda.libraries import Entry, Library
    from distdiag.facts.cuda.toolkits import Nvcc, Toolkit

ANOTHERS = re.compile(
    r"unsupported (GNU|clang)|Failed to preprocess host compiler|Unknown option"
    r"|tmpxft|No space left|Could not open output"
)
"""Complaints of nvcc about something else: the host compiler, a flag, the directory for temporary files."""
_ANY_GCC = 99
_INDEX = "https://download.pytorch.org/whl"


def gpu_archs(facts: CudaFacts) -> list[Arch]:
    """List the architectures of --gpu, else of the local GPUs: those visible to programs, else those present."""
    if facts.meant:
        return sorted({arch for capability in facts.meant if (arch := from_capability(capability)) is not None})
    answer = facts.driver.answer
    gpus = answer.visible or answer.present
    return sorted({arch for gpu in gpus if (arch := from_capability(gpu.capability)) is not None})


def driver_version(facts: CudaFacts) -> str:
    """Return the driver's version: the kernel's, NVML's, or libcuda's."""
    return facts.driver.kernel or facts.driver.answer.nvml_driver or facts.driver.library


def driver_cuda(facts: CudaFacts) -> str:
    """Return the newest CUDA supported by the driver, as "12.8"; empty without a driver."""
    cuda_version = facts.driver.answer.cuda_version or 0
    if cuda_version:
        return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"
    return newest_cuda(driver_version(facts)) if driver_version(facts) else ""


def python(facts: CudaFacts) -> str:
    """Return the examined interpreter, shell-quoted."""
    return shlex.quote(facts.python.executable)


def pip(facts: CudaFacts) -> str:
    """Return the install command for the examined environment."""
    if not facts.python.pip and facts.building.uv:
        return f"uv pip install --python {python(facts)}"
    return f"{python(facts)} -m pip install"


def pip_uninstall(facts: CudaFacts, names: Iterable[str]) -> str:
    """Return the command to remove packages from the examined environment."""
    if not facts.python.pip and facts.building.uv:
        return f"uv pip uninstall --python {python(facts)} {' '.join(names)}"
    return f"{python(facts)} -m pip uninstall -y {' '.join(names)}"


def reinstall(facts: CudaFacts) -> str:
    """Return the option to reinstall an installed package."""
    return "--reinstall" if pip(facts).startswith("uv") else "--force-reinstall"


def rebuild(facts: CudaFacts, name: str, version: str) -> str:
    """Return the command to recompile an installed package from source for the installed torch."""
    flags = f"--no-build-isolation --no-cache-dir {reinstall(facts)} --no-deps"
    return f"{pip(facts)} {flags} --no-binary {name} {name}=={version.partition('+')[0]}"


def install_system(facts: CudaFacts, **names: str) -> tuple[str, ...]:
    """Return the command to install a system package; `names` by apt, dnf, zypper, pacman."""
    sudo = "" if facts.building.root else "sudo "
    tool = facts.building.package_tool
    family = {"apt-get": "apt", "yum": "dnf"}.get(tool, tool)
    name = names.get(family)
    if not name:
        return ()
    words = "-S" if tool == "pacman" else "install -y"
    return (f"{sudo}{tool} {words} {name}",) if facts.building.nvidia_repository or "cuda-" not in name else ()


def install_toolkit(facts: CudaFacts, number: str = "") -> tuple[str, ...]:
    """Return the command to install a toolkit of a version, e.g. "12.8"."""
    name = f"cuda-toolkit-{number.replace('.', '-')}" if number else "cuda-toolkit"
    return install_system(facts, apt=name, dnf=name, zypper=name)


def from_repository(facts: CudaFacts) -> str:
    """Return the source of the system's toolkit, if its package tool does not know it yet."""
    known = facts.building.nvidia_repository
    return "" if known else " from NVIDIA's repository (https://developer.nvidia.com/cuda-downloads) or conda"


def install_torch(
    facts: CudaFacts, *, archs: Iterable[Arch] = (), prefer: str = "", strict: bool = False
) -> tuple[str, ...]:
    """Return the command to install this torch for a CUDA that fits driver, GPUs and toolkit; empty if none does.

    If no build of this version fits, the newest version is installed. `strict`: the `prefer`red CUDA or none.
    """
    torch = facts.torch
    number = torch.version.partition("+")[0] if torch is not None else ""
    release = bool(number) and all(part.isdigit() for part in number.split("."))
    own = builds_of(facts)
    # The installed build exists, whatever the tables list.
    same = bool(prefer) and prefer == torch_cuda(facts)
    cuda = prefer if same else best_build(facts, own, archs=archs, prefer=prefer)
    if not cuda:
        release, cuda = False, best_build(facts, _newest_builds(facts), archs=archs, prefer=prefer)
    if not cuda or (strict and cuda != prefer):
        return ()
    build = f"cu{cuda.replace('.', '')}"
    # Without +cu130 another index in pip's configuration may provide the CPU build again.
    wanted = f"torch=={number}+{build}" if release else "torch"
    is_there = torch is not None and (not release or wanted == f"torch=={torch.version}")
    again = f"{reinstall(facts)} " if is_there else ""
    return (f"{pip(facts)} {again}{wanted} --index-url {_INDEX}/{build}",)


def beside_torch(facts: CudaFacts, name: str) -> str:
    """Return the command to install a package built per torch version, keeping the installed torch."""
    assert facts.torch is not None
    local = facts.torch.version.partition("+")[2]
    index = f" --index-url {_INDEX}/{local}" if re.fullmatch(r"cu\d+|cpu", local) else ""
    return f"{pip(facts)} --upgrade {name} torch=={facts.torch.version}{index}"


def builds_of(facts: CudaFacts) -> dict[str, tuple[int, ...]]:
    """Return the builds of the installed torch's version, CUDA -> architectures: its own table, or ours."""
    torch = facts.torch
    if torch is None:
        return _newest_builds(facts)
    if torch.releases:
        return dict(torch.releases)
    archs = _newest_builds(facts)
    return {cuda: archs[cuda] for cuda in tables().builds.get(minor(torch.version), ()) if cuda in archs}


def _newest_builds(facts: CudaFacts) -> dict[str, tuple[int, ...]]:
    return tables().wheels.get("aarch64" if facts.machine == "aarch64" else "x86_64", {})


def best_build(
    facts: CudaFacts, builds: dict[str, tuple[int, ...]], *, archs: Iterable[Arch] = (), prefer: str = ""
) -> str:
    """Choose the CUDA of a torch build that has the GPUs' code and is supported by the driver.

    In order of preference: `prefer`, that of an installed toolkit, the newest.
    """
    gpus = list(archs) or gpu_archs(facts)
    fitting = [
        cuda for cuda, codes in builds.items() if _serves(codes, gpus) and driver_carries(facts, cuda) is not False
    ]
    if not fitting:
        return ""
    if prefer in fitting:
        return prefer
    same = [minor(toolkit.version) for toolkit in usable_toolkits(facts) if minor(toolkit.version) in fitting]
    return max(same or fitting, key=version)


def _serves(codes: Iterable[int], gpus: Iterable[Arch]) -> bool:
    names = [str(code) for code in codes]
    return all(how_it_runs(names, (), gpu) for gpu in gpus)


def driver_carries(facts: CudaFacts, cuda: str) -> bool | None:
    """Return whether the driver supports programs of a CUDA's major version; None without a driver."""
    have, least = driver_version(facts), tables().least_driver.get(str(major(cuda)))
    cuda_version = facts.driver.answer.cuda_version
    if cuda_version:
        return cuda_version // 1000 >= major(cuda)
    if not have or least is None:
        return None
    return version(have) >= version(least)


def torch_cuda(facts: CudaFacts) -> str:
    """Return the CUDA of torch's build; empty for a CPU or ROCm build, or without torch."""
    return minor(facts.torch.cuda) if facts.torch is not None else ""


def usable_toolkits(facts: CudaFacts) -> list[Toolkit]:
    """List the complete toolkits: a working nvcc, and headers; each once, by its shortest name."""
    whole = [
        toolkit
        for toolkit in facts.toolkits
        if toolkit.exists
        and toolkit.nvcc
        and toolkit.headers
        and toolkit.version
        and not is_broken(nvcc_at(facts, toolkit.nvcc))
    ]
    best: dict[str, Toolkit] = {}
    for toolkit in sorted(whole, key=lambda toolkit: (toolkit.root != toolkit.real, len(toolkit.root))):
        best.setdefault(toolkit.real, toolkit)
    return list(best.values())


def is_broken(nvcc: Nvcc | None) -> bool:
    """Return whether an nvcc itself is broken, rather than its host compiler, a flag or lack of space."""
    if nvcc is None:
        return False
    return nvcc.timed_out or bool(nvcc.complaint and not ANOTHERS.search(nvcc.complaint))


def toolkits_for(facts: CudaFacts, cuda: str) -> list[Toolkit]:
    """List the toolkits of a CUDA's major version (all if it is empty), the same version first, then the newest.

    Among equals the toolkit of an nvcc on PATH comes first.
    """
    tops = {nvcc.top for nvcc in facts.nvccs if nvcc.top}
    fitting = [toolkit for toolkit in usable_toolkits(facts) if not cuda or major(toolkit.version) == major(cuda)]

    def rank(toolkit: Toolkit) -> tuple[bool, tuple[int, ...], bool]:
        return minor(toolkit.version) == minor(cuda), version(toolkit.version)[:2], toolkit.real in tops

    return sorted(fitting, key=rank, reverse=True)


def best_toolkit(facts: CudaFacts) -> Toolkit | None:
    """Choose the toolkit for torch."""
    return next(iter(toolkits_for(facts, torch_cuda(facts))), None)


def choose_toolkit(facts: CudaFacts, toolkit: Toolkit) -> tuple[tuple[str, str], ...]:
    """Return the variables that select one toolkit for every kind of build."""
    root = shlex.quote(toolkit.root)
    first = f"{toolkit.root}/bin" == (facts.variables.get("PATH", "").split(":") or [""])[0]
    path = () if first else (("PATH", f"{root}/bin:$PATH"),)
    cmake = facts.uses["cmake"]
    named = cmake.nvcc and cmake.rule in ("CUDACXX", "beside c++") and cmake.nvcc != toolkit.nvcc
    return (("CUDA_HOME", root), *path, *((("CUDACXX", shlex.quote(toolkit.nvcc)),) if named else ()))


def toolkit_at(facts: CudaFacts, root: str) -> Toolkit | None:
    """Find a toolkit by its directory."""
    plain = root.rstrip("/") or "/"
    return next((toolkit for toolkit in facts.toolkits if toolkit.root == plain), None) or next(
        (toolkit for toolkit in facts.toolkits if toolkit.real == os.path.normpath(plain)), None
    )


def nvcc_at(facts: CudaFacts, path: str) -> Nvcc | None:
    """Find an nvcc by its path."""
    return next((nvcc for nvcc in facts.nvccs if nvcc.path == path), None)


def used_toolkit(facts: CudaFacts) -> Toolkit | None:
    """Return the toolkit of torch's extension builds, resolved through a wrapper; None without one."""
    use = facts.uses["torch"]
    if not use.home:
        return None
    own = toolkit_at(facts, use.home)
    if own is not None and own.version and own.headers:
        return own
    nvcc = nvcc_at(facts, use.nvcc)
    return (toolkit_at(facts, nvcc.top) if nvcc is not None and nvcc.top else None) or own


def target_toolkit(facts: CudaFacts) -> Toolkit | None:
    """Return the toolkit of extension builds after all fixes: the used one, or one that fits torch."""
    used, wanted = used_toolkit(facts), torch_cuda(facts)
    if used is not None and used in usable_toolkits(facts) and (not wanted or major(used.version) == major(wanted)):
        return used
    return best_toolkit(facts) or used


def compiler_at(facts: CudaFacts, path: str) -> Compiler | None:
    """Find a compiler by its path."""
    return next((compiler for compiler in facts.compilers.found if path in (compiler.path, compiler.real)), None)


def distinct_compilers(facts: CudaFacts) -> list[Compiler]:
    """List the compilers without duplicates under the same name: /bin is often /usr/bin."""
    named: dict[tuple[str, str], Compiler] = {}
    for compiler in facts.compilers.found:
        named.setdefault((compiler.real, os.path.basename(compiler.path)), compiler)
    return list(named.values())


def compiler_called(facts: CudaFacts, name: str) -> Compiler | None:
    """Find a compiler by its path or, as in some variables, by its bare name."""
    return compiler_at(facts, name) or next(
        (compiler for compiler in facts.compilers.found if os.path.basename(compiler.path) == name), None
    )


def stand_ins(facts: CudaFacts, entry: Entry) -> list[tuple[Library, Library]]:
    """Pair the libraries of an entry of LD_LIBRARY_PATH with torch's wheels' libraries of the same name."""
    own = {wheel.soname: wheel for wheel in facts.wheels}
    return [
        (library, own[library.soname])
        for library in entry.libraries
        if library.soname in own and os.path.dirname(own[library.soname].path) != os.path.dirname(library.path)
    ]


def preloaded(facts: CudaFacts) -> list[str]:
    """List the paths in LD_PRELOAD, which ld.so splits at spaces and colons."""
    return [path for path in facts.variables.get("LD_PRELOAD", "").replace(":", " ").split() if path]


def loader_path_without(facts: CudaFacts, entries: Iterable[str]) -> str:
    """Format LD_LIBRARY_PATH without some of its entries, shell-quoted.

    Other faulty entries are removed too, so that the fixes of several findings do not undo each other.
    """
    first = facts.torch is not None and facts.torch.rpath_first
    gone = set(entries)
    for entry in facts.loader_path:
        shadows = bool(stand_ins(facts, entry)) and not first
        compat = "/compat" in entry.text and facts.driver.answer.cuda_status in (803, 804)
        if not entry.text or not entry.exists or entry.stubs or shadows or compat:
            gone.add(entry.text)
    return shlex.quote(":".join(dict.fromkeys(entry.text for entry in facts.loader_path if entry.text not in gone)))


def allowed_pair(facts: CudaFacts, newest: int, oldest: int = 6) -> tuple[Compiler, Compiler] | None:
    """Find the newest allowed gcc (major versions) with its g++ installed."""
    by_name = {compiler.path: compiler for compiler in facts.compilers.found}
    pairs = []
    for compiler in facts.compilers.found:
        folder, name = os.path.split(compiler.path)
        other = by_name.get(f"{folder}/{name.replace('gcc', 'g++', 1)}")
        if compiler.family != "gcc" or not name.startswith("gcc") or other is None:
            continue
        if oldest <= compiler.major <= newest:
            pairs.append((compiler, other))
    # A numbered name is stable; a plain gcc may change at the next upgrade.
    return max(pairs, key=lambda pair: (version(pair[0].version), "-" in os.path.basename(pair[0].path)), default=None)


def use_gcc(facts: CudaFacts, newest: int | None, oldest: int = 6) -> Remedy:
    """Use the newest installed gcc of these major versions (None: any), else install one."""
    pair = allowed_pair(facts, newest or _ANY_GCC, oldest)
    if pair is not None:
        gcc, gxx = (shlex.quote(compiler.path) for compiler in pair)
        exports = (("CC", gcc), ("CXX", gxx), ("NVCC_CCBIN", gxx))
        return Remedy(text=f"use the installed gcc {pair[0].version}", exports=exports)
    known = [number for number in facts.compilers.installable if oldest <= number <= (newest or _ANY_GCC)]
    wanted = max(known, default=newest or 0)
    apt = f"gcc-{wanted} g++-{wanted}" if wanted else ""
    name = f"gcc {wanted}" if wanted else f"gcc {oldest} or newer,"
    is_unsure = apt and not known and facts.building.package_tool == "apt-get"
    where = f" (apt-get install {apt}, where the distribution has it)" if is_unsure else ""
    return Remedy(
        text=f"install {name} with its g++{where}, then set CC and CXX to them",
        commands=install_system(facts, apt=apt if known else "", dnf="gcc gcc-c++", zypper="gcc gcc-c++"),
    )


def newest_host_gcc(facts: CudaFacts, toolkit: Toolkit) -> int | None:
    """Return the newest gcc (major) accepted by a toolkit's header, within torch's bounds for it."""
    limit = toolkit.limit.gcc_max if toolkit.limit is not None else None
    bounds = facts.torch.gcc.get(minor(toolkit.version)) if facts.torch is not None else None
    if bounds is None:
        return limit
    below = bounds.below[0] - 1 if not any(bounds.below[1:]) else bounds.below[0]
    return below if limit is None else min(limit, below)


def as_code(arch: str) -> str:
    """Format nvcc's "90a" as 9.0a."""
    try:
        return from_nvcc(arch).torch
    except ValueError:
        return arch
