"""The CUDA toolkits: which builds use which, complete, compatible with torch, and consistent."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.problems import problem
from distdiag.commands.cuda_env.types import Problem, Remedy, Section
from distdiag.knowledge.cuda import major, minor, version
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.toolkits import Toolkit

_NOT_BUILT = "building CUDA extensions; running is fine"
_BY_OTHERS = "builds from a shell or with CMake; torch uses another nvcc"
_SHOWN = {"nvcc": "plain nvcc"}
_NO_ROOM = re.compile(r"tmpxft|No space left|Could not open output")


def about_toolkits(facts: CudaFacts) -> Section:
    """Judge the toolkits; the first problem hides its consequences."""
    used = fixes.used_toolkit(facts)
    shown = used if used is not None and used.version and used.headers else fixes.target_toolkit(facts)
    none = "none in use" if fixes.usable_toolkits(facts) else "none"
    line = _line(facts, shown) if shown is not None and shown.version else none
    first = [found for found in (_variable(facts), _broken(facts)) if found]
    hidden = any(found.level is Level.FAIL for found in first)
    checks = (
        *(() if hidden else (_found(facts), _home(facts), _headers(facts))),
        *(_sources(facts), _with_torch(facts), _with_each_other(facts), _dev_link(facts), _gone(facts)),
    )
    problems = (*first, *(found for found in checks if found))
    return Section(name="Toolkit", line=line, problems=problems, details=tuple(_details(facts)))


def _line(facts: CudaFacts, used: Toolkit) -> str:
    homes = {name: fixes.toolkit_at(facts, home) for name, home in who_uses(facts).items()}
    users = [_SHOWN.get(name, name) for name, toolkit in homes.items() if toolkit and toolkit.real == used.real]
    by = " and ".join(filter(None, (", ".join(users[:-1]), *users[-1:])))
    return f"{used.version} ({used.root})" + (f", used by {by}" if users else "")


def _details(facts: CudaFacts) -> list[str]:
    cpu_only = facts.torch is not None and not facts.torch.cuda
    lines = []
    for name, home in who_uses(facts).items():
        none = "none: this torch is built without CUDA" if cpu_only and name != "CMake" and name != "nvcc" else "none"
        lines.append(f"{_SHOWN.get(name, name)} -> {home or none}")
    for toolkit in facts.toolkits:
        state = toolkit.version or ("does not exist" if not toolkit.exists else "not a toolkit")
        ways = [f"from {way}" for way in toolkit.found_by if way != toolkit.root]
        link = [f"-> {toolkit.real}"] if toolkit.real != toolkit.root else []
        more = ", ".join([*link, *ways])
        lines.append(f"{toolkit.root}: {state}" + (f" ({more})" if more else ""))
    return [*lines, *(f"on PATH but missing: {folder}" for folder in facts.no_path)]


def _remedy(facts: CudaFacts) -> Remedy:
    best = fixes.best_toolkit(facts)
    if best is not None:
        return Remedy(
            text=f"use the toolkit in {best.root} ({best.version})", exports=fixes.choose_toolkit(facts, best)
        )
    if facts.driver.container and "singularity" not in facts.driver.container:
        return Remedy(
            text="use the -devel variant of the image (nvidia/cuda, pytorch/pytorch): it has nvcc and headers"
        )
    wanted = fixes.torch_cuda(facts)
    source = fixes.from_repository(facts)
    return Remedy(
        text=f"install CUDA toolkit {wanted or 'in the version of your torch'}{source}",
        commands=fixes.install_toolkit(facts, wanted),
    )


def _variable(facts: CudaFacts) -> Problem | None:
    """Judge the literal value of CUDA_HOME (or CUDA_PATH): torch does not check it."""
    name = next((name for name in ("CUDA_HOME", "CUDA_PATH") if facts.variables.get(name)), "")
    value = facts.variables.get(name, "")
    wrong = _why_wrong(value) if value else ""
    toolkit = fixes.toolkit_at(facts, value) if value else None
    if value and not wrong and (toolkit is None or not toolkit.exists):
        wrong = "no such directory"
    if not wrong:
        return None
    words = {"variable": name, "value": repr(value), "wrong": wrong}
    return problem("toolkit.variable", words, evidence=_set_in(facts, name), remedy=_remedy(facts))


def _why_wrong(value: str) -> str:
    if ":" in value:
        return "it is a list, not a directory; the ':' often comes from CUDA_HOME=$CUDA_HOME:..."
    if value != value.strip():
        return "the leading or trailing white space is part of the path"
    if value[0] in "\"'" or value[-1] in "\"'":
        return "the quotes are part of the path"
    return "the ~ is not expanded here" if value.startswith("~") else ""


def _broken(facts: CudaFacts) -> Problem | None:
    """Report an nvcc that answers --version but cannot compile; only a warning if torch does not use it."""
    for use in facts.uses.values():
        nvcc = fixes.nvcc_at(facts, use.nvcc)
        if nvcc is None:
            continue
        if nvcc.complaint and _NO_ROOM.search(nvcc.complaint):
            return _no_room(facts, nvcc.complaint)
        if not fixes.is_broken(nvcc):
            continue
        used, remedy = nvcc.path == facts.uses["torch"].nvcc, _remedy(facts)
        lost = nvcc.kind == "symlink" and "cuda_runtime.h" in (nvcc.complaint or "")
        evidence = f"{nvcc.path} -x cu -E /dev/null: {nvcc.complaint}" if nvcc.complaint else f"{nvcc.path} --version"
        if lost:
            first = f"put {os.path.dirname(nvcc.real)} before it on PATH, and " if remedy.exports else ""
            remedy = replace(remedy, text=f"{first}remove the symlink", commands=(f"rm {shlex.quote(nvcc.path)}",))
        return problem(
            "toolkit.nvcc-broken",
            level=Level.FAIL if used else Level.WARN,
            nvcc=nvcc.path,
            how="does not respond" if nvcc.timed_out else "cannot compile",
            link="symlink" if lost else "",
            breaks=_NOT_BUILT if used else _BY_OTHERS,
            evidence=(evidence, f"{nvcc.path} -> {nvcc.real}" if lost else ""),
            remedy=remedy,
        )
    return None


def _no_room(facts: CudaFacts, complaint: str) -> Problem:
    place = facts.variables.get("TMPDIR", "/tmp")
    remedy = Remedy(commands=("df -h /tmp",)) if place == "/tmp" else Remedy(exports=(("TMPDIR", "/tmp"),))
    return problem("toolkit.no-room", place=place, evidence=(complaint,), remedy=remedy)


def _found(facts: CudaFacts) -> Problem | None:
    use = facts.uses["torch"]
    dangling = next(
        (toolkit for toolkit in facts.toolkits if not toolkit.exists and "CUDA" not in " ".join(toolkit.found_by)), None
    )
    home = fixes.toolkit_at(facts, use.home) if use.home else None
    if use.home and home is not None and home.exists and (home.nvcc or fixes.nvcc_at(facts, use.nvcc)):
        return None
    evidence = [use.rule] if not use.home else [f"torch would use {use.home} ({use.rule}); {use.nvcc} does not exist"]
    root = ""
    if dangling is not None:
        row, root = "toolkit.dangling", dangling.root
        evidence.append(f"{dangling.root} -> {dangling.real}")
    elif use.home:
        row = "toolkit.no-bin" if use.rule.startswith("above") else "toolkit.runtime-only"
    elif whole := fixes.usable_toolkits(facts):
        row, root = "toolkit.unused", whole[0].root
    else:
        row = "toolkit.found"
    return problem(row, root=root, home=use.home, evidence=evidence, remedy=_remedy(facts))


def _home(facts: CudaFacts) -> Problem | None:
    """Find a common trap: torch takes the directory above nvcc, which is no toolkit if nvcc is a wrapper or a link."""
    use = facts.uses["torch"]
    home, nvcc = fixes.toolkit_at(facts, use.home), fixes.nvcc_at(facts, use.nvcc)
    if home is None or home.headers or nvcc is None or _conda_headers(home):
        return None
    real = fixes.toolkit_at(facts, nvcc.top) if nvcc.top else None
    remedy = _remedy(facts)
    if real is not None and real.headers:
        remedy = Remedy(text="set CUDA_HOME to the toolkit itself", exports=(("CUDA_HOME", shlex.quote(real.root)),))
    # A torch without CUDA uses no toolkit, so the trap is not in effect yet.
    caught = facts.torch is not None and bool(facts.torch.cuda)
    uses = f"{nvcc.path} uses {nvcc.top}" if nvcc.top else ""
    return problem(
        "toolkit.home",
        level=Level.FAIL if caught else Level.WARN,
        who="torch uses" if caught else "a CUDA build of torch would use",
        home=use.home,
        nvcc=nvcc.path,
        kind={"script": "a wrapper script", "symlink": "a symlink"}.get(nvcc.kind, "not part of a toolkit"),
        evidence=(uses, f"no {use.home}/include/cuda_runtime_api.h"),
        remedy=remedy,
    )


def _conda_headers(toolkit: Toolkit) -> str:
    """Return the headers of a conda toolkit, which are in targets/, where torch does not look."""
    return toolkit.headers if "conda" in toolkit.found_by and "/targets/" in toolkit.headers else ""


def _headers(facts: CudaFacts) -> Problem | None:
    use = facts.uses["torch"]
    home = fixes.toolkit_at(facts, use.home)
    if home is None or not home.exists or not home.nvcc or home.headers in facts.variables.get("CPATH", "").split(":"):
        return None
    if home.headers and "/targets/" in home.headers:
        libraries = shlex.quote(os.path.join(os.path.dirname(home.headers), "lib"))
        exports = (
            ("CPATH", f"{shlex.quote(home.headers)}${{CPATH:+:$CPATH}}"),
            ("LIBRARY_PATH", f"{libraries}${{LIBRARY_PATH:+:$LIBRARY_PATH}}"),
        )
        evidence = (f"{home.headers}/cuda_runtime_api.h",)
        words = {"root": home.root, "headers": home.headers}
        return problem("toolkit.headers-conda", words, evidence=evidence, remedy=Remedy(exports=exports))
    nvcc = fixes.nvcc_at(facts, use.nvcc)
    if home.headers or nvcc is None or nvcc.kind != "binary" or not home.version:
        return None
    sources = [f"{file}: {value}" for file, value in home.sources[:2]]
    return problem("toolkit.headers", root=home.root, evidence=sources, remedy=_remedy(facts))


def _sources(facts: CudaFacts) -> Problem | None:
    """Find a mixed tree: its files disagree on the version beyond the patch level."""
    for toolkit in facts.toolkits:
        versions = {minor(value) for _, value in toolkit.sources}
        if len(versions) > 1 and toolkit.exists:
            return problem(
                "toolkit.version-sources",
                level=Level.FAIL if toolkit is fixes.used_toolkit(facts) else Level.WARN,
                root=toolkit.root,
                versions=" and ".join(sorted(versions, key=version)),
                evidence=(f"{file}: {value}" for file, value in toolkit.sources),
            )
    return None


def _gone(facts: CudaFacts) -> Problem | None:
    """Find missing CUDA directories in PATH, removed or misspelt; may explain why no nvcc is found."""
    cuda = [folder for folder in facts.no_path if "cuda" in folder.lower() or "nvcc" in folder.lower()]
    if not cuda:
        return None
    unfound = not facts.uses["nvcc"].nvcc
    return problem(
        "toolkit.path-missing",
        level=Level.WARN if unfound else Level.INFO,
        folders=", ".join(cuda[:3]),
        breaks="finding nvcc" if unfound else "",
        evidence=_set_in(facts, "PATH"),
    )


def _dev_link(facts: CudaFacts) -> Problem | None:
    """Find a toolkit of pip's wheels: it has no libcudart.so to link against."""
    used = fixes.target_toolkit(facts)  # even if it must be selected first: one run should report both steps
    if used is None or not used.runtime or used.dev_link or not used.nvcc:
        return None
    words = {"libraries": used.libraries, "runtime": used.runtime, "quoted": shlex.quote(used.libraries)}
    return problem("toolkit.cudart-devlink", words, evidence=(f"{used.libraries}/{used.runtime}",))


