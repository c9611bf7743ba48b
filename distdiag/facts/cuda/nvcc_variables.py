"""Environment variables that break nvcc, found by experiment: nvcc fails, and works again without the variable."""

from __future__ import annotations

import os
import tempfile

from distdiag.facts import programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
"""Options that nvcc adds to each of its command lines (manual, "NVCC Environment Variables")."""
_OTHERS = (
    *("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH"),  # gcc's header directories, searched before its own
    *("GCC_EXEC_PREFIX", "COMPILER_PATH", "LD_LIBRARY_PATH"),  # programs started and libraries loaded by gcc and nvcc
)
_ERRORS = ("error", "fatal", "not found", "No such file")
_SOURCE = """\
#if __cplusplus < 201703L
#error torch needs C++17 or newer
#endif
"""
"""Flags that remove torch's -std=c++17 break its headers, but not an empty file."""


def culprits(
    nvcc: str, options: Sequence[str], env: Mapping[str, str], *, fails: bool, timeout_s: float
) -> tuple[tuple[str, ...], str]:
    """Return the variables that break this nvcc, and its error with them; empty if none is proven to.

    `fails`: it did not preprocess an empty file. Otherwise only FLAGS are tested, by compiling a file.
    """
    flags = [name for name in FLAGS if env.get(name)]
    suspects = [*flags, *(name for name in _OTHERS if env.get(name))]
    if not suspects or not (flags or fails):
        return (), ""
    sets: list[tuple[str, ...]] = [(), *((name,) for name in suspects), *([FLAGS] if len(flags) > 1 else ())]
    try:
        with tempfile.TemporaryDirectory(prefix="distdiag-nvcc-") as folder:
            errors = _compile(nvcc, options, sets[:1], folder, timeout_s)
            if errors.get(()):
                errors.update(_compile(nvcc, options, sets[1:], folder, timeout_s))
    except OSError:  # no space for temporary files: nvcc reports the same
        return (), ""
    error = errors.get((), "")
    if not error:
        return (), ""
    for names in sets[1:]:
        if errors.get(names) == "":
            return names, error
    # In addition to another fault: without the flags nvcc fails in another way.
    changed = [name for name in flags if errors.get((name,), error) != error]
    return tuple(changed), error if changed else ""


def _compile(
    nvcc: str, options: Sequence[str], sets: Sequence[tuple[str, ...]], folder: str, timeout_s: float
) -> dict[tuple[str, ...], str]:
    """Compile without each set of variables: the first error, empty if an object was written. No row: timed out."""
    source = os.path.join(folder, "empty.cu")
    with open(source, "w", encoding="ascii") as file:
        file.write(_SOURCE)
    objects = {names: os.path.join(folder, "-".join(names) + ".o") for names in sets}
    commands = {
        names: [
            *("/usr/bin/env", *(word for name in names for word in ("-u", name))),
            *(nvcc, *options, "-std=c++17", "-c", "-x", "cu", source, "-o", objects[names]),
        ]
        for names in sets
    }
    errors = {}
    for names, done in programs.run_many(commands, timeout_s):
        if done is None or done.timed_out:
            continue
        text = (done.stdout + done.stderr).decode("utf-8", "replace")
        errors[names] = first_error(text.replace(folder + os.sep, "")) if done.status else _no_object(objects[names])
    return errors


def _no_object(path: str) -> str:
    """Describe the fault of nvcc's output file: -ptx, -E or --dryrun among the flags replace -c."""
    try:
        with open(path, "rb") as file:
            return "" if file.read(4) == b"\x7fELF" else "its output is not an object file"
    except OSError:
        return "it writes no object file"


def first_error(text: str) -> str:
    """Return the decisive error in nvcc's output: the first, and nvcc's own verdict if present."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if any(word in line for word in _ERRORS)]
    verdict = [line for line in errors[1:] if line.startswith("nvcc fatal")]
    return "; ".join([*(errors or lines or ["it failed without a word"])[:1], *verdict[:1]])
