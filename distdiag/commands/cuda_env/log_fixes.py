"""Fixes of known failures in a log, with the examined machine's compilers, toolkits and GPUs. Pure.

The commands in `knowledge/lines/builds.toml` assume usual paths and tools; only those valid on this machine are
printed.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.archs import as_list, from_nvcc
from distdiag.commands.cuda_env.sections import after, sections_of
from distdiag.commands.cuda_env.types import Goal, Remedy
from distdiag.knowledge.cuda import major, version
from distdiag.report import Fix, Level

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from distdiag.commands.cuda_env.archs import Arch
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.toolkits import Toolkit
    from distdiag.knowledge.logs import Match

_OLDEST = 6
_TOO_NEW = "gcc-too-new-for-nvcc"
OF_THE_LOG = (_TOO_NEW, "gcc-headers-unreadable", "cxx-too-new-for-torch", "cxx-too-old-for-torch")
"""The log's compiler limits take precedence over this machine's."""
_ANY_GCC = (
    *("cxx-missing-for-torch", "cxx-missing", "cc1plus-missing", "host-compiler-missing"),
    *("clang-too-new-for-nvcc", "host-compiler-unsupported"),
)
_TOOLKIT = re.compile(r"/usr/local/cuda(?:-(\d+\.\d+))?(?![\w.*-])")
_ARCH_LIST = re.compile(r"(TORCH_CUDA_ARCH_LIST=)'[\d.;]+'")
_ABSOLUTE = re.compile(r"(?<![\w.$}:/~-])/[\w./+-]++(?![*?$])")
_INNER = re.compile(r"\$\(.*\)|'[^']*'")
"""Arguments of other programs, with no paths of this machine."""
_PIP = re.compile(r"(?<![\w/.-])(?:python3? -m )?pip install")
_PYTHON = re.compile(r"(?<![\w/.-])python3? (?=-)")
_EXPORT = re.compile(r"^export ((?:\w+=\S+ ?)+)$")
_SHELL = ("export", "unset", "echo", "distdiag")
_EXPLORES = re.compile(r"^ls .*(?:/usr/local/cuda\S*|/usr/bin/\S*(?:g\+\+|gcc)\S*)$")
"""Commands that search for toolkits and compilers; dropped if these are known."""


def compiler_fix(match: Match, facts: CudaFacts) -> tuple[str, Fix] | None:
    """Return this machine's compilers and the fix, for a failure of the host compiler; None for any other failure."""
    if match.known.id in _ANY_GCC:
        toolkit = fixes.target_toolkit(facts)
        bounds = _OLDEST, fixes.newest_host_gcc(facts, toolkit) if toolkit is not None else None
    elif match.known.id in OF_THE_LOG and (said := _bounds(match, facts)) is not None:
        bounds = said
    else:
        return None
    oldest, newest = bounds
    here, remedy = f"on this machine: {_gccs(facts)}", fixes.use_gcc(facts, newest, oldest)
    if remedy.exports:
        remedy = replace(remedy, exports=(*remedy.exports, ("CUDAHOSTCXX", dict(remedy.exports)["CXX"])))
    elif match.known.id == _TOO_NEW and (toolkit := _accepting(facts)) is not None and toolkit.limit is not None:
        here += f"; the toolkit in {toolkit.root} ({toolkit.version}) supports gcc up to {toolkit.limit.gcc_max}"
        text = f"use the toolkit in {toolkit.root}; or {remedy.text}"
        remedy = Remedy(text=text, exports=fixes.choose_toolkit(facts, toolkit))
    return _sentence(here, _build_used(match, facts)), Fix(text=remedy.text, commands=remedy.to_paste)


def _sentence(*lines: str) -> str:
    return "\n".join(filter(None, reversed(lines)))


