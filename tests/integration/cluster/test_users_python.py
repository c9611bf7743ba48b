"""cuda-env, and a bare script of a job, take the Python of the user's environment, not that of a tool's own."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

import distdiag

OURS = [str(Path(distdiag.__file__).parents[1]), sysconfig.get_path("purelib")]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make distdiag's own environment as pipx leaves it, and as uvx's cache has it, and a user's."""
    folder = tmp_path_factory.mktemp("places")
    made = {"pipx": folder / "venvs/distdiag", "uvx": folder / "archive-v0/Xy12", "user": folder / "user"}
    for place in made.values():
        venv.create(place, symlinks=True)
        (next(place.glob("lib/python*/site-packages")) / "distdiag.pth").write_text("\n".join(OURS))
    (made["pipx"] / "pipx_metadata.json").write_text("{}")
    return made


def run(python: Path, *words: str, **env: str) -> str:
    started = [str(python / "bin/python"), *words]
    env = {"HOME": os.devnull, "PATH": "/usr/bin:/bin", **env}
    return subprocess.run(started, env=env, capture_output=True, text=True, check=False).stdout


def chosen(python: Path, **env: str) -> list[str]:
    """Ask this Python's distdiag which Python is the user's, and why."""
    return run(python, "-c", "import distdiag.users_python as u; print(*u.users_python(), sep='\\n')", **env).split(
        "\n"
    )[:2]


def test_the_active_environment_is_examined(places: dict[str, Path]) -> None:
    user = places["user"]
    active = [f"{user}/bin/python", "the active environment, VIRTUAL_ENV"]
    out = run(places["pipx"], "-m", "distdiag", "cuda-env", "--goal", "build", "--json", VIRTUAL_ENV=str(user))
    facts = json.loads(out)["data"]["nodes"][0]["facts"]
    assert [facts["python"]["executable"], facts["chosen"]] == active
    assert chosen(places["pipx"], CONDA_PREFIX=str(user)) == [active[0], "the active environment, CONDA_PREFIX"]
    assert chosen(places["user"], VIRTUAL_ENV=str(user)) == [active[0], ""]


def test_a_tool_in_an_environment_apart_examines_the_python_on_path(places: dict[str, Path]) -> None:
    """uvx puts its own environment first on PATH; all three are links to one and the same Python."""
    user = places["user"]
    for tool in ("pipx", "uvx"):
        found = chosen(places[tool], PATH=f"{places[tool]}/bin:{user}/bin:/usr/bin:/bin")
        assert found == [f"{user}/bin/python3", "the first on PATH"], tool


def test_an_environment_that_was_not_activated_is_examined_by_its_own_distdiag(places: dict[str, Path]) -> None:
    found = chosen(places["user"])  # that of the system, which is on PATH, has no torch
    assert found == [f"{places['user']}/bin/python", ""]
