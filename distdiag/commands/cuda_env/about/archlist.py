"""TORCH_CUDA_ARCH_LIST: does torch read it, does nvcc compile it, does it fit the GPUs."""

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
from distdiag.commands.cuda_env.types import BUILD, Problem, Section
from distdiag.knowledge.cuda import compiles, major, minor, tables, version
from distdiag.report import Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.toolkits import Toolkit

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
        problems = [problem for problem in (_nvcc(facts, text, read, gpus), _gpus(facts, text, read, gpus)) if problem]
    return Section(name="Arch list", line=f"{_NAME}={text}", problems=tuple(problems))


def _unset(facts: CudaFacts, gpus: Sequence[Arch], text: str) -> Section:
    shown = f"{_NAME}={text}" if text else f"{_NAME} is not set"
    if gpus:
        kinds = as_list(gpus)
        if len(set(gpus)) > 1 and facts.meant:
            return Section(name="Arch list", line=shown, problems=(_not_asked(shown, kinds),))
        targets = [Arch(gpu.major, gpu.minor) for gpu in gpus]
        if refused := [arch for arch in targets if _is_compiled(facts, arch.nvcc) is False]:
            what = f"{shown}, so torch targets the architecture of the GPUs"
            return Section(name="Arch list", line=shown, problems=(_refused(facts, refused, [], gpus, what),))
        if len(set(gpus)) > 1:
            return Section(
                name="Arch list", line=f"{shown}: torch builds for the local GPUs; for all GPUs here: {kinds}"
            )
        if facts.meant:
            return Section(name="Arch list", line=shown, problems=(_not_asked(shown, kinds),))
        return Section(name="Arch list", line=f"{shown}: torch would build for {kinds}")
    if not fixes.usable_toolkits(facts):
        return Section(name="Arch list", line=shown, skipped="no toolkit and no GPU")
    if facts.driver.answer.stuck or facts.driver.answer.unasked:
        return Section(name="Arch list", line=shown, skipped="the driver did not respond: the GPUs are unknown")
    wanted = recommended(facts)
    count = len(wanted.split(";")) if wanted else 0
    problem = Problem(
        id="archlist.unset-nogpu",
        goals=BUILD,
        level=Level.WARN,
        title=f"{shown}, and no GPU is visible to take the architecture from",
        cause="A build with torch then fails: IndexError: list index out of range.",
        breaks="building CUDA extensions on this machine; running is fine",
        fix="if the GPUs are elsewhere, name them: distdiag cuda-env --goal build --gpu H100"
        + (f". Or build for all {count} architectures of this torch, in about {count} times the time" if count else ""),
        exports=((_NAME, f'"{wanted}"'),) if wanted else (),
    )
    return Section(name="Arch list", line=f"{shown}, no GPU visible", problems=(problem,))


def _not_asked(shown: str, kinds: str) -> Problem:
    """Return the list for GPUs that are not here: torch builds for those that are, or for none."""
    return Problem(
        id="archlist.unset-nogpu",
        goals=BUILD,
        level=Level.WARN,
        title=f"{shown}: a build here would not target the requested GPUs ({kinds})",
        breaks="running this build on those GPUs; running programs here is fine",
        fix=f"set {_NAME}",
        exports=((_NAME, f'"{kinds}"'),),
    )


