"""Programs of Python that are forked from a process which has loaded what they import.

A fork has the arguments, environment, streams, session, umask, namespaces and exit status of a started program, also
as /proc shows them. Its stacks have one frame more, the outermost: `<module> <string>`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import CodeType, TracebackType

_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "OMP_", "MKL_")
"""Variables with such names take effect before the first line of a program, or while a library is loaded."""
_PID_NAMESPACE = 0x20000000
_NAMESPACES = {"net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.sbrk.restype = ctypes.c_void_p
_SET_MM, _SET_MM_MAP = 35, 14  # prctl(2)


class Program(subprocess.Popen[str]):
    """A program forked by the server: what tests use of Popen, without pipes."""

    def __init__(self, server: socket.socket, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        self._end, end_of_server = socket.socketpair()
        text = json.dumps(message).encode()
        socket.send_fds(server, [len(text).to_bytes(4, "big")], [*fds, end_of_server.fileno()])
        server.sendall(text)
        end_of_server.close()
        self.args = message["argv"]
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = False  # it is the server's: Popen itself has nothing to reap
        self.pid = int.from_bytes(self._end.recv(4, socket.MSG_WAITALL), "big")
        assert self.pid, "the server has ended"

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self.returncode is None and select.select([self._end], [], [], 0)[0]:
            self._read_status()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._read_status()
        assert self.returncode is not None
        return self.returncode

    def _read_status(self) -> None:
        status = self._end.recv(4, socket.MSG_WAITALL)
        self.returncode = int.from_bytes(status, "big", signed=True) if status else -signal.SIGKILL
        self._end.close()


class ForkServer:
    """A process that has imported `loads`, and what its forks had to import if it `learns`.

    It ends with this process; `shared`, a name, with the test run, whose workers all use the one of this name.
    """

    def __init__(self, loads: Sequence[str], env: Mapping[str, str], *, learns: bool = False, shared: str = "") -> None:
        self._env = dict(env)
        self._shared = bool(shared)
        if shared:
            run = int(os.environ.get("DISTDIAG_TESTS_RUN", os.getpid()))
            self._connection = socket.socket(socket.AF_UNIX)
            kind = zlib.crc32(json.dumps(sorted(_of_start(env).items())).encode())
            address = f"\0distdiag-tests-{run}-{shared}-{kind}"
            with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):  # another worker was first
                listener.bind(address)
                listener.listen()
                server = self._start(listener, loads, learns, run)
                server.returncode = 0  # it outlives this worker, whose end would warn of it
            _connect(self._connection, address)
        else:
            self._connection, theirs = socket.socketpair()
            self._process = self._start(theirs, loads, learns, 0)
            theirs.close()
        atexit.register(self._close)

    def _start(self, end: socket.socket, loads: Sequence[str], learns: bool, run: int) -> subprocess.Popen[bytes]:
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fork_server\n"
        code += f"with fork_server.quick_end: exec(*fork_server.serve({end.fileno()}, {list(loads)}, {learns}, {run}))"
        return subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[end.fileno()],
            stdin=subprocess.DEVNULL,
            env={**self._env, "DISTDIAG_TESTS_WHOLE_TORCH": "1"},
            start_new_session=True,
        )

    def fork(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        streams: Sequence[int | IO[Any]],
        node: int = 0,
        *,
        for_children: Collection[str] = (),
    ) -> Program | None:
        """Fork a script with these streams, as of Popen. None: it has to be started as usual, it is another program.

        `argv` may begin with words of nsenter or env. `node`: a process whose namespaces it gets. `for_children`:
        variables that have to take effect in its children only.
        """
        words, changed = list(argv), dict(env)
        if words[0] == "nsenter":
            words, node = words[words.index("--") + 1 :], int(words[words.index("-t") + 1])
        cwd = "/" if node else os.getcwd()
        if words[0] == "env":
            del words[0]
            while words[0] in ("-u", "-C") or ("=" in words[0] and words[0][0] != "-"):
                name, _, value = words.pop(0).partition("=")
                if name == "-u":
                    changed.pop(words.pop(0), None)
                elif name == "-C":
                    cwd = words.pop(0)
                else:
                    changed[name] = value
        if Path(words[0]).parent == Path(sys.executable).parent and words[0] != sys.executable:
            words.insert(0, sys.executable)  # a script such as torchrun
        own = {**changed, **{name: self._env.get(name, "") for name in for_children}}
        if words[0] != sys.executable or words[1].startswith("-") or not starts_alike(own, self._env):
            return None
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        os.umask(umask := os.umask(0))
        message = {"argv": words, "env": changed, "node": node, "cwd": cwd, "priority": priority, "umask": umask}
        with open(os.devnull, "r+b") as null:
            numbers = [null.fileno()]
            for stream in streams:
                number = stream if isinstance(stream, int) else stream.fileno()
                numbers.append({subprocess.DEVNULL: null.fileno(), subprocess.STDOUT: numbers[-1]}.get(number, number))
            return Program(self._connection, message, numbers)

    def _close(self) -> None:
        self._connection.close()
        if not self._shared:
            self._process.wait(20)


def _connect(connection: socket.socket, address: str) -> None:
    """Connect, also while the worker that has bound the address does not listen yet."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return connection.connect(address)
        time.sleep(0.05)
    raise ConnectionRefusedError(address)


