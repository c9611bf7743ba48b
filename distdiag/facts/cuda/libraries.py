"""Shared CUDA libraries: in torch's wheels, in LD_LIBRARY_PATH before them, loaded; and the files that need them."""

from __future__ import annotations

import glob
import mmap
import os
import re
import time
from itertools import chain

from distdiag.facts import elf, machine
from distdiag.facts.cuda import fatbin
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distdiag.facts.cuda.environment import Package

_CUDA = re.compile(r"lib(cu[a-zA-Z_]+\d*|nccl|nv[a-zA-Z_]+|cudnn\w*)\.so\.[\d.]+$")
_NO_EXTENSIONS = re.compile(r"nvidia-|torch$|triton$|numpy$|cuda-")
_SITES = ("site-packages", "dist-packages")
_TORCH = re.compile(r"lib(torch|c10)(_\w+)?\.so")
_CACHE, _MOST_CACHE = "/etc/ld.so.cache", 16 << 20
_BUDGET_S = 3.0


@record
class Library:
    """One library file; `version`: from its real name or its package, if available."""

    soname: str
    path: str
    version: str
    package: str = ""


@record
class Entry:
    """One element of LD_LIBRARY_PATH as written, and the CUDA libraries in it."""

    text: str
    exists: bool
    stubs: bool
    libraries: tuple[Library, ...]


@record
class Conflict:
    """A file claimed by two installed packages: the later install has overwritten it."""

    file: str
    packages: tuple[str, ...]

    def __post_init__(self) -> None:
        if not all(name.strip() for name in self.packages):
            raise ValueError("a package without a name")


@record
class Extension:
    """A compiled file with GPU code, or one that needs CUDA libraries; `needs`: their sonames.

    `torch`: it is linked against torch. `lost`: those of `needs` that the loader finds neither by the file's own run
    path, nor in LD_LIBRARY_PATH, nor in the system's cache.
    """

    path: str
    package: str
    archs: tuple[str, ...]
    ptx: tuple[str, ...]
    needs: tuple[str, ...]
    complete: bool
    torch: bool = False
    lost: tuple[str, ...] = ()


class Loader:
    """The search path of ld.so(8); `text`: LD_LIBRARY_PATH."""

    def __init__(self, text: str) -> None:
        self._folders = [folder for folder in text.split(":") if folder]
        try:
            with open(_CACHE, "rb") as file:
                self._cache = file.read(_MOST_CACHE)
        except OSError:
            self._cache = b""

    def finds(self, name: str, path: str, header: elf.Elf) -> bool:
        """Return whether the loader finds a library for a file that needs it."""
        origin = os.path.dirname(path)
        own = [re.sub(r"\$(ORIGIN|\{ORIGIN\})", lambda _: origin, path) for path in (*header.rpath, *header.runpath)]
        folders = (*own, *self._folders, "/lib", "/usr/lib", "/lib64", "/usr/lib64")
        return any(os.path.exists(f"{folder}/{name}") for folder in folders) or b"\0%s\0" % name.encode() in self._cache


def loader_path(text: str) -> tuple[Entry, ...]:
    """Parse LD_LIBRARY_PATH, including empty elements, which mean the working directory."""
    return tuple(_entry(element) for element in text.split(":")) if text else ()


def _entry(text: str) -> Entry:
    found = []
    for path in sorted(glob.glob(f"{glob.escape(text)}/lib*.so.*")) if text else []:
        name = os.path.basename(path)
        if _CUDA.match(name) and re.search(r"\.so\.\d+$", name):
            found.append(Library(name, path, _version(path)))
    stubs = bool(text) and (text.rstrip("/").endswith("/stubs") or "/stubs/" in text)
    return Entry(text, os.path.isdir(text), stubs, tuple(found))


