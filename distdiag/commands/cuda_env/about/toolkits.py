"""The CUDA toolkits: who would use which, is that one whole, does it fit torch, and do builds agree on it."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from distdiag.commands.cuda_env import fixes
from distdiag.commands.cuda_env.types import BUILD, Problem, Section
from distdiag.knowledge.cuda import major, minor, version
from distdiag.report import Level

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.facts.cuda.toolkits import Toolkit

_BREAKS = "building CUDA extensions; running is fine"
_SHOWN = {"nvcc": "plain nvcc"}
_NO_ROOM = re.compile(r"tmpxft|No space left|Could not open output")


def about_toolkits(facts: CudaFacts) -> Section:
    """Judge the toolkits; the first thing that is wrong hides what follows from it."""
    used = fixes.used_toolkit(facts)
    whole = fixes.usable_toolkits(facts)
    shown = used if used is not None and used.version and used.headers else fixes.target_toolkit(facts)
    line = _line(facts, shown) if shown is not None and shown.version else "none in use" if whole else "none"
    problems = [problem for problem in (_variable(facts), _broken(facts)) if problem]
    if not any(problem.level is Level.FAIL for problem in problems):
        problems += [problem for problem in (_found(facts), _home(facts), _headers(facts)) if problem]
    problems += [
        problem
        for problem in (_sources(facts), _with_torch(facts), _with_each_other(facts), _dev_link(facts))
        if problem
    ]
    problems += [problem for problem in (_gone(facts),) if problem]
    return Section(name="Toolkit", line=line, problems=tuple(problems), details=tuple(_details(facts)))


def _line(facts: CudaFacts, used: Toolkit) -> str:
    """Name the toolkit, and who uses it."""
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


def _problem(id_: str, level: Level, title: str, **rest: object) -> Problem:
    return Problem(id=id_, goals=BUILD, level=level, title=title, **{"breaks": _BREAKS, **rest})  # type: ignore[arg-type]


def _mend(facts: CudaFacts) -> dict[str, object]:
    """Return the fix that chooses the best toolkit here, or says what to install."""
    best = fixes.best_toolkit(facts)
    if best is not None:
        return {"fix": f"use the toolkit in {best.root} ({best.version})", "exports": fixes.choose_toolkit(facts, best)}
    if facts.driver.container and "singularity" not in facts.driver.container:
        return {"fix": "use the -devel variant of the image (nvidia/cuda, pytorch/pytorch): it has nvcc and headers"}
    wanted = fixes.torch_cuda(facts)
    name = f"cuda-toolkit-{wanted.replace('.', '-')}" if wanted else "cuda-toolkit"
    return {
        "fix": "install a toolkit of version "
        f"{wanted or 'that your torch was built for'}{fixes.from_repository(facts)}",
        "commands": fixes.install_system(facts, apt=name, dnf=name, zypper=name),
    }


def _variable(facts: CudaFacts) -> Problem | None:
    """Judge CUDA_HOME (or CUDA_PATH) as it is written: torch takes it unseen."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        value = facts.variables.get(name, "")
        if not value:
            continue
        wrong = _why_wrong(value)
        toolkit = fixes.toolkit_at(facts, value)
        if not wrong and (toolkit is None or not toolkit.exists):
            wrong = "no such directory"
        if wrong:
            return _problem(
                "toolkit.home",
                Level.FAIL,
                f"{name}={value!r}: {wrong}",
                cause="torch and DeepSpeed use it unchecked, and fail later.",
                evidence=_set_in(facts, name),
                **_mend(facts),
            )
        return None
    return None


def _why_wrong(value: str) -> str:
    if ":" in value:
        return "it is a list, not a directory; the ':' often comes from CUDA_HOME=$CUDA_HOME:..."
    if value != value.strip():
        return "the leading or trailing white space is part of the path"
    if value[0] in "\"'" or value[-1] in "\"'":
        return "the quotes are part of the path"
    return "the ~ is not expanded here" if value.startswith("~") else ""


