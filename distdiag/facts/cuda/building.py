"""Requirements of building an extension besides compilers: ninja, headers, memory, and earlier builds' caches."""

from __future__ import annotations

import glob
import os
import re

from distdiag.facts import machine
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.facts.cuda.environment import Interpreter
    from distdiag.facts.cuda.places import Places

_RC_FILES = ("~/.bashrc", "~/.bash_profile", "~/.profile", "~/.zshrc", "~/.zshenv", "/etc/profile", "/etc/bash.bashrc")
_SOURCES = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/*", "/etc/yum.repos.d/*", "/etc/zypp/repos.d/*")
_SETS = re.compile(r"\s*(?:export\s+)?(CUDA_HOME|CUDA_PATH|PATH|LD_LIBRARY_PATH|CC|CXX|NVCC_\w+|TORCH_CUDA_ARCH_LIST)=")


@record
class Cache:
    """A directory of extensions built by torch at first use, such as py311_cu128."""

    path: str
    name: str
    built: tuple[str, ...]
    changed_s: float


@record
class Origin:
    """A line of a start-up file that sets a variable, without the value."""

    variable: str
    file: str
    line: int


@record
class Building:
    """Build tools and resources; paths are empty if missing."""

    ninja: str
    python_header: str
    aio_header: str
    aio_library: str
    processors: int
    memory_available_bytes: int | None
    shm_total_bytes: int | None
    caches: tuple[Cache, ...]
    origins: tuple[Origin, ...]
    package_tool: str
    nvidia_repository: bool
    root: bool
    uv: str


def look(places: Places, python: Interpreter) -> Building:
    """Collect build tools and resources."""
    header = f"{python.include}/Python.h"
    ninja = places.which("ninja") or (f"{python.executable} -m ninja" if python.ninja else "")
    shm = machine.shared_memory_bytes()
    return Building(
        ninja=ninja,
        python_header=header if os.path.exists(header) else "",
        aio_header=_header(places, "libaio.h"),
        aio_library=next(iter(places.glob("/usr/lib*/libaio.so") + places.glob("/usr/lib/*/libaio.so")), ""),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_available_bytes=machine.available_memory_bytes(),
        shm_total_bytes=shm[1] if shm else None,
        caches=tuple(_caches(places)),
        origins=tuple(_origins(places)),
        package_tool=next((tool for tool in ("apt-get", "dnf", "yum", "zypper", "pacman") if places.which(tool)), ""),
        nvidia_repository=_has_repository(places),
        root=os.geteuid() == 0,
        uv=places.which("uv"),
    )


def _has_repository(places: Places) -> bool:
    files = [file for pattern in _SOURCES for file in places.glob(pattern)]
    return any("developer.download.nvidia.com" in machine.read_text(file) for file in files)


def _header(places: Places, name: str) -> str:
    folders = [*places.env.get("CPATH", "").split(":"), places.at("/usr/include"), places.at("/usr/local/include")]
    prefix = places.env.get("CONDA_PREFIX")
    folders += [f"{prefix}/include"] if prefix else []
    return next((f"{folder}/{name}" for folder in folders if folder and os.path.exists(f"{folder}/{name}")), "")


def _caches(places: Places) -> list[Cache]:
    """List torch's caches: $TORCH_EXTENSIONS_DIR, else ~/.cache/torch_extensions (torch.utils.cpp_extension)."""
    own = places.env.get("TORCH_EXTENSIONS_DIR")
    home = places.env.get("XDG_CACHE_HOME") or os.path.join(places.env.get("HOME", "/nonexistent"), ".cache")
    folders = [own] if own else sorted(glob.glob(f"{glob.escape(home)}/torch_extensions/py*"))
    found = []
    for folder in folders:
        built = sorted(os.path.basename(path) for path in glob.glob(f"{glob.escape(folder)}/*") if os.path.isdir(path))
        if built:
            found.append(Cache(folder, os.path.basename(folder), tuple(built), os.stat(folder).st_mtime))
    return found


def _origins(places: Places) -> list[Origin]:
    found = []
    home = places.env.get("HOME", "")
    files = [path.replace("~", home, 1) if path[0] == "~" else places.at(path) for path in _RC_FILES]
    files += places.glob("/etc/profile.d/*.sh")
    if places.env.get("CONDA_PREFIX"):
        files += sorted(glob.glob(places.env["CONDA_PREFIX"] + "/etc/conda/activate.d/*.sh"))
    for file in files:
        for number, line in enumerate(machine.read_text(file).splitlines(), 1):
            if match := _SETS.match(line):
                found.append(Origin(match[1], file, number))
    return found