def _version(path: str) -> str:
    """Return a library's version: from its file name; if that has the major only, from its wheel or cuDNN's header."""
    real = os.path.realpath(path)
    named = os.path.basename(real).partition(".so.")[2]
    if re.fullmatch(r"\d+(\.\d+)+", named):
        return named
    for header in ("../include/cudnn_version.h", "../../include/cudnn_version.h"):
        text = machine.read_text(os.path.join(os.path.dirname(real), header)) if "cudnn" in real else ""
        numbers = re.findall(r"^#define CUDNN_(?:MAJOR|MINOR|PATCHLEVEL) (\d+)", text, re.MULTILINE)
        if len(numbers) == 3:
            return ".".join(numbers)
    return _wheel_version(real) or named


def _nccl_version(path: str) -> str:
    """Find NCCL's version in its own message text, independent of its file name."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(b"NCCL version 2.")
            match = re.match(rb"NCCL version (\d+\.\d+\.\d+)", data[at : at + 40]) if at >= 0 else None
    except (OSError, ValueError):  # empty, or removed since
        return ""
    return match[1].decode() if match else ""


def _wheel_version(path: str) -> str:
    """Return the version of a library's wheel, in whatever environment; empty if it is in none."""
    home, name, file = next((path.partition(f"/{folder}/") for folder in _SITES if f"/{folder}/" in path), ("", "", ""))
    for folder in glob.glob(f"{glob.escape(home + name)}nvidia_*.dist-info") if home else []:
        if f"\n{file}," in "\n" + machine.read_text(f"{folder}/RECORD"):
            return os.path.basename(folder).removesuffix(".dist-info").rpartition("-")[2]
    return ""


def loaded(paths: Iterable[str]) -> tuple[Library, ...]:
    """Select the CUDA libraries among a process's mapped files, by soname, as files may have any name."""
    found = []
    for path in paths:
        header = elf.read(path) if path.startswith("/") else None
        if header is not None and _CUDA.match(header.soname):
            own = _nccl_version(path) if header.soname.startswith("libnccl.") else ""
            found.append(Library(header.soname, path, own or _version(path)))
    return tuple(found)


def in_wheels(packages: Iterable[Package]) -> tuple[tuple[Library, ...], tuple[Conflict, ...]]:
    """List the libraries of NVIDIA's wheels, and the files claimed by two of them."""
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
        Conflict(file, tuple(f"{package.name} {package.version}" for package in own))
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
    packages: Iterable[Package], caches: Iterable[str], paths: Iterable[str], loader: Loader
) -> tuple[tuple[Extension, ...], bool]:
    """Find compiled files with GPU code in packages, torch's caches, on the path; return whether all were checked."""
    until = time.monotonic() + _BUDGET_S
    found: list[Extension] = []
    seen = set()
    for path, package in chain(_compiled(packages, caches), _loose(paths)):
        if path in seen:
            continue
        seen.add(path)
        if time.monotonic() > until:
            return tuple(found), False
        extension = _extension(path, package, loader)
        if extension is not None:
            found.append(extension)
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
    """Yield compiled modules in no RECORD: eggs, in-place builds, and folders from PYTHONPATH and .pth files."""
    for folder in paths:
        if folder.endswith("lib-dynload") or os.path.isdir(f"{folder}/lib-dynload"):  # the standard library
            continue
        installed = os.path.basename(folder) in _SITES
        for pattern in ("*.so",) if installed else ("*.so", "*/*.so", "*/*/*.so"):
            yield from ((path, "") for path in sorted(glob.glob(f"{glob.escape(folder)}/{pattern}")))


def _extension(path: str, package: str, loader: Loader) -> Extension | None:
    header = elf.read(path)
    if header is None:
        return None
    needs = tuple(name for name in header.needed if _CUDA.match(name))
    code = fatbin.archs(path, header) or fatbin.Archs((), (), complete=True)
    if not needs and not code.cubins and not code.ptx:
        return None
    return Extension(
        path,
        package,
        code.cubins,
        code.ptx,
        needs,
        code.complete,
        torch=any(_TORCH.match(name) for name in header.needed),
        lost=tuple(name for name in needs if not loader.finds(name, path, header)),
    )
