"""The class of a thread by a frame, as data (frames.toml), and whether a frame is the user's own code."""

from __future__ import annotations

import re
from functools import cache

from distdiag.knowledge.tables import load
from distdiag.record import record

_LIBRARY = re.compile(
    r"/(?:site-packages|dist-packages)/(.+)|/lib(?:64)?/python3\.\d+t?/(?!(?:site|dist)-packages/)(.+)"
    r"|<(?:frozen ([^>]*)|string)>"
)
_TORCH_FROM_SOURCE = re.compile(
    r"/(torch/(?:distributed|utils|nn|optim|autograd|cuda|_dynamo|_inductor|_functorch|multiprocessing|serialization\.py"
    r"|_tensor\.py|_ops\.py).*)"
)


@record(kw_only=True)
class Rule:
    """One line of frames.toml."""

    kind: str
    file: re.Pattern[str]
    function: re.Pattern[str] | None = None
    weak: bool = False


@cache
def library_path(file: str) -> str | None:
    """Return a file's path below site-packages or the standard library; None for the user's own code."""
    if is_native(file):
        return file.rpartition("/")[2]
    found = _LIBRARY.search(file) or _TORCH_FROM_SOURCE.search(file)
    if found is None:
        # py-spy's text output has short names such as torch/... or threading.py, unlikely for a user's script.
        return file if not file.startswith("/") and _is_known(file) else None
    return next((part for part in found.groups() if part), file)


@cache
def kind_of(function: str, file: str) -> tuple[str, bool]:
    """Return the class of a frame, and whether it is weak evidence; ("", False) if unknown."""
    path = library_path(file)
    if path is None:
        return "", False
    for rule in _rules():
        if rule.file.search(path) and (rule.function is None or rule.function.fullmatch(function)):
            return rule.kind, rule.weak
    return "", False


@cache
def is_native(file: str) -> bool:
    """Return whether a frame's file is compiled code: a library, or the interpreter itself."""
    name = file.rpartition("/")[2]
    return ".so" in name or name in ("python", "[vdso]") or re.fullmatch(r"python3(\.\d+t?)?", name) is not None


@cache
def _is_known(file: str) -> bool:
    return file.startswith(("<", "torch/")) or any(rule.file.search(file) for rule in _rules())


def _rules() -> tuple[Rule, ...]:
    return load("frames", "frame", tuple[Rule, ...])
