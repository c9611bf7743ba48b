"""Run distdiag to its end from a process that has loaded its modules: a fork instead of 0.3 s of imports.

What depends on the start itself (signals, variables of Python, wrappers other than a node's) belongs to
`support.Running`.

    from support_warm import distdiag
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import tempfile
import threading
import uuid
from typing import TYPE_CHECKING

import support
from fork_server import ForkServer
from support import PROGRAM, Running

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from support import Result

_ENOUGH_OF_TORCH = """
import sys
from types import SimpleNamespace as Has
__version__, device, cuda, version = "2", str, Has(is_available=lambda: False), Has(cuda=None, hip=None)
distributed = sys.modules["torch.distributed"] = Has(is_available=lambda: True)
"""


@functools.cache
def _server() -> ForkServer:
    return ForkServer(["distdiag.__main__"], os.environ, learns=True)


def run_script(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a script that imports distdiag to its end, like subprocess.run; `argv` as of `ForkServer.fork`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _server().fork(argv, env, (out, err)) or subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), err.read())


class WarmRunning(Running):
    """A distdiag forked by the server of this test process, or started where it cannot be; several may run at once."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()) -> None:
        self.mark = uuid.uuid4().hex
        self.before = set(os.listdir("/proc"))
        environment = {**os.environ, "COLUMNS": "80", **(env or {}), support._MARK: self.mark}
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        # gpu-test imports nothing that a user may have put there; its ranks do.
        ranks = ("PYTHONPATH",) if arguments[:1] == ("gpu-test",) else ()
        argv = [*wrap, PROGRAM, *arguments]
        process = _server().fork(argv, environment, (out_end, err_end), for_children=ranks)
        os.close(out_end)
        os.close(err_end)
        if process is None:
            os.close(out)
            os.close(err)
            super().__init__(*arguments, env=env, wrap=wrap)
            return
        process.stdout, process.stderr = os.fdopen(out, encoding="utf-8"), os.fdopen(err, encoding="utf-8")
        self.process = process
        support._running.append(self)
        self.stderr_lines = []
        self._news = threading.Condition()
        self._over = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()


def distdiag(*arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()) -> Result:
    """Run distdiag to its end."""
    return WarmRunning(*arguments, env=env, wrap=wrap).finish()


def gpu_test(
    *arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = (), computes: bool = False
) -> Result:
    """Run gpu-test on the CPU with a small buffer, without its products unless it `computes`, and read its JSON."""
    typed = ["--json", "--size", "4MiB", *([] if computes else ["--no-compute"]), *arguments]
    return distdiag("gpu-test", *typed, env=env, wrap=wrap)


def enough_of_torch(folder: Path) -> dict[str, str]:
    """Return variables for ranks that do not come further than connect: until then they use no more of torch."""
    (folder / "torch.py").write_text(_ENOUGH_OF_TORCH)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
