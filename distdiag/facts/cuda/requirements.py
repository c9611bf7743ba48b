"""Version conflicts with torch: its requirements, and those of others for it (Requires-Dist).

Like `pip check` for these packages only, from their METADATA (PEP 566, 508 and 440); no program is run.
"""

from __future__ import annotations

import os
import re

from distdiag.facts import machine
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from distdiag.facts.cuda.environment import Package

_LINE = re.compile(r"^Requires-Dist: *([\w.-]+) *(?:\[[^\]]*\])? *\(?([^;()\n]*)\)? *(?:;(.*))?$", re.MULTILINE)
_PART = re.compile(r"(===?|!=|>=|<=|~=|>|<) *([\w.*+!-]+)")
_TERM = re.compile(r"\(?\s*(\w+) *(==|!=|>=|<=|>|<) *['\"]([^'\"]*)['\"]\s*\)?")
_OF_TORCH = re.compile(r"nvidia-|triton$|pytorch-triton|cuda-")


@record
class Unmet:
    """An unmet requirement: `package` ("torch 2.9.1") `wants` ("==9.20.0.48") of `name`, installed as `has`.

    `compiled`: the package has compiled files of its own.
    """

    package: str
    name: str
    wants: str
    has: str
    compiled: bool


def unmet(packages: Iterable[Package], python: str) -> tuple[Unmet, ...]:
    """List the unmet requirements between torch and related packages; packages not installed are omitted."""
    installed = {package.name: package for package in packages}
    return tuple(_unmet(installed, python)) if "torch" in installed else ()


def _unmet(installed: dict[str, Package], python: str) -> Iterator[Unmet]:
    for package in installed.values():
        for name, wants in _requires(package, python):
            around = _OF_TORCH.match(name) if package.name in ("torch", "cuda-toolkit") else name == "torch"
            if around and name in installed and fits(installed[name].version, wants) is False:
                has = installed[name].version
                is_compiled = ".so," in machine.read_text(f"{package.folder}/RECORD")
                yield Unmet(f"{package.name} {package.version}", name, wants, has, is_compiled)


def _requires(package: Package, python: str) -> Iterator[tuple[str, str]]:
    text = machine.read_text(f"{package.folder}/METADATA").partition("\n\n")[0]
    for name, wants, marker in _LINE.findall(text):
        # cuda-toolkit consists of its extras; other packages' extras may not have been requested.
        if _applies(marker, python, extras=package.name == "cuda-toolkit"):
            yield re.sub(r"[-_.]+", "-", name).lower(), wants.strip()


def _applies(marker: str, python: str, *, extras: bool) -> bool:
    """Evaluate a marker; unsupported ones do not apply."""
    if not marker.strip():
        return True
    here = {
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_machine": os.uname().machine,
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    values = []
    for term in _TERM.finditer(marker):
        name, operator, value = term.groups()
        if name == "extra":
            values.append(extras)
        elif name.startswith("python_"):
            values.append(bool(fits(here[name], operator + value)))
        elif name in here and operator in ("==", "!="):
            values.append((here[name] == value) == (operator == "=="))
        else:
            return False
    rest = _TERM.sub("", marker)
    return bool(values) and (any(values) if re.search(r"\bor\b", rest) else all(values))


def fits(version: str, wants: str) -> bool | None:
    """Return whether a version is in a set of specifiers; None if either is not made of plain numbers."""
    have = _numbers(version.partition("+")[0])
    parts = [part for part in _PART.findall(wants) if part[1]]
    if have is None or (wants and not parts):
        return None
    results = [_fits_one(have, operator, value) for operator, value in parts]
    return False if False in results else None if None in results else True


def _fits_one(have: tuple[int, ...], operator: str, value: str) -> bool | None:
    if value.endswith(".*"):
        start = _numbers(value[:-2])
        return None if start is None else (have[: len(start)] == start) == (operator == "==")
    want = _numbers(value.partition("+")[0])
    if want is None:
        return None
    size = max(len(have), len(want))
    own, other = ((*version, *[0] * (size - len(version))) for version in (have, want))
    if operator == "~=":
        return own >= other and have[: len(want) - 1] == want[:-1]
    return {
        "==": own == other,
        "===": own == other,
        "!=": own != other,
        ">=": own >= other,
        "<=": own <= other,
        ">": own > other,
        "<": own < other,
    }[operator]


def _numbers(text: str) -> tuple[int, ...] | None:
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d{1,9}(\.\d{1,9}){0,9}", text) else None