def _broken(facts: CudaFacts) -> Problem | None:
    """Name an nvcc that answers --version and compiles nothing; one that torch does not use is only worth a warning."""
    for use in facts.uses.values():
        nvcc = fixes.nvcc_at(facts, use.nvcc)
        if nvcc is None:
            continue
        if nvcc.complaint and _NO_ROOM.search(nvcc.complaint):
            return _no_room(facts, nvcc.complaint)
        if not fixes.is_broken(nvcc):
            continue
        used = nvcc.path == facts.uses["torch"].nvcc
        mend = _mend(facts)
        lost = nvcc.kind == "symlink" and "cuda_runtime.h" in (nvcc.complaint or "")
        real = os.path.dirname(nvcc.real)
        how = "does not respond" if nvcc.timed_out else "cannot compile"
        evidence = f"{nvcc.path} -x cu -E /dev/null: {nvcc.complaint}" if nvcc.complaint else f"{nvcc.path} --version"
        if lost:
            mend["commands"] = (f"rm {shlex.quote(nvcc.path)}",)
            mend["fix"] = (
                f"put {real} before it on PATH, and remove the symlink" if "exports" in mend else "remove the symlink"
            )
        return _problem(
            "toolkit.nvcc-broken",
            Level.FAIL if used else Level.WARN,
            f"{nvcc.path} {how}" + (", although --version works: it is a symlink" if lost else ""),
            cause="nvcc looks for nvcc.profile next to the symlink, not next to its target." if lost else "",
            breaks=_BREAKS if used else "builds from a shell or with CMake; torch uses another nvcc",
            evidence=(evidence, f"{nvcc.path} -> {nvcc.real}" if lost else ""),
            **mend,
        )
    return None


def _no_room(facts: CudaFacts, complaint: str) -> Problem:
    """Report that it is the place for temporary files that is missing, full or not ours to write."""
    place = facts.variables.get("TMPDIR", "/tmp")
    return _problem(
        "toolkit.nvcc-broken",
        Level.FAIL,
        f"nvcc cannot write its temporary files in {place}",
        evidence=(complaint,),
        fix="use a directory that exists and has free space",
        exports=(("TMPDIR", "/tmp"),) if place != "/tmp" else (),
        commands=(f"df -h {shlex.quote(place)}",) if place == "/tmp" else (),
    )


def _found(facts: CudaFacts) -> Problem | None:
    """Report that there is no toolkit that anybody would find."""
    use = facts.uses["torch"]
    dangling = next(
        (toolkit for toolkit in facts.toolkits if not toolkit.exists and "CUDA" not in " ".join(toolkit.found_by)), None
    )
    home = fixes.toolkit_at(facts, use.home) if use.home else None
    if use.home and home is not None and home.exists and (home.nvcc or fixes.nvcc_at(facts, use.nvcc)):
        return None
    evidence = [use.rule] if not use.home else [f"torch would use {use.home} ({use.rule}); {use.nvcc} does not exist"]
    evidence += [f"{dangling.root} -> {dangling.real}"] if dangling else []
    if dangling is not None:
        title = f"{dangling.root} is a dangling symlink, and no nvcc is on PATH"
    elif use.home and use.rule.startswith("above"):
        title = f"torch would look for nvcc in {use.home}/bin: the nvcc on PATH is not in a directory called bin"
    elif use.home:
        title = f"{use.home} has no nvcc: it is a runtime-only install"
    else:
        whole = fixes.usable_toolkits(facts)
        title = (
            f"no nvcc on PATH or in CUDA_HOME, but {whole[0].root} has one"
            if whole
            else "no CUDA toolkit found (no nvcc)"
        )
    return _problem("toolkit.found", Level.FAIL, title, evidence=tuple(evidence), **_mend(facts))


