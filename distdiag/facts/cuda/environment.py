"""One Python environment, read from its files: interpreter and installed packages, without importing any."""

from __future__ import annotations

import contextlib
import json
import os
import re

from distdiag.facts import machine, programs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# Drops the working directory from sys.path, as a script elsewhere would not see it.
_PROBE = """
import os, sys
out = os.dup(1); os.dup2(2, 1)
sys.path[:1] = [] if not sys.path[0] else sys.path[:1]
import json, platform, importlib.util, sysconfig
spec = lambda name: getattr(importlib.util.find_spec(name), "origin", None)
answer = {"executable": sys.executable, "version": platform.python_version(), "prefix": sys.prefix,
  "paths": [p for p in sys.path if os.path.isdir(p)], "include": sysconfig.get_path("include"),
  "cxx": sysconfig.get_config_var("CXX"), "torch": spec("torch"), "deepspeed": spec("deepspeed"),
  "pip": spec("pip") is not None, "ninja": spec("ninja")}
os.write(out, json.dumps(answer).encode())
"""
_DIST = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.(?:dist|egg)-info$")


@record
class Interpreter:
    """The examined Python. `error`: why its facts are missing."""

    executable: str
    version: str = ""
    prefix: str = ""
    paths: tuple[str, ...] = ()
    include: str = ""
    pip: bool = False
    ninja: bool = False
    error: str = ""
    cxx: str = ""
    """The compiler of its setup.py builds, unless CXX names another."""
    torch_origin: str = ""
    deepspeed_origin: str = ""


@record
class Package:
    """One installed distribution and when it was installed (seconds since 1970)."""

    name: str
    version: str
    folder: str
    installed_s: float


def interpreter(executable: str, *, timeout_s: float) -> Interpreter:
    """Query a Python for its module paths."""
    try:
        done = programs.run([executable, "-B", "-c", _PROBE], timeout_s=timeout_s)
    except programs.CannotRun as error:
        return Interpreter(executable, error=str(error))
    # Our line is among output of others (sitecustomize, a wrapper).
    for line in reversed(done.stdout.decode("utf-8", "replace").splitlines()):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and "executable" in answer:
                return Interpreter(
                    executable=answer["executable"] or executable,
                    version=answer["version"],
                    prefix=answer["prefix"],
                    paths=tuple(answer["paths"]),
                    include=answer["include"] or "",
                    pip=answer["pip"],
                    ninja=answer["ninja"] is not None,
                    cxx=(answer["cxx"] or "").split(" ")[0],
                    torch_origin=answer["torch"] or "",
                    deepspeed_origin=answer["deepspeed"] or "",
                )
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()
    why = f"it did not answer within {timeout_s:g} s" if done.timed_out else (last[-1] if last else "no answer")
    return Interpreter(executable, error=why[:120])


def packages(paths: Iterable[str]) -> list[Package]:
    """List the packages on these paths; the first of a name wins, as at import."""
    found: dict[str, Package] = {}
    for folder in paths:
        for name in sorted(machine.names_in(folder)):
            if match := _DIST.match(name):
                plain = re.sub(r"[-_.]+", "-", match["name"]).lower()
                where = os.path.join(folder, name)
                found.setdefault(plain, Package(plain, match["version"], where, machine.modified_s(where)))
    return list(found.values())
