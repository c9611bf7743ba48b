"""Start programs that import torch from a process that has done so: a fork instead of 2 s of processor time."""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fork_server import ForkServer, Program
from support import PROGRAM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LOADS = (
    "torch",
    "torch.distributed",
    "torch.distributed.run",
    "torch._dynamo",
    "torch.distributed.elastic.rendezvous.registry",
)
_IMPORTS = r"^\s*(import|from) torch\b|^from job import .*\bjoin\b"


@functools.cache
def _server() -> ForkServer:
    return ForkServer(_LOADS, {**os.environ, "OMP_NUM_THREADS": "1"}, shared="torch")


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    output: int | IO[Any] = subprocess.DEVNULL,
    errors: int | IO[Any] = subprocess.STDOUT,
    node: int = 0,
) -> Program | None:
    """Fork a script of Python, see `ForkServer.fork`; None if it has to be started as usual."""
    if output == subprocess.PIPE or "OMP_NUM_THREADS" not in env or not _imports_torch(argv):
        return None
    return _server().fork(argv, env, (output, errors), node)


def _imports_torch(argv: Sequence[str]) -> bool:
    if argv[0] == PROGRAM:  # it starts the script itself, by exec
        return False
    scripts = [word for word in argv if word.endswith((".py", "/torchrun"))]
    return bool(scripts) and re.search(_IMPORTS, Path(scripts[0]).read_text(), re.MULTILINE) is not None
