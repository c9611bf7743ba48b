"""Children of Python that a forked program starts: forks of it, too, which have what it has imported.

Such a child has the arguments, environment, descriptors, session, signals and exit status of a started program, and
imports distdiag anew. Its stacks begin with those of its parents.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import fork_server

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import CodeType

_finders, _path = list(sys.meta_path), sys.path[1:]  # without the folder of this module
_kept: list[object] = []
"""What would write the buffers of a parent's streams, or end what is its parent's, if it were taken apart."""


class Forking(subprocess.Popen[bytes]):
    """A child that goes on with its program, where a start would give it the same interpreter."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Collection[int] = (),
        **more: object,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        if fork_server.starts_alike(environment, os.environ) and (words := _as_of_python(list(args))):
            more["preexec_fn"] = functools.partial(_go_on, words, environment, set(pass_fds))
        super().__init__(args, env=env, pass_fds=pass_fds, **more)  # type: ignore[call-overload]


def _as_of_python(argv: list[str]) -> list[str]:
    """Return the arguments of this Python that run this; none if it is another program."""
    if os.path.dirname(argv[0]) == os.path.dirname(sys.executable) and _begins_with(argv[0], b"#!"):
        return [sys.executable, *argv]  # a script such as distdiag, not py-spy
    flags = [word for word in argv if word in ("-B", "-S")]
    return argv if argv[: len(flags) + 2] == [sys.executable, *flags, "-c"] else []


def _begins_with(path: str, words: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(words)) == words


def _go_on(argv: list[str], environment: dict[str, str], pass_fds: set[int]) -> NoReturn:
    """Take the place of the program about to be started, of which Popen has set up streams and session."""
    _let_go_of_descriptors(pass_fds)
    _forget_signals()
    _forget_modules(without_site="-S" in argv)
    atexit._clear()
    os.environ.clear()
    os.environ.update(environment)
    fork_server.show(argv, environment)
    fork_server.name_process(os.path.basename(argv[0]))
    sys.orig_argv[:] = argv
    namespace = sys.modules["__main__"].__dict__
    if argv[1].startswith("-"):
        text, *sys.argv[1:] = argv[argv.index("-c") + 1 :]
        sys.argv[0], sys.path[0] = "-c", ""
        run(compile(text, "<string>", "exec"), namespace)
    sys.argv[:] = argv[1:]
    sys.path[0], namespace["__file__"] = os.path.dirname(argv[1]), argv[1]
    run(compile(Path(argv[1]).read_bytes(), argv[1], "exec"), namespace)


def run(program: CodeType, namespace: dict[str, Any]) -> NoReturn:
    """Run a program to its exit, but leave out to take apart what it and its parents have imported."""
    status = 0
    try:
        exec(program, namespace)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _let_go_of_descriptors(but: set[int]) -> None:
    """Put nothing in the place of each: what knows it by its number, such as libuv at a fork, may close it again."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in {*but, nothing}:
            os.dup2(nothing, number, inheritable=False)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)


def _forget_modules(*, without_site: bool) -> None:
    sys.meta_path[:] = [one for one in _finders if not without_site or one.__module__.startswith("_frozen_importlib")]
    sys.path[:] = ["", *(place for place in _path[1:] if not without_site or "site-packages" not in place)]
    _kept.extend((sys.modules["__main__"], sys.stdin, sys.stdout, sys.stderr))
    _kept.extend(sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "distdiag")
    sys.modules["__main__"] = ModuleType("__main__")
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        stream = os.fdopen(number, mode, closefd=False, encoding="utf-8", errors=errors)
        vars(sys)[name] = vars(sys)[f"__{name}__"] = stream
    sys.excepthook = sys.__excepthook__