def recommended(facts: CudaFacts) -> str:
    """Format a list for machines without a GPU: what torch's own build is for and the toolkit compiles.

    Not what is inside torch's library: some of its kernels have code for more architectures than all of them have.
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
    return Problem(
        id="archlist.syntax",
        goals=BUILD,
        level=Level.FAIL,
        title=f"torch rejects {shown} in {_NAME}={text!r}",
        cause='Separate entries by ";" or one space; valid entries are 8.0, 9.0a, 8.6+PTX or a name such as Ampere.',
        breaks='building CUDA extensions ("Unknown CUDA arch"); running is fine',
        fix="use the syntax that torch accepts",
        exports=((_NAME, f'"{better}"'),) if better else (),
    )


def _nvcc(facts: CudaFacts, text: str, read: ArchList, gpus: Sequence[Arch]) -> Problem | None:
    refused = [arch for arch, _ in read.wanted if _is_compiled(facts, arch.nvcc) is False]
    if not refused:
        return None
    kept = [f"{arch.torch}{'+PTX' if ptx else ''}" for arch, ptx in read.wanted if arch not in refused]
    return _refused(facts, refused, kept, gpus, f"{_NAME}={text} requests it")


def _refused(facts: CudaFacts, refused: Sequence[Arch], kept: Sequence[str], gpus: Sequence[Arch], why: str) -> Problem:
    toolkit, archs = fixes.target_toolkit(facts), _nvcc_archs(facts)
    names = ", ".join(arch.torch for arch in refused)
    return Problem(
        id="archlist.nvcc",
        goals=BUILD,
        level=Level.FAIL,
        title=f"nvcc {toolkit.version if toolkit is not None else '?'} cannot compile for {names}; {why}",
        cause="torch accepts the name; nvcc fails: Unsupported gpu architecture.",
        breaks="building CUDA extensions; running is fine",
        evidence=(f"nvcc --list-gpu-arch: {' '.join(archs)}",) if archs else (),
        **_remedy(facts, refused, kept, gpus),  # type: ignore[arg-type]
    )


def _remedy(facts: CudaFacts, refused: Sequence[Arch], kept: Sequence[str], gpus: Sequence[Arch]) -> dict[str, object]:
    """Leave out what no GPU here needs; else another toolkit, older code that runs on the GPUs too, or an install."""
    read = read_list(";".join(kept), (), {}) if kept else None
    names = ", ".join(arch.torch for arch in refused)
    if read is not None and all(how_it_runs(read.cubins, read.ptx, gpu) for gpu in gpus):
        return {"fix": f"remove {names} from the list", "exports": ((_NAME, f'"{";".join(kept)}"'),)}
    for other in _other_toolkits(facts):
        if all(compiles(arch.nvcc, other.version) for arch in refused):
            fix = f"use the toolkit in {other.root} ({other.version}), which supports it"
            return {"fix": fix, "exports": fixes.choose_toolkit(facts, other)}
    older = _older_code(facts, gpus)
    if older:
        wanted = ";".join(dict.fromkeys([*kept, *older]))
        ptx = ", which the driver compiles at first use" if any("PTX" in arch for arch in older) else ""
        return {
            "fix": f"build for {' and '.join(older)}, which runs there too{ptx}; or use a toolkit that "
            f"supports {names}",
            "exports": ((_NAME, f'"{wanted}"'),),
        }
    first = max((tables().nvcc.get(arch.nvcc, ("", ""))[0] for arch in refused), key=version, default="")
    newer = f"use a toolkit that supports {names}" + (f": {first} or newer" if first else "")
    if not gpus and (better := recommended(facts)):
        return {"fix": f"list only supported architectures; or {newer}", "exports": ((_NAME, f'"{better}"'),)}
    name = f"cuda-toolkit-{first.replace('.', '-')}" if first else ""
    return {"fix": newer, "commands": fixes.install_system(facts, apt=name, dnf=name, zypper=name) if name else ()}


def _other_toolkits(facts: CudaFacts) -> list[Toolkit]:
    """List the other toolkits here that torch accepts, the newest first."""
    used, wanted = fixes.target_toolkit(facts), fixes.torch_cuda(facts)
    fitting = [
        toolkit for toolkit in fixes.usable_toolkits(facts) if not wanted or major(toolkit.version) == major(wanted)
    ]
    others = [toolkit for toolkit in fitting if used is None or toolkit.real != used.real]
    return sorted(others, key=lambda toolkit: version(toolkit.version), reverse=True)


def _older_code(facts: CudaFacts, gpus: Sequence[Arch]) -> list[str]:
    """Write, for each GPU, the newest that nvcc compiles and that runs there; empty if one of them can have none."""
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
    """Report for which GPUs nothing, or only PTX, would be built."""
    how = {gpu: how_it_runs(read.cubins, read.ptx, gpu) for gpu in gpus}
    missing = [gpu for gpu, way in how.items() if not way]
    compiled = [gpu for gpu, way in how.items() if way == "ptx"]
    if not missing and not compiled:
        return None
    more = missing or compiled
    names = ", ".join(gpu.torch for gpu in more)
    refused = [gpu for gpu in more if _is_compiled(facts, gpu.nvcc) is False]
    if refused and not missing:
        return None  # this nvcc makes nothing better
    return Problem(
        id="archlist.gpus",
        goals=BUILD,
        level=Level.FAIL if missing else Level.WARN,
        title=f"{_NAME}={text} builds no code that runs on GPU architecture {names}"
        if missing
        else f"{_NAME}={text} builds only PTX for GPU architecture {names}: the driver compiles it at first use",
        breaks='running this build on them ("no kernel image is available")' if missing else "",
        **_remedy(facts, refused, _kept(read), gpus)
        if refused
        else {"fix": f"add {names} to {_NAME}", "exports": ((_NAME, f'"{_with(read, more)}"'),)},
    )


def _kept(read: ArchList) -> list[str]:
    return [f"{arch.torch}{'+PTX' if ptx else ''}" for arch, ptx in read.wanted]


def _with(read: ArchList, more: Iterable[Arch]) -> str:
    kept = dict(read.wanted)
    kept.update((gpu, kept.get(gpu, False)) for gpu in more)
    return ";".join(f"{arch.torch}{'+PTX' if ptx else ''}" for arch, ptx in sorted(kept.items()))