def who_uses(facts: CudaFacts) -> dict[str, str]:
    """Return the toolkit of each kind of build: name -> directory, empty for none."""
    torch = facts.torch
    own = facts.uses["torch"].home if torch is not None and torch.cuda else ""
    users = {"torch extensions": own, "CMake": _seen_through(facts, "cmake"), "nvcc": _seen_through(facts, "nvcc")}
    return {**users, "DeepSpeed": own} if facts.deepspeed is not None else users


def _seen_through(facts: CudaFacts, who: str) -> str:
    """Resolve a wrapper: a shell and CMake get the directory that nvcc itself calls TOP."""
    nvcc = fixes.nvcc_at(facts, facts.uses[who].nvcc)
    return nvcc.top if nvcc is not None and nvcc.top else facts.uses[who].home


def _with_torch(facts: CudaFacts) -> Problem | None:
    """Compare the toolkit in use with torch's CUDA (torch: TE._check_cuda_version, exact major version)."""
    used, wanted = fixes.used_toolkit(facts), fixes.torch_cuda(facts)
    if used is None or not used.version or not wanted or minor(used.version) == wanted:
        return None
    have = minor(used.version)
    if major(have) != major(wanted):
        return _mismatch(facts, have, wanted)
    return _for_deepspeed(facts, have, wanted) or problem("toolkit.torch-minor", nvcc=have, cuda=wanted)


