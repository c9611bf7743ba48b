"""Ranks that poll for a file, or for the end of a build that was killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support import need
from support_warm import distdiag

from distdiag.facts.process.polled_path import stale_build_locks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

POLLS = "import os, sys, time\nprint(flush=True)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.3)"
BATON = (
    "import runpy, sys\nfrom importlib.util import find_spec\n"
    "folder = find_spec('torch').submodule_search_locations[0]\n"
    "names = runpy.run_path(folder + '/utils/file_baton.py')\n"
    "print(flush=True)\nnames['FileBaton'](sys.argv[1]).wait()"
)


@contextlib.contextmanager
def running(text: str, path: Path, **variables: str) -> Iterator[int]:
    job = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    command = [sys.executable, "-c", text, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **job, **variables}) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("program", "name", "says"),
    [(POLLS, "READY", "polls for {}, which does not exist"), (BATON, "lock", "waits for {} to be removed")],
)
def test_trace_sys_names_the_path(program: str, name: str, says: str, tmp_path: Path) -> None:
    need("strace")
    path = tmp_path / name
    if name == "lock":
        path.touch()
    with running(program, path) as pid:
        result = distdiag("trace", "sys", "--json", "--pid", str(pid), "--for", "3s")
    finding = result.findings["polled-path"]
    assert finding["level"] == "warn"
    assert says.format(path) in finding["title"]


@pytest.mark.parametrize(
    ("place", "variables"),
    [
        ("cache/torch_extensions/py312_cpu/fused", {"XDG_CACHE_HOME": "cache", "TORCH_EXTENSIONS_DIR": ""}),
        (".cache/torch_extensions/py312_cpu/fused", {"HOME": "", "XDG_CACHE_HOME": "", "TORCH_EXTENSIONS_DIR": ""}),
        ("builds/fused", {"TORCH_EXTENSIONS_DIR": "builds"}),
    ],
)
def test_a_lock_is_stale_that_no_process_has_open(place: str, variables: dict[str, str], tmp_path: Path) -> None:
    lock = tmp_path / place / "lock"
    lock.parent.mkdir(parents=True)
    there = {name: str(tmp_path / value) if value or name == "HOME" else "" for name, value in variables.items()}
    keeps = "; import time; print(flush=True); time.sleep(600)"
    builds = BATON.replace("print(flush=True)\n", "baton = ").replace(".wait()", f"; baton.try_acquire(){keeps}")
    with running(builds, lock, **there) as builder:
        with running(BATON, lock, **there) as waiter:
            assert stale_build_locks(waiter) == []
        assert stale_build_locks(builder) == []
    assert lock.exists()
    with running(BATON, lock, **there) as waiter:
        assert stale_build_locks(waiter) == [str(lock)]