def starts_alike(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether Python starts alike with both."""
    return _of_start(one) == _of_start(other)


def _of_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if value and name.startswith(_AT_START)}


def serve(fd: int, loads: list[str], learns: bool, run: int) -> tuple[CodeType, dict[str, Any]]:
    """Fork for each message; return in the forks, with the program and its namespace.

    It ends with the connection `fd`. With the process `run`, if given: then `fd` listens, and a fork of this process
    serves each connection, as programs of one parent would be one job.
    """
    del sys.path[0]
    gc.disable()  # imports make no garbage
    for name in loads:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    end = socket.socket(fileno=fd)
    connection = _accept(end, run) if run else end
    reading, writing = os.pipe()  # names of modules
    os.set_blocking(reading, False)
    woken, waking = socket.socketpair()
    for each in (woken, waking):
        each.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    while True:
        readable = select.select([connection, woken], [], [])[0]
        if woken in readable:
            woken.recv(4096)
            _report_ended(running)
            with contextlib.suppress(BlockingIOError):
                load(os.read(reading, 65536).decode().split())
        if connection in readable and (asked := _fork_next(connection, running)):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (connection, woken, waking, *running.values()):
                each.close()
            os.close(reading)
            if learns:
                atexit.register(_report_modules, writing, set(sys.modules))
            else:
                os.close(writing)
            return _become(*asked)


class _QuickEnd:
    """Ends a program as Python does, with its threads, handlers and streams, but frees no object.

    That would copy each page that a fork shares with the server: 0.2 s of processor time with torch.
    """

    def __enter__(self) -> None:
        """Nothing begins."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = 0
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            status = error.code or 0
        elif error is not None:
            return  # Python prints it, or ends by the signal
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, ValueError, OSError):
                return  # None, closed or broken: Python complains, with a status of its own
        os._exit(status & 0xFF)


quick_end = _QuickEnd()


def _accept(listener: socket.socket, run: int) -> socket.socket:
    """Return each connection in a fork of its own, until the run ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how these end
    ended = os.pidfd_open(run)
    waited_for: list[Any] = [listener, ended]
    while ended not in select.select(waited_for, [], [])[0]:
        connection = listener.accept()[0]
        if not os.fork():
            listener.close()
            os.close(ended)
            return connection
        connection.close()
    os._exit(0)


def _fork_next(connection: socket.socket, running: dict[int, socket.socket]) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for the next message, which the fork returns with its streams."""
    head, fds, *_ = socket.recv_fds(connection, 4, 4)
    if not head:
        _end_all(running)
    message = json.loads(connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL))
    pid = _fork(message["node"])
    if pid == 0:
        return message, fds
    for each in fds[:3]:
        os.close(each)
    running[pid] = socket.socket(fileno=fds[3])
    running[pid].sendall(pid.to_bytes(4, "big"))
    return None


