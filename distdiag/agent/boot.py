"""Starts distdiag's own modules in an interpreter that has none of them installed.

The payload carries their sources, an entry module and its configuration; the interpreter makes the sources importable
under their own names (so tracebacks and py-spy show real file names and lines) and calls `main` of the entry module.
It comes over the connection that the sender keeps, whose end means that the sender is gone:

    stdin    `python -c START <length> <title>` reads `pack(...)` from it.
    socket   srun and mpirun give stdin to one task only. There `python -c ARGUMENT_START <modules>` gets the few
             modules that connect back and prove who they are (distdiag/agent/connect_back.py); these read
             `pack_message(...)` from the socket.

No payload is ever an argument: Linux allows 128 KiB per argument.
Of a large job all nodes do this at once, sometimes many on one machine: what every agent imports at its start does
without modules of the standard library that take long to import (dataclasses, base64, contextlib, shutil).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import zlib
from importlib.machinery import ModuleSpec, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType
    from typing import Any

MAX_PAYLOAD_BYTES = 16 * 2**20
"""Of a payload that comes over a socket; all sources of distdiag are a twentieth of this."""

# The first statement drops the working directory from sys.path: a stray ./random.py must not break a diagnosis.
START = r"""import os,sys
if sys.path and not sys.path[0]: del sys.path[0]
import zlib
n,b=int(sys.argv[1]),b""
while len(b)<n:
  c=os.read(0,n-len(b))
  if not c: sys.exit(0)
  b+=c
exec(compile(zlib.decompress(b),"<distdiag>/agent/boot.py","exec"))"""

ARGUMENT_START = (
    "import sys,zlib,binascii;sys.path[:]=[p for p in sys.path if p];"
    'exec(compile(zlib.decompress(binascii.a2b_base64(sys.argv.pop(1))),"<distdiag>/agent/boot.py","exec"))'
)

carried: dict[str, str] = {}
"""Module name -> source of what this interpreter was given; empty where distdiag is installed."""
installed: list[str] = []
"""The folder of the distdiag that gave them, if it is on this machine: what Python keeps compiled there is used."""


class CarriedFinder:
    """Imports modules from source text that was sent; goes before an installed distdiag.

    Where that is in `folder` on this machine, modules are read there, as Python has them compiled, and none need come.
    """

    def __init__(self, sources: dict[str, str], folder: str = "") -> None:
        self.sources = sources
        self.folder = folder
        parts = (name.split(".") for name in sources)
        self.packages = {".".join(words[:above]) for words in parts for above in range(1, len(words))}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Answer for what is carried, or distdiag's own, and for nothing else. Packages are empty."""
        file = self.get_filename(name)
        if self.folder:
            is_package = os.path.isdir(file[:-3])
            is_known = name.partition(".")[0] == "distdiag" and (is_package or os.path.isfile(file))
        else:
            is_package = name in self.packages
            is_known = is_package or name in self.sources
        if not is_known:
            return None
        spec = ModuleSpec(name, self, origin=file, is_package=is_package)  # type: ignore[arg-type]
        spec.has_location = True
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Let Python make the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code in it."""
        if not hasattr(module, "__path__"):
            exec(self._code(module.__name__), module.__dict__)

    def get_filename(self, name: str) -> str:
        """Return the path that tracebacks show."""
        return "/".join([self.folder or "<distdiag>", *name.split(".")[1:]]) + ".py"

    def get_source(self, name: str) -> str:
        """Return the source text, for tracebacks."""
        if not self.folder:
            return self.sources.get(name, "")
        with open(self.get_filename(name), encoding="utf-8") as file:
            return file.read()

    def _code(self, name: str) -> CodeType:
        path = self.get_filename(name)
        if self.folder:
            try:
                code = SourceFileLoader(name, path).get_code(name)
                if code is not None:
                    return code
            except (EOFError, ValueError, TypeError, ImportError):
                pass  # what Python kept is damaged
        return compile(self.get_source(name), path, "exec", dont_inherit=True)


def pack(sources: dict[str, str], entry: str, config: dict[str, Any], folder: str = "") -> bytes:
    """Return the bytes that START expects on stdin. `entry` names a carried module with a `main(config)`.

    `folder`: where distdiag is installed, if it is for this machine: then no source but this one's need be carried.
    What was started so starts others so, too.
    """
    order = _order(sources, entry, config, folder or "".join(installed))
    return zlib.compress(f"{sources[__name__]}\nbegin({order!r})\n".encode())


def pack_message(sources: dict[str, str], entry: str, config: dict[str, Any]) -> bytes:
    """Return the same for an interpreter that runs this module already: a line with the length, then the bytes."""
    message = zlib.compress(_order(sources, entry, config, "").encode())
    return b"%d\n%b" % (len(message), message)


def begin_message(message: bytes, *arguments: Any) -> None:  # noqa: ANN401 - of the entry module
    """Continue with what `pack_message` returned, without its first line."""
    begin(zlib.decompress(message).decode(), *arguments)


def begin(order: str, *arguments: Any) -> None:  # noqa: ANN401 - of the entry module
    """Install the carried modules and hand over to the entry module: main(config, *arguments)."""
    given = json.loads(order)
    sys.meta_path.insert(0, CarriedFinder(given["sources"], given["folder"]))
    boot = importlib.import_module("distdiag.agent.boot")
    boot.carried.update(given["sources"])
    boot.installed.extend(filter(None, [given["folder"]]))
    importlib.import_module(given["entry"]).main(given["config"], *arguments)


def _order(sources: dict[str, str], entry: str, config: dict[str, Any], folder: str) -> str:
    return json.dumps({"sources": sources, "entry": entry, "config": config, "folder": folder})