def _mismatch(facts: CudaFacts, have: str, wanted: str) -> Problem:
    torch, use = facts.torch, facts.uses["torch"]
    assert torch is not None
    there = ", ".join(f"{toolkit.version} in {toolkit.root}" for toolkit in fixes.usable_toolkits(facts))
    other = f"install toolkit {wanted}{fixes.from_repository(facts)}, or a torch for CUDA {have}"
    install = (*fixes.install_toolkit(facts, wanted), *fixes.install_torch(facts, prefer=have, strict=True))
    return problem(
        "toolkit.torch-mismatch",
        nvcc=have,
        torch=torch.version,
        cuda=wanted,
        evidence=(
            f"torch and DeepSpeed -> {use.home} ({use.rule})",
            f"installed: {there or 'no other toolkit'}",
            f"{torch.source}: cuda = {torch.cuda}",
            *_set_in(facts, use.rule if use.rule.startswith("CUDA_") else "PATH"),
        ),
        remedy=_remedy(facts) if fixes.best_toolkit(facts) else Remedy(text=other, commands=install),
    )


def _set_in(facts: CudaFacts, variable: str) -> list[str]:
    origins = [origin for origin in facts.building.origins if origin.variable == variable]
    return [f"{variable} is set in {origin.file}:{origin.line}" for origin in origins[:3]]


