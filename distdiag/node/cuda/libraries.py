"""Shared CUDA libraries: those in the wheels beside torch, and those that LD_LIBRARY_PATH puts before them."""

from __future__ import annotations

import glob
import os
import re
import time
from dataclasses import dataclass
from itertools import chain

from distdiag.node import elf, machine
from distdiag.node.cuda import fatbin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distdiag.node.cuda.environment import Package

_CUDA = re.compile(r"lib(cu[a-zA-Z_]+\d*|nccl|nv[a-zA-Z_]+|cudnn\w*)\.so\.[\d.]+$")
_NO_EXTENSIONS = re.compile(r"nvidia-|torch$|triton$|numpy$|cuda-")
_BUDGET_S = 3.0


@dataclass(frozen=True)
class Library:
    """One library file; `version` as far as its real name or its package tells."""

    soname: str
    path: str
    version: str
    package: str = ""


@dataclass(frozen=True)
class Entry:
    """One element of LD_LIBRARY_PATH as it is written, and the CUDA libraries in it."""

    text: str
    exists: bool
    stubs: bool
    libraries: tuple[Library, ...]


@dataclass(frozen=True)
class Conflict:
    """A file that two installed packages both say is theirs: the one that was installed last has overwritten it."""

    file: str
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Extension:
    """A compiled file with GPU code, or one that needs a CUDA library; `needs` are the sonames of those."""

    path: str
    package: str
    archs: tuple[str, ...]
    ptx: tuple[str, ...]
    needs: tuple[str, ...]
    complete: bool


def loader_path(text: str) -> tuple[Entry, ...]:
    """Read LD_LIBRARY_PATH; empty elements, which mean the working directory, are kept."""
    return tuple(_entry(element) for element in text.split(":")) if text else ()


def _entry(text: str) -> Entry:
    found = []
    for path in sorted(glob.glob(f"{glob.escape(text)}/lib*.so.*")) if text else []:
        name = os.path.basename(path)
        if _CUDA.match(name) and re.search(r"\.so\.\d+$", name):
            real = os.path.basename(os.path.realpath(path))
            found.append(Library(name, path, real.rpartition(".so.")[2]))
    stubs = bool(text) and (text.rstrip("/").endswith("/stubs") or "/stubs/" in text)
    return Entry(text, os.path.isdir(text), stubs, tuple(found))


def in_wheels(packages: Iterable[Package]) -> tuple[tuple[Library, ...], tuple[Conflict, ...]]:
    """List the libraries of NVIDIA's wheels, and the files that two of them claim."""
    owners: dict[str, list[Package]] = {}
    for package in packages:
        if package.name.startswith("nvidia-"):
            for file in _record(package):
                owners.setdefault(file, []).append(package)
    libraries = [
        Library(os.path.basename(file), os.path.join(_home(own[0]), file), own[0].version, own[0].name)
        for file, own in owners.items()
        if _CUDA.match(os.path.basename(file))
    ]
    doubles = [
        Conflict(file, tuple(f"{one.name} {one.version}" for one in own))
        for file, own in owners.items()
        if len(own) > 1 and ".so" in file
    ]
    return tuple(libraries), tuple(doubles)


def _home(package: Package) -> str:
    return os.path.dirname(package.folder)


def _record(package: Package) -> Iterator[str]:
    """Yield the files of a package, relative to its site-packages (PEP 376, RECORD)."""
    for line in machine.read_text(f"{package.folder}/RECORD").splitlines():
        yield line.partition(",")[0].strip('"')


def extensions(
    packages: Iterable[Package], caches: Iterable[str], paths: Iterable[str]
) -> tuple[tuple[Extension, ...], bool]:
    """Find compiled files with GPU code: in packages, torch's caches, on the path; tells whether all were looked at."""
    until = time.monotonic() + _BUDGET_S
    found: list[Extension] = []
    seen = set()
    for path, package in chain(_compiled(packages, caches), _loose(paths)):
        if path in seen:
            continue
        seen.add(path)
        if time.monotonic() > until:
            return tuple(found), False
        one = _extension(path, package)
        if one is not None:
            found.append(one)
    return tuple(found), True


def _compiled(packages: Iterable[Package], caches: Iterable[str]) -> Iterator[tuple[str, str]]:
    for package in packages:
        if not _NO_EXTENSIONS.match(package.name):
            for file in _record(package):
                if file.endswith(".so"):
                    yield os.path.join(_home(package), file), f"{package.name} {package.version}"
    for cache in caches:
        for path in sorted(glob.glob(f"{glob.escape(cache)}/*/*.so")):
            yield path, ""


def _loose(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield compiled modules that no RECORD names: eggs, builds in place, what PYTHONPATH and .pth files add."""
    for folder in paths:
        if folder.endswith("lib-dynload"):
            continue
        installed = os.path.basename(folder) in ("site-packages", "dist-packages")
        for pattern in ("*.so",) if installed else ("*.so", "*/*.so", "*/*/*.so"):
            yield from ((path, "") for path in sorted(glob.glob(f"{glob.escape(folder)}/{pattern}")))


def _extension(path: str, package: str) -> Extension | None:
    header = elf.read(path)
    if header is None:
        return None
    needs = tuple(name for name in header.needed if _CUDA.match(name))
    code = fatbin.archs(path) or fatbin.Archs((), (), complete=True)
    if not needs and not code.cubins and not code.ptx:
        return None
    return Extension(path, package, code.cubins, code.ptx, needs, code.complete)
