"""Torch and DeepSpeed of an environment, read from their files, which works for broken ones too."""

from __future__ import annotations

import os
import platform
from dataclasses import field

from distdiag.facts import elf, machine
from distdiag.facts.cuda import fatbin
from distdiag.facts.cuda.literals import Source
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from distdiag.facts.cuda.environment import Interpreter


@record
class Bounds:
    """torch's bounds for a host compiler with one toolkit: `least` <= version < `below`."""

    least: tuple[int, ...]
    below: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.below:
            raise ValueError("bounds of a compiler without an end")


@record
class Torch:
    """The torch of an environment.

    `cuda`, `hip`: the versions it was built with, or empty; `archs`, `ptx`: those in its CUDA library; `rpath_first`:
    its libraries search the wheels before LD_LIBRARY_PATH. `gcc`, `clang`: toolkit version -> bounds. `known_archs`,
    `named_archs`: valid in TORCH_CUDA_ARCH_LIST. `releases`: CUDA version -> architectures of this version's builds,
    for this machine's processor. Tables missing in this torch are empty.
    """

    folder: str
    version: str
    cuda: str
    hip: str
    source: str
    installed_s: float
    library: str = ""
    archs: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    rpath_first: bool = False
    gcc: dict[str, Bounds] = field(default_factory=dict)
    clang: dict[str, Bounds] = field(default_factory=dict)
    known_archs: tuple[str, ...] = ()
    named_archs: dict[str, str] = field(default_factory=dict)
    releases: dict[str, tuple[int, ...]] = field(default_factory=dict)


@record
class DeepSpeed:
    """The DeepSpeed of an environment; `built_*`: versions its wheel was compiled with, empty if nothing was prebuilt.

    `minor_ok`: toolkit version -> versions of torch's CUDA considered equal, read from its builder.py.
    """

    version: str
    folder: str
    built_torch: str
    built_cuda: str
    built_ops: tuple[str, ...]
    minor_ok: dict[str, tuple[str, ...]]


def read_torch(place: Interpreter) -> Torch | None:
    """Read torch's files; None if not installed."""
    folder = os.path.dirname(place.torch_origin)
    if not folder:
        return None
    path = f"{folder}/version.py"
    version, extension = Source(path), Source(f"{folder}/utils/cpp_extension.py")
    releases = _mapping(Source(f"{folder}/cuda/__init__.py").literal("PYTORCH_RELEASES_CODE_CC"))
    here = "aarch64" if platform.machine() == "aarch64" else "x86_64"
    library = f"{folder}/lib/libtorch_cuda.so"
    library = library if os.path.exists(library) else ""
    code = fatbin.archs(library) if library else None
    header = elf.read(library) if library else None
    return Torch(
        folder=folder,
        version=str(version.literal("__version__") or ""),
        cuda=str(version.literal("cuda") or ""),
        hip=str(version.literal("hip") or ""),
        source=path,
        installed_s=machine.modified_s(path),
        library=library,
        archs=code.cubins if code else (),
        ptx=code.ptx if code else (),
        rpath_first=bool(header and header.rpath and not header.runpath),
        gcc=_bounds(extension.literal("CUDA_GCC_VERSIONS")),
        clang=_bounds(extension.literal("CUDA_CLANG_VERSIONS")),
        known_archs=_strings(extension.literal("supported_arches")),
        named_archs=_names(extension.literal("named_arches")),
        releases={str(cuda): _codes(archs, here) for cuda, archs in releases.items()},
    )


def _codes(archs: Any, processor: str) -> tuple[int, ...]:  # noqa: ANN401 - somebody's literal
    """Parse the architectures of one build: per processor, or (before 2.13) for all, Thor's 110 only for aarch64."""
    own = _mapping(archs).get(processor, ()) if isinstance(archs, dict) else archs
    if not isinstance(own, (set, tuple, list)):
        return ()
    codes = {code for code in own if isinstance(code, int)}
    return tuple(sorted(codes if isinstance(archs, dict) or processor == "aarch64" else codes - {110}))


def _mapping(value: Any) -> dict[Any, Any]:  # noqa: ANN401 - somebody's literal
    return value if isinstance(value, dict) else {}


def _strings(value: Any) -> tuple[str, ...]:  # noqa: ANN401 - somebody's literal
    return tuple(str(arch) for arch in value) if isinstance(value, (list, tuple)) else ()


def _names(value: Any) -> dict[str, str]:  # noqa: ANN401 - somebody's literal
    pairs = value if isinstance(value, (list, tuple)) else ()
    return {str(pair[0]): str(pair[1]) for pair in pairs if isinstance(pair, tuple) and len(pair) == 2}


def _bounds(table: Any) -> dict[str, Bounds]:  # noqa: ANN401 - somebody's literal
    found = {}
    for cuda, pair in _mapping(table).items():
        if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(version, tuple) for version in pair):
            found[str(cuda)] = Bounds(*(tuple(int(part) for part in version) for version in pair))
    return found


def read_deepspeed(place: Interpreter, version: str) -> DeepSpeed | None:
    """Read DeepSpeed's files; None if not installed."""
    folder = os.path.dirname(place.deepspeed_origin)
    if not folder:
        return None
    built = Source(f"{folder}/git_version_info_installed.py")
    info, ops = _mapping(built.literal("torch_info")), _mapping(built.literal("installed_ops"))
    prebuilt = tuple(str(name) for name, there in ops.items() if there)
    builders = (f"{home}/op_builder/builder.py" for home in (f"{folder}/ops", os.path.dirname(folder)))
    builder = next(filter(os.path.exists, builders), "")
    minor = Source(builder).literal("cuda_minor_mismatch_ok") if builder else None
    return DeepSpeed(
        version=version,
        folder=folder,
        built_torch=str(info.get("version") or "") if prebuilt else "",
        built_cuda=str(info.get("cuda_version") or "") if prebuilt else "",
        built_ops=prebuilt,
        minor_ok={str(major): _strings(versions) for major, versions in _mapping(minor).items()},
    )
