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
_NO_ROOM = re.compile(r"tmpxft|No space left|Could not open output")


def about_toolkits(facts: CudaFacts) -> Section:
    """Judge the toolkits; the first thing that is wrong hides what follows from it."""
    used = fixes.used_toolkit(facts)
    whole = fixes.usable_toolkits(facts)
    shown = used if used is not None and used.version and used.headers else fixes.target_toolkit(facts)
    line = _line(facts, shown) if shown is not None and shown.version else "none that is used" if whole else "none"
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
    users = [name for name, toolkit in homes.items() if toolkit is not None and toolkit.real == used.real]
    return f"{used.version} ({used.root})" + (f", used by {', '.join(users)}" if users else "")


def _details(facts: CudaFacts) -> list[str]:
    lines = [f"{name} -> {home or 'none'}" for name, home in who_uses(facts).items()]
    for toolkit in facts.toolkits:
        state = toolkit.version or ("not there" if not toolkit.exists else "no toolkit")
        lines.append(f"{toolkit.root}: {state} (by {', '.join(toolkit.found_by)})")
    return [*lines, *(f"on PATH and not there: {folder}" for folder in facts.no_path)]


def _problem(id_: str, level: Level, title: str, **rest: object) -> Problem:
    return Problem(id=id_, goals=BUILD, level=level, title=title, **{"breaks": _BREAKS, **rest})  # type: ignore[arg-type]


