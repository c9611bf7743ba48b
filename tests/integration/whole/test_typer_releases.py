"""The lazy loader on each release of Typer that pyproject.toml admits: help, errors and TAB as on the installed one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest
from support import PROGRAM

if TYPE_CHECKING:
    from pathlib import Path

RELEASES = ("0.26.0", "0.26.8", "0.27.0", "0.27.3", "0.28.0")
CALLS = (
    ("--help",),
    ("hang", "-h"),
    ("hang", "--help"),
    ("help", "hosts"),
    ("trace", "--help"),
    ("trace", "fds", "--nosuch"),
    ("gpu-test", "--nproc", "many"),
    ("nosuch",),
    ("explain", "OSError: [Errno 98] Address already in use"),
)


def _results(path: str) -> list[tuple[int, str, str]]:
    base = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}
    tab = {"_DISTDIAG_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "distdiag trace f"}
    found = []
    for words, more in (*((words, {}) for words in CALLS), ((), tab)):
        done = subprocess.run(
            [PROGRAM, *words], env={**base, **more}, capture_output=True, text=True, check=False, timeout=60
        )
        found.append((done.returncode, _plain(done.stdout), _plain(done.stderr)))
    return found


def _plain(text: str) -> str:
    """Drop the line breaks and the brackets, which Typer 0.27 changed ("[PID]" to "PID", "[a|b]" to "<a|b>")."""
    return " ".join(re.sub(r"[][<>]", " ", text).split())


@cache
def _installed() -> list[tuple[int, str, str]]:
    return _results("")


@pytest.mark.parametrize("release", RELEASES)
def test_help_errors_and_tab_are_those_of_the_installed_release(release: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, f"typer=={release}"], check=True, timeout=100)
    assert _results(str(tmp_path)) == _installed()
    codes = [code for code, _, _ in _installed()]
    assert codes == [0, 0, 0, 0, 0, 2, 2, 2, *codes[8:]]
    assert "fds" in _installed()[-1][1]
