"""CUDA toolkits on this machine: location, version by each file, and which builds use which.

Only an empty file is compiled, to nowhere (`nvcc -E`, `nvcc --dryrun`): so nvcc itself reports its toolkit and host
compiler, see its manual. If variables add flags, one is compiled to a temporary directory.
"""

from __future__ import annotations

import glob
import json
import os
import re
from dataclasses import replace

from distdiag.facts import machine, programs
from distdiag.facts.cuda.nvcc_variables import culprits, first_error
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distdiag.facts.cuda.places import Places

_RELEASE = re.compile(r"release (\d+\.\d+), V([\d.]+)")
_STANDARD = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/opt/cuda-*", "/usr/lib/cuda")
_DISTRO = "/usr/lib/nvidia-cuda-toolkit"
_HPC = "/opt/nvidia/hpc_sdk/Linux_*/*/cuda/[0-9]*"
_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDAToolkit_ROOT", "EBROOTCUDA")
_EMPTY = ("-x", "cu", "/dev/null", "-o", "/dev/null")


@record
class HostLimit:
    """The limits in crt/host_config.h: the newest supported gcc (major), and the first refused clang."""

    path: str
    gcc_max: int | None
    gcc_line: int
    clang_below: int | None


@record
class Toolkit:
    """A directory used as a CUDA toolkit, rightly or not.

    `found_by`: what refers to it; `sources` (file or command, version) in order of trust, `version` the first of them
    as major.minor, empty if unknown. `headers` and `libraries`: directories, empty if missing; `runtime`: the runtime
    library (libcudart.so.13), `dev_link`: libcudart.so, needed by linkers, exists too.
    """

    root: str
    real: str
    found_by: tuple[str, ...]
    version: str
    sources: tuple[tuple[str, str], ...]
    exists: bool
    nvcc: str
    headers: str
    libraries: str
    runtime: str
    dev_link: bool
    limit: HostLimit | None


@record
class Nvcc:
    """A program called nvcc, and its answers.

    `kind`: binary, symlink or script. `release` as major.minor. `top`: the toolkit it really uses, `compiler`: the host
    compiler it would call. `complaint`: its first error for an empty file, empty if it compiles, None if not queried or
    not answered. `broken_by`: variables without which it works, `broken_how`: its error with them; the other fields are
    without them.
    """

    path: str
    real: str
    kind: str
    release: str
    top: str
    compiler: str
    complaint: str | None
    timed_out: bool
    archs: tuple[str, ...]
    broken_by: tuple[str, ...] = ()
    broken_how: str = ""


@record
class Use:
    """The toolkit of one kind of build, its nvcc, and the rule that selects it; empty `home`: none."""

    home: str
    nvcc: str
    rule: str


def candidates(places: Places, prefixes: Iterable[str]) -> dict[str, list[str]]:
    """Find possible toolkits: directory -> what refers to it. `prefixes` are Python environments."""
    found: dict[str, list[str]] = {}
    for way, root in _ways(places, prefixes):
        found.setdefault(root.rstrip("/") or "/", []).append(way)
    return found


def _ways(places: Places, prefixes: Iterable[str]) -> Iterator[tuple[str, str]]:
    yield from ((name, places.env[name]) for name in _VARIABLES if places.env.get(name))
    for nvcc in places.which_all("nvcc"):
        yield "PATH", os.path.dirname(os.path.dirname(os.path.realpath(nvcc)))
    yield from ((root, root) for pattern in _STANDARD for root in places.glob(pattern))
    yield from (("distribution", root) for root in places.glob(_DISTRO))
    yield from (("HPC SDK", root) for root in places.glob(_HPC))
    for prefix in prefixes:
        yield from _in_python(prefix)


def _in_python(prefix: str) -> Iterator[tuple[str, str]]:
    if os.path.exists(f"{prefix}/bin/nvcc") and os.path.isdir(f"{prefix}/conda-meta"):
        yield "conda", prefix
    for root in glob.glob(f"{prefix}/nvidia/cu[0-9]*") + glob.glob(f"{prefix}/nvidia/cuda_nvcc"):
        if os.path.exists(f"{root}/bin/nvcc"):
            yield "pip wheel", root


