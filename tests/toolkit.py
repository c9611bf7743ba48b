"""The CUDA toolkit that tests compile with: `make test` installs one from PyPI, else the machine's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import need

_WITHOUT_SPECIAL_FUNCTIONS = "-D_GLIBCXX_BITS_SPECFUN_H"
"""To parse Bessel functions and the like, in each pass of nvcc, takes a third of the time of a small kernel."""


def nvcc() -> Path:
    """Find nvcc; skip where there is none, fail where it is promised."""
    installed = [Path(sys.prefix) / "cuda" / "nvidia/cu13/bin/nvcc", *sorted(_of_machine(), key=_version, reverse=True)]
    for program in installed:
        if program.is_file():
            return program
    if os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
        pytest.fail(f"required here and not installed: nvcc (looked for {installed[0]} and /usr/local/cuda*)")
    pytest.skip("not installed: nvcc")


def compiled(output: Path, source: str, *options: str) -> Path:
    """Compile CUDA source to an object (*.o) or a shared library; the file made."""
    program = nvcc()
    need("gcc", "g++")
    output.with_suffix(".cu").write_text(source)
    kind = ["-c"] if output.suffix == ".o" else ["-shared"]
    libraries = f"-L{program.parent.parent / 'lib'}"  # packages of PyPI have it where nvcc does not look
    argv = [str(program), *kind, "--threads=0", "-Xcompiler", "-fPIC", _WITHOUT_SPECIAL_FUNCTIONS, libraries, *options]
    done = subprocess.run(
        [*argv, "-o", str(output), str(output.with_suffix(".cu"))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def _of_machine() -> set[Path]:
    return {found.resolve() for found in Path("/usr/local").glob("cuda*/bin/nvcc")}


def _version(program: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", program.parent.parent.name))