def _home(facts: CudaFacts) -> Problem | None:
    """Find the trap: torch takes the directory above nvcc, which is no toolkit where nvcc is a wrapper or a link."""
    use = facts.uses["torch"]
    home, nvcc = fixes.toolkit_at(facts, use.home), fixes.nvcc_at(facts, use.nvcc)
    if home is None or home.headers or nvcc is None or _conda_headers(home):
        return None
    real = fixes.toolkit_at(facts, nvcc.top) if nvcc.top else None
    kind = {"script": "a wrapper script", "symlink": "a symlink"}.get(nvcc.kind, "not part of a toolkit")
    chosen = real if real is not None and real.headers else None
    mend = (
        {
            "fix": "set CUDA_HOME to the toolkit itself",
            "exports": (("CUDA_HOME", shlex.quote(chosen.root)),),
        }
        if chosen
        else _mend(facts)
    )
    # A torch without CUDA looks at no toolkit: the trap is there, and nobody is in it yet.
    caught = facts.torch is not None and bool(facts.torch.cuda)
    who = "torch takes" if caught else "a CUDA build of torch would take"
    return _problem(
        "toolkit.home",
        Level.FAIL if caught else Level.WARN,
        f"{who} {use.home} as the CUDA toolkit, because {nvcc.path} is {kind}",
        cause=f"torch goes up from the first nvcc on PATH. {use.home} has no CUDA headers, so C++ files do not "
        "compile.",
        evidence=tuple(
            filter(
                None, (f"{nvcc.path} uses {nvcc.top}" if nvcc.top else "", f"no {use.home}/include/cuda_runtime_api.h")
            )
        ),
        **mend,
    )


def _conda_headers(toolkit: Toolkit) -> str:
    """Return the headers of a conda toolkit, which lie in targets/ where torch does not look."""
    return toolkit.headers if "conda" in toolkit.found_by and "/targets/" in toolkit.headers else ""


def _headers(facts: CudaFacts) -> Problem | None:
    use = facts.uses["torch"]
    home = fixes.toolkit_at(facts, use.home)
    if home is None or not home.exists or not home.nvcc or home.headers in facts.variables.get("CPATH", "").split(":"):
        return None
    if home.headers and "/targets/" in home.headers:
        libraries = os.path.join(os.path.dirname(home.headers), "lib")
        return _problem(
            "toolkit.headers",
            Level.FAIL,
            f"the headers of {home.root} are in {home.headers}, which torch does not search",
            cause="conda packages of CUDA 12 and later use this layout; torch adds only include/.",
            evidence=(f"{home.headers}/cuda_runtime_api.h",),
            fix="add them to the compiler's and the linker's search paths",
            exports=(
                ("CPATH", f"{shlex.quote(home.headers)}${{CPATH:+:$CPATH}}"),
                ("LIBRARY_PATH", f"{shlex.quote(libraries)}${{LIBRARY_PATH:+:$LIBRARY_PATH}}"),
            ),
        )
    nvcc = fixes.nvcc_at(facts, use.nvcc)
    if home.headers or nvcc is None or nvcc.kind != "binary" or not home.version:
        return None
    return _problem(
        "toolkit.headers",
        Level.FAIL,
        f"{home.root} has nvcc but no headers (cuda_runtime_api.h)",
        evidence=tuple(f"{file}: {value}" for file, value in home.sources[:2]),
        **_mend(facts),
    )


def _sources(facts: CudaFacts) -> Problem | None:
    """Find a tree of two versions: its files disagree beyond the patch level."""
    for toolkit in facts.toolkits:
        versions = {minor(value) for _, value in toolkit.sources}
        if len(versions) > 1 and toolkit.exists:
            return _problem(
                "toolkit.version-sources",
                Level.FAIL if toolkit is fixes.used_toolkit(facts) else Level.WARN,
                f"{toolkit.root} has files of two versions: {' and '.join(sorted(versions, key=version))}",
                cause="One version was installed over the other.",
                evidence=tuple(f"{file}: {value}" for file, value in toolkit.sources),
                fix="reinstall that toolkit into an empty directory, or use another toolkit",
            )
    return None


