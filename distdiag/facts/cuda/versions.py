"""Versions usually requested in a ticket: the system, CMake, libraries and packages, from their files."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import field

from distdiag.facts import machine, programs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from distdiag.facts.cuda.places import Places

_LIBRARIES = {"cuDNN": ("nvidia-cudnn", "cudnn"), "NCCL": ("nvidia-nccl", "nccl")}
"""Library -> prefix of its wheels' names, and its name in conda and in lib<name>.so.<version>."""
_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64", "/usr/local/lib")
_CONDA = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)-[^-]+\.json$")
_WANTED = re.compile(r"cuda|cud|nccl|torch|triton|numpy|gcc|gxx|mkl$|blas|magma|nv|flash-attn|deepspeed|cmake|ninja")


@record
class Versions:
    """Versions, empty if unknown. `libraries`: cuDNN and NCCL by name; `conda`: packages of the environment."""

    os: str = ""
    kernel: str = ""
    libc: str = ""
    processor: str = ""
    cmake: str = ""
    libraries: dict[str, str] = field(default_factory=dict)
    conda: dict[str, str] = field(default_factory=dict)


def look(places: Places, packages: Mapping[str, str], prefix: str, *, timeout_s: float) -> Versions:
    """Read the versions; `packages`: the wheels (name -> version), `prefix`: the folder of the environment."""
    pretty = re.search(r'^PRETTY_NAME="?([^"\n]*)', machine.read_text(places.at("/etc/os-release")), re.MULTILINE)
    model = re.search(r"^model name\s*: (.*)", machine.read_text(places.at("/proc/cpuinfo")), re.MULTILINE)
    conda = _conda(prefix)
    found = {name: _library(places, packages, conda, *names) for name, names in _LIBRARIES.items()}
    return Versions(
        os=pretty[1] if pretty else "",
        kernel=os.uname().release,
        libc=_libc(),
        processor=model[1].strip() if model else "",
        cmake=_cmake(places, timeout_s),
        libraries={name: version for name, version in found.items() if version},
        conda={name: version for name, version in conda.items() if _WANTED.match(name)},
    )


def _library(places: Places, packages: Mapping[str, str], conda: Mapping[str, str], wheel: str, name: str) -> str:
    """Return the version of a library: its wheel's, as torch loads that; else conda's, else the system's."""
    wheels = [version for package, version in packages.items() if package.startswith(wheel)]
    files = [path for folder in _FOLDERS for path in places.glob(f"{folder}/lib{name}.so.*.*.*")]
    system = [path.rpartition(".so.")[2] for path in files]
    return next(iter([*wheels, *filter(None, [conda.get(name)]), *system]), "")


def _conda(prefix: str) -> dict[str, str]:
    names = [os.path.basename(path) for path in sorted(glob.glob(f"{glob.escape(prefix)}/conda-meta/*.json"))]
    return {match["name"]: match["version"] for match in map(_CONDA.match, names) if match}


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # another libc, such as musl
        return ""


def _cmake(places: Places, timeout_s: float) -> str:
    program = places.which("cmake")
    if not program:
        return ""
    done = programs.run([program, "--version"], timeout_s=timeout_s)
    found = re.search(rb"version ([\d.]+)", done.stdout)
    return found[1].decode() if found else ""