def examine(root: str, ways: Iterable[str]) -> Toolkit:
    """Read one directory as a toolkit, without running a program."""
    sources = tuple(_versions(root))
    headers = next((path for path in _includes(root) if os.path.exists(f"{path}/cuda_runtime_api.h")), "")
    libraries = next((path for path in (f"{root}/lib64", f"{root}/lib") if glob.glob(f"{path}/libcudart*")), "")
    return Toolkit(
        root=root,
        real=os.path.realpath(root),
        found_by=tuple(dict.fromkeys(ways)),
        version=_minor(sources[0][1]) if sources else "",
        sources=sources,
        exists=os.path.isdir(root),
        nvcc=f"{root}/bin/nvcc" if os.access(f"{root}/bin/nvcc", os.X_OK) else "",
        headers=headers,
        libraries=libraries,
        runtime=_runtime(libraries),
        dev_link=bool(libraries) and os.path.exists(f"{libraries}/libcudart.so"),
        limit=_limit(root),
    )


def _runtime(libraries: str) -> str:
    """Return the runtime library's soname: libcudart.so.13."""
    names = sorted(os.path.basename(path) for path in glob.glob(f"{libraries}/libcudart.so.*")) if libraries else []
    return names[0] if names else ""


def _includes(root: str) -> list[str]:
    return [f"{root}/include", *glob.glob(f"{root}/targets/*/include")]


def _versions(root: str) -> Iterator[tuple[str, str]]:
    """Yield (file, version) from the files of a toolkit, in order of trust."""
    try:
        version = json.loads(machine.read_text(f"{root}/version.json") or "{}")["cuda"]["version"]
        yield f"{root}/version.json", str(version)
    except (ValueError, KeyError, TypeError):
        pass
    if found := re.search(r"CUDA Version ([\d.]+)", machine.read_text(f"{root}/version.txt")):
        yield f"{root}/version.txt", found[1]
    for include in _includes(root):
        if found := re.search(r"^#define CUDA_VERSION (\d+)", machine.read_text(f"{include}/cuda.h"), re.MULTILINE):
            yield f"{include}/cuda.h", f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}"
            break
    for library in sorted(glob.glob(f"{root}/lib64/libcudart.so.*.*.*") + glob.glob(f"{root}/lib/libcudart.so.*.*.*")):
        yield library, _minor(library.rpartition(".so.")[2])
        break


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _limit(root: str) -> HostLimit | None:
    """Parse the compilers refused by a toolkit from the messages in its header."""
    for include in _includes(root):
        path = f"{include}/crt/host_config.h"
        text = machine.read_text(path)
        if not text:
            continue
        gcc, line, clang = None, 0, None
        for number, words in enumerate(text.splitlines(), 1):
            if found := re.search(r"gcc versions later than (\d+)", words):
                gcc, line = int(found[1]), number
            elif found := re.search(r"unsupported clang version! clang version must be less than (\d+)", words):
                clang = int(found[1])
        return HostLimit(path, gcc, line, clang)
    return None


def kind_of(path: str) -> str:
    """Return the kind of a program file: symlink, script, or binary."""
    if os.path.islink(path):
        return "symlink"
    try:
        with open(path, "rb") as file:
            return "script" if file.read(2) == b"#!" else "binary"
    except OSError:
        return "binary"


def ask(
    paths: Iterable[str], used: Mapping[str, Sequence[str]], *, timeout_s: float, env: Mapping[str, str]
) -> list[Nvcc]:
    """Query each nvcc's version; for those `used` also their result for an empty file, and their GPUs.

    `used`: nvcc -> options: torch passes CC as -ccbin. An nvcc broken by variables of `env` is queried again without
    them.
    """
    found = _ask(list(dict.fromkeys(paths)), used, timeout_s)
    for number, nvcc in enumerate(found):
        if nvcc.path not in used or nvcc.timed_out:
            continue
        options = used[nvcc.path]
        names, error = culprits(nvcc.path, options, env, fails=bool(nvcc.complaint), timeout_s=timeout_s)
        if names:
            (again,) = _ask([nvcc.path], used, timeout_s, without=names)
            found[number] = replace(again, broken_by=names, broken_how=error)
    return found


def _ask(
    paths: Sequence[str], used: Mapping[str, Sequence[str]], timeout_s: float, *, without: Iterable[str] = ()
) -> list[Nvcc]:
    prefix = [word for name in without for word in ("-u", name)]
    commands: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        start = ["/usr/bin/env", *prefix, path] if prefix else [path]
        commands[path, "version"] = [*start, "--version"]
        if path in used:
            commands[path, "preprocess"] = [*start, "-E", *used[path], *_EMPTY]
            commands[path, "dryrun"] = [*start, "--dryrun", "-c", *used[path], *_EMPTY]
            commands[path, "archs"] = [*start, "--list-gpu-arch"]
    done = {key: end for key, end in programs.run_many(commands, timeout_s) if end is not None}
    return [_read_answers(path, {what: end for (asked, what), end in done.items() if asked == path}) for path in paths]