def _bounds(match: Match, facts: CudaFacts) -> tuple[int, int | None] | None:
    """Return the oldest and newest gcc (major versions; None: any) allowed by a log; None if unknown."""
    said = match.groups
    if match.known.id == _TOO_NEW:
        return _OLDEST, major(said["max"]) if "max" in said else major(said.get("from", "")) - 1
    if match.known.id == "cxx-too-old-for-torch":
        toolkit = fixes.target_toolkit(facts)
        return major(said["minimum"]), fixes.newest_host_gcc(facts, toolkit) if toolkit is not None else None
    if match.known.id == "gcc-headers-unreadable":
        of_gcc = re.search(r"/(?:c\+\+|gcc/[^/]+)/(\d+)", match.file)
        return (_OLDEST, int(of_gcc[1]) - 1) if of_gcc else None
    below = re.search(r"<(=?) ?(\d+)((?:\.\d+)*)", said.get("range", ""))
    if below is None:
        return None
    whole = not below[1] and not any(version(below[3]))
    least = re.search(r">=? ?(\d+)", said["range"])
    return int(least[1]) if least else _OLDEST, int(below[2]) - whole


def _gccs(facts: CudaFacts) -> str:
    found = {compiler.version for compiler in facts.compilers.found if compiler.family == "gcc" and compiler.version}
    names = sorted(found, key=version)
    return f"gcc {', '.join(names)}" + (" only" if len(names) == 1 else "") if names else "no gcc"


def _build_used(match: Match, facts: CudaFacts) -> str:
    """Describe the toolkit whose header refused the compiler, and whether it is on this machine."""
    root = toolkit_of(match.file)
    if match.known.id != _TOO_NEW or not root:
        return ""
    there = fixes.toolkit_at(facts, root) if root.startswith("/") else None
    return f"the build used the toolkit in {root}" + ("" if there else ", which was not found on this machine")


def toolkit_of(header: str) -> str:
    """Return the toolkit directory of a header, as named in the log; empty if it is in none."""
    found = re.fullmatch(r"(.+?)(?:/targets/[^/]+)?/include/(?:crt/)?[\w.]+", header)
    if found is None:
        return ""
    root = os.path.normpath(found[1])
    return root if root.startswith(("/", ".")) else f"./{root}"


def _accepting(facts: CudaFacts) -> Toolkit | None:
    """Return the toolkit for torch if it accepts a gcc installed here, and choosing it fails no check."""
    toolkit = fixes.best_toolkit(facts)
    if toolkit is None or toolkit.limit is None or toolkit.limit.gcc_max is None:
        return None
    pair = fixes.allowed_pair(facts, toolkit.limit.gcc_max)
    return toolkit if pair is not None and _holds(facts, fixes.choose_toolkit(facts, toolkit)) else None


def _holds(facts: CudaFacts, exports: Iterable[tuple[str, str]]) -> bool:
    """Return whether the checks of toolkits and compilers pass with these variables set."""
    problems = (
        problem for section in sections_of(after(facts, exports, ()), Goal.BUILD) for problem in section.problems
    )
    return not any(problem.level is Level.FAIL and problem.id.startswith(("cc.", "toolkit.")) for problem in problems)


def fitted(commands: Sequence[str], facts: CudaFacts | None, archs: Sequence[Arch]) -> tuple[str, ...]:
    """Keep the commands that apply, rewritten for the GPUs to build for and, if facts are known, for this machine."""
    found = [_for_gpus(command, archs) for command in commands]
    if facts is None:
        return tuple(command for command in found if archs or not _ARCH_LIST.search(command))
    fitting = (_on_machine(command, facts, archs) for command in found if not _EXPLORES.match(command))
    return tuple(command for command in dict.fromkeys(fitting) if command)


def _for_gpus(command: str, archs: Sequence[Arch]) -> str:
    if not archs:
        return command
    command = _ARCH_LIST.sub(rf'\g<1>"{as_list(archs)}"', command)
    numbers = ";".join(dict.fromkeys(f"{arch.major}{arch.minor}" for arch in archs))
    return re.sub(r"(CMAKE_CUDA_ARCHITECTURES=)\d+", rf'\g<1>"{numbers}"', command)


