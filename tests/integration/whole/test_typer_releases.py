"""The lazy loader on each minor release of Typer that pyproject.toml admits: help, errors and TAB are the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from fork_server import ForkServer
from support import PROGRAM

ROOT = Path(__file__).parents[3]
RELEASES = ("0.26.0", "0.27.0", "0.28.0")
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


def _results(folder: Path, path: str) -> list[tuple[int, str, str]]:
    base = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT)]), "COLUMNS": "80"}
    tab = {"_DISTDIAG_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "distdiag trace f"}
    server = ForkServer(["distdiag.cli"], base, learns=True)
    found = []
    for words, more in (*((words, {}) for words in CALLS), ((), tab)):
        texts = folder / "out", folder / "err"
        with texts[0].open("w") as out, texts[1].open("w") as err:
            called = server.fork([PROGRAM, *words], {**base, **more}, (out, err))
            assert called is not None
        found.append((called.wait(60), _plain(texts[0].read_text()), _plain(texts[1].read_text())))
    server._close()
    return found


def _plain(text: str) -> str:
    """Drop the line breaks and the brackets, which Typer 0.27 changed ("[PID]" to "PID", "[a|b]" to "<a|b>")."""
    return " ".join(re.sub(r"[][<>]", " ", text).split())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    return _results(tmp_path_factory.mktemp("installed"), "")


@pytest.mark.parametrize("release", [release for release in RELEASES if release != version("typer")])
def test_help_errors_and_tab_are_those_of_the_installed_release(
    release: str, installed: list[tuple[int, str, str]], tmp_path: Path
) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target"]
    subprocess.run([*pip, tmp_path / "lib", f"typer=={release}"], check=True, timeout=100)
    assert _results(tmp_path, str(tmp_path / "lib")) == installed
    codes = [code for code, _, _ in installed]
    assert codes == [0, 0, 0, 0, 0, 2, 2, 2, *codes[8:]]
    assert "fds" in installed[-1][1]
