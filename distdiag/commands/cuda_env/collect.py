"""Collects one node's facts about building and running CUDA. Judges and changes nothing."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace

from distdiag.facts import machine, programs
from distdiag.facts.cuda import (
    building,
    compilers,
    driver,
    environment,
    libraries,
    requirements,
    toolkits,
    torchfiles,
    versions,
)
from distdiag.facts.cuda.building import Building  # noqa: TC001 - these are decoded by their annotations
from distdiag.facts.cuda.compilers import Compilers  # noqa: TC001
from distdiag.facts.cuda.driver import Driver  # noqa: TC001
from distdiag.facts.cuda.environment import Interpreter  # noqa: TC001
from distdiag.facts.cuda.libraries import Conflict, Entry, Extension, Library  # noqa: TC001
from distdiag.facts.cuda.places import Places
from distdiag.facts.cuda.requirements import Unmet  # noqa: TC001
from distdiag.facts.cuda.toolkits import Nvcc, Toolkit, Use  # noqa: TC001
from distdiag.facts.cuda.torchfiles import DeepSpeed, Torch  # noqa: TC001
from distdiag.facts.cuda.versions import Versions
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_QUICK_S = 10.0
"""For programs that answer in milliseconds: compilers, nvcc, a Python that only prints its paths."""
_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDAToolkit_ROOT", "CUDACXX"),
    *("CC", "CXX", "NVCC_CCBIN", "CUDAHOSTCXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "TORCH_CUDA_ARCH_LIST"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "MAX_JOBS", "CPATH", "LIBRARY_PATH", "CONDA_PREFIX"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_MODULE_LOADING"),
    *("CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH"),
    *("VIRTUAL_ENV", "PYTHONPATH", "TMPDIR", "TORCH_EXTENSIONS_DIR", "TORCH_DONT_CHECK_COMPILER_ABI"),
    *("DS_SKIP_CUDA_CHECK", "BNB_CUDA_VERSION"),
)


@record
class Ask:
    """`goal`: run, build or all. `python`: interpreter of the environment, "": this one; `chosen`: by which rule.

    `timeout_s`: for importing torch and for the driver. `root`: examine below it instead of /.
    """

    goal: str
    timeout_s: float
    python: str = ""
    chosen: str = ""
    root: str = ""


@record
class Imported:
    """The result of importing torch. `error`: empty on success; `stage`: the step that timed out, if any.

    `count`: None if unknown; `libraries`: the CUDA libraries actually loaded, `loaded`: the same with sonames.
    `fixed_without`: a variable that makes the import fail, or empty.
    """

    version: str = ""
    error: str = ""
    came_in: bool = False
    """Whether the import itself succeeded, whatever failed later."""
    stage: str = ""
    available: bool | None = None
    count: int | None = None
    archs: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    loaded: tuple[Library, ...] = ()
    fixed_without: str = ""


@record
class CudaFacts:
    """One node. `imported`: None if torch is not installed, or its import was not requested."""

    host: str
    goal: str
    machine: str
    variables: dict[str, str]
    python: Interpreter
    packages: dict[str, str]
    torch: Torch | None
    imported: Imported | None
    deepspeed: DeepSpeed | None
    driver: Driver
    toolkits: tuple[Toolkit, ...]
    nvccs: tuple[Nvcc, ...]
    uses: dict[str, Use]
    compilers: Compilers
    loader_path: tuple[Entry, ...]
    wheels: tuple[Library, ...]
    conflicts: tuple[Conflict, ...]
    extensions: tuple[Extension, ...]
    extensions_complete: bool
    building: Building
    unmet: tuple[Unmet, ...] = ()
    meant: tuple[str, ...] = ()
    """Capabilities of the GPUs to build for, if not this machine's own."""
    versions: Versions = field(default_factory=Versions)
    chosen: str = ""
    """The rule that selected this Python, if it is not distdiag's own."""
    no_path: tuple[str, ...] = ()
    """Missing directories of PATH."""

    def __post_init__(self) -> None:
        if lacking := {"torch", "cmake", "nvcc"} - self.uses.keys():
            raise ValueError(f"no record of the toolkit that {min(lacking)} uses")


@record
class Arrived:
    """The facts known before examining the node."""

    host: str