def _gone(facts: CudaFacts) -> Problem | None:
    """Find directories of CUDA on PATH that are not there: removed or misspelt; it may be why no nvcc is found."""
    cuda = [folder for folder in facts.no_path if "cuda" in folder.lower() or "nvcc" in folder.lower()]
    if not cuda:
        return None
    unfound = not facts.uses["nvcc"].nvcc
    return _problem(
        "toolkit.path-missing",
        Level.WARN if unfound else Level.INFO,
        f"PATH has directories that do not exist: {', '.join(cuda[:3])}",
        breaks="finding nvcc" if unfound else "",
        evidence=_set_in(facts, "PATH"),
        fix="correct or remove it where PATH is set",
    )


def _dev_link(facts: CudaFacts) -> Problem | None:
    """Find a toolkit of pip's wheels: it has no libcudart.so to link against."""
    used = fixes.target_toolkit(facts)  # also where it must be chosen first: one run shall tell both steps
    if used is None or not used.runtime or used.dev_link or not used.nvcc:
        return None
    return _problem(
        "toolkit.cudart-devlink",
        Level.FAIL,
        f"{used.libraries} has no libcudart.so: linking an extension fails (cannot find -lcudart)",
        cause="The pip wheels ship only the runtime library.",
        evidence=(f"{used.libraries}/{used.runtime}",),
        fix="create the symlink that a full toolkit has",
        commands=(f"ln -s {used.runtime} {shlex.quote(used.libraries)}/libcudart.so",),
    )


def who_uses(facts: CudaFacts) -> dict[str, str]:
    """Return which toolkit each kind of build takes: name -> directory, empty for none."""
    torch = facts.torch
    own = facts.uses["torch"].home if torch is not None and torch.cuda else ""
    users = {"torch extensions": own, "CMake": _seen_through(facts, "cmake"), "nvcc": _seen_through(facts, "nvcc")}
    return {**users, "DeepSpeed": own} if facts.deepspeed is not None else users


def _seen_through(facts: CudaFacts, who: str) -> str:
    """See through a wrapper: what nvcc itself calls its TOP is what a shell and CMake get."""
    nvcc = fixes.nvcc_at(facts, facts.uses[who].nvcc)
    return nvcc.top if nvcc is not None and nvcc.top else facts.uses[who].home


def _with_torch(facts: CudaFacts) -> Problem | None:
    """Compare the toolkit that would be used with torch's CUDA (torch: TE._check_cuda_version, exact major version)."""
    used, wanted = fixes.used_toolkit(facts), fixes.torch_cuda(facts)
    if used is None or not used.version or not wanted or minor(used.version) == wanted:
        return None
    have = minor(used.version)
    if major(have) != major(wanted):
        return _mismatch(facts, used, wanted)
    return _for_deepspeed(facts, have, wanted) or Problem(
        id="toolkit.torch-mismatch",
        goals=BUILD,
        level=Level.INFO,
        title=f"nvcc is {have}, torch was built with {wanted}: same major version, torch only warns",
    )


def _mismatch(facts: CudaFacts, used: Toolkit, wanted: str) -> Problem:
    torch, use = facts.torch, facts.uses["torch"]
    assert torch is not None
    there = ", ".join(f"{toolkit.version} in {toolkit.root}" for toolkit in fixes.usable_toolkits(facts))
    variable = use.rule if use.rule.startswith("CUDA_") else "PATH"
    best = fixes.best_toolkit(facts)
    name = f"cuda-toolkit-{wanted.replace('.', '-')}"
    return Problem(
        id="toolkit.torch-mismatch",
        goals=BUILD,
        level=Level.FAIL,
        title=f"nvcc is {minor(used.version)}, but torch {torch.version} was built with CUDA {wanted}",
        breaks='building CUDA extensions ("detected CUDA version mismatches"); running is fine',
        evidence=(
            f"torch and DeepSpeed -> {use.home} ({use.rule})",
            f"installed: {there or 'no other toolkit'}",
            f"{torch.source}: cuda = {torch.cuda}",
            *_set_in(facts, variable),
        ),
        fix=f"use the toolkit in {best.root} ({best.version})"
        if best
        else f"install toolkit {wanted}{fixes.from_repository(facts)}, or a torch for CUDA {minor(used.version)}",
        exports=fixes.choose_toolkit(facts, best) if best else (),
        commands=()
        if best
        else (
            *fixes.install_system(facts, apt=name, dnf=name, zypper=name),
            *fixes.install_torch(facts, prefer=minor(used.version), strict=True),
        ),
    )