def _for_deepspeed(facts: CudaFacts, have: str, wanted: str) -> Problem | None:
    """Check two minor versions against DeepSpeed's own list (builder.py, cuda_minor_mismatch_ok)."""
    deepspeed = facts.deepspeed
    if deepspeed is None or facts.variables.get("DS_SKIP_CUDA_CHECK") == "1":
        return None
    same = deepspeed.minor_ok.get(str(major(have)), ())
    if have in same and wanted in same:
        return None
    row = "deepspeed.cuda13" if major(have) >= 13 else "deepspeed.cuda-minor"
    remedy = Remedy(exports=(("DS_SKIP_CUDA_CHECK", "1"),))
    return problem(row, version=deepspeed.version, nvcc=have, cuda=wanted, remedy=remedy)


def _with_each_other(facts: CudaFacts) -> Problem | None:
    """Report builds that would use different toolkits, else the number of toolkits."""
    users = {name: home for name, home in who_uses(facts).items() if home}
    found = {name: fixes.toolkit_at(facts, home) for name, home in users.items()}
    versions = {name: toolkit.version for name, toolkit in found.items() if toolkit is not None and toolkit.version}
    if len({minor(number) for number in versions.values()}) > 1:
        best = fixes.best_toolkit(facts) or fixes.used_toolkit(facts)
        return problem(
            "toolkit.multiple",
            versions=", ".join(f"{_SHOWN.get(name, name)} {number}" for name, number in versions.items()),
            evidence=(f"{name} -> {home}" for name, home in users.items()),
            remedy=Remedy(exports=fixes.choose_toolkit(facts, best) if best else ()),
        )
    whole = fixes.usable_toolkits(facts)
    contradiction = _variables_differ(facts)
    if contradiction is not None or len(whole) < 2:
        return contradiction
    return problem("toolkit.several", count=len(whole), roots=", ".join(toolkit.root for toolkit in whole))


def _variables_differ(facts: CudaFacts) -> Problem | None:
    home, path = facts.variables.get("CUDA_HOME"), facts.variables.get("CUDA_PATH")
    if not home or not path:
        return None
    named = [fixes.toolkit_at(facts, home), fixes.toolkit_at(facts, path)]
    if named[0] is not None and named[1] is not None and named[0].real == named[1].real:
        return None
    remedy = Remedy(exports=(("CUDA_PATH", '"$CUDA_HOME"'),))
    return problem("toolkit.variables-differ", home=home, path=path, remedy=remedy)
