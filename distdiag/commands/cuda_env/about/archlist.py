"""TORCH_CUDA_ARCH_LIST: valid for torch, supported by nvcc, and right for the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.archs import (
    Arch,
    ArchList,
    as_list,
    corrected,
    cubin_runs,
    from_nvcc,
    how_it_runs,
    ptx_runs,
    read_list,
)
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.knowledge.cuda import compiles, minor, tables, version

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.cuda_env.collect import CudaFacts

_NAME = "TORCH_CUDA_ARCH_LIST"


def about_arch_list(facts: CudaFacts, everywhere: Sequence[Arch] = ()) -> Section:
    """Judge the list; `everywhere`: the GPUs of all nodes, which one build must serve."""
    text = facts.variables.get(_NAME, "")
    gpus = list(everywhere) or fixes.gpu_archs(facts)
    if not text or text == "native":
        return _unset(facts, gpus, text)
    known = facts.torch.known_archs if facts.torch is not None else ()
    named = facts.torch.named_archs if facts.torch is not None else {}
    read = read_list(text, known, named)
    if read.wrong:
        problems = [_syntax(facts, text, read, gpus)]
    else:
        checks = (_nvcc(facts, text, read, gpus), _gpus(facts, text, read, gpus))
        problems = [found for found in checks if found]
    return Section(name="Arch list", line=f"{_NAME}={text}", problems=tuple(problems))


def _unset(facts: CudaFacts, gpus: Sequence[Arch], text: str) -> Section:
    shown = f"{_NAME}={text}" if text else f"{_NAME} is not set"
    if gpus:
        return _for_gpus_here(facts, gpus, shown)
    if not fixes.usable_toolkits(facts):
        return Section(name="Arch list", line=shown, skipped="no toolkit and no GPU")
    if facts.driver.answer.stuck or facts.driver.answer.unasked:
        return Section(name="Arch list", line=shown, skipped="the driver did not respond: the GPUs are unknown")
    wanted = recommended(facts)
    count = len(wanted.split(";")) if wanted else ""
    found = problem("archlist.unset-nogpu", shown=shown, count=count, remedy=_set_to(wanted))
    return Section(name="Arch list", line=f"{shown}, no GPU visible", problems=(found,))


def _for_gpus_here(facts: CudaFacts, gpus: Sequence[Arch], shown: str) -> Section:
    """Judge torch's default without a list: the local GPUs, not others given by --gpu."""
    kinds, several = as_list(gpus), len(set(gpus)) > 1
    refused = [arch for arch in (Arch(gpu.major, gpu.minor) for gpu in gpus) if _is_compiled(facts, arch.nvcc) is False]
    found: tuple[Problem, ...] = ()
    line = shown
    if refused and not (several and facts.meant):
        what = f"{shown}, so torch targets the architecture of the GPUs"
        found = (_refused(facts, refused, [], gpus, what),)
    elif facts.meant:
        found = (problem("archlist.not-asked", shown=shown, kinds=kinds, remedy=_set_to(kinds)),)
    elif several:
        line = f"{shown}: torch builds for the local GPUs; for all GPUs here: {kinds}"
    else:
        line = f"{shown}: torch would build for {kinds}"
    return Section(name="Arch list", line=line, problems=found)


def _set_to(archs: str, text: str = "") -> Remedy:
    return Remedy(text=text, exports=((_NAME, f'"{archs}"'),) if archs else ())


def recommended(facts: CudaFacts) -> str:
    """Format a list for machines without a GPU: the architectures of torch's build that the toolkit compiles.

    Not those found in torch's library: some of its kernels have code for more architectures than the rest.
    """
    torch, used = facts.torch, fixes.target_toolkit(facts)
    if torch is None:
        return ""
    builds = fixes.builds_of(facts)
    cuda = minor(torch.cuda) or (minor(used.version) if used is not None else "")
    own = builds.get(cuda) or builds.get(fixes.best_build(facts, builds), ())
    return ";".join(from_nvcc(str(code)).torch for code in own if _is_compiled(facts, str(code)) is not False)


def _is_compiled(facts: CudaFacts, arch: str) -> bool | None:
    """Return whether nvcc compiles for an architecture: its own list, else our table; None if unknown."""
    archs = _nvcc_archs(facts)
    if archs:
        return arch in archs or arch.rstrip("af") in archs
    toolkit = fixes.target_toolkit(facts)
    return compiles(arch, toolkit.version) if toolkit is not None and toolkit.version else None


def _nvcc_archs(facts: CudaFacts) -> tuple[str, ...]:
    toolkit = fixes.target_toolkit(facts)
    own = (nvcc.archs for nvcc in facts.nvccs if toolkit is not None and nvcc.top == toolkit.real and nvcc.archs)
    return next(own, ())


def _syntax(facts: CudaFacts, text: str, read: ArchList, gpus: Sequence[Arch]) -> Problem:
    known = facts.torch.known_archs if facts.torch is not None else ()
    better = corrected(text, known) or as_list(gpus) or recommended(facts)
    shown = ", ".join(repr(word) for word in read.wrong[:4])
    return problem("archlist.syntax", rejected=shown, text=repr(text), remedy=_set_to(better))