def _set_in(facts: CudaFacts, variable: str) -> tuple[str, ...]:
    """Report which start-up files set a variable."""
    lines = [
        f"{origin.variable} is set in {origin.file}:{origin.line}"
        for origin in facts.building.origins
        if origin.variable == variable
    ]
    return tuple(lines[:3])


def _for_deepspeed(facts: CudaFacts, have: str, wanted: str) -> Problem | None:
    """Ask DeepSpeed's own list (builder.py, cuda_minor_mismatch_ok) whether two minor versions go together for it."""
    deepspeed = facts.deepspeed
    if deepspeed is None or facts.variables.get("DS_SKIP_CUDA_CHECK") == "1":
        return None
    same = deepspeed.minor_ok.get(str(major(have)), ())
    if have in same and wanted in same:
        return None
    return Problem(
        id="deepspeed.cuda13" if major(have) >= 13 else "deepspeed.cuda-minor",
        goals=BUILD,
        level=Level.WARN,
        title=f"DeepSpeed {deepspeed.version} rejects nvcc {have} with torch's CUDA {wanted}; torch accepts it",
        cause="Its list of compatible minor versions does not include this pair.",
        breaks="building DeepSpeed's ops (CUDAMismatchException); running is fine",
        fix="skip its check; code of the same major version is compatible",
        exports=(("DS_SKIP_CUDA_CHECK", "1"),),
    )


def _with_each_other(facts: CudaFacts) -> Problem | None:
    """Report that builds here would use different toolkits, or how many there are."""
    users = {name: home for name, home in who_uses(facts).items() if home}
    found = {name: fixes.toolkit_at(facts, home) for name, home in users.items()}
    versions = {name: toolkit.version for name, toolkit in found.items() if toolkit is not None and toolkit.version}
    if len({minor(number) for number in versions.values()}) > 1:
        best = fixes.best_toolkit(facts) or fixes.used_toolkit(facts)
        return Problem(
            id="toolkit.multiple",
            goals=BUILD,
            level=Level.WARN,
            title="builds here use different toolkits: "
            + ", ".join(f"{_SHOWN.get(name, name)} {number}" for name, number in versions.items()),
            breaks="extensions built partly with one toolkit, partly with another",
            evidence=tuple(f"{name} -> {home}" for name, home in users.items()),
            fix="use the same toolkit for all",
            exports=fixes.choose_toolkit(facts, best) if best else (),
        )
    whole = fixes.usable_toolkits(facts)
    contradiction = _variables_differ(facts)
    if contradiction is not None or len(whole) < 2:
        return contradiction
    return Problem(
        id="toolkit.multiple",
        goals=BUILD,
        level=Level.INFO,
        title=f"{len(whole)} toolkits are installed; all builds use the same one of them: "
        + ", ".join(toolkit.root for toolkit in whole),
    )


def _variables_differ(facts: CudaFacts) -> Problem | None:
    home, path = facts.variables.get("CUDA_HOME"), facts.variables.get("CUDA_PATH")
    if not home or not path:
        return None
    named = [fixes.toolkit_at(facts, home), fixes.toolkit_at(facts, path)]
    if named[0] is not None and named[1] is not None and named[0].real == named[1].real:
        return None
    return Problem(
        id="toolkit.multiple",
        goals=BUILD,
        level=Level.WARN,
        title=f"CUDA_HOME={home} and CUDA_PATH={path} name different toolkits",
        cause="torch uses CUDA_HOME; other tools use CUDA_PATH.",
        fix="set both to the same toolkit",
        exports=(("CUDA_PATH", '"$CUDA_HOME"'),),
    )