def _on_machine(command: str, facts: CudaFacts, archs: Sequence[Arch]) -> str:
    """Rewrite a command for this machine; empty if it lacks a requirement, or the command changes nothing."""
    if _ARCH_LIST.search(command) and not archs:
        return ""
    for rewrite in (_python, _torch_wheel, _system_package, _toolkits):
        command = rewrite(command, facts)
    if not command or not _can_run(command, facts):
        return ""
    if command.startswith("unset ") and not set(command.split()[1:]) & facts.variables.keys():
        return ""
    if facts.building.root:
        command = command.removeprefix("sudo ")
    gone = command.startswith("rm -rf ~") and not os.path.exists(os.path.expanduser(command.split()[-1]))
    is_there = not gone and all(os.path.exists(path) for path in _ABSOLUTE.findall(_INNER.sub("", command)))
    return command if is_there and not _names_absent_compiler(command, facts) and _changes(command, facts) else ""


def _torch_wheel(command: str, facts: CudaFacts) -> str:
    """Replace an install of torch by the build that fits this machine; empty if that is already installed."""
    if re.search(r"pip install .*\btorchvision\b", command):
        return fixes.beside_torch(facts, "torchvision") if facts.torch is not None else command
    if not re.search(r"pip install .*\btorch --index-url", command):
        return command
    (again, *_) = fixes.install_torch(facts) or ("",)
    is_there = facts.torch is not None and f" torch=={facts.torch.version} " in again
    return "" if is_there else again


def _system_package(command: str, facts: CudaFacts) -> str:
    found = re.fullmatch(r"sudo apt-get install (\S+)", command)
    if found is None:
        return command
    return next(iter(fixes.install_system(facts, apt=found[1], dnf=found[1].replace("-dev", "-devel"))), "")


def _python(command: str, facts: CudaFacts) -> str:
    own = fixes.pip(facts)
    command = _PIP.sub(lambda _: own, command)
    return _PYTHON.sub(lambda _: f"{fixes.python(facts)} ", command)


def _toolkits(command: str, facts: CudaFacts) -> str:
    """Replace /usr/local/cuda by this machine's toolkit; empty if none has that version."""
    absent = False

    def root(named: re.Match[str]) -> str:
        nonlocal absent
        fitting = fixes.toolkits_for(facts, named[1] or fixes.torch_cuda(facts))
        toolkit = fitting[0] if fitting else None
        absent = absent or toolkit is None
        return toolkit.root if toolkit is not None else named[0]

    if "CUDA_HOME" not in facts.variables:
        command = re.sub(r"\$CUDA_HOME\b(?!=)", "/usr/local/cuda", command)
    command = _TOOLKIT.sub(root, command)
    return "" if absent else command


def _can_run(command: str, facts: CudaFacts) -> bool:
    words = [word for word in command.split() if not re.match(r"\w+=", word) and word != "sudo"]
    program = words[0] if words else ""
    if program == "conda":
        return bool(facts.variables.get("CONDA_PREFIX"))
    return program in _SHELL or shutil.which(program) is not None


def _names_absent_compiler(command: str, facts: CudaFacts) -> bool:
    named = re.findall(r"\b(?:CC|CXX|NVCC_CCBIN|CUDAHOSTCXX)=(\S+)", command)
    return any(fixes.compiler_called(facts, name) is None for name in named)


def _changes(command: str, facts: CudaFacts) -> bool:
    found = _EXPORT.match(command)
    if found is None:
        return True
    pairs = [pair.partition("=")[::2] for pair in found[1].split()]
    path = facts.variables.get("PATH", "")
    return any(
        not path.startswith(value.removesuffix("$PATH")) if name == "PATH" else facts.variables.get(name) != value
        for name, value in pairs
    )


def archs_of(capabilities: Sequence[str], nodes: Sequence[CudaFacts]) -> list[Arch]:
    """Return the requested architectures, else those of the GPUs here."""
    if capabilities:
        return sorted({from_nvcc(capability.replace(".", "")) for capability in capabilities})
    return sorted({arch for facts in nodes for arch in fixes.gpu_archs(facts)})