def _nvcc(facts: CudaFacts, text: str, read: ArchList, gpus: Sequence[Arch]) -> Problem | None:
    refused = [arch for arch, _ in read.wanted if _is_compiled(facts, arch.nvcc) is False]
    if not refused:
        return None
    kept = [_named(arch, ptx=ptx) for arch, ptx in read.wanted if arch not in refused]
    return _refused(facts, refused, kept, gpus, f"{_NAME}={text} requests it")


def _named(arch: Arch, *, ptx: bool) -> str:
    return f"{arch.torch}+PTX" if ptx else arch.torch


def _refused(facts: CudaFacts, refused: Sequence[Arch], kept: Sequence[str], gpus: Sequence[Arch], why: str) -> Problem:
    toolkit, archs = fixes.target_toolkit(facts), _nvcc_archs(facts)
    return problem(
        "archlist.nvcc",
        version=toolkit.version if toolkit is not None else "",
        archs=", ".join(arch.torch for arch in refused),
        why=why,
        evidence=(f"nvcc --list-gpu-arch: {' '.join(archs)}",) if archs else (),
        remedy=_remedy(facts, refused, kept, gpus),
    )


def _remedy(facts: CudaFacts, refused: Sequence[Arch], kept: Sequence[str], gpus: Sequence[Arch]) -> Remedy:
    """Remove architectures unused here; else suggest another toolkit, older code that also runs, or an install."""
    read = read_list(";".join(kept), (), {}) if kept else None
    names = ", ".join(arch.torch for arch in refused)
    if read is not None and all(how_it_runs(read.cubins, read.ptx, gpu) for gpu in gpus):
        return _set_to(";".join(kept), f"remove {names} from the list")
    used = fixes.target_toolkit(facts)
    for other in fixes.toolkits_for(facts, fixes.torch_cuda(facts)):
        if other is not used and all(compiles(arch.nvcc, other.version) for arch in refused):
            text = f"use the toolkit in {other.root} ({other.version}), which supports it"
            return Remedy(text=text, exports=fixes.choose_toolkit(facts, other))
    older = _older_code(facts, gpus)
    if older:
        ptx = " (the driver compiles PTX at first use)" if any("PTX" in arch for arch in older) else ""
        text = f"build for {' and '.join(older)}, which also runs there{ptx}; or use a toolkit that supports {names}"
        return _set_to(";".join(dict.fromkeys([*kept, *older])), text)
    first = max((tables().nvcc.get(arch.nvcc, ("", ""))[0] for arch in refused), key=version, default="")
    newer = f"use a toolkit that supports {names}" + (f": {first} or newer" if first else "")
    if not gpus and (better := recommended(facts)):
        return _set_to(better, f"list only supported architectures; or {newer}")
    return Remedy(text=newer, commands=fixes.install_toolkit(facts, first) if first else ())


def _older_code(facts: CudaFacts, gpus: Sequence[Arch]) -> list[str]:
    """List the newest code per GPU that nvcc compiles and that runs there; empty if any GPU has none."""
    known = [from_nvcc(code) for code in (_nvcc_archs(facts) or tables().nvcc) if code.isdigit()]
    known = [arch for arch in known if _is_compiled(facts, arch.nvcc)]
    found = []
    for gpu in gpus:
        cubin = max((arch for arch in known if cubin_runs(arch, gpu)), default=None)
        ptx = max((arch for arch in known if ptx_runs(arch, gpu)), default=None)
        if cubin is None and ptx is None:
            return []
        found.append(cubin.torch if cubin is not None else f"{ptx.torch}+PTX" if ptx is not None else "")
    return found


def _gpus(facts: CudaFacts, text: str, read: ArchList, gpus: Sequence[Arch]) -> Problem | None:
    """Report GPUs for which no code, or only PTX, would be built."""
    how = {gpu: how_it_runs(read.cubins, read.ptx, gpu) for gpu in gpus}
    missing = [gpu for gpu, way in how.items() if not way]
    compiled = [gpu for gpu, way in how.items() if way == "ptx"]
    if not missing and not compiled:
        return None
    more = missing or compiled
    names = ", ".join(gpu.torch for gpu in more)
    refused = [gpu for gpu in more if _is_compiled(facts, gpu.nvcc) is False]
    if refused and not missing:
        return None  # this nvcc cannot build better code
    remedy = _set_to(_with(read, more), f"add {names} to {_NAME}")
    if refused:
        remedy = _remedy(facts, refused, [_named(arch, ptx=ptx) for arch, ptx in read.wanted], gpus)
    return problem("archlist.gpus" if missing else "archlist.gpus-ptx", text=text, archs=names, remedy=remedy)


def _with(read: ArchList, more: Iterable[Arch]) -> str:
    kept = dict(read.wanted)
    kept.update((gpu, kept.get(gpu, False)) for gpu in more)
    return ";".join(_named(arch, ptx=ptx) for arch, ptx in sorted(kept.items()))