def _read_answers(path: str, done: dict[str, programs.Done]) -> Nvcc:
    texts = {what: (end.stdout + end.stderr).decode("utf-8", "replace") for what, end in done.items()}
    release = _RELEASE.search(texts.get("version", ""))
    plan = texts.get("dryrun", "")
    tried = done.get("preprocess")
    return Nvcc(
        path=path,
        real=os.path.realpath(path),
        kind=kind_of(path),
        release=release[1] if release else "",
        top=_top(plan),
        compiler=_compiler(plan),
        complaint=None
        if tried is None or tried.timed_out
        else first_error(texts["preprocess"])
        if tried.status
        else "",
        timed_out=any(end.timed_out for end in done.values()),
        archs=tuple(re.findall(r"^compute_(\w+)$", texts.get("archs", ""), re.MULTILINE)),
    )


def _top(plan: str) -> str:
    found = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    return os.path.realpath(found[1]) if found else ""


def _compiler(plan: str) -> str:
    """Extract the host compiler from the plan: the first command that preprocesses C++; "/bin"/gcc means /bin/gcc."""
    found = re.search(r'^#\$ ((?:"[^"\n]*"|[^\s"])+) .*-E -x c\+\+', plan, re.MULTILINE)
    return found[1].replace('"', "") if found else ""


def with_compiler(nvcc: Nvcc, places: Places) -> Nvcc:
    """Resolve the host compiler like nvcc, which searches its own directories before PATH."""
    if not nvcc.compiler or os.sep in nvcc.compiler:
        return nvcc
    own = [f"{nvcc.top}/nvvm/bin", f"{nvcc.top}/bin"] if nvcc.top else []
    found = next((path for path in (f"{folder}/{nvcc.compiler}" for folder in own) if os.access(path, os.X_OK)), "")
    return replace(nvcc, compiler=found or places.which(nvcc.compiler) or nvcc.compiler)


def torch_use(places: Places) -> Use:
    """Follow torch.utils.cpp_extension._find_cuda_home (torch 2.13): variables, nvcc on PATH, /usr/local/cuda.

    torch verifies none of it, and takes nvcc's directory without resolving links.
    """
    env = places.env
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    nvcc = places.which("nvcc")
    if home == "":
        return Use("", "", "CUDA_PATH is set but empty, and torch takes it as it is")
    if home is not None:
        rule = "CUDA_HOME" if env.get("CUDA_HOME") else "CUDA_PATH"
    elif nvcc:
        home, rule = os.path.dirname(os.path.dirname(nvcc)), f"above {nvcc}, the first nvcc on PATH"
    elif os.path.exists(places.at("/usr/local/cuda")):
        home, rule = places.at("/usr/local/cuda"), "the default of torch"
    else:
        return Use("", "", "no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda")
    return Use(home, os.path.join(home, "bin", "nvcc"), rule)


def path_use(places: Places) -> Use:
    """Return the nvcc that a shell runs."""
    nvcc = places.which("nvcc")
    home = os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else ""
    return Use(home, nvcc, "first on PATH" if nvcc else "no nvcc on PATH")


def cmake_use(places: Places) -> Use:
    """Follow CMakeDetermineCUDACompiler (CMake 3.25): CUDACXX, beside c++, PATH, then CUDA_PATH/bin."""
    given = places.env.get("CUDACXX", "").split()
    beside = places.which("c++") and os.path.join(os.path.dirname(places.which("c++")), "nvcc")
    cuda_path = places.env.get("CUDA_PATH", "")
    choices = [
        (places.which(given[0]) if given else "", "CUDACXX"),
        (places.which(beside) if beside else "", "beside c++"),
        (places.which("nvcc"), "first on PATH"),
        (places.which(f"{cuda_path}/bin/nvcc") if cuda_path else "", "CUDA_PATH"),
    ]
    nvcc, rule = next(((path, rule) for path, rule in choices if path), ("", "no nvcc on PATH, no CUDACXX"))
    return Use(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else "", nvcc, rule)


def with_nvcc_version(toolkit: Toolkit, nvccs: Iterable[Nvcc]) -> Toolkit:
    """Add its own nvcc's version to the sources of a toolkit."""
    own = next((nvcc for nvcc in nvccs if nvcc.path == toolkit.nvcc and nvcc.release), None)
    if own is None:
        return toolkit
    sources = (*toolkit.sources, (f"{own.path} --version", own.release))
    return replace(toolkit, sources=sources, version=toolkit.version or own.release)
