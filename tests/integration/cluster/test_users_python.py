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

OURS = [str(Path(distdiag.__file__).parents[2]), sysconfig.get_path("purelib")]


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


def head(python: Path, **env: str) -> dict[str, str]:
    """Run this Python's distdiag; return the examined Python of its report."""
    done = subprocess.run(
        [str(python / "bin/python"), "-m", "distdiag", "cuda-env", "--goal", "build", "--json"],
        env={"HOME": os.devnull, "PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        check=False,
    )
    facts = json.loads(done.stdout)["data"]["nodes"][0]["facts"]
    return {**facts["python"], "chosen": facts["chosen"]}


def test_the_active_environment_is_examined(places: dict[str, Path]) -> None:
    user = places["user"]
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        found = head(places["pipx"], **{variable: str(user)})
        assert (found["executable"], found["chosen"]) == (f"{user}/bin/python", f"the active environment, {variable}")
    own = head(places["user"], VIRTUAL_ENV=str(user))
    assert (own["executable"], own["chosen"]) == (f"{user}/bin/python", "")


def test_a_tool_in_an_environment_apart_examines_the_python_on_path(places: dict[str, Path]) -> None:
    """uvx puts its own environment first on PATH; all three are links to one and the same Python."""
    user = places["user"]
    for tool in ("pipx", "uvx"):
        found = head(places[tool], PATH=f"{places[tool]}/bin:{user}/bin:/usr/bin:/bin")
        assert (found["executable"], found["chosen"]) == (f"{user}/bin/python3", "the first on PATH"), tool


def test_an_environment_that_was_not_activated_is_examined_by_its_own_distdiag(places: dict[str, Path]) -> None:
    found = head(places["user"])  # that of the system, which is on PATH, has no torch
    assert (found["executable"], found["chosen"]) == (f"{places['user']}/bin/python", "")
