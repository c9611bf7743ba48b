"""TORCH_CUDA_ARCH_LIST: does torch read it, does nvcc compile it, does it fit the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.archs import Arch, ArchList, as_list, corrected, from_nvcc, how_it_runs, read_list
from distdiag.commands.cuda_env.model import BUILD, Problem, Section
from distdiag.knowledge.cuda import compiles, minor
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.cuda_env.collect import CudaFacts

_NAME = "TORCH_CUDA_ARCH_LIST"


def about_arch_list(facts: CudaFacts, everywhere: Sequence[Arch] = ()) -> Section:
    """Judge the list; `everywhere` are the GPUs of all nodes, which one build must serve."""
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
        problems = [one for one in (_nvcc(facts, text, read), _gpus(facts, text, read, gpus)) if one]
    return Section(name="Arch list", line=f"{_NAME}={text}", problems=tuple(problems))


def _unset(facts: CudaFacts, gpus: Sequence[Arch], text: str) -> Section:
    shown = f"{_NAME}={text}" if text else f"{_NAME} is not set"
    if gpus:
        kinds = as_list(gpus)
        if len(set(gpus)) > 1:
            return Section(
                name="Arch list", line=f"{shown}: this node builds for its own GPUs; for all kinds here: {kinds}"
            )
        return Section(name="Arch list", line=f"{shown}: {kinds} would be built")
    if not fixes.usable_toolkits(facts):
        return Section(name="Arch list", line=shown, skipped="no toolkit, no GPU")
    wanted = recommended(facts)
    problem = Problem(
        id="archlist.unset-nogpu",
        goals=BUILD,
        level=Level.WARN,
        title=f"{shown}, and no GPU is here to take it from",
        cause="torch asks the GPUs for their architecture; without one it fails: IndexError: list index out of range.",
        breaks="building CUDA extensions on this machine; running is fine",
        fix="name the GPUs that it is built for (this is for all that torch itself serves)",
        exports=((_NAME, f'"{wanted}"'),) if wanted else (),
    )
    return Section(name="Arch list", line=f"{shown}, no GPU", problems=(problem,))


def recommended(facts: CudaFacts) -> str:
    """Write a list for machines without a GPU: what torch's own build is for and the toolkit compiles.

    Not what is inside torch's library: some of its kernels have code for more architectures than all of them have.
    """
    torch, used = facts.torch, fixes.target_toolkit(facts)
    if torch is None:
        return ""
    builds = fixes.builds_of(facts)
    cuda = minor(torch.cuda) or (minor(used.version) if used is not None else "")
    own = builds.get(cuda) or builds.get(fixes.best_build(facts, builds), ())
    return ";".join(from_nvcc(str(one)).torch for one in own if _is_compiled(facts, str(one)) is not False)


def _is_compiled(facts: CudaFacts, arch: str) -> bool | None:
    """Tell whether nvcc compiles for an architecture: its own list, else our table; None if unknown."""
    archs = _nvcc_archs(facts)
    if archs:
        return arch in archs or arch.rstrip("af") in archs
    toolkit = fixes.target_toolkit(facts)
    return compiles(arch, toolkit.version) if toolkit is not None and toolkit.version else None


def _nvcc_archs(facts: CudaFacts) -> tuple[str, ...]:
    toolkit = fixes.target_toolkit(facts)
    own = (one.archs for one in facts.nvccs if toolkit is not None and one.top == toolkit.real and one.archs)
    return next(own, ())


def _syntax(facts: CudaFacts, text: str, read: ArchList, gpus: Sequence[Arch]) -> Problem:
    known = facts.torch.known_archs if facts.torch is not None else ()
    better = corrected(text, known) or as_list(gpus) or recommended(facts)
    shown = ", ".join(repr(one) for one in read.wrong[:4])
    return Problem(
        id="archlist.syntax",
        goals=BUILD,
        level=Level.FAIL,
        title=f"torch does not understand {shown} in {_NAME}={text!r}",
        cause='It splits at ";" or single spaces, and takes 8.0, 9.0a, 8.6+PTX or a name such as Ampere.',
        breaks='building CUDA extensions ("Unknown CUDA arch"); running is fine',
        fix="write it as torch reads it",
        exports=((_NAME, f'"{better}"'),) if better else (),
    )


def _nvcc(facts: CudaFacts, text: str, read: ArchList) -> Problem | None:
    refused = [arch for arch, _ in read.wanted if _is_compiled(facts, arch.nvcc) is False]
    if not refused:
        return None
    kept = [f"{arch.torch}{'+PTX' if ptx else ''}" for arch, ptx in read.wanted if arch not in refused]
    toolkit = fixes.target_toolkit(facts)
    number = toolkit.version if toolkit is not None else "?"
    archs = _nvcc_archs(facts)
    names = ", ".join(arch.torch for arch in refused)
    better = ";".join(kept) or as_list(fixes.gpu_archs(facts)) or recommended(facts)
    fix = f"leave {names} out" if kept else "name what it does compile for, or take a toolkit that compiles for it"
    return Problem(
        id="archlist.nvcc",
        goals=BUILD,
        level=Level.FAIL,
        title=f"nvcc {number} does not compile for {names}, which {_NAME}={text} asks for",
        cause="torch takes the name; nvcc says: Unsupported gpu architecture.",
        breaks="building CUDA extensions; running is fine",
        evidence=(f"nvcc --list-gpu-arch: {' '.join(archs)}",) if archs else (),
        fix=fix,
        exports=((_NAME, f'"{better}"'),) if better else (),
    )


def _gpus(facts: CudaFacts, text: str, read: ArchList, gpus: Sequence[Arch]) -> Problem | None:
    """Say for which GPUs nothing, or only PTX, would be built."""
    how = {gpu: how_it_runs(read.cubins, read.ptx, gpu) for gpu in gpus}
    missing = [gpu for gpu, way in how.items() if not way]
    compiled = [gpu for gpu, way in how.items() if way == "ptx"]
    if not missing and not compiled:
        return None
    better = _with(read, missing or compiled)
    names = ", ".join(gpu.torch for gpu in missing or compiled)
    return Problem(
        id="archlist.gpus",
        goals=BUILD,
        level=Level.FAIL if missing else Level.WARN,
        title=f"{_NAME}={text} builds nothing that runs on the GPUs of {names}"
        if missing
        else f"{_NAME}={text} builds only PTX for the GPUs of {names}: the driver compiles it at each first start",
        breaks='what is built fails on them: "no kernel image is available"' if missing else "",
        fix="add them",
        exports=((_NAME, f'"{better}"'),),
    )


def _with(read: ArchList, more: Iterable[Arch]) -> str:
    kept = dict(read.wanted)
    kept.update((gpu, kept.get(gpu, False)) for gpu in more)
    return ";".join(f"{arch.torch}{'+PTX' if ptx else ''}" for arch, ptx in sorted(kept.items()))
