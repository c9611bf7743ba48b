"""The whole program on one page: one line for each subcommand."""

from __future__ import annotations

import contextlib
import errno
import sys
from typing import Annotated, NoReturn, TextIO, cast

import typer

from distdiag import __version__, interrupts, limits
from distdiag.deliver import harmless
from distdiag.errors import Interrupted
from distdiag.subcommands import Group, Sub, add, split, typed_words

_SUBCOMMANDS = (
    Sub("gpu-test", "gpu_test.command:gpu_test", "Can all ranks talk, reduce correctly and use their memory?"),
    Sub(
        "allreduce-bench",
        "allreduce_bench.command:allreduce_bench",
        "How fast are the collectives, is that good, and which rank is late?",
    ),
    Sub(
        "pyspy-all",
        "pyspy_all.command:pyspy_all",
        "Where does every rank of a hung job stand, and which one is not where the others are?",
    ),
    Group(
        "trace",
        "What is every rank blocked on, and what did it do last? (blocked, fds, py, show, sys)",
        "What did each rank do last: its system calls, its lines of Python; and what is it blocked on?",
        (
            Sub("blocked", "trace.blocked.command:blocked", "Who is blocked on what, and whom do all ranks wait for?"),
            Sub("fds", "trace.fds.command:fds", "What are the descriptors of a process, and who has the other ends?"),
            Sub("py", "trace.py:trace_py", "Run a job and keep the last lines of Python of every thread."),
            Sub("show", "trace.show.command:trace_show", "Where was, or is, each rank? The last lines trace py kept."),
            Sub("sys", "trace.sys.command:trace_sys", "System calls of ranks that run, of a new job, or of logs."),
        ),
    ),
    Sub(
        "overflow",
        "overflow.command:overflow",
        "Where does the first nan or inf of a training run come from: which rank, step, module?",
        below=(Sub("show", "overflow.show.command:overflow_show", "Where did the numbers grow, or two runs part?"),),
    ),
    Sub("core-bt", "core_bt.command:core_bt", "What crashed, in which thread, in Python and in C, and why?"),
    Sub("ports", "ports.command:ports", "Can the nodes reach each other, on which interface, both ways?"),
    Sub("cuda-env", "cuda_env.command:cuda_env", "Why does CUDA not run or build here, and what mends it?"),
    Sub(
        "floatcmp",
        "floatcmp.command:floatcmp",
        "Are two files of tensors the same but for rounding, and where do they part?",
    ),
)


def _program() -> typer.Typer:
    app = typer.Typer(
        name="distdiag",
        help="Find which rank, GPU, link or setting makes a distributed PyTorch job slow, hang or fail, and the fix.",
        no_args_is_help=True,
        # Plain text: it pastes, reads the same in a pipe, and spares every TAB the import of rich.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_main)
    add(app, _SUBCOMMANDS, typed_words())
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"distdiag {__version__}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


class _Tee:
    """stderr that remembers what typer says about a wrong command line, and bears a stderr that cannot be written.

    Whatever is written here, by us or by typer, cannot command the terminal.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.heard = ""

    def write(self, text: str) -> int:
        self.heard = (self.heard + text)[-4000:]
        with contextlib.suppress(OSError):
            if self.stream is not None:
                self.stream.write(harmless(text, self.stream.encoding))
                self.stream.flush()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            if self.stream is not None:
                self.stream.flush()

    def isatty(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream if self.stream is not None else sys.__stdout__, name)


def main() -> None:
    """Run distdiag; however it ends, a program that asked for JSON gets a document and the right exit status."""
    tee = _Tee(sys.stderr)
    sys.stderr = cast("TextIO", tee)
    try:
        interrupts.handle()
        _program()()
    except SystemExit as end:
        if end.code == Interrupted.exit_code and not _has_spoken():
            # Typer took the Ctrl-C for itself, before any command had begun.
            _end_without_report(Interrupted.exit_code, Interrupted.id, str(Interrupted()))
        if end.code == 2 and "--json" in sys.argv and "Error: " in tee.heard:
            _end_without_report(2, "usage", tee.heard.rpartition("Error: ")[2].strip())
        raise
    except KeyboardInterrupt:
        if _has_spoken():  # stdout took only a part of the report, or none: a second document would be no JSON
            sys.exit(Interrupted.exit_code)
        _end_without_report(Interrupted.exit_code, Interrupted.id, str(Interrupted()))
    except Exception as bug:  # noqa: BLE001 - the last boundary: status 1 would say that a fault of the job was found
        if scarce := _scarce(bug):
            hint = limits.hint_for(scarce)
            sys.stderr.write(f"distdiag: {scarce}\nhint: {hint}\n")
            _end_without_report(3, "scarce", scarce, hint)
        import traceback

        traceback.print_exc()
        _end_without_report(3, "distdiag.bug", f"this is a bug of distdiag: {type(bug).__name__}: {bug}")


def _scarce(error: Exception) -> str:
    """Name what there is no more of for us; empty if that is not what went wrong."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return "Too many open files"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        return "no process or thread can be started: Resource temporarily unavailable"
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return "no memory is left for distdiag: Cannot allocate memory"
    return ""


def _has_spoken() -> bool:
    deliver = sys.modules.get("distdiag.deliver")
    return deliver is not None and deliver.has_spoken()


def _end_without_report(code: int, id_: str, message: str, hint: str = "") -> NoReturn:
    if "--json" in sys.argv:
        from distdiag import deliver

        command = _command_of(sys.argv[1:])
        hint = hint or (f"distdiag {command} --help" if command else "distdiag --help")
        deliver.emit(deliver.error_document(command, code, id_, message, hint))
    sys.exit(code)


def _command_of(words: list[str]) -> str:
    """Find the command in what was typed: "pyspy-all", "trace blocked"; empty if there is none."""
    chosen, rest = split(_SUBCOMMANDS, words)
    below = split(chosen.subs if isinstance(chosen, Group) else chosen.below, rest[:1])[0] if chosen else None
    return " ".join(one.name for one in (chosen, below) if one is not None)
