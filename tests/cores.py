"""Real core files: the programs of tests/programs whose names begin with "dies" are run, and die."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")


def make_core(program: str, folder: Path, *arguments: str) -> Path:
    """Run a program in a folder until it has died, and find its core; the first one where several processes died.

    Skips where the kernel leaves no core in a process's own folder; fails where that is promised.
    """
    need_cores()
    done = _run_to_death([sys.executable, str(PROGRAMS / f"{program}.py"), *arguments], folder)
    assert "ready\n" in done, done
    cores = cores_in(folder)
    assert cores, f"{program} left no core: {done}"
    return cores[0]


def cores_in(folder: Path) -> list[Path]:
    """List the cores of a folder and of those in it, in the order in which they were finished."""
    return sorted((path for path in folder.rglob("core*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)


def names_its_functions() -> bool:
    """Return whether this Python has the names of its own C functions; distributions strip them."""
    sections = subprocess.run(["readelf", "-SW", os.path.realpath(sys.executable)], capture_output=True, text=True)
    return " .symtab " in sections.stdout


def need_cores() -> None:
    """Skip where a process that dies leaves no core in its folder; fail where that is promised."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    reason = ""
    if not re.match(r"core(\.|%|$)", pattern):
        reason = f"cores do not stay where a process dies: kernel.core_pattern is {pattern!r}"
    elif _hard_limit() != "unlimited":
        reason = f"cores are limited to {_hard_limit()} blocks (ulimit -Hc)"
    if reason and os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
        pytest.fail(f"required here: {reason}")
    if reason:
        pytest.skip(reason)


def _hard_limit() -> str:
    return subprocess.run(["sh", "-c", "ulimit -Hc"], capture_output=True, text=True, check=True).stdout.strip()


def _run_to_death(argv: list[str], folder: Path) -> str:
    """Run a program without a limit on its core; return its output and status."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    with subprocess.Popen(
        ["sh", "-c", 'ulimit -c unlimited && exec "$@"', "sh", *argv],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out = process.communicate(timeout=60)[0]
            return f"{out}(status {process.returncode})"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