def _mend(facts: CudaFacts) -> dict[str, object]:
    """Return the fix that chooses the best toolkit here, or says what to install."""
    best = fixes.best_toolkit(facts)
    if best is not None:
        return {"fix": f"use the one in {best.root} ({best.version})", "exports": fixes.choose_toolkit(facts, best)}
    if facts.driver.container and "singularity" not in facts.driver.container:
        return {"fix": "take the image's -devel variant (nvidia/cuda, pytorch/pytorch): it has nvcc and headers"}
    wanted = fixes.torch_cuda(facts)
    name = f"cuda-toolkit-{wanted.replace('.', '-')}" if wanted else "cuda-toolkit"
    return {
        "fix": f"install a toolkit of version {wanted or 'that your torch is built for'}{fixes.from_repository(facts)}",
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
            wrong = "there is no such directory"
        if wrong:
            return _problem(
                "toolkit.home",
                Level.FAIL,
                f"{name}={value!r}: {wrong}",
                cause="torch and DeepSpeed take it as it stands, and fail later.",
                evidence=_set_in(facts, name),
                **_mend(facts),
            )
        return None
    return None


def _why_wrong(value: str) -> str:
    if ":" in value:
        return "it holds a list; a stray ':' comes from CUDA_HOME=$CUDA_HOME:..."
    if value != value.strip():
        return "white space at its ends belongs to the name"
    if value[0] in "\"'" or value[-1] in "\"'":
        return "the quotes belong to the name"
    return "nobody expands the ~ here" if value.startswith("~") else ""


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
        how = "does not answer" if nvcc.timed_out else "does not compile"
        said = f"{nvcc.path} -x cu -E /dev/null: {nvcc.complaint}" if nvcc.complaint else f"{nvcc.path} --version"
        if lost:
            mend["commands"] = (f"rm {shlex.quote(nvcc.path)}",)
            mend["fix"] = (
                f"put {real} before it on PATH, and remove the link" if "exports" in mend else "remove the link"
            )
        return _problem(
            "toolkit.nvcc-broken",
            Level.FAIL if used else Level.WARN,
            f"{nvcc.path} {how}" + (", although --version works: it is a symlink" if lost else ""),
            cause="nvcc looks for nvcc.profile beside the link, not beside the file that it leads to." if lost else "",
            breaks=_BREAKS if used else "what a shell or CMake builds with it; torch uses another",
            evidence=(said, f"{nvcc.path} -> {nvcc.real}" if lost else ""),
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
        fix="name a directory that is there and has room",
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
    evidence = [use.rule] if not use.home else [f"torch would take {use.home} ({use.rule}); {use.nvcc} is not there"]
    evidence += [f"{dangling.root} -> {dangling.real}"] if dangling else []
    if dangling is not None:
        title = f"{dangling.root} leads nowhere, and no nvcc is on PATH"
    elif use.home and use.rule.startswith("above"):
        title = f"torch would look for nvcc in {use.home}/bin, because that on PATH lies in no directory called bin"
    elif use.home:
        title = f"{use.home} has no nvcc: it is there to run programs, not to build them"
    else:
        whole = fixes.usable_toolkits(facts)
        title = (
            f"no nvcc is found, though {whole[0].root} has one" if whole else "there is no CUDA toolkit (no nvcc) here"
        )
    return _problem("toolkit.found", Level.FAIL, title, evidence=tuple(evidence), **_mend(facts))


def _home(facts: CudaFacts) -> Problem | None:
    """Find the trap: torch takes the directory above nvcc, which is no toolkit where nvcc is a wrapper or a link."""
    use = facts.uses["torch"]
    home, nvcc = fixes.toolkit_at(facts, use.home), fixes.nvcc_at(facts, use.nvcc)
    if home is None or home.headers or nvcc is None or _conda_headers(home):
        return None
    real = fixes.toolkit_at(facts, nvcc.top) if nvcc.top else None
    kind = {"script": "a script that starts another nvcc", "symlink": "a link"}.get(nvcc.kind, "not in a toolkit")
    chosen = real if real is not None and real.headers else None
    mend = (
        {"fix": f"name the toolkit itself, {chosen.root}", "exports": (("CUDA_HOME", shlex.quote(chosen.root)),)}
        if chosen
        else _mend(facts)
    )
    # A torch without CUDA looks at no toolkit: the trap is there, and nobody is in it yet.
    caught = facts.torch is not None and bool(facts.torch.cuda)
    who = "torch" if caught else "a torch with CUDA"
    return _problem(
        "toolkit.home",
        Level.FAIL if caught else Level.WARN,
        f"{who} would take {use.home} for the toolkit, because {nvcc.path} is {kind}",
        cause=f"It takes the directory above the first nvcc on PATH; {use.home} has no include/cuda_runtime_api.h. "
        "Its version check passes, and C++ files then fail to compile.",
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
            f"the headers of {home.root} lie in {home.headers}, where torch does not look",
            cause="conda's toolkits from CUDA 12 on are laid out so; torch adds only include/.",
            evidence=(f"{home.headers}/cuda_runtime_api.h",),
            fix="show them to the compiler and the linker",
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
        f"{home.root} has nvcc and no headers (cuda_runtime_api.h)",
        evidence=tuple(f"{file}: {value}" for file, value in home.sources[:2]),
        **_mend(facts),
    )


def _sources(facts: CudaFacts) -> Problem | None:
    """Find a tree of two versions: its files disagree beyond the patch level."""
    for toolkit in facts.toolkits:
        told = {minor(value) for _, value in toolkit.sources}
        if len(told) > 1 and toolkit.exists:
            return _problem(
                "toolkit.version-sources",
                Level.FAIL if toolkit is fixes.used_toolkit(facts) else Level.WARN,
                f"{toolkit.root} is of two versions: {' and '.join(sorted(told, key=version))}",
                cause="One was installed over the other.",
                evidence=tuple(f"{file}: {value}" for file, value in toolkit.sources),
                fix="install that toolkit again into an empty directory; or use another one",
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
        f"PATH names what is not there: {', '.join(cuda[:3])}",
        breaks="finding nvcc" if unfound else "",
        evidence=_set_in(facts, "PATH"),
        fix="correct it, or take it out, where PATH is set",
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
        cause="The wheels bring the library for running only.",
        evidence=(f"{used.libraries}/{used.runtime}",),
        fix="make the link that a toolkit would have",
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
        title=f"nvcc is {have}, torch was built with {wanted}: the same major version, torch only warns",
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
        title=f"nvcc is {minor(used.version)}, and torch {torch.version} was built with CUDA {wanted}",
        breaks='building CUDA extensions ("detected CUDA version mismatches"); running is fine',
        evidence=(
            f"torch and DeepSpeed -> {use.home} ({use.rule})",
            f"on disk: {there or 'no other'}",
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
        title=f"DeepSpeed {deepspeed.version} refuses nvcc {have} with torch's CUDA {wanted}; torch itself takes it",
        cause="Its list of minor versions that go together does not have them.",
        breaks="building DeepSpeed's ops (CUDAMismatchException); running is fine",
        fix="tell it to go on; code of one major version works together",
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
            + ", ".join(f"{name} {number}" for name, number in versions.items()),
            breaks="extensions that are partly built with each",
            evidence=tuple(f"{name} -> {home}" for name, home in users.items()),
            fix="let all use the same",
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
        title=f"{len(whole)} toolkits are installed, and all builds use the same: "
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
        cause="torch takes CUDA_HOME; other tools take CUDA_PATH.",
        fix="let both name the same",
        exports=(("CUDA_PATH", '"$CUDA_HOME"'),),
    )