def facts() -> Arrived:
    """Return the host name at once: examining the node takes as long as importing torch, and has its own deadlines."""
    return Arrived(machine.host_name())


def more(ask: Ask, tell: Callable[[CudaFacts], None]) -> None:
    """Examine this node and report."""
    tell(look(ask))


def look(ask: Ask) -> CudaFacts:
    """Examine this node: all parts at once, each with deadlines of its own."""
    places = Places(ask.root, dict(os.environ))
    executable = ask.python or sys.executable
    with ThreadPoolExecutor() as pool:
        own = pool.submit(_Environment, executable, ask.timeout_s, runs=ask.goal != "build")
        # Also for a build: without a list torch builds for the local GPUs.
        gpus = pool.submit(driver.look, places, ask=True, timeout_s=ask.timeout_s)
        tools = pool.submit(_Tools, places, min(_QUICK_S, ask.timeout_s))
    return _assemble(ask, places, own.result(), gpus.result(), tools.result())


class _Environment:
    """The Python environment, and the result of importing its torch; a torch without CUDA is not imported."""

    def __init__(self, executable: str, timeout_s: float, *, runs: bool) -> None:
        self.python = environment.interpreter(executable, timeout_s=max(_QUICK_S, timeout_s))
        self.torch = torchfiles.read_torch(self.python)
        wanted = runs and self.torch is not None and bool(self.torch.cuda)
        self.imported = _import_torch(executable, timeout_s) if wanted else None


class _Tools:
    """The facts from tools on PATH: every nvcc, and the compilers called by nvcc and torch."""

    def __init__(self, places: Places, timeout_s: float) -> None:
        self.uses = {
            "torch": toolkits.torch_use(places),
            "cmake": toolkits.cmake_use(places),
            "nvcc": toolkits.path_use(places),
        }
        self.ways = toolkits.candidates(places, [])
        home = self.uses["torch"].home
        if home:
            self.ways.setdefault(home.rstrip("/") or "/", []).append("torch")
        self.found = [toolkits.examine(root, ways) for root, ways in self.ways.items()]
        used: dict[str, list[str]] = {use.nvcc: [] for use in self.uses.values() if os.access(use.nvcc, os.X_OK)}
        if self.uses["torch"].nvcc in used and places.env.get("CC"):
            used[self.uses["torch"].nvcc] = ["-ccbin", places.env["CC"]]
        paths = [*used, *places.which_all("nvcc"), *(toolkit.nvcc for toolkit in self.found if toolkit.nvcc)]
        self.nvccs = [
            toolkits.with_compiler(nvcc, places)
            for nvcc in toolkits.ask(paths, used, timeout_s=timeout_s, env=places.env)
        ]
        for nvcc in self.nvccs:  # a wrapper may call an nvcc in an unusual place
            if nvcc.top and nvcc.top not in self.ways and nvcc.top not in (toolkit.real for toolkit in self.found):
                self.found.append(toolkits.examine(nvcc.top, [nvcc.path]))
        limits = [
            toolkit.limit.gcc_max
            for toolkit in self.found
            if toolkit.limit is not None and toolkit.limit.gcc_max is not None
        ]
        called = [nvcc.compiler for nvcc in self.nvccs]
        self.compilers = compilers.find(places, called, newest_gcc=min(limits, default=99), timeout_s=timeout_s)


