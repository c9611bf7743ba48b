"""The Pythons whose torch is tested: those of DISTDIAG_TEST_PYTHONS ("path:path"), else the one that runs the tests.

distdiag itself always runs in the latter; only the jobs run in the others, which need torch and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ASKED = [path for path in os.environ.get("DISTDIAG_TEST_PYTHONS", "").split(os.pathsep) if path]
PYTHONS = _ASKED or [sys.executable]
_VERSION = "from importlib.metadata import version; print(version('torch'), end='')"


def name_of(python: str) -> str:
    """Return "torch-2.13.0+cpu", the id of a test on this Python; a Python without torch is an error."""
    return "torch-" + subprocess.run([python, "-c", _VERSION], stdout=subprocess.PIPE, text=True, check=True).stdout


BUILDS = [name_of(python) for python in PYTHONS] if _ASKED else ["torch"]


def environment() -> dict[str, str]:
    """Return an environment in which another Python imports this checkout's distdiag."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