def _report_modules(pipe: int, before: set[str]) -> None:
    names = " ".join([*sys.modules.keys() - before, ""]).encode()
    with contextlib.suppress(BlockingIOError):
        os.write(pipe, names[:4000])  # one write of a pipe is whole up to PIPE_BUF


def load(names: list[str]) -> None:
    """Import what a fork had to, where that is possible; never torch, which distdiag itself does not import either."""
    for name in names:
        if name.partition(".")[0] not in ("torch", "numpy", "__mp_main__") and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _report_ended(running: dict[int, socket.socket]) -> None:
    while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        with running.pop(ended[0]) as end:
            try:
                end.sendall(os.waitstatus_to_exitcode(ended[1]).to_bytes(4, "big", signed=True))
            except OSError:
                continue  # no test waits for it


def _end_all(running: dict[int, socket.socket]) -> None:
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _fork(node: int) -> int:
    """Fork; the child is in the pid namespace of the node."""
    if node:
        _enter(node, "pid", _PID_NAMESPACE)
    pid = os.fork()
    if node and pid:
        _enter(os.getpid(), "pid", _PID_NAMESPACE)
    return pid


def _enter(process: int, kind: str, flag: int) -> None:
    with open(f"/proc/{process}/ns/{kind}") as namespace:
        assert _LIBC.setns(namespace.fileno(), flag) == 0, f"setns {kind}: {os.strerror(ctypes.get_errno())}"


def _become(message: dict[str, Any], fds: list[int]) -> tuple[CodeType, dict[str, Any]]:
    """Take the place of a program that was just started; return what it runs."""
    os.setsid()
    if message["node"]:
        spaces = [(kind, os.open(f"/proc/{message['node']}/ns/{kind}", os.O_RDONLY)) for kind in _NAMESPACES]
        for kind, opened in spaces:
            assert _LIBC.setns(opened, _NAMESPACES[kind]) == 0, f"setns {kind}: {os.strerror(ctypes.get_errno())}"
            os.close(opened)
    for number, opened in enumerate(fds[:3]):
        os.dup2(opened, number)
    for opened in fds:
        os.close(opened)
    os.chdir(message["cwd"])
    os.setpriority(os.PRIO_PROCESS, 0, message["priority"])
    os.umask(message["umask"])
    message["env"].pop("JOB_STARTER", None)
    os.environ.clear()
    os.environ.update(message["env"])
    sys.argv[:] = message["argv"][1:]
    sys.orig_argv[:] = message["argv"]
    script = Path(sys.argv[0])
    sys.path[0] = str(script.parent)
    _show(message["argv"], message["env"])
    namespace = sys.modules["__main__"].__dict__
    del namespace["fork_server"], namespace["sys"]
    namespace["__file__"] = str(script)
    return compile(script.read_bytes(), str(script), "exec"), namespace


def _show(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc show these as this process's arguments and environment."""
    shown = os.fsencode("".join(f"{word}\0" for word in arguments)), _lines(environment)
    size = sum(map(len, shown))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"".join(shown))
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _kept.append(memory)
    words = ["0", "0", "0", *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]  # numbered as in proc(5)
    code, data, stack = words[26:28], words[45:48], words[28]
    places = [*map(int, (*code, *data)), _LIBC.sbrk(0), int(stack)]
    middle = first + len(shown[0])
    layout = struct.pack("11QQII", *places, first, middle, middle, first + size, 0, 0, 0xFFFFFFFF)
    done = _LIBC.prctl(_SET_MM, _SET_MM_MAP, layout, ctypes.c_ulong(len(layout)), 0)
    assert done == 0, os.strerror(ctypes.get_errno())


def _lines(environment: Mapping[str, str]) -> bytes:
    return os.fsencode("".join(f"{name}={value}\0" for name, value in environment.items()))


_kept: list[mmap.mmap] = []
"""What /proc shows."""
