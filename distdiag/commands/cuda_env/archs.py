"""GPU architectures: names, compatibility, and TORCH_CUDA_ARCH_LIST as parsed by torch. Pure.

A cubin runs on GPUs of the same major version with the same or a higher minor version (CUDA programming guide, binary
compatibility); the driver compiles PTX for any newer GPU; "a" code runs on exactly its own capability, "f" code on the
same major from its own minor upwards; Tegra chips and discrete cards are not interchangeable.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distdiag.errors import UsageError
from distdiag.knowledge.cuda import arch_of, tables
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_TEGRA = {(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)}
_SAME_CHIP = ({(10, 1), (11, 0)},)
"""Thor: CUDA 13.0 renamed 10.1 to 11.0."""


@record(order=True)
class Arch:
    """One architecture: 9.0a is (9, 0, "a")."""

    major: int
    minor: int
    suffix: str = ""

    @property
    def nvcc(self) -> str:
        """The name for nvcc: 90a."""
        return f"{self.major}{self.minor}{self.suffix}"

    @property
    def torch(self) -> str:
        """The name in TORCH_CUDA_ARCH_LIST: 9.0a."""
        return f"{self.major}.{self.minor}{self.suffix}"


def from_nvcc(text: str) -> Arch:
    """Parse nvcc's notation: "90a", "120", "75"."""
    found = re.fullmatch(r"(\d+)(\d)([af]?)", text)
    if found is None:
        raise ValueError(f"{text!r} is not an architecture")
    return Arch(int(found[1]), int(found[2]), found[3])


def from_capability(text: str) -> Arch | None:
    """Parse a GPU's capability, "9.0"; None if unknown."""
    found = re.fullmatch(r"(\d+)\.(\d)([af]?)", text)
    return Arch(int(found[1]), int(found[2]), found[3]) if found else None


def cubin_runs(code: Arch, gpu: Arch) -> bool:
    """Return whether compiled code runs on a GPU."""
    own, other = (code.major, code.minor), (gpu.major, gpu.minor)
    if own == other or any({own, other} <= chips for chips in _SAME_CHIP):
        return True
    if code.suffix == "a" or own in _TEGRA or other in _TEGRA:
        return False
    return code.major == gpu.major and code.minor <= gpu.minor


def ptx_runs(code: Arch, gpu: Arch) -> bool:
    """Return whether the driver can compile PTX for a GPU."""
    if code.suffix:
        return cubin_runs(code, gpu)
    return (code.major, code.minor) <= (gpu.major, gpu.minor)


def how_it_runs(cubins: Iterable[str], ptx: Iterable[str], gpu: Arch) -> str:
    """Return how code, in nvcc's notation, runs on a GPU: "cubin", "ptx", or empty: not at all."""
    if any(cubin_runs(from_nvcc(arch), gpu) for arch in cubins):
        return "cubin"
    return "ptx" if any(ptx_runs(from_nvcc(arch), gpu) for arch in ptx) else ""


@record(kw_only=True)
class ArchList:
    """TORCH_CUDA_ARCH_LIST as parsed by torch: `wanted` (architecture, with PTX), `wrong`: the elements it rejects."""

    wanted: tuple[tuple[Arch, bool], ...]
    wrong: tuple[str, ...]

    @property
    def cubins(self) -> tuple[str, ...]:
        """Architectures compiled to cubins, in nvcc's notation."""
        return tuple(arch.nvcc for arch, _ in self.wanted)

    @property
    def ptx(self) -> tuple[str, ...]:
        """Architectures compiled to PTX, in nvcc's notation."""
        return tuple(arch.nvcc for arch, ptx in self.wanted if ptx)


def read_list(text: str, known: Sequence[str], named: Mapping[str, str]) -> ArchList:
    """Parse a list with the tables of torch.utils.cpp_extension; its separators are ";" and one space."""
    known = known or tables().known_archs
    text = text.replace(" ", ";")
    for name, archs in (named or tables().named_archs).items():
        text = text.replace(name, archs)
    wanted: list[tuple[Arch, bool]] = []
    wrong: list[str] = []
    for element in text.split(";"):
        plain = element.removesuffix("+PTX")
        arch = from_capability(plain) if plain in known else None
        if arch is None:
            wrong.append(element)
        else:
            wanted.append((arch, element.endswith("+PTX")))
    return ArchList(wanted=tuple(wanted), wrong=tuple(wrong))


def corrected(text: str, known: Sequence[str]) -> str:
    """Return the probably intended list; empty if no element is recognized."""
    known = known or tables().known_archs
    named = {name.lower(): archs for name, archs in tables().named_archs.items()}
    found: list[str] = []
    for word in re.split(r"[;, ]+", text.strip().strip("\"'")):
        plain = re.sub(r"^(sm|compute)_?", "", word.removesuffix("+PTX"), flags=re.IGNORECASE)
        if plain.lower() in named:
            found += named[plain.lower()].split(";")
            continue
        plain = plain[:-1] + plain[-1:].lower()
        if re.fullmatch(r"\d{2,3}[af]?", plain):
            plain = from_nvcc(plain).torch
        if plain.endswith("f"):
            plain = plain[:-1]  # torch does not know family variants
        if plain in known:
            found.append(plain + ("+PTX" if word.endswith("+PTX") else ""))
    return ";".join(dict.fromkeys(found))


def as_list(gpus: Iterable[Arch]) -> str:
    """Format the exact list for these GPUs, without duplicates."""
    return ";".join(arch.torch for arch in sorted({Arch(gpu.major, gpu.minor) for gpu in gpus}))


def capability(gpu: str) -> str:
    """Parse --gpu: "RTX 3090", "H100", "8.6" or "sm_86" -> "8.6".

    Raises:
        UsageError: the name is unknown.
    """
    plain = re.fullmatch(r"(?:(?:sm|compute)_?)?(\d{1,2})\.?(\d)", gpu.strip())
    found = f"{plain[1]}.{plain[2]}" if plain else arch_of(gpu)
    if not found:
        raise UsageError(
            f"--gpu {gpu!r}: unknown GPU",
            hint="give its compute capability, as nvidia-smi --query-gpu=compute_cap --format=csv prints it: --gpu 8.6",
        )
    return found
