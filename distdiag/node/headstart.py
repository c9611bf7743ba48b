"""The node side of a command for this machine, started before the command itself is loaded.

Loading either takes as long; so they load side by side. What is started here loads modules and waits for its payload.
Nobody needs to take it; it ends with us at the latest.
"""

from __future__ import annotations

import os
import signal
import sys

from distdiag.node.spawn import spawn

_PROGRAM = r"""import sys
if sys.path and not sys.path[0]: del sys.path[0]
from importlib.machinery import SourceFileLoader
name,here="distdiag.node.boot",{}
exec(SourceFileLoader(name,sys.argv[1]+"/node/boot.py").get_code(name),here)
here["wait"](sys.argv[1],sys.argv[2].split(","))"""
"""What boot.START is to those who know neither payload nor its length yet; its arguments: folder, modules, title."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.node.spawn import Spawned

_begun: dict[str, Spawned] = {}
"""By the module that it collects by."""


def begin(*modules: str) -> None:
    """Start an agent that collects by the last of these modules. Where that cannot be, it is done later, as ever."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.isfile(os.path.join(folder, "node", "boot.py")) or None in (sys.stdin, sys.stdout, sys.stderr):
        return
    flags = ["-B"] if sys.dont_write_bytecode else []
    argv = [sys.executable, *flags, "-S", "-c", _PROGRAM, folder, ",".join(modules), "distdiag-agent"]
    if (spawned := spawn(argv)) is not None:
        _begun[modules[-1]] = spawned


def take(module: str) -> Spawned | None:
    """Give the agent that was begun for this module, if there is one; it is the taker's from now on."""
    return _begun.pop(module, None)


def drop() -> None:
    """End what nobody took."""
    while _begun:
        _, one = _begun.popitem()
        os.kill(one.pid, signal.SIGKILL)
        os.waitpid(one.pid, 0)