def _assemble(ask: Ask, places: Places, own: _Environment, gpus: Driver, tools: _Tools) -> CudaFacts:
    python = replace(own.python, cxx=_as_listed(own.python.cxx, places, tools.compilers))
    packages = environment.packages(python.paths)
    wheel_versions = {package.name: package.version for package in packages}
    build = building.look(places, python)
    wheels, conflicts = libraries.in_wheels(packages)
    loader = libraries.Loader(places.env.get("LD_LIBRARY_PATH", ""))
    extensions, complete = libraries.extensions(packages, [cache.path for cache in build.caches], python.paths, loader)
    return CudaFacts(
        host=machine.host_name(),
        goal=ask.goal,
        machine=os.uname().machine,
        variables={name: places.env[name] for name in _VARIABLES if name in places.env},
        python=python,
        packages={name: version for name, version in wheel_versions.items() if _is_wanted(name)},
        torch=own.torch,
        imported=own.imported,
        deepspeed=torchfiles.read_deepspeed(python, wheel_versions.get("deepspeed", "")),
        driver=gpus,
        toolkits=tuple(
            toolkits.with_nvcc_version(toolkit, tools.nvccs) for toolkit in _with_wheels(tools, places, python)
        ),
        nvccs=tuple(tools.nvccs),
        uses=tools.uses,
        compilers=tools.compilers,
        loader_path=libraries.loader_path(places.env.get("LD_LIBRARY_PATH", "")),
        wheels=wheels,
        conflicts=conflicts,
        extensions=extensions,
        extensions_complete=complete,
        building=build,
        no_path=tuple(folder for folder in dict.fromkeys(places.path) if folder and not os.path.isdir(folder)),
        unmet=requirements.unmet(packages, python.version),
        versions=versions.look(places, wheel_versions, python.prefix, timeout_s=_QUICK_S),
        chosen=ask.chosen,
    )


def _as_listed(name: str, places: Places, compilers: Compilers) -> str:
    """Return the path under which a compiler is listed: Debian's Python calls its g++ x86_64-linux-gnu-g++."""
    path = places.which(name)
    real = os.path.realpath(path)
    same = (compiler.path for compiler in compilers.found if path and real == compiler.real)
    return next(same, name)


def _with_wheels(tools: _Tools, places: Places, python: Interpreter) -> list[Toolkit]:
    """Add the toolkits inside the Python environment, whose location is known last."""
    prefixes = dict.fromkeys([*python.paths, python.prefix, places.env.get("CONDA_PREFIX", "")])
    known = {toolkit.root for toolkit in tools.found}
    more = toolkits.candidates(Places("/nonexistent", {}), [prefix for prefix in prefixes if prefix])
    return [*tools.found, *(toolkits.examine(root, ways) for root, ways in more.items() if root not in known)]


def _is_wanted(name: str) -> bool:
    return name.startswith(("nvidia-", "torch", "cuda-", "flash-attn", "deepspeed", "apex", "xformers")) or name in (
        *("triton", "ninja", "pip", "setuptools", "wheel", "numpy", "transformer-engine", "bitsandbytes", "vllm"),
        *("transformers", "accelerate", "lightning", "pytorch-lightning", "peft", "megatron-core", "onnx", "optree"),
    )


def _import_torch(executable: str, timeout_s: float) -> Imported | None:
    """Import torch in a child of the examined interpreter; None if torch is not installed.

    On failure it is retried without each variable that affects the loader.
    """
    until = time.monotonic() + timeout_s
    imported = _try_to_import(executable, timeout_s, dict(os.environ))
    if imported is None or not imported.error or imported.came_in:
        return imported
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        if os.environ.get(name):
            others = {key: value for key, value in os.environ.items() if key != name}
            again = _try_to_import(executable, max(1.0, until - time.monotonic()), others)
            if again is not None and again.came_in:
                return replace(imported, fixed_without=name)
    return imported


def _try_to_import(executable: str, timeout_s: float, env: dict[str, str]) -> Imported | None:
    source = driver.source_of("distdiag.commands.cuda_env.ask_torch")
    try:
        done = programs.run([executable, "-B", "-c", source], timeout_s=timeout_s, env=env)
    except programs.CannotRun:
        return None
    records = {record["about"]: record for record in driver.records_in(done.stdout)}
    failed, torch, devices, end = (records.get(name, {}) for name in ("failed", "torch", "devices", "end"))
    if "No module named 'torch'" in failed.get("error", ""):
        return None
    ended = "failed" in records or "end" in records
    stage = "" if ended else "torch.cuda.is_available()" if "torch" in records else "import torch"
    found = libraries.loaded(end.get("libraries") or torch.get("libraries") or failed.get("libraries") or ())
    return Imported(
        version=torch.get("version", ""),
        error=failed.get("error", "") or ("" if ended or done.timed_out else driver.how_it_died(done)),
        came_in="torch" in records,
        stage=stage if done.timed_out else "",
        available=devices.get("available"),
        count=devices.get("count"),
        archs=tuple(torch.get("archs", ())),
        warnings=tuple(end.get("warnings", ())),
        libraries=tuple(library.path for library in found),
        loaded=found,
    )
