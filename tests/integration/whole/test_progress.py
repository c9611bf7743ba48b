"""Progress on a terminal, and colours where they are asked for in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

SLEEPS = "import sys, time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def on_terminal(*arguments: str) -> str:
    """Run distdiag on a terminal of 80 columns, and return all that it wrote there, without its colours."""
    parent, child = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        [sys.executable, "-m", "distdiag", *arguments], stdin=child, stdout=child, stderr=child, env=env
    ):
        os.close(child)
        written = b""
        while True:
            try:
                written += os.read(parent, 65536)
            except OSError:  # the other end is closed
                break
    os.close(parent)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def test_the_samples_are_counted_on_a_terminal(sleeper: subprocess.Popen[str]) -> None:
    shown = on_terminal("pyspy-all", "--pid", str(sleeper.pid), "--samples", "4", "--interval", "1")
    assert "sampling 1 process, 2 of 4" in shown
    assert "hosts" not in shown.partition("distdiag pyspy-all:")[0]


def test_a_pipe_gets_one_line_of_progress(sleeper: subprocess.Popen[str]) -> None:
    result = distdiag("pyspy-all", "--pid", str(sleeper.pid), "--samples", "3", "--interval", "1")
    assert result.err.splitlines() == ["distdiag: sampling 1 process"]


@pytest.mark.parametrize(
    ("env", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"CLICOLOR_FORCE": "1"}, True), ({"FORCE_COLOR": "0"}, False)],
    ids=["plain", "force-color", "clicolor-force", "force-color-0"],
)
def test_colours_in_a_pipe_where_they_are_forced(env: dict[str, str], coloured: bool) -> None:
    assert ("\x1b[" in distdiag("ports", env=env).out) is coloured
