"""Starts distdiag's modules in an interpreter where distdiag is not installed.

The payload contains their sources, an entry module and its configuration. The modules are importable under their own
names (so tracebacks and py-spy show real file names and lines); then `main` of the entry module is called. The sender
keeps the payload's connection open; its end means that the sender died:

    stdin    `python -c START <length> <title>` reads `pack(...)` from it.
    socket   srun and mpirun connect stdin to one task only, so `python -c ARGUMENT_START <modules>` gets just the
             modules that connect back and authenticate (distdiag/agent/connect_back.py); these read
             `pack_message(...)` from the socket.

No payload is ever an argument: Linux allows 128 KiB per argument.
In a large job all nodes do this at once, sometimes many on one machine, so modules that every agent imports avoid slow
standard library imports (dataclasses, base64, contextlib, shutil).
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
"""Limit for a payload received over a socket, 20 times the size of distdiag's sources."""

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
"""Module name -> source, as received; empty for an installed distdiag."""
installed: list[str] = []
"""The sender's package folder, if it is on this machine: gives access to its compiled bytecode."""


class CarriedFinder:
    """Imports modules from received source text, in preference to an installed distdiag.

    With `folder` (the sender's package on this machine) modules are read from it with their cached bytecode, and
    `sources` may be empty.
    """

    def __init__(self, sources: dict[str, str], folder: str = "") -> None:
        self.sources = sources
        self.folder = folder
        parts = (name.split(".") for name in sources)
        self.packages = {".".join(words[:above]) for words in parts for above in range(1, len(words))}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Answer for received modules and distdiag's own only. Packages are empty."""
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
        """Use Python's default."""

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
                pass  # damaged bytecode
        return compile(self.get_source(name), path, "exec", dont_inherit=True)


def pack(sources: dict[str, str], entry: str, config: object, folder: str = "") -> bytes:
    """Return the bytes that START expects on stdin. `entry` names a carried module with a `main(config)`.

    `folder`: the installed package, for a child on this machine: only this module's source is sent then. A child
    started this way passes the folder on to its own children.
    """
    order = _order(sources, entry, config, folder or "".join(installed))
    return zlib.compress(f"{sources[__name__]}\nbegin({order!r})\n".encode())


def pack_message(sources: dict[str, str], entry: str, config: object) -> bytes:
    """Pack for an interpreter that already runs this module: a line with the length, then the bytes."""
    message = zlib.compress(_order(sources, entry, config, "").encode())
    return b"%d\n%b" % (len(message), message)


def begin_message(message: bytes, *arguments: Any) -> None:  # noqa: ANN401 - of the entry module
    """Start from a message of `pack_message`, without its length line."""
    begin(zlib.decompress(message).decode(), *arguments)


def begin(order: str, *arguments: Any) -> None:  # noqa: ANN401 - of the entry module
    """Install the carried modules and call the entry module's main(config, *arguments)."""
    given = json.loads(order)
    sys.meta_path.insert(0, CarriedFinder(given["sources"], given["folder"]))
    boot = importlib.import_module("distdiag.agent.boot")
    boot.carried.update(given["sources"])
    boot.installed.extend(filter(None, [given["folder"]]))
    importlib.import_module(given["entry"]).main(given["config"], *arguments)


def _order(sources: dict[str, str], entry: str, config: object, folder: str) -> str:
    order = {"sources": sources, "entry": entry, "config": config, "folder": folder}
    return json.dumps(order, default=vars)  # of a record its fields, as in agent/protocol.py
