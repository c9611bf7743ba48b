"""Run distdiag to its end from a process that has loaded its modules: a fork instead of 0.3 s of imports.

The fork runs the program's own main() as a process of its own: session, streams, working directory, environment, exit
status and interpreter exit are those of a program that a shell starts. Of wrappers it does by itself what `env` and
`nsenter` would. What depends on the start itself (signals, variables of Python, other wrappers) belongs to
`support.Running`.

    from support_warm import distdiag
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import support
from support import PROGRAM, Result, Running

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STARTS_PYTHON = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_")
"""Variables with such names change the interpreter before its first line."""


def _of_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_STARTS_PYTHON)}


_AT_START = _of_python(os.environ)


_NAMESPACES = {"-n": "net", "-m": "mnt", "-u": "uts"}
"""Options of nsenter, and the names of their namespaces in /proc/PID/ns."""


class WarmRunning(Running):
    """A distdiag, or a script that imports it, forked by the server of this test process, one at a time.

    Raises ValueError if only a shell can start it so.
    """

    def __init__(
        self, *arguments: str, env: Mapping[str, str] | None = None, wrap: Sequence[str] = (), program: str = PROGRAM
    ) -> None:
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "COLUMNS": "80", **(env or {}), support._MARK: self.mark}
        place = _unwrap(list(wrap), environment)
        if _of_python(environment) != _AT_START:
            raise ValueError("variables of Python are changed")
        self.process = Forked(_server(), {"argv": [program, *arguments], "env": environment, **place})  # type: ignore[assignment]
        support._running.append(self)
        self.stderr_lines = []
        self._news = threading.Condition()
        self._over = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()


def distdiag(*arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()) -> Result:
    """Run distdiag to its end; from its first line on where only a shell can start it so."""
    try:
        running = WarmRunning(*arguments, env=env, wrap=wrap)
    except ValueError:
        return support.distdiag(*arguments, env=env, wrap=wrap)
    return running.finish()


def gpu_test(
    *arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = (), computes: bool = False
) -> Result:
    """Run gpu-test on the CPU with a small buffer, without its products unless it `computes`, and read its JSON."""
    typed = ["--json", "--size", "4MiB", *([] if computes else ["--no-compute"]), *arguments]
    return distdiag("gpu-test", *typed, env=env, wrap=wrap)


def _unwrap(wrap: list[str], environment: dict[str, str]) -> dict[str, object]:
    """Change the environment as `env` would; return the working directory, and the files of nsenter's namespaces."""
    namespaces, cwd = [], os.getcwd()
    if wrap[:1] == ["nsenter"]:
        end = wrap.index("--")
        _, target, pid, *kinds = wrap[:end]
        if target != "-t" or not set(kinds) <= _NAMESPACES.keys():
            raise ValueError(f"not supported: {wrap}")
        namespaces = [f"/proc/{pid}/ns/{_NAMESPACES[kind]}" for kind in kinds]
        del wrap[: end + 1]
        cwd = "/"  # as nsenter does
    if wrap[:1] == ["env"]:
        del wrap[0]
        while wrap[:1] in (["-u"], ["-C"]):
            option, value = wrap[:2]
            del wrap[:2]
            if option == "-u":
                environment.pop(value, None)
            else:
                cwd = value
        while wrap and "=" in wrap[0] and wrap[0][0] != "-":
            name, _, environment[name] = wrap.pop(0).partition("=")
    if wrap:
        raise ValueError(f"not supported: {wrap}")
    return {"cwd": cwd, "namespaces": namespaces}


class Forked:
    """The part of subprocess.Popen that `Running` uses, for a child of the server."""

    def __init__(self, server: socket.socket, order: Mapping[str, object]) -> None:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        (self._end, end_of_server) = socket.socketpair()
        message = json.dumps(order).encode()
        ends = [out_end, err_end, end_of_server.fileno()]
        socket.send_fds(server, [len(message).to_bytes(4, "big")], ends)
        server.sendall(message)
        for fd in (out_end, err_end):
            os.close(fd)
        end_of_server.close()
        self.stdout, self.stderr = (os.fdopen(fd, encoding="utf-8") for fd in (out, err))
        self.returncode: int | None = None
        self.pid = int.from_bytes(self._receive(4), "big")

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._end.settimeout(timeout)
            try:
                self.returncode = int.from_bytes(self._receive(4), "big", signed=True)
            except TimeoutError:
                raise subprocess.TimeoutExpired(PROGRAM, timeout or 0) from None
            self._end.close()
        return self.returncode

    def _receive(self, size: int) -> bytes:
        found = self._end.recv(size, socket.MSG_WAITALL)
        assert len(found) == size, "the server has ended"
        return found


@functools.cache
def _server() -> socket.socket:
    """Return the connection to this process's server; it ends with that connection."""
    ours, theirs = socket.socketpair()
    words = [sys.executable, __file__, str(theirs.fileno())]
    process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    atexit.register(end)
    return ours


def _serve(connection: socket.socket) -> int | None:
    """Fork for each message. Return in the forks, the pipe for names of modules; None at the end of the connection."""
    while True:
        head, fds, *_ = socket.recv_fds(connection, 4, 3)
        if not head:
            return None
        message = json.loads(connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(reading)
            _become(message, fds)
            return writing
        os.close(writing)
        out, err, end = fds
        os.close(out)
        os.close(err)
        _report(pid, end)
        with os.fdopen(reading) as names:
            _load(names.read().split())


def _report(pid: int, end: int) -> None:
    """Report a child's process id and its exit status: 4 bytes each. No threads: the next fork would lose them."""
    with socket.socket(fileno=end) as answers, contextlib.suppress(OSError):
        answers.sendall(pid.to_bytes(4, "big"))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answers.sendall(status.to_bytes(4, "big", signed=True))


def _become(message: dict[str, object], fds: list[int]) -> None:
    """Take the place of a program that was just started."""
    os.setsid()
    for fd, number in zip(fds[:2], (1, 2), strict=True):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    _enter(message["namespaces"])  # type: ignore[arg-type]
    os.chdir(str(message["cwd"]))
    os.environ.clear()
    os.environ.update(message["env"])  # type: ignore[call-overload]
    sys.argv[:] = message["argv"]  # type: ignore[call-overload]
    sys.orig_argv[:] = [sys.executable, *sys.argv]


def _enter(namespaces: Sequence[str]) -> None:
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(open(path, "rb")) for path in namespaces]  # before /proc is another one
        libc = ctypes.CDLL(None, use_errno=True)
        for file in files:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {file.name}")


def _load(names: list[str]) -> None:
    """Import what a child had to; never torch, which distdiag itself does not import either."""
    for name in names:
        if name.partition(".")[0] not in ("torch", "numpy", "__mp_main__") and name not in sys.modules:
            with contextlib.suppress(Exception):
                __import__(name)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    pipe = _serve(socket.socket(fileno=int(sys.argv[1])))
    if pipe is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = set(sys.modules)
    try:
        if sys.argv[0] == PROGRAM:
            from distdiag.__main__ import main

            main()
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        new = [name for name in sys.modules if name not in before]
        os.write(pipe, " ".join(["distdiag.__main__", *new]).encode()[:60_000])  # fits into the pipe


if __name__ == "__main__":
    sys.path[0] = str(Path(PROGRAM).parent)
    _main()
